"""shardstore.mapping: shards described, checked, narrowed, and factories applied and merged."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardstore import mapping
from shardstore.errors import CheckpointingException, DTypeMismatchError, ShapeMismatchError
from shardstore.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
)

DATA = torch.arange(6.0).reshape(2, 3)


def described(**changes: Any) -> ShardedTensor:
    """The lower half of a (4, 3) tensor, with attributes changed."""
    attributes: dict[str, Any] = {
        "key": "k",
        "data": DATA,
        "dtype": torch.float32,
        "local_shape": (2, 3),
        "global_shape": (4, 3),
        "global_offset": (2, 0),
        "axis_fragmentations": (2, 1),
    }
    return ShardedTensor(**(attributes | changes))


def flat(start: int, stop: int, **kwargs: Any) -> ShardedTensor:
    """A range of the lower (4, 3) half of an (8, 3) tensor; data counts the flat elements."""
    data = torch.arange(float(start), float(stop))
    return ShardedTensor.from_rank_offsets_flat(
        "k", data, (4, 3), (0, 1, 2), flattened_range=slice(start, stop), **kwargs
    )


# ---- from_rank_offsets


def test_further_attributes_are_passed_on() -> None:
    shard = ShardedTensor.from_rank_offsets("k", DATA, replica_id=(0, 1), allow_shape_mismatch=True)
    assert shard.replica_id == (0, 1)
    assert shard.allow_shape_mismatch is True
    with pytest.raises(TypeError, match="foo"):
        ShardedTensor.from_rank_offsets("k", DATA, foo=1)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.nn.Parameter(DATA),
        DATA.to("meta"),
        DATA.t().contiguous().t(),
        DATA.to(torch.bfloat16),
        DATA.to(torch.float8_e4m3fn),
    ],
    ids=["parameter", "meta", "strided", "bf16", "float8"],
)
def test_tensors_of_any_kind_are_described(tensor: torch.Tensor) -> None:
    shard = ShardedTensor.from_rank_offsets("k", tensor, (0, 1, 3))
    assert shard.data is tensor
    assert shard.dtype == tensor.dtype
    assert (shard.global_shape, shard.global_offset) == ((6, 3), (2, 0))


def test_empty_shard() -> None:
    shard = ShardedTensor.from_rank_offsets("k", torch.zeros(0, 3), (0, 1, 3))
    assert (shard.global_shape, shard.global_offset) == ((0, 3), (0, 0))
    assert shard.local_chunk_offset_in_global() == (0, 0)
    assert shard.max_allowed_chunks() == (0, 3)


@pytest.mark.parametrize(
    "offset",
    [(-1, 0, 5), (2, 0, 5), (0, -1, 5), (0, 5, 5), (0, 0, 0), (0, 0, -1), (0, 0), None],
)
def test_impossible_rank_offsets(offset: Any) -> None:
    with pytest.raises(CheckpointingException, match="weight") as caught:
        ShardedTensor.from_rank_offsets("weight", DATA, offset)
    assert caught.value.key == "weight"


def test_two_rank_offsets_for_one_axis_must_agree() -> None:
    twice = ShardedTensor.from_rank_offsets("k", DATA, (0, 1, 2), (0, 1, 2))
    assert twice.global_offset == (2, 0)
    with pytest.raises(CheckpointingException, match="different"):
        ShardedTensor.from_rank_offsets("k", DATA, (0, 0, 2), (0, 1, 2))


def test_flattened_range_needs_the_other_constructor() -> None:
    with pytest.raises(ValueError, match="from_rank_offsets_flat"):
        ShardedTensor.from_rank_offsets("k", DATA, flattened_range=slice(0, 1))  # type: ignore[arg-type]
    with pytest.raises(CheckpointingException, match="from_rank_offsets"):
        ShardedTensor.from_rank_offsets_flat("k", DATA.flatten(), (2, 3))


# ---- metadata integrity


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"dtype": torch.float16}, DTypeMismatchError),
        ({"local_shape": (3, 2)}, ShapeMismatchError),
        ({"global_shape": (4, 3, 1)}, CheckpointingException),
        ({"global_offset": (2, 0, 0)}, CheckpointingException),
        ({"prepend_axis_num": 1}, CheckpointingException),
        ({"global_offset": (1, 0)}, CheckpointingException),
        ({"global_offset": (-2, 0)}, CheckpointingException),
        ({"axis_fragmentations": (2,)}, CheckpointingException),
        ({"axis_fragmentations": (0, 1)}, CheckpointingException),
        ({"data": torch.arange(3.0), "flattened_range": slice(1, 5)}, ShapeMismatchError),
        ({"data": torch.ones(2, 2), "flattened_range": slice(1, 5)}, ShapeMismatchError),
        ({"data": torch.arange(4.0), "flattened_range": slice(4, 8)}, ShapeMismatchError),
        ({"data": torch.arange(4), "flattened_range": slice(1, 5)}, DTypeMismatchError),
        ({"data": torch.arange(4.0), "flattened_range": slice(1, 5, 1)}, CheckpointingException),
        ({"data": None, "flattened_range": slice(0, 4, 2)}, CheckpointingException),
        ({"data": None, "flattened_range": (0, 4)}, CheckpointingException),
    ],
)
def test_contradictions_are_refused(
    changes: dict[str, Any], error: type[CheckpointingException]
) -> None:
    with pytest.raises(error, match="'k'") as caught:
        described(**changes)
    assert caught.value.key == "k"


def test_attributes_set_later_are_checked_on_demand() -> None:
    shard = described()
    shard.validate_metadata_integrity()
    shard.dtype = torch.float64
    with pytest.raises(DTypeMismatchError, match=r"float32.*float64"):
        shard.validate_metadata_integrity()


def test_irregular_cut_may_start_anywhere() -> None:
    shard = described(axis_fragmentations=None, global_shape=(5, 3), global_offset=(1, 0))
    assert shard.has_regular_grid is False
    assert shard.global_slice() == (slice(1, 3), slice(0, 3))
    with pytest.raises(CheckpointingException, match="irregular"):
        shard.local_chunk_offset_in_global()
    with pytest.raises(CheckpointingException, match="irregular"):
        shard.max_allowed_chunks()


def test_irregular_cut_counts_chunks_where_it_lies_on_a_multiple() -> None:
    shard = described(axis_fragmentations=None, global_shape=(5, 3), global_offset=(2, 0))
    assert shard.local_chunk_offset_in_global() == (1, 0)


@pytest.mark.parametrize(
    ("bounds", "elements"), [((0, 9), 6), ((-1, 6), 1), ((2, 1), 0), ((0, 9), 9)]
)
def test_flattened_range_lies_within_the_local_tensor(
    bounds: tuple[int, int], elements: int
) -> None:
    data = torch.zeros(elements)
    with pytest.raises(ShapeMismatchError, match="not within the 6 elements"):
        ShardedTensor.from_rank_offsets_flat("k", data, (2, 3), flattened_range=slice(*bounds))


def test_uneven_axis_needs_allow_shape_mismatch_for_chunks() -> None:
    with pytest.raises(CheckpointingException, match="5 cannot be cut into 2"):
        described(global_shape=(5, 3)).max_allowed_chunks()
    padded = described(global_shape=(5, 3), allow_shape_mismatch=True)
    assert padded.max_allowed_chunks() == (2, 3)


def test_shapes_become_tuples_of_ints() -> None:
    shard = described(local_shape=[2, 3], global_shape=torch.Size([4, 3]))
    assert (type(shard.local_shape), type(shard.global_shape)) == (tuple, tuple)


def test_description_survives_copying() -> None:
    shard = flat(1, 5).without_data()
    assert shard.data is None
    assert copy.deepcopy(shard) == shard
    assert pickle.loads(pickle.dumps(shard)) == shard
    assert "tensor" not in repr(described()).lower().replace("shardedtensor", "")


def test_flattened_ranges_are_remarked_upon_once(caplog: pytest.LogCaptureFixture) -> None:
    mapping._logged_deprecations.clear()
    with caplog.at_level("INFO", logger=mapping.logger.name):
        flat(0, 1)
        flat(0, 1)
    assert len(caplog.records) == 1
    assert caplog.records[0].levelname == "INFO"


# ---- flattened ranges


def test_flat_data_must_be_one_dimensional_and_as_long_as_the_range() -> None:
    with pytest.raises(CheckpointingException, match="1-D"):
        ShardedTensor.from_rank_offsets_flat("k", DATA, (2, 3), flattened_range=slice(0, 6))
    with pytest.raises(CheckpointingException, match="4 elements"):
        ShardedTensor.from_rank_offsets_flat(
            "k", torch.ones(4), (2, 3), flattened_range=slice(0, 3)
        )


def test_coordinates_are_those_of_flattened_ranges() -> None:
    with pytest.raises(CheckpointingException, match="global_coordinates"):
        described().global_coordinates()
    with pytest.raises(CheckpointingException, match="local_coordinates"):
        described().local_coordinates()


# ---- init_data


def test_init_data_makes_the_local_tensor() -> None:
    shard = described(data=None)
    shard.init_data("cpu", torch.ones)
    assert shard.data is not None
    assert torch.equal(shard.data, torch.ones(2, 3))
    kept = shard.data
    shard.init_data("meta")
    assert shard.data is kept


def test_init_data_of_a_flattened_range() -> None:
    shard = described(data=None, flattened_range=slice(1, 5))
    shard.init_data(torch.device("meta"))
    assert shard.data is not None
    assert (shard.data.shape, shard.data.device.type) == ((4,), "meta")

    asked: list[Any] = []

    def counting(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
        asked.append((shape, options))
        return torch.arange(math.prod(shape), **options).reshape(shape)

    shard = described(data=None, flattened_range=slice(1, 5))
    shard.init_data("cpu", counting)
    assert asked == [((2, 3), {"dtype": torch.float32, "device": "cpu"})]
    assert shard.data is not None
    assert shard.data.tolist() == [1, 2, 3, 4]
    shard.validate_metadata_integrity()


# ---- narrow


def test_narrow_shrinks_the_global_tensor() -> None:
    (part,) = described(replica_id=3).narrow(0, 1, 1)
    assert (part.global_shape, part.global_offset, part.replica_id) == ((2, 3), (1, 0), 3)
    assert part.data is not None
    assert part.data.tolist() == [[3, 4, 5]]
    assert part.data.data_ptr() == DATA[1:].data_ptr()


def test_narrow_counts_from_the_end_too() -> None:
    (part,) = described().narrow(-1, -1, 1)
    assert (part.global_shape, part.global_offset) == ((4, 1), (2, 0))
    assert part.data is not None
    assert part.data.tolist() == [[2], [5]]


def test_narrow_without_data() -> None:
    (part,) = described(data=None).narrow(0, 0, 1)
    assert (part.data, part.global_shape, part.global_offset) == (None, (2, 3), (1, 0))
    (part,) = flat(1, 10).without_data().narrow(0, 1, 2)
    assert (part.data, part.flattened_range) == (None, slice(0, 6))


@pytest.mark.parametrize("bounds", [(1, 2, 2), (2, 0, 1), (-3, 0, 1), (1, 0, -1), (0, -3, 1)])
def test_narrow_beyond_the_local_tensor(bounds: tuple[int, int, int]) -> None:
    with pytest.raises(CheckpointingException, match="'k'"):
        described().narrow(*bounds)


def test_narrow_needs_a_regular_cut_along_that_axis_alone() -> None:
    shard = described(axis_fragmentations=None, global_shape=(5, 3), global_offset=(1, 0))
    with pytest.raises(CheckpointingException, match="regular"):
        shard.narrow(0, 0, 1)
    (part,) = shard.narrow(1, 0, 2)
    assert (part.global_shape, part.global_offset) == ((5, 2), (1, 0))


def test_narrow_of_an_empty_shard() -> None:
    empty = ShardedTensor.from_rank_offsets("k", torch.zeros(0, 3), (0, 1, 2))
    (part,) = empty.narrow(0, 0, 0)
    assert part.global_shape == (0, 3)
    (part,) = empty.narrow(1, 1, 2)
    assert (part.local_shape, part.global_shape) == ((0, 2), (0, 2))


def test_flat_narrow() -> None:
    assert flat(1, 3).narrow(0, 1, 2) == []
    assert flat(0, 3).narrow(0, 1, 2) == []
    assert flat(4, 4).narrow(0, 1, 2) == []
    with pytest.raises(CheckpointingException, match="contiguous"):
        flat(1, 10).narrow(1, 0, 1)


@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 4),
    data=st.data(),
)
def test_flat_narrow_keeps_what_rows_and_range_share(
    rows: int, columns: int, data: st.DataObject
) -> None:
    size = rows * columns
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    first = data.draw(st.integers(0, rows))
    length = data.draw(st.integers(0, rows - first))
    whole = torch.arange(size)
    shard = ShardedTensor.from_rank_offsets_flat(
        "k", whole[start:stop].to("cpu"), (rows, columns), flattened_range=slice(start, stop)
    )
    wanted = whole.reshape(rows, columns)[first : first + length].flatten()
    kept = [int(e) for e in wanted if start <= e < stop]
    parts = shard.narrow(0, first, length)
    assert [e for part in parts for e in part.data.tolist()] == kept  # type: ignore[union-attr]
    for part in parts:
        assert part.flattened_range is not None
        assert wanted[part.flattened_range].tolist() == kept


@given(
    shape=st.lists(st.integers(1, 4), max_size=3),
    prepended=st.integers(0, 2),
    data=st.data(),
)
def test_shards_tile_the_global_tensor(
    shape: list[int], prepended: int, data: st.DataObject
) -> None:
    parts = [data.draw(st.integers(1, 3)) for _ in range(prepended + len(shape))]
    local = torch.zeros(shape)
    covered: np.ndarray[Any, np.dtype[np.int64]] | None = None
    for index in np.ndindex(*parts):
        shard = ShardedTensor.from_rank_offsets(
            "k",
            local,
            *((axis, i, parts[axis]) for axis, i in enumerate(index)),
            prepend_axis_num=prepended,
        )
        covered = np.zeros(shard.global_shape, np.int64) if covered is None else covered
        assert covered[shard.global_slice()].shape == tuple(shape)
        covered[shard.global_slice()] += 1
        assert shard.local_chunk_offset_in_global() == index
        chunk = shard.max_allowed_chunks()
        assert shard.global_offset == tuple(i * c for i, c in zip(index, chunk, strict=True))
    assert covered is not None
    assert (covered == 1).all()


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    index=st.integers(0, 2),
    data=st.data(),
)
def test_coordinates_find_the_elements(shape: list[int], index: int, data: st.DataObject) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    world = np.arange(3 * size).reshape(3 * shape[0], *shape[1:])
    local = torch.from_numpy(world[index * shape[0] : (index + 1) * shape[0]].copy())
    shard = ShardedTensor.from_rank_offsets_flat(
        "k",
        local.flatten()[start:stop],
        tuple(shape),
        (0, index, 3),
        flattened_range=slice(start, stop),
    )
    assert shard.data is not None
    assert world[shard.global_coordinates()].tolist() == shard.data.tolist()
    assert local.numpy()[shard.local_coordinates()].tolist() == shard.data.tolist()


# ---- replicas, objects


def test_the_base_class_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        ShardedBase()  # type: ignore[abstract]


def test_sharded_object() -> None:
    thing = ShardedObject("a/b", {"x": 1}, (1, 2), (0, 1), replica_id=(0, 3))
    assert thing.unique_key == "a/b/shard_0.1_1.2"
    assert str(thing) == "ShardedObject(key='a/b')"
    assert thing.without_data().data is None
    assert thing.data == {"x": 1}
    with pytest.raises(CheckpointingException, match="the same number of axes"):
        ShardedObject("a", 5, (1, 2), (0,))


@given(
    key=st.text(st.characters(exclude_categories=["Cs"])),
    cells=st.lists(st.tuples(st.integers(0, 99), st.integers(1, 99)), max_size=4),
)
def test_unique_key_round_trip(key: str, cells: list[tuple[int, int]]) -> None:
    thing = ShardedObject(key, None, tuple(n for _, n in cells), tuple(i for i, _ in cells), 7)
    assert ShardedObject.empty_from_unique_key(thing.unique_key, replica_id=7) == thing


def test_unique_key_of_a_key_that_looks_like_one() -> None:
    thing = ShardedObject.empty_from_unique_key("a/shard_0_1/shard_2_3")
    assert (thing.key, thing.global_offset, thing.global_shape) == ("a/shard_0_1", (2,), (3,))


def test_unique_key_with_the_first_length_alone() -> None:
    thing = ShardedObject.empty_from_unique_key("a/shard_0.1_1")
    assert (thing.global_offset, thing.global_shape) == ((0, 1), (1, -1))


@pytest.mark.parametrize(
    "text", ["a/b", "shard_0_1", "a/shard_x_1", "a/shard_0_1_2", "a/shard_0", "a/shard_0_1.2", ""]
)
def test_not_a_unique_key(text: str) -> None:
    with pytest.raises(ValueError, match="is not the unique key") as caught:
        ShardedObject.empty_from_unique_key(text)
    assert isinstance(caught.value, CheckpointingException)


# ---- factories


def halves(key: str = "f", **kwargs: Any) -> ShardedTensorFactory:
    def build(
        key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any
    ) -> dict[str, Any]:
        assert flattened_range == kwargs.get("flattened_range")
        return {
            name: ShardedTensor.from_rank_offsets(f"{key}.{name}", part, replica_id=replica_id)
            for name, part in zip("ab", data.chunk(2), strict=True)
        }

    def merge(loaded: dict[str, Any]) -> torch.Tensor:
        return torch.cat([loaded["a"], loaded["b"]])

    return ShardedTensorFactory(key, torch.arange(4.0), build, merge, **kwargs)


def test_factories_are_applied_in_dicts_and_lists() -> None:
    inside_a_value = halves()
    whole = torch.ones(1)
    state: dict[str, Any] = {
        "f": halves(replica_id=2, flattened_range=slice(0, 4)),
        "list": [halves("g"), 5, [halves("h")]],
        "tuple": (inside_a_value,),
        "x": whole,
    }
    apply_factories(state)
    assert state["f"]["b"].key == "f.b"
    assert state["f"]["b"].replica_id == 2
    assert state["f"]["b"].data.tolist() == [2, 3]
    assert state["list"][0]["a"].key == "g.a"
    assert state["list"][1] == 5
    assert state["list"][2][0]["a"].key == "h.a"
    assert state["tuple"] == (inside_a_value,)
    assert state["x"] is whole
    for value in (None, 5, halves(), (halves(), {"f": inside_a_value})):  # nothing to replace in
        apply_factories(value)  # type: ignore[arg-type]
    assert inside_a_value.key == "f"


def test_what_a_factory_builds_is_left_as_it_is() -> None:
    inner = halves()
    state: dict[str, Any] = {
        "f": ShardedTensorFactory("f", DATA, lambda *_: {"inner": inner}, lambda x: DATA)
    }
    apply_factories(state)
    assert state == {"f": {"inner": inner}}


def test_factory_without_data_keeps_the_rest() -> None:
    factory = halves(replica_id=1)
    bare = factory.without_data()
    assert vars(bare) == {**vars(factory), "data": None}
    assert bare.merge_fn is factory.merge_fn
    assert factory.data is not None
    factory.validate_metadata_integrity()


def loaded_halves() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(2.0), "b": torch.arange(2.0, 4.0)}


def test_merges_in_dicts_and_lists() -> None:
    loaded = {"f": loaded_halves(), "list": [0, [loaded_halves()]], "other": 3}
    merged = apply_factory_merges(loaded, {"f": halves(), "list": {1: [halves()]}})
    assert merged is loaded
    assert merged["f"].tolist() == merged["list"][1][0].tolist() == [0, 1, 2, 3]
    assert merged["list"][0] == 0
    assert merged["other"] == 3
    assert list(merged) == ["f", "list", "other"]


def test_merge_at_the_root() -> None:
    assert apply_factory_merges(loaded_halves(), halves()).tolist() == [0, 1, 2, 3]  # type: ignore[arg-type, attr-defined]


@pytest.mark.parametrize(
    ("loaded", "factories", "text"),
    [
        ({"b": 3}, {"a": halves()}, r"'a'.*not loaded"),
        ({"z": {"c": 3}}, {"z": {"a": halves()}}, r"\('p', 'z'\)"),
        ({"z": [1, 2]}, {"z": [halves()]}, "2 elements.*1"),
        ({"z": [1, 2]}, {"z": {2: halves()}}, "element 2 of a list of 2"),
        ({"z": [1, 2]}, {"z": {"x": halves()}}, "element 'x'"),
        ({"z": {0: 1}}, {"z": [halves()]}, "dict was loaded"),
        ({"z": [{"y": 1}]}, {"z": [{"y": 3}]}, r"\('p', 'z', 0, 'y'\)"),
        ({"z": 1}, {"z": {"b": halves()}}, "int was loaded"),
    ],
)
def test_factory_merges_of_other_structures_are_refused(
    loaded: Any, factories: Any, text: str
) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        apply_factory_merges(loaded, factories, key=("p",))
    assert isinstance(caught.value, CheckpointingException)


def test_an_error_in_a_merge_tells_the_factory() -> None:
    with pytest.raises(KeyError) as caught:
        apply_factory_merges({"z": {"a": DATA}}, {"z": halves("weight")})
    assert "weight" in caught.value.__notes__[0]
