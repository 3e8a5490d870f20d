"""Wrong use: one clear error on every rank, no hang, and nothing left behind."""

from __future__ import annotations

import os
import pickle
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zarr

import shardstore
from shardstore.distributed.coordinator import DEADLINE_VARIABLE
from shardstore.errors import (
    AccessPatternError,
    ArgumentError,
    CheckpointingException,
    DTypeMismatchError,
    FormatVersionError,
    KeyNameError,
    MissingKeyError,
    RanksError,
    ShapeMismatchError,
    UnsafeObjectError,
)
from shardstore.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from shardstore.saving.session import session_of
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.stores.location import Location
from shardstore.strategies.common import TorchCommonSaveStrategy
from shardstore.strategies.zarr import ZarrSaveShardedStrategy
from shardstore.values.torch_dump import dump_bytes
from tests.helpers.ranks_helper import run_ranks
from tests.helpers.root_documents import about, rewrite
from tests.helpers.scenarios import raised, remains, remains_of_all, run_scenarios, scenarios_of

WORLD = 3


def shard(key: str, index: int, parts: int = WORLD, **options: Any) -> ShardedTensor:
    part = torch.full((2, 4), float(index))
    return ShardedTensor.from_rank_offsets(key, part, (0, index, parts), **options)


def flat(key: str, start: int, stop: int) -> ShardedTensor:
    part = torch.arange(float(start), float(stop))
    return ShardedTensor.from_rank_offsets_flat(
        key, part, (6, 5), flattened_range=slice(start, stop)
    )


def refused(
    state: dict[str, Any],
    folder: Path,
    *words: str,
    kind: type[CheckpointingException] = CheckpointingException,
    name: str = "c",
    **options: Any,
) -> CheckpointingException:
    """Save what is to be refused; the error of this rank."""
    error = raised(partial(shardstore.save, state, folder / name, **options), *words, kind=kind)
    assert remains_of_all(folder) == []
    dist.barrier()
    return error


def a_shard_is_missing(rank: int, world_size: int, folder: Path) -> None:
    state = {} if rank == 1 else {"layer.w": shard("layer.w", rank)}
    words = ("Invalid access pattern", "'layer.w'", "offset (2, 0)", "(2, 4)", "no rank", "replica")
    assert refused(state, folder, *words, kind=AccessPatternError).key == "layer.w"
    refused(state, folder, *words, kind=AccessPatternError, sharded_strategy=("zarr", 1))
    # The holder of the first shard, who creates the array, is no special case.
    state = {} if rank == 0 else {"layer.w": shard("layer.w", rank)}
    refused(state, folder, "Invalid access pattern", "'layer.w'", kind=AccessPatternError)


def shards_overlap(rank: int, world_size: int, folder: Path) -> None:
    state: dict[str, Any] = {"w": shard("w", min(rank, 1), 2)}
    words = ("Invalid access pattern", "'w'", "offset (2, 0)", "[1, 2]", "replica")
    refused(state, folder, *words, kind=AccessPatternError)
    state = {"w": [shard("w", 0, 1), shard("w", 0, 1)] if rank == 2 else []}
    refused(state, folder, "'w'", "2 times", "[2]", kind=AccessPatternError)


def irregular_shards_overlap(rank: int, world_size: int, folder: Path) -> None:
    overlap, hole = ((0, 3, 6), (4, 3, 4)), ((0, 3, 8), (3, 3, 2))
    for (starts, lengths), words in (
        (overlap, ("offset (3,)", "[0, 1]")),
        (hole, ("offset (6,)", "no rank")),
    ):
        size, start = (lengths[rank],), (starts[rank],)
        tensor = ShardedTensor("w", torch.zeros(size), torch.float32, size, (10,), start, None)
        refused({"w": tensor}, folder, "Invalid access pattern", "'w'", *words)


def main_replicas_are_two_or_none(rank: int, world_size: int, folder: Path) -> None:
    one = ShardedTensor.from_rank_offsets("w", torch.ones(3), replica_id=max(0, rank - 1))
    refused({"w": one}, folder, "Invalid access pattern", "'w'", "[0, 1]", kind=AccessPatternError)
    index = min(rank, 1)
    other = shard("w", index, 2, replica_id=index)
    refused({"w": other}, folder, "Invalid access pattern", "'w'", "no rank")


def flat_ranges_overlap_or_leave_a_gap(rank: int, world_size: int, folder: Path) -> None:
    gap = "Flattened ranges dont cover the whole shard ShardedTensor"
    cases: list[tuple[list[int], list[int], list[str]]] = [
        ([0, 8, 20], [10, 20, 30], ["Invalid access pattern", "'w'", "[0, 1]", "8:10"]),
        ([0, 12, 20], [10, 20, 30], [gap, "'w'", "10:12", "30"]),
        ([0, 10, 20], [10, 20, 27], ["27:30"]),
        ([4, 10, 20], [10, 20, 30], ["0:4"]),
    ]
    for starts, stops, words in cases:
        state = {"w": flat("w", starts[rank], stops[rank])}
        refused(state, folder, *words, kind=AccessPatternError)


def one_rank_can_not_prepare(rank: int, world_size: int, folder: Path) -> None:
    def build(key: str, data: torch.Tensor, replica_id: Any, bounds: Any) -> dict[str, Any]:
        if rank == 1:
            raise RuntimeError("no such expert: 17")
        return {"w": shard(key, rank)}

    factory = ShardedTensorFactory("w", torch.ones(2), build, lambda loaded: loaded["w"])
    with pytest.raises(RuntimeError, match=r"no such expert: 17") as caught:
        shardstore.save({"f": factory}, folder / "c")
    if rank != 1:
        assert isinstance(caught.value, RanksError)
        assert "rank 1" in str(caught.value)
        assert caught.value.failures.keys() == {1}
    assert remains_of_all(folder) == []
    dist.barrier()

    state: dict[str, Any] = {"w": shard("w", rank), "l": threading.Lock()}
    refused(state, folder, "pickle", "LocalNonpersistentObject")

    data = threading.Lock() if rank == 2 else 1
    state = {"w": shard("w", rank), "o": ShardedObject("bad.o", data, (world_size,), (rank,))}
    refused(state, folder, "bad.o", "pickle", *([] if rank == 2 else ["rank 2"]))

    for victim, wrong, words in (
        (2, None, ["'w'", "rank 2", "no data"]),
        (1, torch.ones(1, 4), ["'w'", "(1, 4)", "(2, 4)"]),
    ):
        state = {"w": shard("w", rank)}
        state["w"].data = wrong if rank == victim else state["w"].data
        refused(state, folder, *words)

    state = {"w": shard("w", rank)}
    if rank == 1:
        data = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
        state["q"] = ShardedTensor.from_rank_offsets("q", data)
    refused(state, folder, "q", "int8", *([] if rank == 1 else ["rank 1"]))


def places_differ(rank: int, world_size: int, folder: Path) -> None:
    state = {"w": shard("w", rank)}
    name = "elsewhere" if rank == 1 else "c"
    refused(state, folder, "rank 0", "rank 1", "/elsewhere", "/c", "same place", name=name)


def a_rank_has_no_place(rank: int, folder: Path) -> None:
    state, place = {"w": shard("w", rank)}, folder / "c"
    shardstore.save(state, place)
    for call in (shardstore.save, shardstore.load):
        error = raised(partial(call, state, place if rank else ""), "empty")
        assert isinstance(error, ArgumentError) == (rank == 0)
    assert remains_of_all(folder) == ["c"]


def a_rank_gives_what_is_no_group(rank: int, folder: Path) -> None:
    state, place = {"w": shard("w", 0, 1, replica_id=rank)}, folder / "c"
    wrong: Any = 3 if rank == 1 else None
    refused(state, folder, "replica_group=3", replica_group=wrong)
    shardstore.save(state, place, replica_group=dist.group.WORLD)
    raised(lambda: shardstore.load(state, place, replica_group=wrong), "replica_group=3")
    # What a rank that is no member of a group holds of it.
    alone = dist.new_group([0])
    shardstore.save(state, place, overwrite=True, replica_group=alone)
    shardstore.load(state, place, replica_group=alone)


def a_rank_wants_no_documents_of_arrays(rank: int, folder: Path) -> None:
    state = {"w": shard("w", rank)}
    for place in (str(folder / "c"), f"local://{folder}/d"):
        error = raised(lambda p=place: shardstore.save(state, p, array_documents=rank != 0))  # type: ignore[misc]
        said = "saves with array_documents=True but rank 0 with array_documents=False"
        assert said in str(error)
        if rank == 0:
            assert not Location.of(place).listing()
        shardstore.save(state, place, array_documents=False)
        strategy = ZarrSaveShardedStrategy("zarr", 2, array_documents=rank != 0)
        shardstore.save(state, place, strategy, array_documents=rank == 0, overwrite=True)
        shardstore.load(state, place)
        stored = StoredCheckpoint(Location.of(place))
        assert not stored.root.array_documents
        assert sorted(stored.location.listing("w")) == ["c.0.0", "c.1.0", "c.2.0"]


def a_rank_has_no_deadline(rank: int, world_size: int, folder: Path) -> None:
    manager = shardstore.CheckpointManager(folder / "run", every_s=60)
    place, state = str(folder / "c"), {"w": shard("w", rank)}
    before = os.environ[DEADLINE_VARIABLE]
    for wrong in (0, 2):
        os.environ[DEADLINE_VARIABLE] = "30m" if rank == wrong else before
        for call in (
            lambda: shardstore.save(state, place),
            lambda: shardstore.async_save(state, place),
            lambda: shardstore.load(state, place),
            lambda: manager.should_save(1),
            lambda: manager.save(1, state),
            lambda: manager.restore(state),
        ):
            text = f"{'' if rank == wrong else f'rank {wrong}: '}{DEADLINE_VARIABLE}='30m' is not"
            assert text in str(raised(call))
    os.environ[DEADLINE_VARIABLE] = before
    assert remains_of_all(folder) == []
    shardstore.save(state, place)


def a_rank_lost_its_working_directory(rank: int, world_size: int, folder: Path) -> None:
    """A relative place is none then. Every rank is told, of a load too, and goes on."""
    before, place = Path.cwd(), folder / "c"
    shardstore.save({"w": shard("w", rank)}, place)
    own = folder if rank != 1 else folder / "gone"
    own.mkdir(exist_ok=True)
    dist.barrier()
    try:
        os.chdir(own)
        if rank == 1:
            own.rmdir()
        for call in (shardstore.load, shardstore.save):
            words = ["'c', is relative to a working directory", *([] if rank == 1 else ["rank 1"])]
            kind = ArgumentError if rank == 1 else RanksError
            raised(partial(call, {"w": shard("w", rank)}, "c"), *words, kind=kind)
        shardstore.load({"w": shard("w", rank)}, place)
    finally:
        os.chdir(before)


def an_argument_of_a_load_raises_an_error_of_its_own(
    rank: int, world_size: int, folder: Path
) -> None:
    shardstore.save({"w": shard("w", rank)}, folder / "c")
    wrong: Any = {"cast": torch.ones(2)} if rank == 1 else {}  # it is neither true nor false
    with pytest.raises(RuntimeError, match="ambiguous"):
        shardstore.load({"w": shard("w", rank)}, folder / "c", **wrong)
    shardstore.load({"w": shard("w", rank)}, folder / "c")


def keys_can_not_be_stored(rank: int, world_size: int, folder: Path) -> None:
    refused({"w": shard("", rank)}, folder, "empty key", kind=KeyNameError)
    refused({"w": shard("a\ud800", rank)}, folder, "Unicode", kind=KeyNameError)
    state = {"a": shard("Layer.w", rank), "b": shard("layer.w", rank)}
    words = ("'Layer.w'", "'layer.w'", "case", "rename")
    refused(state, folder, *words, kind=KeyNameError)
    # Each rank holds but one of the two.
    key = "Layer.w" if rank == 1 else "layer.w"
    other = ShardedTensor.from_rank_offsets(key, torch.ones(2), replica_id=rank // 2)
    refused({"w": other}, folder, *words, kind=KeyNameError)


def objects_are_two_or_missing(rank: int, world_size: int, folder: Path) -> None:
    state = {"o": ShardedObject("o", rank, (2,), (min(rank, 1),))}
    refused(state, folder, "Invalid access pattern", "o/shard_1_2", "[1, 2]", "replica")
    state = {"o": ShardedObject("o", rank, (4,), (rank,))}
    refused(state, folder, "Invalid access pattern", "'o'", "(3,) of shape (1,)", "replica")


def what_is_asked_for_is_not_what_is_stored(rank: int, world_size: int, folder: Path) -> None:
    place = folder / "c"
    stored = {"layers.0.weight": shard("layers.0.weight", rank), "one": shard("one", rank)}
    shardstore.save({**stored, "rng": ShardedObject("rng", 1, (world_size,), (rank,))}, place)
    parts = [f"shard_{n}_{world_size}" for n in range(world_size)]
    left = ["no part of this key is stored. strict='log_unexpected' leaves"]

    def one(data: torch.Tensor, *offsets: tuple[int, int, int]) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets("one", data, *offsets)

    by_rows, by_columns = (0, rank, world_size), (1, rank, world_size)
    nearest = ["'layer.0.weight'", "did you mean 'layers.0.weight'", str(place)]
    shapes = ["'one'", "(6, 4)"]
    cases: list[tuple[Any, type[Exception], list[str]]] = [
        (shard("layer.0.weight", rank), MissingKeyError, nearest),
        (
            one(torch.ones(2, 4).half(), by_rows),
            DTypeMismatchError,
            ["'one'", "float32", "float16", "convert"],
        ),
        (
            one(torch.ones(2, 5), by_rows),
            ShapeMismatchError,
            [*shapes, "(6, 5)", "allow_shape_mismatch"],
        ),
        (one(torch.ones(2, 4), by_columns), ShapeMismatchError, [*shapes, "(2, 12)"]),
        (one(torch.ones(24)), ShapeMismatchError, [*shapes, "(24,)"]),
        (ShardedObject("o", None, (1,), (0,)), MissingKeyError, ["o/shard_0_1", str(place), *left]),
        (ShardedObject("rng", None, (1,), (0,)), MissingKeyError, ["ask for these parts", *parts]),
    ]
    for asked, kind, words in cases:
        # Only rank 1 asks for what is not there.
        state = {"t": asked} if rank == 1 else {"one": shard("one", rank)}
        load = partial(shardstore.load, state, place, validate_access_integrity=False)
        if rank == 1:
            raised(load, *words, kind=kind)
        else:
            raised(load, *words, "rank 1", kind=RanksError)
    # All ranks, and the whole is asked for twice.
    load = partial(shardstore.load, {"one": shard("one", 0)}, place)
    raised(load, "Invalid access pattern", "'one'", kind=AccessPatternError)


SCENARIOS = scenarios_of(globals())


def test_all_scenarios_hold_on_three_ranks(tmp_path: Path) -> None:
    names = [scenario.__name__ for scenario in SCENARIOS]
    assert run_ranks(run_scenarios, WORLD, str(tmp_path), SCENARIOS) == [names] * WORLD


# -- a world of one -------------------------------------------------------------------------------

ODD_KEYS = [
    *("../x", "../../x", "a/b", "/etc/x", "ü", "x" * 500, "x" * 500 + "y", ".", "..", "CON"),
    *("zarr.json", "metadata.json", "common.pt", "c.0", "__init__", "a\\b", "a\nb", "a%2Fb"),
    *(" ", "a.", "*", ".owner.json", "shard_0_1.pt", "manifest.npz", "c"),
]


def test_odd_keys_are_stored_safely(tmp_path: Path) -> None:
    """Under names of their own, below the checkpoint, and found again by their true key."""
    values = {key: torch.tensor([float(i)]) for i, key in enumerate(ODD_KEYS)}
    tensors = {
        str(i): ShardedTensor.from_rank_offsets(k, v) for i, (k, v) in enumerate(values.items())
    }
    place = tmp_path / "deep" / "er" / "c"
    shardstore.save(tensors, place)
    assert remains(tmp_path) == ["deep"]
    assert remains(place.parent) == ["c"]
    loaded = shardstore.load_plain_tensors(place)
    for key, value in values.items():
        assert torch.equal(loaded[key], value), key
    group = zarr.open_group(place, mode="r")
    found: list[Any] = [array.attrs["shardstore"] for _, array in group.arrays()]
    assert sorted(attributes["key"] for attributes in found) == sorted(ODD_KEYS)
    shardstore.remove_sharded_tensors(place, "../")
    assert "../x" not in shardstore.load_tensors_metadata(place)
    assert remains(tmp_path) == ["deep"]


def test_odd_keys_of_objects_are_stored_safely(tmp_path: Path) -> None:
    place = tmp_path / "c"
    state = {str(i): ShardedObject(key, key, (1,), (0,)) for i, key in enumerate(ODD_KEYS)}
    shardstore.save({**state, **_one()}, place)
    assert remains(tmp_path) == ["c"]
    wanted = {key: ShardedObject(key, None, (1,), (0,)) for key in ODD_KEYS}
    loaded = shardstore.load(wanted, place)
    assert loaded == {**{key: key for key in ODD_KEYS}, "step": 1}


def _one(value: float = 1.0) -> dict[str, Any]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((3,), value)), "step": 1}


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    shardstore.save(_one(), tmp_path / "c")
    return tmp_path / "c"


def test_a_newer_format_is_refused(stored: Path) -> None:
    rewrite(stored, lambda root: about(root).update(format_version=99), sign=True)
    with pytest.raises(FormatVersionError, match="99") as caught:
        shardstore.load(_one(), stored)
    assert "upgrade" in str(caught.value)
    assert str(stored) in str(caught.value)


class Trap:
    """Leaves a trace where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


class Unproved(TorchCommonSaveStrategy):
    """Writes what the proof of a save would refuse, as another program may."""

    def save_common(self, common_state_dict: Any, checkpoint_dir: str | Path) -> None:
        session = session_of(checkpoint_dir)
        session.files.put("common.pt", dump_bytes(common_state_dict))


class Items(list[int]):
    """A class that has to be filled, which ``weights_only`` can not do."""


class Harmless:
    def __init__(self) -> None:
        self.value = 5


def test_a_class_that_was_not_allowed_is_not_loaded(tmp_path: Path) -> None:
    place, sprung = tmp_path / "c", tmp_path / "sprung"
    shardstore.save({**_one(), "trap": Trap(str(sprung))}, place, common_strategy=Unproved())
    with pytest.raises(UnsafeObjectError, match=r"common\.pt.*mkdir.*add_safe_globals"):
        shardstore.load(_one(), place)
    assert not sprung.exists()

    place = tmp_path / "d"
    with torch.serialization.safe_globals([Items]):
        shardstore.save({**_one(), "items": (Items([1]),)}, place)
    with pytest.raises(UnsafeObjectError, match=r"test_wrong_input\.Items"):
        shardstore.load(_one(), place)
    with torch.serialization.safe_globals([Items]):
        allowed: Any = shardstore.load(_one(), place)
    assert (type(allowed["items"][0]), allowed["items"]) == (Items, ([1],))

    place, wanted = tmp_path / "o", {"o": ShardedObject("my.o", None, (1,), (0,))}
    with torch.serialization.safe_globals([Harmless]):
        shardstore.save({"o": ShardedObject("my.o", Harmless(), (1,), (0,))}, place)
    with pytest.raises(UnsafeObjectError, match=r"my\.o.*Harmless.*add_safe_globals"):
        shardstore.load(wanted, place)
    with torch.serialization.safe_globals([Harmless]):
        loaded: Any = shardstore.load(wanted, place)
    assert loaded["o"].value == 5


def test_a_bare_pickle_in_place_of_a_document_is_not_loaded(stored: Path) -> None:
    sprung = stored.parent / "sprung"
    (stored / "common.pt").write_bytes(pickle.dumps({"step": Trap(str(sprung))}))
    raised(lambda: shardstore.load(_one(), stored))
    raised(lambda: shardstore.load_common_state_dict(stored))
    assert not sprung.exists()
