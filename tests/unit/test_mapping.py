"""shardstore.mapping: shards described, checked, narrowed, and factories applied and merged."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
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
    "offset", [(-1, 0, 5), (2, 0, 5), (0, -1, 5), (0, 5, 5), (0, 0, 0), (0, 0, -1), (0, 0), None]
)
def test_impossible_rank_offsets(offset: Any) -> None:
    with pytest.raises(CheckpointingException, match="weight") as caught:
        ShardedTensor.from_rank_offsets("weight", DATA, offset)
    assert caught.value.key == "weight"


@pytest.mark.parametrize(
    "data",
    [
        np.ones((2, 3), np.float32),
        [[1.0] * 3] * 2,
        torch.nested.nested_tensor([torch.ones(3)] * 2),
        torch.nn.LazyLinear(3).weight,
    ],
    ids=["array", "list", "nested", "lazy"],
)
def test_data_that_is_no_dense_tensor_is_refused(data: Any) -> None:
    for make in (lambda: OF("k", data), lambda: described(data=data)):
        with pytest.raises(DTypeMismatchError, match="not a dense tensor") as caught:
            make()
        assert caught.value.key == "k"


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
        ({"data": torch.arange(4.0), "flattened_range": slice(0.0, 4.0)}, CheckpointingException),
        ({"data": None, "flattened_range": slice(0, "4")}, CheckpointingException),
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


def irregular(**changes: Any) -> ShardedTensor:
    return described(
        **{"axis_fragmentations": None, "global_shape": (5, 3), "global_offset": (1, 0), **changes}
    )


def test_an_irregular_cut_counts_chunks_where_it_lies_on_a_multiple() -> None:
    assert irregular().has_regular_grid is False
    assert irregular().global_slice() == (slice(1, 3), slice(0, 3))
    assert irregular(global_offset=(2, 0)).local_chunk_offset_in_global() == (1, 0)


OF = ShardedTensor.from_rank_offsets
OF_FLAT = ShardedTensor.from_rank_offsets_flat
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "two offsets": (lambda: OF("k", DATA, (0, 0, 2), (0, 1, 2)), "different"),
    "range": (lambda: OF("k", DATA, flattened_range=slice(0, 1)), "from_rank_offsets_flat"),  # type: ignore[arg-type]
    "no range": (lambda: OF_FLAT("k", DATA.flatten(), (2, 3)), "from_rank_offsets"),
    "range in 2-D": (lambda: OF_FLAT("k", DATA, (2, 3), flattened_range=slice(0, 6)), "1-D"),
    "too many elements": (
        lambda: OF_FLAT("k", torch.ones(4), (2, 3), flattened_range=slice(0, 3)),
        "4 elements",
    ),
    "uneven axis": (
        lambda: described(global_shape=(5, 3)).max_allowed_chunks(),
        "5 cannot be cut into 2",
    ),
    "chunk of an irregular cut": (lambda: irregular().local_chunk_offset_in_global(), "irregular"),
    "chunks of an irregular cut": (lambda: irregular().max_allowed_chunks(), "irregular"),
    "coordinates": (lambda: described().global_coordinates(), "global_coordinates"),
    "local coordinates": (lambda: described().local_coordinates(), "local_coordinates"),
    "narrowed beyond the axes": (lambda: described().narrow(2, 0, 1), "'k'"),
    "narrowed before the axes": (lambda: described().narrow(-3, 0, 1), "'k'"),
    "narrowed beyond the end": (lambda: described().narrow(1, 2, 2), "'k'"),
    "narrowed before the start": (lambda: described().narrow(0, -3, 1), "'k'"),
    "narrowed to less than nothing": (lambda: described().narrow(1, 0, -1), "'k'"),
    "narrowed rest": (lambda: irregular(global_offset=(2, 0)).narrow(0, 0, 1), "regular"),
    "narrowed odd part": (lambda: irregular(global_shape=(4, 3)).narrow(0, 0, 1), "regular"),
    "narrowed empty part": (
        lambda: irregular(data=None, local_shape=(0, 3)).narrow(0, 0, 0),
        "regular",
    ),
    "narrowed columns of a range": (lambda: flat(1, 10).narrow(1, 0, 1), "contiguous"),
    "object of other axes": (lambda: ShardedObject("a", 5, (1, 2), (0,)), "same number of axes"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_makes_no_sense_is_refused(what: str) -> None:
    call, text = REFUSED[what]
    with pytest.raises(CheckpointingException, match=text) as caught:
        call()
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("bounds", "elements"), [((0, 9), 6), ((-1, 6), 1), ((2, 1), 0), ((0, 9), 9)]
)
def test_flattened_range_lies_within_the_local_tensor(
    bounds: tuple[int, int], elements: int
) -> None:
    with pytest.raises(ShapeMismatchError, match="not within the 6 elements"):
        OF_FLAT("k", torch.zeros(elements), (2, 3), flattened_range=slice(*bounds))


def test_two_equal_rank_offsets_are_one() -> None:
    assert OF("k", DATA, (0, 1, 2), (0, 1, 2)).global_offset == (2, 0)


def test_an_uneven_axis_is_padded_where_shapes_may_differ() -> None:
    padded = described(global_shape=(5, 3), allow_shape_mismatch=True)
    assert padded.max_allowed_chunks() == (2, 3)


def test_shapes_become_tuples_of_ints() -> None:
    shard = described(
        local_shape=[2, 3], global_shape=torch.Size([4, 3]), axis_fragmentations=[2, 1]
    )
    shapes = (shard.local_shape, shard.global_shape, shard.axis_fragmentations)
    assert [type(shape) for shape in shapes] == [tuple] * 3
    assert OF_FLAT("k", torch.ones(1), (), flattened_range=slice(None)).local_coordinates() == ()


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
    assert (shard.data.shape, shard.data.device.type) == ((4,), "meta")

    asked: list[Any] = []

    def counting(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
        asked.append((shape, options))
        return torch.arange(math.prod(shape), **options).reshape(shape)

    shard = described(data=None, flattened_range=slice(1, 5))
    shard.init_data("cpu", counting)
    assert asked == [((2, 3), {"dtype": torch.float32, "device": "cpu"})]
    assert shard.data.tolist() == [1, 2, 3, 4]
    shard.validate_metadata_integrity()


# ---- narrow


@pytest.mark.parametrize(
    ("shard", "bounds", "shape", "offset", "data"),
    [
        (described(), (0, 1, 1), (2, 3), (1, 0), [[3, 4, 5]]),
        (described(), (-1, -1, 1), (4, 1), (2, 0), [[2], [5]]),
        (described(data=None), (0, 0, 1), (2, 3), (1, 0), None),
        (irregular(), (1, 0, 2), (5, 2), (1, 0), [[0, 1], [3, 4]]),
        (OF("k", torch.zeros(0, 3), (0, 1, 2)), (0, 0, 0), (0, 3), (0, 0), []),
        (OF("k", torch.zeros(0, 3), (0, 1, 2)), (1, 1, 2), (0, 2), (0, 0), []),
    ],
)
def test_narrow_shrinks_the_global_tensor(
    shard: ShardedTensor, bounds: tuple[int, int, int], shape: Any, offset: Any, data: Any
) -> None:
    shard.replica_id = 3
    (part,) = shard.narrow(*bounds)
    assert (part.global_shape, part.global_offset, part.replica_id) == (shape, offset, 3)
    if part.data is None or shard.data is None:
        assert data is None
    else:
        assert part.data.tolist() == data
        assert part.data.untyped_storage().data_ptr() == shard.data.untyped_storage().data_ptr()


def test_narrow_of_a_range_without_data() -> None:
    (part,) = flat(1, 10).without_data().narrow(0, 1, 2)
    assert (part.data, part.flattened_range) == (None, slice(0, 6))


@given(rows=st.integers(1, 5), columns=st.integers(1, 4), data=st.data())
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
    assert bool(parts) == bool(kept)
    assert [e for part in parts for e in part.data.tolist()] == kept  # type: ignore[union-attr]
    for part in parts:
        assert part.flattened_range is not None
        assert wanted[part.flattened_range].tolist() == kept


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


@given(
    key=st.text(st.characters(exclude_categories=["Cs"])),
    cells=st.lists(st.tuples(st.integers(0, 99), st.integers(1, 99)), max_size=4),
)
def test_unique_key_round_trip(key: str, cells: list[tuple[int, int]]) -> None:
    thing = ShardedObject(key, None, tuple(n for _, n in cells), tuple(i for i, _ in cells), 7)
    assert ShardedObject.empty_from_unique_key(thing.unique_key, replica_id=7) == thing


def test_unusual_unique_keys() -> None:
    """Of a key that looks like one, and with the first length alone."""
    thing = ShardedObject.empty_from_unique_key("a/shard_0_1/shard_2_3")
    assert (thing.key, thing.global_offset, thing.global_shape) == ("a/shard_0_1", (2,), (3,))
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
