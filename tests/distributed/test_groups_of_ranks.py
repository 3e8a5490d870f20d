"""Saves and loads by the ranks of a process group, whose numbers in the group are not their global
numbers: two groups at the same time, every kind of state, every way to save, and errors that name
global ranks."""

from __future__ import annotations

import contextlib
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardstore
from shardstore import CheckpointManager, ShardedObject, ShardedTensor
from shardstore.distributed.coordinator import DEADLINE_VARIABLE, Ranks
from shardstore.errors import (
    AccessPatternError,
    ArgumentError,
    DamagedCheckpointError,
    MissingKeyError,
    NotACheckpointError,
    RanksError,
)
from shardstore.mapping import ShardedTensorFactory
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.stores.location import Location
from tests.helpers.dtensor_states import cut
from tests.helpers.scenarios import logged, raised

WORLD = 4
GROUPS = ([0, 2], [1, 3])
WHOLE = torch.arange(22.0).reshape(11, 2)


class Place:
    """This rank's group, its position there, and a folder for each group."""

    def __init__(self, rank: int, folder: Path) -> None:
        made = [dist.new_group(ranks) for ranks in GROUPS]
        self.ranks = GROUPS[rank % 2]
        self.group, self.number = made[rank % 2], rank // 2
        self.url = folder / f"of-{self.ranks[0]}"
        self.row = DeviceMesh("cpu", self.ranks, _init_backend=False)
        self.square = DeviceMesh("cpu", [[0, 2], [1, 3]], _init_backend=False)


def dtensor(mesh: DeviceMesh, placements: list[Any], zero: bool, whole: Any = WHOLE) -> DTensor:
    return cut(whole * (0 if zero else 1), mesh, placements)


def dtensors(at: Place, zero: bool = False) -> dict[str, Any]:
    """DTensors over exactly this group, over a part of it, and over more ranks than it has."""
    alone = DeviceMesh("cpu", [at.ranks[at.number]], _init_backend=False)
    tensors: dict[str, Any] = {
        "rows": dtensor(at.row, [Shard(0)], zero),
        "copy": dtensor(at.row, [Replicate()], zero),
        "hybrid": dtensor(at.square, [Replicate(), Shard(0)], zero),
        "everywhere": dtensor(at.square, [Replicate(), Replicate()], zero),
        "tied": dtensor(alone, [Replicate()], zero),
        "empty": dtensor(at.square, [Replicate(), Shard(0)], zero, torch.zeros(0, 2)),
        # Uneven nested cuts, which are saved as flattened ranges.
        "tall": dtensor(at.row, [Shard(0)], zero, torch.arange(5001.0 * 3).reshape(5001, 3)),
        "plain": WHOLE.clone() * (0 if zero else 1),
    }
    tensors[f"stage{at.number}"] = dtensor(alone, [Replicate()], zero)
    return tensors


def described(at: Place, zero: bool = False) -> dict[str, Any]:
    """Tensors and objects that the caller describes by numbers within the group."""
    n, scale = at.number, 0 if zero else 1
    half, flat = (WHOLE[:8].chunk(2)[n] * scale).clone(), WHOLE.reshape(-1) * scale
    mine = slice(0, 7) if n == 0 else slice(7, 22)

    def build(key: str, tensor: Any, *_: Any) -> dict[str, Any]:
        return {"w": ShardedTensor.from_rank_offsets(key, tensor, (0, n, 2))}

    return {
        "half": ShardedTensor.from_rank_offsets("half", half, (0, n, 2)),
        "copies": ShardedTensor.from_rank_offsets("copies", flat.clone(), replica_id=n),
        "uneven": ShardedTensor(
            "uneven", flat[mine].clone(), flat.dtype, flat[mine].shape, (22,), (mine.start,), None
        ),
        "flat": ShardedTensor.from_rank_offsets_flat(
            "flat", flat[mine].clone(), (11, 2), flattened_range=mine
        ),
        "thing": ShardedObject("thing", None if zero else {"of": n}, (2,), (n,)),
        "made": ShardedTensorFactory("made", half.clone(), build, lambda built: built["w"]),
    }


def saved_ways(at: Place, state: dict[str, Any], url: Path, way: str) -> None:
    if way == "async":
        shardstore.async_save(state, url, process_group=at.group).result(60)
    elif way == "manager":
        CheckpointManager(url, process_group=at.group).save(1, state)
    else:
        strategy: Any = ("torch_dist", 1) if way == "torch_dist" else ("zarr", int(way))
        shardstore.save(state, url, strategy, process_group=at.group)


def the_state_of_each_group_comes_back(rank: int, folder: Path) -> None:
    """Both groups at the same time, which hold different values and save different places."""
    at = Place(rank, folder)
    for way in ("2", "1", "async", "manager", "torch_dist"):
        for kind in (dtensors, described):
            url = at.url / f"{way}-{kind.__name__}"
            url.mkdir(parents=True, exist_ok=True)
            state = kind(at)
            if way == "torch_dist":  # DCP's planner knows no flattened ranges
                state = {k: v for k, v in state.items() if k not in ("flat", "tall")}
            with logged() as texts:
                saved_ways(at, {**state, "who": at.ranks, "rank": rank}, url, way)
            assert all(f"rank {at.ranks[0]}" in text for text in texts), texts
            wanted = {k: v for k, v in kind(at, zero=True).items() if k in state}
            place = url / "step-1" if way == "manager" else url
            loaded = shardstore.load(wanted, place, process_group=at.group, strict="raise_all")
            assert (loaded["who"], loaded["rank"]) == (at.ranks, at.ranks[0])
            for key, value in kind(at).items():
                if key in state:
                    same(key, loaded[key], value)
    dist.barrier()


def a_checkpoint_of_all_ranks_loads_in_groups(rank: int, world_size: int, folder: Path) -> None:
    everyone = DeviceMesh("cpu", range(world_size), _init_backend=False)
    keys = ("rows", "copy", "hybrid", "everywhere", "tied", "stage0", "stage1", "plain")
    state: dict[str, Any] = {key: dtensor(everyone, [Shard(0)], False) for key in keys}
    shardstore.save(state, folder / "c")
    at = Place(rank, folder)
    for make in (dict, shardstore.shard):
        wanted = {k: v for k, v in dtensors(at, zero=True).items() if k in keys}
        loaded = shardstore.load(make(wanted), folder / "c", process_group=at.group)
        for key in wanted:
            same(key, loaded[key], dtensors(at)[key])


def same(key: str, found: Any, expected: Any) -> None:
    if isinstance(expected, DTensor):
        found, expected = found.to_local(), expected.to_local()
    elif isinstance(expected, ShardedTensor | ShardedObject | ShardedTensorFactory):
        expected = expected.data
    is_tensor = isinstance(expected, torch.Tensor)
    assert torch.equal(found, expected) if is_tensor else found == expected, key


def the_manifest_names_global_ranks(rank: int, folder: Path) -> None:
    at = Place(rank, folder)
    shardstore.save(described(at), at.url, process_group=at.group)
    manifest = StoredCheckpoint(Location.of(at.url)).manifest
    half = StoredCheckpoint(Location.of(at.url)).arrays["half"]
    assert [manifest.writer(half, (n, 0)) for n in range(2)] == at.ranks
    record = shardstore.async_save(described(at), at.url / "b", process_group=at.group).result(60)
    assert record["ranks"]["slowest"] in at.ranks
    assert len(record["ranks"]["bytes"]) == record["world_size"] == 2


def adopted_replicas_share_the_writing(rank: int, world_size: int, folder: Path) -> None:
    """Plain tensors and DTensors, of all ranks, of a group, and of a group whose first rank is
    not the first of the save."""
    at = Place(rank, folder)
    everyone = DeviceMesh("cpu", range(world_size), _init_backend=False)
    for number, (mesh, save_group, replica_group) in enumerate(
        ((everyone, None, dist.group.WORLD), (at.row, at.group, at.group), (at.row, None, at.group))
    ):
        by_key = {
            f"{kind}{n}": torch.full((64, 64), float(n)) for kind in "pd" for n in range(world_size)
        }
        own = f"-{at.ranks[0]}" if number == 2 else ""
        state: dict[str, Any] = {}
        for key, data in by_key.items():
            is_plain = key.startswith("p")
            state[key + own] = data if is_plain else dtensor(mesh, [Replicate()], False, data)
        place = folder / f"{number}-{0 if save_group is None else at.ranks[0]}"
        groups: dict[str, Any] = {"process_group": save_group, "replica_group": replica_group}
        shardstore.save(shardstore.shard(state), place, **groups)
        stored = StoredCheckpoint(Location.of(place))
        holders = at.ranks if mesh is at.row else list(range(world_size))
        for kind in "pd":
            keys = [key for key in state if key.startswith(kind)]
            writers = [stored.manifest.writer(stored.arrays[key], (0, 0)) for key in keys]
            assert {*writers} == {*holders}, (number, kind, writers)
        dist.barrier()


def replicas_share_within_a_group(rank: int, folder: Path) -> None:
    at = Place(rank, folder)
    tensor = torch.arange(64.0 * 64).reshape(64, 64)

    def state(data: torch.Tensor) -> dict[str, Any]:
        return {
            key: ShardedTensor.from_rank_offsets(key, data.clone(), replica_id=at.number)
            for key in "ab"
        }

    groups: dict[str, Any] = {"process_group": at.group, "replica_group": at.group}
    shardstore.save(state(tensor), at.url, **groups)
    loaded = shardstore.load(state(tensor * 0), at.url, share_replicas="always", **groups)
    assert torch.equal(loaded["a"], tensor)
    # A group with ranks that do not load is named by global ranks.
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups["replica_group"] = pairs[rank // 2]
    load = partial(shardstore.load, state(tensor), at.url, share_replicas="always", **groups)
    other = {0: 1, 2: 3, 1: 0, 3: 2}[at.ranks[0]]
    raised(load, f"rank(s) [{other}] gave none", kind=ArgumentError)


def errors_name_global_ranks(rank: int, folder: Path) -> None:
    at = Place(rank, folder)
    first, second = at.ranks
    both = {"w": ShardedTensor.from_rank_offsets("w", WHOLE.clone())}
    flat = {
        "w": ShardedTensor.from_rank_offsets_flat(
            "w", torch.ones(20), (11, 2), flattened_range=slice(0, 20)
        )
    }
    copy = {"w": ShardedTensor.from_rank_offsets("w", WHOLE.clone(), replica_id=1)}
    place = folder / f"good-{first}"
    shardstore.save(described(at), place, process_group=at.group)
    for state in (both, flat):
        for call in (
            lambda state=state: shardstore.save(state, at.url, process_group=at.group),
            lambda state=state: shardstore.load(state, place, process_group=at.group),
        ):
            error = raised(call, kind=AccessPatternError)
            assert f"{at.ranks}" in str(error) or f"rank(s) {at.ranks}" in str(error), error
    save = partial(shardstore.save, copy, at.url, process_group=at.group)
    assert raised(save, f"rank {first} holds a copy").rank == first
    # One rank fails: the other one names it.
    wrong: Any = None if at.number else described(at)
    error = raised(lambda: shardstore.save(wrong, at.url, process_group=at.group))
    assert at.number or list(getattr(error, "failures", ())) == [second]
    wanted: dict[str, Any] = {"half": described(at)["half"]}
    if at.number:
        wanted["half"].key = "none"
    options: dict[str, Any] = {"validate_access_integrity": False, "process_group": at.group}
    load = partial(shardstore.load, wanted, place, **options)
    error = raised(load, kind=MissingKeyError if at.number else RanksError)
    assert at.number or list(error.failures) == [second]
    save = partial(shardstore.save, {}, folder / f"at-{rank}", process_group=at.group)
    assert raised(save, f"rank {first} saves to", f"but rank {second} to").rank == second
    assert not at.url.exists()


def a_rank_outside_the_group_is_refused(rank: int, folder: Path) -> None:
    group = dist.new_group([1, 3])
    if rank % 2:
        shardstore.save({"a": 1}, folder / "c", process_group=group)
        assert shardstore.load({}, folder / "c", process_group=group)["a"] == 1
    else:
        for call in (
            lambda: shardstore.save({"a": 1}, folder / "c", process_group=group),
            lambda: shardstore.async_save({"a": 1}, folder / "c", process_group=group),
            lambda: shardstore.load({}, folder / "c", process_group=group),
            lambda: CheckpointManager(folder, process_group=group),
        ):
            raised(call, f"rank {rank} is not in process_group", kind=ArgumentError)
    for wrong in ("data-parallel", 5):
        raised(partial(shardstore.save, {}, folder / "d", process_group=wrong), kind=ArgumentError)
    pair = dist.new_group(GROUPS[rank % 2], use_local_synchronization=True)
    later: dict[str, Any] = {"async_sharded_save": True, "process_group": pair}
    save = partial(shardstore.save, {}, folder / "d", **later)
    raised(save, "async_save(process_group=)", kind=ArgumentError)


def a_group_without_a_checkpoint_fails_alone(rank: int, folder: Path) -> None:
    """The arguments are those of Megatron-Core 0.19, by position."""
    at = Place(rank, folder)
    shardstore.save(described(at), at.url, process_group=at.group)
    place = folder / "none" if rank == 3 else at.url
    for _ in range(2):
        loaded = None
        with contextlib.suppress(RanksError, NotACheckpointError):
            given: Any = described(at, zero=True), place, None, True, "assume_ok_unexpected", False
            loaded = shardstore.load(*given, at.group)
        assert (loaded is None) == (rank in (1, 3))


def groups_that_share_ranks_take_turns(rank: int, folder: Path) -> None:
    """A rank saves with one group, then with another one, then with all ranks, and again."""
    for turn in range(2):
        for members in ([1, 2, 3], [2, 3], [3], range(4), [0, 3]):
            group = dist.new_group(list(members))
            if rank in members:
                number = list(members).index(rank)
                part = torch.full((2,), float(rank))
                state = {"w": ShardedTensor.from_rank_offsets("w", part, (0, number, len(members)))}
                place = folder / f"{turn}-{'-'.join(map(str, members))}"
                shardstore.async_save(state, place, process_group=group).result(60)
                found = shardstore.load(state, place, process_group=group)
                assert found["w"].eq(rank).all()
        dist.barrier()


def each_group_has_a_manager(rank: int, folder: Path) -> None:
    at = Place(rank, folder)
    with CheckpointManager(at.url, keep_last=2, process_group=at.group) as manager:
        for step in range(3):
            manager.save(step, described(at))
        manager.async_save(3, described(at)).result(60)
        manager.wait()
        dist.barrier()
        assert manager.steps() == [2, 3]
        if at.number == 1:  # damage that only one rank of the group meets
            chunk = next((at.url / "step-3" / "half").glob("c.1*"))
            chunk.write_bytes(chunk.read_bytes()[:-1])
        dist.barrier()
        with logged() as texts:
            restored = manager.restore(described(at, zero=True))
        assert (restored.step, restored.damaged) == (2, (3,))
        assert len(texts) == 1
        same("half", restored.state["half"], described(at)["half"])
        with pytest.raises(DamagedCheckpointError if at.number else RanksError):
            manager.restore(described(at), 3)
        restored = manager.restore(described(at), 2, discard_later=True)
        dist.barrier()
        assert manager.steps() == [2]


def a_silent_member_is_named_within_the_deadline(rank: int, folder: Path) -> None:
    at = Place(rank, folder)
    os.environ[DEADLINE_VARIABLE] = "1"
    try:
        if at.number == 0:
            error = raised(lambda: shardstore.save({}, at.url, process_group=at.group))
            assert isinstance(error, RanksError)
            assert list(error.failures) == [at.ranks[1]]
            assert not at.url.exists()
        dist.barrier()
    finally:
        os.environ[DEADLINE_VARIABLE] = "30"
    if at.number:  # learns of it, as among all ranks
        assert isinstance(
            raised(lambda: shardstore.save({}, at.url, process_group=at.group)), RanksError
        )
    dist.barrier()
    shardstore.save(described(at), at.url, process_group=at.group)
    ranks = Ranks.of(at.group)
    assert (ranks.rank, list(ranks.members), ranks.is_broken) == (rank, at.ranks, False)


def test_a_scenario_holds_on_all_ranks(held: list[list[str]], scenario: str) -> None:
    assert all(scenario in names for names in held)
