"""Coverage, overlap and strictness, with no ranks: the metadata of all ranks is made up here."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardstore
from shardstore import coverage, validation
from shardstore.core import CheckpointingConfig, save_config
from shardstore.errors import (
    AccessPatternError,
    CheckpointingException,
    NotACheckpointError,
    ShapeMismatchError,
)
from shardstore.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from shardstore.strategies.base import (
    LoadCommonStrategy,
    LoadShardedStrategy,
    StrategyAction,
    default_strategies,
    register_default_strategy,
)
from shardstore.validation import StrictHandling, validate_sharding_integrity


def _box(
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    global_shape: tuple[int, ...],
    *,
    replica_id: int | tuple[int, ...] = 0,
    key: str = "irregular",
    dtype: torch.dtype = torch.float32,
) -> ShardedTensor:
    return ShardedTensor(key, None, dtype, shape, global_shape, offset, None, replica_id=replica_id)


def _cell(index: int, parts: int, **kwargs: Any) -> ShardedTensor:
    data = torch.zeros(2, dtype=kwargs.pop("dtype", torch.float32))
    return ShardedTensor.from_rank_offsets("grid", data, (0, index, parts), **kwargs).without_data()


def _flat(start: int, stop: int, **kwargs: Any) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets_flat(
        "flat", torch.zeros(stop - start), (3, 4), flattened_range=slice(start, stop), **kwargs
    ).without_data()


# -- geometry, against counting element by element --------------------------------------------


@st.composite
def _boxes(draw: st.DrawFn) -> tuple[list[int], list[tuple[list[int], list[int]]]]:
    """A tiling made by random cuts, from which boxes may be dropped, doubled or moved."""
    shape = draw(st.lists(st.integers(0, 5), min_size=0, max_size=3))
    parts = [([0] * len(shape), list(shape))]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        low, high = parts.pop(draw(st.integers(0, len(parts) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(low[axis], high[axis]))
        left, right = list(high), list(low)
        left[axis] = right[axis] = cut
        parts += [(low, left), (right, high)]
    boxes = [(low, [h - lo for h, lo in zip(high, low, strict=True)]) for low, high in parts]
    match draw(st.sampled_from(["keep", "keep", "drop", "double", "move"])):
        case "drop":
            boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        case "double":
            boxes.append(draw(st.sampled_from(boxes)))
        case "move":
            index = draw(st.integers(0, len(boxes) - 1))
            offset, extent = boxes[index]
            boxes[index] = ([draw(st.integers(0, o)) for o in offset], extent)
    return shape, boxes


def _check_against_counting(shape: list[int], boxes: list[tuple[list[int], list[int]]]) -> None:
    count = np.zeros(shape, dtype=int)
    regions = [
        tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))
        for offset, extent in boxes
    ]
    for region in regions:
        count[region] += 1
    fault = coverage.find_tiling_fault(boxes, shape)
    assert (fault is None) == bool((count == 1).all())
    if fault is None:
        return
    part = tuple(slice(o, o + n) for o, n in zip(fault.offset, fault.shape, strict=True))
    assert count[part].size > 0
    assert (count[part] != 1).all()
    for number, region in enumerate(regions):
        covered = np.zeros(shape, dtype=bool)
        covered[region] = True
        if number in fault.shards:
            assert covered[part].all()
    assert (len(fault.shards) == 0) == bool((count[part] == 0).all())


@given(_boxes())
def test_tiling_agrees_with_counting(case: tuple[Any, Any]) -> None:
    _check_against_counting(*case)


def test_tiling_is_near_linear() -> None:
    """30,000 irregular boxes: quadratic work, 10^9 comparisons, would not end in time."""
    rows, height = 15_000, 8
    cut = np.arange(rows) % (height - 1) + 1
    top = np.arange(rows) * 2
    offsets = np.stack([np.tile(top, 2), np.concatenate([np.zeros_like(cut), cut])], axis=1)
    shapes = np.stack([np.full(2 * rows, 2), np.concatenate([cut, height - cut])], axis=1)
    boxes = list(zip(offsets.tolist(), shapes.tolist(), strict=True))
    assert coverage.find_tiling_fault(boxes, (2 * rows, height)) is None
    boxes[11_234][0][0] += 1
    assert coverage.find_tiling_fault(boxes, (2 * rows, height)) is not None


def test_staircase_with_a_huge_fragment_grid() -> None:
    """Disjoint diagonal boxes and what fills the rest: cells are the square of the boxes."""
    n = 1500
    boxes: list[tuple[tuple[int, int], tuple[int, int]]] = []
    for i in range(n):
        if i:
            boxes.append(((i, 0), (1, i)))
        boxes.append(((i, i), (1, 1)))
        if i < n - 1:
            boxes.append(((i, i + 1), (1, n - i - 1)))
    assert coverage.find_tiling_fault(boxes, (n, n)) is None
    fault = coverage.find_tiling_fault(boxes[:1000] + boxes[1001:], (n, n))
    assert fault.shards == ()
    low, high = np.cumsum(boxes[1000], axis=0)
    at = np.array(fault.offset)
    assert (at >= low).all()
    assert (at < high).all()


# -- tensors -----------------------------------------------------------------------------------


def test_shard_outside_the_global_shape() -> None:
    shards = [[_box((0,), (4,), (6,))], [_box((4,), (3,), (6,))]]
    with pytest.raises(AccessPatternError, match=r"rank 1 .*outside.*\(6,\)"):
        validate_sharding_integrity(shards)


def test_prepended_axes_zero_dimensions_and_empty_tensors() -> None:
    layers = [
        [
            ShardedTensor.from_rank_offsets(
                "layers", torch.zeros(2), (0, layer, 3), prepend_axis_num=1
            )
        ]
        for layer in range(3)
    ]
    scalar = ShardedTensor.from_rank_offsets("scalar", torch.zeros(()))
    empty = ShardedTensor.from_rank_offsets("empty", torch.zeros(0, 3))
    layers[0] += [scalar, empty]
    validate_sharding_integrity(layers)
    with pytest.raises(AccessPatternError, match="layers"):
        validate_sharding_integrity(layers[:2])
    with pytest.raises(AccessPatternError, match="scalar"):
        validate_sharding_integrity([*layers, [scalar]])


@given(cuts=st.lists(st.integers(0, 12), max_size=5), drop=st.booleans())
def test_any_cuts_of_a_flattened_shard(cuts: list[int], drop: bool) -> None:
    edges = [0, *sorted(cuts), 12]
    shards = [[_flat(a, b)] for a, b in itertools.pairwise(edges)]
    validate_sharding_integrity(shards)
    widest = max(range(len(shards)), key=lambda i: edges[i + 1] - edges[i])
    if drop:
        del shards[widest]
        if shards:
            with pytest.raises(AccessPatternError):
                validate_sharding_integrity(shards)


# -- objects -----------------------------------------------------------------------------------


def _object(index: int, count: int, replica_id: int = 0) -> ShardedObject:
    return ShardedObject("obj", None, (count,), (index,), replica_id)


def test_objects() -> None:
    with pytest.raises(AccessPatternError, match=r"rank 1 at offset \(2,\).*outside.*\(2,\)"):
        validate_sharding_integrity([[_object(0, 2)], [_object(2, 2)]])
    with pytest.raises(ShapeMismatchError, match="obj"):
        validate_sharding_integrity([[_object(0, 3)], [_object(1, 2)]])


# -- strictness --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["log_all", "return_all", "ignore_all"])
def test_factories_that_are_not_stored_are_left_out(mode: str, tmp_path: Path) -> None:
    """Each of the others merges its own parts, in a list too."""

    def factory(key: str, value: float) -> ShardedTensorFactory:
        def build(key: str, data: torch.Tensor, *_: Any) -> dict[str, Any]:
            halves = zip("ab", data.chunk(2), strict=True)
            parts = {n: ShardedTensor.from_rank_offsets(f"{key}.{n}", half) for n, half in halves}
            return {"here": LocalNonpersistentObject(key), **parts}

        def merge(parts: dict[str, Any]) -> tuple[str, torch.Tensor]:
            return parts["here"], torch.cat([parts["a"], parts["b"]])

        return ShardedTensorFactory(key, torch.full((4,), value), build, merge)

    shardstore.save({name: factory(name, i) for i, name in enumerate("fg")}, tmp_path / "c")
    state = {
        "f": factory("f", 9),
        "new": factory("n1", 9),
        "nested": {"new": factory("n2", 9)},
        "list": [factory("n3", 9), factory("g", 9)],
    }
    found = shardstore.load(state, tmp_path / "c", strict=mode)
    if mode == "return_all":
        found, missing, unexpected = found
        assert (missing, unexpected) == (
            set(),
            {f"n{i}.{part}" for i in (1, 2, 3) for part in "ab"},
        )
    assert isinstance(found, dict)
    assert set(found) == {"f", "list"}
    merged = [found["f"], *found["list"]]
    assert [(key, tensor.tolist()) for key, tensor in merged] == [
        ("f", [0.0] * 4),
        ("g", [1.0] * 4),
    ]


def test_metadata_that_is_needed_must_be_given() -> None:
    check = validation.validate_integrity_and_strict_load
    with pytest.raises(CheckpointingException, match="local_metadata"):
        check({}, StrictHandling.RAISE_ALL, False)
    with pytest.raises(CheckpointingException, match="global_metadata"):
        check({}, StrictHandling.RAISE_ALL, False, [], None, {})
    with pytest.raises(CheckpointingException, match="global_metadata"):
        check({}, StrictHandling.ASSUME_OK_UNEXPECTED, True)


# -- strategies --------------------------------------------------------------------------------


class _Load(LoadShardedStrategy, LoadCommonStrategy):
    def __init__(self, reads: str) -> None:
        self.reads = reads

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        if loaded_backend != self.reads:
            raise CheckpointingException(f"only {self.reads}, not {loaded_backend}")

    def check_version_compatibility(self, loaded_version: int) -> None:
        if loaded_version > 2:
            raise CheckpointingException(f"version {loaded_version} is too new")

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any: ...
    def load_tensors_metadata(self, checkpoint_dir: Any) -> Any: ...
    def load_common(self, checkpoint_dir: Any) -> Any: ...
    def load_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: Any) -> Any: ...


def test_verify_finds_the_strategies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sharded, common = _Load("mine"), _Load("plain")
    for action in StrategyAction:
        monkeypatch.setitem(
            default_strategies, action.value, dict(default_strategies[action.value])
        )
    register_default_strategy(StrategyAction.LOAD_SHARDED, "mine", 2, sharded)
    register_default_strategy(StrategyAction.LOAD_COMMON, "plain", 1, common)
    verify = validation.verify_checkpoint_and_load_strategy
    with pytest.raises(NotACheckpointError, match=r"directory .*/no does not exist"):
        verify(str(tmp_path / "no"))
    with pytest.raises(NotACheckpointError, match="is not a distributed checkpoint"):
        verify(str(tmp_path))
    save_config(CheckpointingConfig("mine", 2, "plain", 1), str(tmp_path))
    assert verify(str(tmp_path)) == (sharded, common)
    assert verify(str(tmp_path), ("mine", 2), common) == (sharded, common)
    with pytest.raises(CheckpointingException, match="only other, not mine"):
        verify(str(tmp_path), _Load("other"))
    save_config(CheckpointingConfig("mine", 3, "plain", 1), str(tmp_path))
    with pytest.raises(CheckpointingException, match="too new"):
        verify(str(tmp_path), sharded)


def test_someone_must_handle_objects() -> None:
    class Handles(_Load):
        @property
        def can_handle_sharded_objects(self) -> bool:
            return True

    validation.validate_sharded_objects_handling(_Load("a"), Handles("b"))
    validation.validate_sharded_objects_handling(Handles("a"), _Load("b"))
    with pytest.raises(CheckpointingException, match="can_handle_sharded_objects"):
        validation.validate_sharded_objects_handling(_Load("a"), _Load("b"))


def test_global_metadata_of_a_world_of_one() -> None:
    tensor, thing = ShardedTensor.from_rank_offsets("t", torch.zeros(2)), _object(0, 1)
    local, everywhere = validation.determine_global_metadata({"a": [tensor, 3], "b": thing})
    assert [item.key for item in local] == ["t", "obj"]
    assert all(item.data is None for item in local)
    assert everywhere == [local]
    assert tensor.data is not None
