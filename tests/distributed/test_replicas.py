"""Replicas share the work: each byte is written once and read once in a group, whatever the ranks
of the group ask for, and what goes wrong on one of them is raised on all."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardstore
from shardstore.errors import AccessPatternError, ArgumentError, StorageError
from shardstore.exchange_utils import distribute_shards_to_ranks
from shardstore.loading import read
from shardstore.loading.replicas import read_group
from shardstore.mapping import ShardedTensor
from shardstore.storage.runtime.counters import counters
from shardstore.storage.stores.location import Location
from shardstore.strategies.zarr import ZarrSaveShardedStrategy
from tests.helpers.cli_checkpoints import flip
from tests.helpers.scenarios import gathered, raised, remains_of_all

WORLD = 4
CHUNK = 4096
WHOLE = torch.arange(64 * 256, dtype=torch.float32).reshape(64, 256)
SMALL = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=CHUNK)
OTHER = (WHOLE.bfloat16(), torch.arange(7, dtype=torch.int8), torch.tensor(5.0))


def everything() -> Any:
    return dist.group.WORLD


def replicated(rank: int) -> dict[str, Any]:
    """The same on every rank; rank 0 holds the main replicas."""
    tensors = {"w": WHOLE, "a": OTHER[0], "b": OTHER[1], "c": OTHER[2]}
    return {
        key: ShardedTensor.from_rank_offsets(key, tensor.clone(), replica_id=rank)
        for key, tensor in tensors.items()
    }


def whole_bytes() -> int:
    return WHOLE.nbytes + sum(t.nbytes for t in OTHER)


def moved(name: str, before: dict[str, int]) -> list[int]:
    """What each rank's counter has grown by."""
    return gathered(counters.copy()[name] - before[name])


def check(place: Path) -> None:
    loaded = shardstore.load_plain_tensors(place)
    assert torch.equal(loaded["w"], WHOLE)
    for key, tensor in zip("abc", OTHER, strict=True):
        assert torch.equal(loaded[key], tensor)


def chunks_are_shared_out_by_bytes(rank: int, folder: Path) -> None:
    for number, background in enumerate((False, True)):
        place = folder / f"c{number}"
        before = counters.copy()
        options: dict[str, Any] = {"replica_group": everything()}
        if background:
            shardstore.async_save(replicated(rank), place, SMALL, **options).result(60)
        else:
            shardstore.save(replicated(rank), place, SMALL, **options)
        written = moved("bytes_written", before)
        assert max(written) <= 1.1 * sum(written) / WORLD
        assert whole_bytes() <= sum(written) <= 1.02 * whole_bytes()
        check(place)


def groups_share_their_own_shards(rank: int, folder: Path) -> None:
    """Two tensor-parallel halves, each held by a data-parallel group of two."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    half, copy = rank % 2, rank // 2
    state: dict[str, Any] = {
        "w": ShardedTensor.from_rank_offsets(
            "w", WHOLE.chunk(2)[half].clone(), (0, half, 2), replica_id=copy
        ),
        # Replicas in both groups: the group of the main replica writes.
        "a": ShardedTensor.from_rank_offsets("a", OTHER[0].clone(), replica_id=(half, copy)),
        # A distributed optimizer's own part of the state is no replica.
        "flat": ShardedTensor.from_rank_offsets_flat(
            "flat",
            WHOLE.reshape(-1)[rank * 4096 : (rank + 1) * 4096].clone(),
            tuple(WHOLE.shape),
            flattened_range=slice(rank * 4096, (rank + 1) * 4096),
        ),
    }
    before = counters.copy()
    shardstore.save(state, folder / "c", SMALL, replica_group=groups[half])
    written = moved("bytes_written", before)
    # The optimizer's part is a quarter each; weights of the other half are none of a group's.
    assert max(written) <= WHOLE.nbytes // 2 + OTHER[0].nbytes // 2 + CHUNK * 2
    assert min(written) >= WHOLE.nbytes // 2
    loaded = shardstore.load_plain_tensors(folder / "c")
    assert torch.equal(loaded["w"], WHOLE)
    assert torch.equal(loaded["a"], OTHER[0])
    assert torch.equal(loaded["flat"], WHOLE)


def other_shards_in_a_group_are_left_to_their_main_replica(rank: int, folder: Path) -> None:
    state = replicated(rank)
    state["mine"] = ShardedTensor.from_rank_offsets(
        "mine", torch.full((4,), rank), (0, rank, WORLD)
    )
    if rank == 3:
        state["w"].data = None  # and not every replica need have its data
    before = counters.copy()
    shardstore.save(state, folder / "c", SMALL, replica_group=everything())
    written = moved("bytes_written", before)
    assert written[0] > whole_bytes()
    check(folder / "c")


def groups_without_tensors_share_nothing(rank: int, world_size: int, folder: Path) -> None:
    """All ranks, or those of one group: a stage of a pipeline that has none."""
    half = world_size // 2
    groups = [dist.new_group(list(range(half))), dist.new_group(list(range(half, world_size)))]
    mine = groups[rank // half]
    shardstore.save({"step": 1}, folder / "none", replica_group=mine)
    state: dict[str, Any] = {"step": 1}
    if rank < half:
        state["w"] = ShardedTensor.from_rank_offsets("w", torch.ones(4), replica_id=rank)
    shardstore.save(state, folder / "some", replica_group=mine)
    assert torch.equal(shardstore.load_plain_tensors(folder / "some")["w"], torch.ones(4))


def two_main_replicas_are_still_an_error(rank: int, folder: Path) -> None:
    state = replicated(rank)
    if rank == 2:
        state["w"].replica_id = 0
    save = partial(shardstore.save, state, folder / "c", SMALL, replica_group=everything())
    raised(save, "was written 2 times, by rank(s) [0, 2]", kind=AccessPatternError)
    assert remains_of_all(folder) == []


def each_byte_is_read_once(rank: int, folder: Path) -> None:
    """Rounds are as large as the smallest budget of the ranks allows."""
    shardstore.save(replicated(rank), folder / "c", SMALL)
    for budget in (1, 3 * CHUNK, 1 << 28, (1 << 28, 3 * CHUNK, 40 * CHUNK, 1 << 20)[rank]):
        wanted = replicated(rank)
        for tensor in wanted.values():
            tensor.data.zero_()
        before = counters.copy()
        loaded = shardstore.load(
            wanted,
            folder / "c",
            replica_group=everything(),
            share_replicas="always",
            exchange_budget_bytes=budget,
        )
        read = moved("bytes_read", before)
        assert whole_bytes() <= sum(read) <= 1.02 * whole_bytes()
        assert max(read) <= 1.1 * sum(read) / WORLD
        assert torch.equal(loaded["w"], WHOLE)
        assert loaded["w"].data_ptr() == wanted["w"].data.data_ptr()
        for key, tensor in zip("abc", OTHER, strict=True):
            assert torch.equal(loaded[key], tensor)


def a_group_is_given_on_all_of_its_ranks(rank: int, folder: Path) -> None:
    """Else all ranks hear at once who did not give it, or none of them shares."""
    place = folder / "c"
    shardstore.save(replicated(rank), place, SMALL)
    pairs, alone = [dist.new_group([0, 2]), dist.new_group([1, 3])], dist.new_group([2])
    mine = pairs[rank % 2]

    def load(group: Any, share: str) -> None:
        loaded = shardstore.load(replicated(rank), place, replica_group=group, share_replicas=share)
        assert torch.equal(loaded["w"], WHOLE)

    error = raised(partial(load, everything() if rank == 2 else mine, "always"), kind=ArgumentError)
    given = "the group of ranks {} with share_replicas='always'".format
    said = f"rank(s) [0] gave {given([0, 2])}, rank(s) [2] gave {given([0, 1, 2, 3])}"
    assert f"loading {place}: {said}" in str(error)
    load(mine, "always")
    # Where nobody shares nobody waits for anybody.
    load(everything() if rank == 0 else None, "auto")
    load(mine, "auto" if rank == 1 else "never")
    load(alone, "always")


def automatic_is_what_all_ranks_see(rank: int, folder: Path) -> None:
    """Hosts may have different numbers of ranks: what one rank takes for two is one to another."""
    shardstore.save(replicated(rank), folder / "c", SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2" if rank == 0 else "4")
        before = counters.copy()
        loaded = shardstore.load(replicated(rank), folder / "c", replica_group=everything())
        assert torch.equal(loaded["w"], WHOLE)
        assert sum(moved("bytes_read", before)) >= WORLD * whole_bytes()


def sharing_is_a_choice(rank: int, folder: Path) -> None:
    """From a local disk every rank reads, unless told."""
    shardstore.save(replicated(rank), folder / "c", SMALL)
    for share, times in (("auto", WORLD), ("never", WORLD), ("always", 1)):
        before = counters.copy()
        shardstore.load(
            replicated(rank), folder / "c", replica_group=everything(), share_replicas=share
        )
        read = sum(moved("bytes_read", before))
        assert times * whole_bytes() <= read <= 1.02 * times * whole_bytes()


def shares(group: Any, share: str, place: Location) -> bool:
    """Whether this rank wants to share."""
    report = read_group(group, share, place)
    return report is not None and report.shares


def automatic_is_where_bytes_come_over_a_network(rank: int, folder: Path) -> None:
    here, far = Location.of(folder), Location.of("s3://bucket/run")
    alone = [dist.new_group([number]) for number in range(WORLD)][rank]
    assert shares(everything(), "auto", far)
    assert not shares(everything(), "never", far)
    assert not shares(alone, "always", far)
    assert not shares(None, "always", far)
    assert not shares(everything(), "auto", here)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")  # as torchrun says it: two hosts
        assert shares(everything(), "auto", here)
        patch.setenv("LOCAL_WORLD_SIZE", str(WORLD))
        assert not shares(everything(), "auto", here)
        patch.delenv("LOCAL_WORLD_SIZE")  # nobody tells of hosts
        assert not shares(everything(), "auto", here)


def hosts_of_a_group_are_those_of_its_ranks(rank: int, folder: Path) -> None:
    """A group may be on several hosts and have fewer ranks than one of them."""
    here = Location.of(folder)
    within = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    with pytest.MonkeyPatch.context() as patch:
        for local, is_on_several in (("2", True), (str(WORLD), False)):
            patch.setenv("LOCAL_WORLD_SIZE", local)
            assert not shares(within, "auto", here)
            assert shares(across, "auto", here) == is_on_several
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        shardstore.save(replicated(rank), folder / "c", SMALL)
        before = counters.copy()
        loaded = shardstore.load(
            replicated(rank), folder / "c", replica_group=across, validate_access_integrity=False
        )
        assert torch.equal(loaded["w"], WHOLE)
        assert sum(moved("bytes_read", before)) <= 2 * 1.02 * whole_bytes()


def ranks_may_ask_for_different_parts(rank: int, folder: Path) -> None:
    """Random boxes of random tensors, flat ranges, and nothing at all."""
    shardstore.save(replicated(rank), folder / "c", SMALL)
    rng = random.Random(rank)
    for _ in range(12):
        wanted: dict[str, Any] = {}
        expected = {}
        for number in range(rng.randrange(4)):
            top, left = rng.randrange(64), rng.randrange(256)
            rows, columns = rng.randint(1, 64 - top), rng.randint(1, 256 - left)
            key, whole = rng.choice([("w", WHOLE), ("a", OTHER[0])])
            shape, offset = (rows, columns), (top, left)
            expected[f"{number}"] = whole[top : top + rows, left : left + columns]
            wanted[f"{number}"] = ShardedTensor(
                key, None, whole.dtype, shape, (64, 256), offset, None
            )
        if rng.random() < 0.5:
            start = rng.randrange(64 * 256)
            stop = rng.randint(start, 64 * 256)
            expected["flat"] = WHOLE.reshape(-1)[start:stop]
            wanted["flat"] = ShardedTensor(
                "w",
                None,
                WHOLE.dtype,
                (64, 256),
                (64, 256),
                (0, 0),
                (1, 1),
                flattened_range=slice(start, stop),
            )
        before = counters.copy()
        loaded = shardstore.load(
            wanted,
            folder / "c",
            validate_access_integrity=False,
            replica_group=everything(),
            share_replicas="always",
            exchange_budget_bytes=5 * CHUNK,
        )
        assert set(loaded) == set(expected)
        for key, tensor in expected.items():
            assert torch.equal(loaded[key], tensor), key
        assert sum(moved("bytes_read", before)) <= 1.02 * whole_bytes()


def what_goes_wrong_on_one_rank_is_raised_on_all(rank: int, folder: Path) -> None:
    shardstore.save(replicated(rank), folder / "c", SMALL)
    options: dict[str, Any] = {
        "replica_group": everything(),
        "share_replicas": "always",
        "validate_access_integrity": False,
        "exchange_budget_bytes": 3 * CHUNK,
    }
    wanted = replicated(rank)
    if rank == 2:
        wanted["v"] = ShardedTensor.from_rank_offsets("v", torch.zeros(3))
    raised(lambda: shardstore.load(wanted, folder / "c", **options), "'v' is not in the checkpoint")
    if rank == 0:
        chunk = folder / "c" / "w" / "c.9.0"
        flip(chunk, 100)
    dist.barrier()
    load = partial(shardstore.load, replicated(rank), folder / "c", **options)
    raised(load, "chunk (9, 0) of key 'w'")


def refuse(*args: object) -> None:
    raise StorageError("no memory left")


def a_rank_that_cannot_take_its_chunks_fails_on_all(rank: int, folder: Path) -> None:
    """At once, whether it fails before chunks travel or while they do; the next load works."""
    shardstore.save(replicated(rank), folder / "c", SMALL)
    options: dict[str, Any] = {"replica_group": everything(), "share_replicas": "always"}
    for name in ("by_chunk", "deliver"):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 2:
                patch.setattr(read, name, refuse)
            load = partial(shardstore.load, replicated(rank), folder / "c", **options)
            raised(load, "no memory left")
        loaded = shardstore.load(replicated(rank), folder / "c", **options)
        assert torch.equal(loaded["w"], WHOLE)


def test_a_scenario_holds_on_all_ranks(held: list[list[str]], scenario: str) -> None:
    assert all(scenario in names for names in held)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_work_is_shared_evenly_and_alike_on_all_ranks(ranks: int) -> None:
    rng = random.Random(ranks)
    for _ in range(50):
        sizes = [rng.randint(1, 1000) for _ in range(rng.randrange(60))]
        by_number = dict(enumerate(sizes))
        everyone = {number: list(range(ranks)) for number in by_number}
        owners = distribute_shards_to_ranks(everyone, by_number, ranks, set())
        assert owners == distribute_shards_to_ranks(everyone, by_number, ranks, set())
        loads = [0] * ranks
        for number, owner in owners.items():
            loads[owner] += sizes[number]
        least = max(max(sizes, default=0), sum(sizes) / ranks)
        assert max(loads) <= 4 / 3 * least + max(sizes, default=0) / 3
