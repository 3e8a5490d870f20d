"""Megatron-Core's present format, saved at once and in the background, on real ranks: what is saved
is the state at the call, nothing shows before all ranks are done, and everybody learns why not."""

from __future__ import annotations

import pickle
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import shardstore
from shardstore import ShardedObject, ShardedTensor
from shardstore.distributed.coordinator import DEADLINE_VARIABLE
from shardstore.errors import (
    AccessPatternError,
    ArgumentError,
    FormatVersionError,
    MissingKeyError,
    RanksError,
    SaveInProgressError,
    StorageError,
)
from shardstore.mapping import StateDict
from shardstore.strategies.async_utils import AsyncCallsQueue
from shardstore.strategies.common import TorchCommonSaveStrategy
from shardstore.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from shardstore.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy
from tests.helpers.ranks_helper import run_ranks
from tests.helpers.scenarios import files_at_most, logged, raised, remains, scenarios_of

WORLD = 2
FORMAT = ("torch_dist", 1)
WHOLE = torch.arange(64 * 40, dtype=torch.float32).reshape(64, 40)


def state_of(rank: int, world_size: int) -> tuple[dict[str, Any], list[Any]]:
    """Rows, a flattened tensor in two ranges, a replica, an object, common values."""
    rows = WHOLE.chunk(world_size)[rank].clone()
    bounds = [0, 1001, WHOLE.numel()]
    mine = slice(bounds[rank], bounds[rank + 1])
    flat = WHOLE.reshape(-1)[mine].clone()
    same = WHOLE.bfloat16().t().clone()
    about = {"rank": rank, "values": torch.full((3,), float(rank))}
    state = {
        "rows": ShardedTensor.from_rank_offsets("rows", rows, (0, rank, world_size)),
        "flat": ShardedTensor.from_rank_offsets_flat(
            "flat", flat, tuple(WHOLE.shape), flattened_range=mine
        ),
        "same": ShardedTensor.from_rank_offsets("same", same, replica_id=rank),
        "object": ShardedObject("object", about, (world_size,), (rank,)),
        "step": 7,
    }
    return state, [rows, flat, same, about]


def spoil(held: list[Any]) -> None:
    for item in held:
        if isinstance(item, torch.Tensor):
            item.fill_(-1)
        else:
            item["rank"] = "spoilt"
            item["values"].fill_(-1)


def check(folder: Path, rank: int) -> None:
    loaded = shardstore.load_plain_tensors(folder)
    assert torch.equal(loaded["rows"], WHOLE)
    assert torch.equal(loaded["flat"], WHOLE)
    assert torch.equal(loaded["same"], WHOLE.bfloat16().t())
    assert loaded["step"] == 7
    wanted = {"object": ShardedObject("object", None, (WORLD,), (rank,))}
    found = shardstore.load(wanted, folder)
    assert isinstance(found, dict)
    assert found["object"]["rank"] == rank
    assert found["object"]["values"].tolist() == [rank] * 3


def a_request_commits_where_the_trainer_polls(rank: int, world_size: int, folder: Path) -> None:
    queue = AsyncCallsQueue()
    for number in range(3):
        state, held = state_of(rank, world_size)
        request = shardstore.save(state, folder / f"c{number}", FORMAT, async_sharded_save=True)
        spoil(held)
        queue.schedule_async_request(request)
    assert [name for name in remains(folder) if not name.startswith(".")] == []
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1, 2]
    assert remains(folder) == ["c0", "c1", "c2"]
    for number in range(3):
        check(folder / f"c{number}", rank)
    state, held = state_of(rank, world_size)
    request = shardstore.save(state, folder / "c3", FORMAT, async_sharded_save=True)
    spoil(held)
    request.execute_sync()
    check(folder / "c3", rank)


def a_handle_commits_by_itself(rank: int, world_size: int, folder: Path) -> None:
    for number in range(2):
        state, held = state_of(rank, world_size)
        overlap = bool(number)
        handle = shardstore.async_save(
            state, folder / f"c{number}", FORMAT, overlap_staging=overlap
        )
        assert handle.wait_staged(60)
        spoil(held)
        handle.result(60)
        check(folder / f"c{number}", rank)
    assert remains(folder) == ["c0", "c1"]


def an_aborted_save_leaves_nothing(rank: int, world_size: int, folder: Path) -> None:
    strategy = TorchDistSaveShardedStrategy()
    state, _ = state_of(rank, world_size)
    handle = shardstore.async_save(state, folder / "c", strategy)
    handle.abort()
    error = handle.exception(60)
    # Where the commit was faster than the call, on every rank, there is nothing to stop.
    assert error is None or isinstance(error, SaveInProgressError | RanksError)
    dist.barrier()
    assert remains(folder) == ([] if error else ["c"])


def the_strategy_alone_shows_nothing_before_the_end(
    rank: int, world_size: int, folder: Path
) -> None:
    """As programs call it that keep their own queue."""
    state, held = state_of(rank, world_size)
    state.pop("step")
    queue = AsyncCallsQueue()
    request = TorchDistSaveShardedStrategy().async_save(state, folder / "c")
    spoil(held)
    queue.schedule_async_request(request)
    assert ".metadata" not in remains(folder / "c")
    queue.maybe_finalize_async_calls(blocking=True)
    whole = ShardedTensor.from_rank_offsets("flat", torch.zeros(WHOLE.shape))
    TorchDistLoadShardedStrategy().load({"flat": whole}, folder / "c")
    assert whole.data is not None
    assert torch.equal(whole.data, WHOLE)


def replicas_share_the_work(rank: int, world_size: int, folder: Path) -> None:
    state: dict[str, Any] = {
        f"w{n}": ShardedTensor.from_rank_offsets(f"w{n}", WHOLE + n, replica_id=rank)
        for n in range(4)
    }
    wrapper = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy("torch_dist", 1))
    request = shardstore.save(state, folder / "c", wrapper, async_sharded_save=True)
    for value in state.values():
        value.data = None
    queue = AsyncCallsQueue(persistent=True)
    queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    sizes = [
        sum(path.stat().st_size for path in (folder / "c").glob(f"__{r}_*.distcp"))
        for r in range(world_size)
    ]
    assert min(sizes) > WHOLE.nbytes * 2
    assert max(sizes) < WHOLE.nbytes * 3
    loaded = shardstore.load_plain_tensors(folder / "c")
    assert all(torch.equal(loaded[f"w{n}"], WHOLE + n) for n in range(4))


def replicas_without_a_main_one(rank: int, world_size: int, folder: Path) -> None:
    state = {"w": ShardedTensor.from_rank_offsets("w", WHOLE.clone(), replica_id=rank + 1)}
    error = raised(lambda: shardstore.save(state, folder / "a", FORMAT))
    assert "no main replica" in str(error)
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, keep_only_main_replica=False)
    shardstore.save(state, folder / "b", strategy)
    assert torch.equal(shardstore.load_plain_tensors(folder / "b")["w"], WHOLE)
    written = sum(path.stat().st_size for path in (folder / "b").glob("*.distcp"))
    assert written < 1.5 * WHOLE.nbytes


def a_failure_in_the_background_reaches_every_rank(
    rank: int, world_size: int, folder: Path
) -> None:
    def by_handle() -> None:
        shardstore.async_save(state_of(rank, world_size)[0], folder / "a", FORMAT).result(60)

    def by_queue() -> None:
        queue = AsyncCallsQueue()
        state, _ = state_of(rank, world_size)
        queue.schedule_async_request(
            shardstore.save(state, folder / "b", FORMAT, async_sharded_save=True)
        )
        queue.maybe_finalize_async_calls(blocking=True)

    def at_once() -> None:
        shardstore.save(state_of(rank, world_size)[0], folder / "c", FORMAT)

    for save in (by_handle, by_queue, at_once):
        with files_at_most(1000 if rank == 1 else resource.RLIM_INFINITY):
            error = raised(save)
            dist.barrier()
        assert "rank 1" in str(error)
        assert "File too large" in str(error)
        assert str(folder) in str(error)
        dist.barrier()
        assert remains(folder) == []
    by_queue()
    check(folder / "b", rank)


def wrong_input_of_one_rank_fails_on_all(rank: int, world_size: int, folder: Path) -> None:
    def wrong() -> StateDict:
        state, _ = state_of(rank, world_size)
        if rank == 1:
            state["flat"] = ShardedTensor(
                "flat", torch.zeros(4), torch.float32, (2, 3), (2, 3), (0, 0), None,
                flattened_range=slice(0, 4),
            )  # fmt: skip
        return state

    def at_once() -> None:
        shardstore.save(wrong(), folder / "c", FORMAT, validate_access_integrity=False)

    def in_the_background() -> None:
        options: dict[str, Any] = {"validate_access_integrity": False}
        shardstore.async_save(wrong(), folder / "c", FORMAT, **options).result(60)

    def by_the_strategy() -> None:
        state = wrong()
        state.pop("step")
        TorchDistSaveShardedStrategy().save(state, folder / "c")

    for save in (at_once, in_the_background, by_the_strategy):
        error = raised(save)
        assert isinstance(error, AccessPatternError if rank == 1 else RanksError)
        assert "'flat'" in str(error)
        assert "irregular" in str(error)
        dist.barrier()
        assert save is by_the_strategy or remains(folder) == []
        dist.barrier()  # before another rank makes the folder of its next save
    assert remains(folder / "c") == []


class FailingOnRank(TorchCommonSaveStrategy):
    """The common part meets a full disk on one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__("torch", 1)
        self.rank = rank

    def save_common(self, common_state_dict: StateDict, checkpoint_dir: str | Path) -> None:
        if dist.get_rank() == self.rank:
            raise StorageError("the disk is full here")
        super().save_common(common_state_dict, checkpoint_dir)


def a_common_part_that_can_not_be_written_fails_on_all(
    rank: int, world_size: int, folder: Path
) -> None:
    """Also where the strategy has the ranks meet, for flattened ranges or for DCP's plans."""
    for backend in (("zarr", 2), ("zarr", 1), FORMAT):
        for failing in range(world_size):
            state, _ = state_of(rank, world_size)
            error = raised(
                lambda: shardstore.save(state, folder / "c", backend, FailingOnRank(failing))  # noqa: B023
            )
            assert "the disk is full here" in str(error)
            assert f"rank {failing}" in str(error) or rank == failing
            handle = shardstore.async_save(
                state_of(rank, world_size)[0], folder / "c", backend, FailingOnRank(failing)
            )
            assert "the disk is full here" in str(handle.exception(60))
            dist.barrier()
            assert remains(folder) == []
        # The ranks still understand each other.
        shardstore.save(state_of(rank, world_size)[0], folder / "ok", backend, overwrite=True)
        dist.barrier()
        check(folder / "ok", rank)
        dist.barrier()
        if rank == 0:
            shardstore.delete_checkpoint(folder / "ok")
        dist.barrier()


class FailingBefore(TorchDistSaveShardedStrategy):
    """Fails on one rank before it meets the others to plan."""

    def async_save(self, *args: Any) -> Any:
        if dist.get_rank() == 1:
            raise StorageError("no plan here")
        return super().async_save(*args)


def a_rank_that_does_not_come_to_plan_is_not_waited_for(
    rank: int, world_size: int, folder: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DEADLINE_VARIABLE, "600")
        handle = shardstore.async_save(state_of(rank, world_size)[0], folder / "c", FailingBefore())
        error = handle.exception(60)
    assert isinstance(error, StorageError if rank == 1 else RanksError)
    assert "no plan here" in str(error)
    dist.barrier()
    assert remains(folder) == []


def a_copy_that_does_not_fit_its_budget_fails_on_all(
    rank: int, world_size: int, folder: Path
) -> None:
    budget = 1 << 30 if rank == 0 else 4096
    handle = shardstore.async_save(
        state_of(rank, world_size)[0], folder / "c", FORMAT, staging_budget_bytes=budget
    )
    error = handle.exception(60)
    assert isinstance(error, RanksError if rank == 0 else ArgumentError)
    assert "staging_budget_bytes=4096" in str(error)
    dist.barrier()
    assert remains(folder) == []


SCENARIOS = scenarios_of(globals())


def test_a_scenario_holds_on_all_ranks(held: list[list[str]], scenario: str) -> None:
    assert all(scenario in names for names in held)


# -- one process -----------------------------------------------------------------------------------


def sharded(**tensors: torch.Tensor) -> dict[str, Any]:
    return {key: ShardedTensor.from_rank_offsets(key, value) for key, value in tensors.items()}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_error_in_any_of_its_threads_is_not_lost(
    tmp_path: Path, asynchronous: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """PyTorch's writer starts threads whose errors it drops: the file of one would be missing."""
    large = {f"w{n}": torch.rand(4096 if n < 3 else 8) for n in range(12)}
    strategy = TorchDistSaveShardedStrategy(thread_count=4)

    def save() -> None:
        if asynchronous:
            shardstore.async_save(sharded(**large), tmp_path / "c", strategy).result(60)
        else:
            shardstore.save(sharded(**large), tmp_path / "c", strategy)

    with files_at_most(12000), pytest.raises(StorageError, match="File too large") as caught:
        save()
    assert str(tmp_path / "c") in str(caught.value)
    assert caught.value.errno
    assert not list(tmp_path.iterdir())
    assert "Traceback" not in capfd.readouterr().err


def test_types_that_no_array_has_are_copied_too(tmp_path: Path) -> None:
    tensor = torch.arange(6).to(torch.uint8).view(2, 3)
    state = {**sharded(plain=tensor.clone()), **sharded(odd=torch.zeros(3).to(torch.float8_e5m2))}
    other = torch.ones(4, dtype=torch.complex32)
    state |= sharded(other=other)
    request = shardstore.save(state, tmp_path / "c", FORMAT, async_sharded_save=True)
    other.zero_()
    request.execute_sync()
    from torch.distributed.checkpoint import FileSystemReader, load

    found = {"other": torch.zeros(4, dtype=torch.complex32)}
    load(found, storage_reader=FileSystemReader(tmp_path / "c"), no_dist=True)
    assert found["other"].tolist() == [1] * 4


def test_the_metadata_names_no_folder(tmp_path: Path) -> None:
    """The attempt's folder is renamed by the commit, and a checkpoint may be copied."""
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(4.0))}
    shardstore.save(state, tmp_path / "here", FORMAT)
    from torch.distributed.checkpoint import FileSystemReader

    content = (tmp_path / "here" / ".metadata").read_bytes()
    assert tmp_path.name.encode() not in content
    about = FileSystemReader(tmp_path / "here").read_metadata().storage_meta
    assert about is not None
    assert about.checkpoint_id is None


def test_what_is_kept_apart_lies_in_files_of_its_own(tmp_path: Path) -> None:
    """Named as Megatron-Core 0.15.3 names them."""
    state: dict[str, Any] = {
        f"n{n}": ShardedTensor.from_rank_offsets(f"{kind}.{n}", torch.full((5,), float(n)))
        for n, kind in enumerate(["model", "model", "optimizer", "optimizer"])
    }
    state["o"] = ShardedObject("model.o", {"x": 1}, (1,), (0,))
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, separation_hint="model.")
    shardstore.save(state, tmp_path / "c", strategy)
    names = sorted(path.name for path in (tmp_path / "c").glob("*.distcp"))
    assert {name.startswith("model.__0_") for name in names} == {True, False}
    loaded = shardstore.load_plain_tensors(tmp_path / "c")
    assert [loaded[key].tolist()[0] for key in sorted(k for k in loaded if "." in k)] == [
        0, 1, 2, 3,
    ]  # fmt: skip
    for name in names:
        if name.startswith("model."):
            (tmp_path / "c" / name).unlink()
    found = shardstore.load_plain_tensors(tmp_path / "c", keys=["optimizer.2", "optimizer.3"])
    assert [value.tolist()[0] for value in found.values()] == [2, 3]


@pytest.mark.parametrize("threads", [1, 5])
def test_as_many_files_as_threads(tmp_path: Path, threads: int) -> None:
    state = sharded(**{f"w{n}": torch.ones(5) for n in range(10)})
    strategy = TorchDistSaveShardedStrategy(thread_count=threads, cached_metadata=True)
    for name in ("c", "d"):
        shardstore.save(state, tmp_path / name, strategy)
        assert len(list((tmp_path / name).glob("*.distcp"))) == threads


@pytest.mark.parametrize(
    "wrong",
    [{"thread_count": 0}, {"thread_count": "2"}, {"separation_hint": "a/b"},
     {"separation_hint": ".a"}, {"separation_hint": 3}],
    ids=str,
)  # fmt: skip
def test_arguments_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        TorchDistSaveShardedStrategy(**wrong)
    with pytest.raises(FormatVersionError, match="version 2"):
        TorchDistSaveShardedStrategy("torch_dist", 2)


def test_removing_tensors_without_their_own_files_warns_with_the_remedy(
    tmp_path: Path,
) -> None:
    shardstore.save(sharded(w=torch.ones(3)), tmp_path / "c", FORMAT)
    with pytest.warns(UserWarning, match=r"unchanged.*separation_hint='w'.*convert"):
        shardstore.remove_sharded_tensors(tmp_path / "c", "w")
    assert torch.equal(shardstore.load_plain_tensors(tmp_path / "c")["w"], torch.ones(3))


def test_tensors_with_files_of_their_own_are_removed(tmp_path: Path) -> None:
    place, common = tmp_path / "c", ("torch_dist", 1)
    state = sharded(**{name: torch.arange(4.0) for name in ("c.a", "c.b", "w")}) | {"step": 3}
    strategy = TorchDistSaveShardedStrategy(separation_hint="c.")
    shardstore.save(state, place, strategy, common)
    assert {path.name for path in place.glob("*.distcp")} == {"__0_0.distcp", "c.__0_1.distcp"}
    shardstore.remove_sharded_tensors(place, "c")  # the object "common_state" stays
    assert {path.name for path in place.glob("*.distcp")} == {"__0_0.distcp"}
    loaded = shardstore.load_plain_tensors(place)
    assert sorted(loaded) == ["step", "w"]
    assert torch.equal(loaded["w"], torch.arange(4.0))
    plain = {"w": torch.zeros(4)}
    dcp.load(plain, checkpoint_id=place, no_dist=True)
    assert torch.equal(plain["w"], torch.arange(4.0))


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (
            {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, 0, 2))},
            "'w'.*no main replica",
        ),
        ({"o": ShardedObject("o", 1, (2,), (0,))}, "'o'.*no main replica.*o/shard_1_2"),
    ],
    ids=["tensor", "object"],
)
def test_a_missing_part_is_an_error(tmp_path: Path, state: dict[str, Any], said: str) -> None:
    with pytest.raises(AccessPatternError, match=said):
        shardstore.save(state, tmp_path / "c", FORMAT)
    assert not (tmp_path / "c").exists()
    shardstore.save(state, tmp_path / "c", FORMAT, validate_access_integrity=False)


def _load_what_one_rank_lacks(rank: int, world_size: int, place: Path) -> list[str]:
    shardstore.save({"step": 1}, place, FORMAT)
    wrong = sharded(q=torch.ones(3)) if rank == 1 else {}
    with pytest.raises(CheckpointException) as caught:
        shardstore.load(wrong, place)
    error: Any = caught.value
    assert set(error.failures) == {1} or isinstance(error, MissingKeyError)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert type(again) in type(error).__bases__
    return [kind.__name__ for kind in type(error).__mro__]


def test_errors_of_a_load_are_dcps_too_on_every_rank(tmp_path: Path) -> None:
    found = run_ranks(_load_what_one_rank_lacks, 3, tmp_path / "c")
    assert all("CheckpointingException" in kinds and "Exception" in kinds for kinds in found)
    assert "MissingKeyError" in found[1]
    assert "RanksError" in found[0]


def _quietly(rank: int, world_size: int, folder: str) -> None:
    with logged() as lines:
        for number in range(2):
            state, _ = state_of(rank, world_size)
            shardstore.save(state, Path(folder, f"c{number}"), FORMAT)
            check(Path(folder, f"c{number}"), rank)
    assert lines == []


def test_nothing_is_logged_that_needs_no_care(tmp_path: Path) -> None:
    run_ranks(_quietly, WORLD, str(tmp_path))
