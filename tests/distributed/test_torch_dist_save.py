"""Megatron-Core's present format, saved at once and in the background, on real ranks: what is saved
is the state at the call, nothing shows before all ranks are done, and everybody learns why not."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
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
    StorageError,
)
from shardstore.mapping import StateDict
from shardstore.strategies.async_utils import AsyncCallsQueue
from shardstore.strategies.common import TorchCommonSaveStrategy
from shardstore.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from shardstore.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy
from tests.helpers.scenarios import files_at_most, logged, raised, remains, remains_of_all
from tests.helpers.spoilt_states import WHOLE, check, save_later, spoil, state_of

WORLD = 2
FORMAT = ("torch_dist", 1)


def the_strategy_alone_shows_nothing_before_the_end(rank: int, folder: Path) -> None:
    """As programs call it that keep their own queue."""
    state, held = state_of(rank, WORLD)
    state.pop("step")
    queue = AsyncCallsQueue()
    request = TorchDistSaveShardedStrategy().async_save(state, folder / "c")
    spoil(held)
    queue.schedule_async_request(request)
    assert ".metadata" not in remains(folder / "c")
    queue.maybe_finalize_async_calls(blocking=True)
    whole = ShardedTensor.from_rank_offsets("flat", torch.zeros(WHOLE.shape))
    TorchDistLoadShardedStrategy().load({"flat": whole}, folder / "c")
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


def replicas_without_a_main_one(rank: int, folder: Path) -> None:
    state = {"w": ShardedTensor.from_rank_offsets("w", WHOLE.clone(), replica_id=rank + 1)}
    raised(lambda: shardstore.save(state, folder / "a", FORMAT), "no main replica")
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, keep_only_main_replica=False)
    shardstore.save(state, folder / "b", strategy)
    assert torch.equal(shardstore.load_plain_tensors(folder / "b")["w"], WHOLE)
    written = sum(path.stat().st_size for path in (folder / "b").glob("*.distcp"))
    assert written < 1.5 * WHOLE.nbytes


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
        raised(save, "'flat'", "irregular", kind=AccessPatternError if rank == 1 else RanksError)
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
    """Also where the strategy has the ranks meet for DCP's plans."""
    for failing in range(world_size):
        how = folder / "c", FORMAT, FailingOnRank(failing)
        save = partial(shardstore.save, state_of(rank, world_size)[0], *how)
        error = raised(save, "the disk is full here")
        assert f"rank {failing}" in str(error) or rank == failing
        handle = save_later(*how)
        assert "the disk is full here" in str(handle.exception(60))
        assert remains_of_all(folder) == []
    # The ranks still understand each other.
    shardstore.save(state_of(rank, world_size)[0], folder / "ok", FORMAT)
    check(folder / "ok")


class FailingBefore(TorchDistSaveShardedStrategy):
    """Fails on one rank before it meets the others to plan."""

    def async_save(self, *args: Any) -> Any:
        if dist.get_rank() == 1:
            raise StorageError("no plan here")
        return super().async_save(*args)


def a_rank_that_does_not_come_to_plan_is_not_waited_for(rank: int, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DEADLINE_VARIABLE, "600")
        handle = save_later(folder / "c", FailingBefore())
        error = handle.exception(60)
    assert isinstance(error, StorageError if rank == 1 else RanksError)
    assert "no plan here" in str(error)
    assert remains_of_all(folder) == []


def a_copy_that_does_not_fit_its_budget_fails_on_all(rank: int, folder: Path) -> None:
    budget = 1 << 30 if rank == 0 else 4096
    handle = save_later(folder / "c", FORMAT, staging_budget_bytes=budget)
    error = handle.exception(60)
    assert isinstance(error, RanksError if rank == 0 else ArgumentError)
    assert "staging_budget_bytes=4096" in str(error)
    assert remains_of_all(folder) == []


def errors_of_a_load_are_dcps_too_on_every_rank(rank: int, folder: Path) -> None:
    shardstore.save({"step": 1}, folder / "c", FORMAT)
    wrong = sharded(q=torch.ones(3)) if rank == 1 else {}
    with pytest.raises(CheckpointException) as caught:
        shardstore.load(wrong, folder / "c")
    error: Any = caught.value
    assert isinstance(error, MissingKeyError if rank == 1 else RanksError)
    assert rank == 1 or set(error.failures) == {1}
    assert isinstance(error, Exception)  # DCP's own is none
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert type(again) in type(error).__bases__


def nothing_is_logged_that_needs_no_care(rank: int, world_size: int, folder: Path) -> None:
    with logged() as lines:
        for name in ("a", "b"):
            shardstore.save(state_of(rank, world_size)[0], folder / name, FORMAT)
            check(folder / name)
    assert lines == []


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
    other = torch.ones(4, dtype=torch.complex32)
    state = sharded(plain=torch.ones(2, 3), odd=torch.zeros(3).to(torch.float8_e5m2), other=other)
    request = shardstore.save(state, tmp_path / "c", FORMAT, async_sharded_save=True)
    other.zero_()
    request.execute_sync()
    found = {"other": torch.zeros(4, dtype=torch.complex32)}
    dcp.load(found, storage_reader=FileSystemReader(tmp_path / "c"), no_dist=True)
    assert found["other"].tolist() == [1] * 4


def test_the_metadata_names_no_folder(tmp_path: Path) -> None:
    """The attempt's folder is renamed by the commit, and a checkpoint may be copied."""
    shardstore.save(sharded(w=torch.arange(4.0)), tmp_path / "here", FORMAT)
    content = (tmp_path / "here" / ".metadata").read_bytes()
    assert tmp_path.name.encode() not in content
    about = FileSystemReader(tmp_path / "here").read_metadata().storage_meta
    assert about.checkpoint_id is None


@pytest.mark.parametrize("threads", [1, 5])
def test_as_many_files_as_threads(tmp_path: Path, threads: int) -> None:
    state = sharded(**{f"w{n}": torch.ones(5) for n in range(10)})
    strategy = TorchDistSaveShardedStrategy(thread_count=threads, cached_metadata=True)
    for name in ("c", "d"):
        shardstore.save(state, tmp_path / name, strategy)
        assert len(list((tmp_path / name).glob("*.distcp"))) == threads


def test_another_version_of_the_format_is_refused() -> None:
    with pytest.raises(FormatVersionError, match="version 2"):
        TorchDistSaveShardedStrategy("torch_dist", 2)


def test_removing_tensors_without_their_own_files_warns_with_the_remedy(tmp_path: Path) -> None:
    shardstore.save(sharded(w=torch.ones(3)), tmp_path / "c", FORMAT)
    with pytest.warns(UserWarning, match=r"unchanged.*separation_hint='w'.*convert"):
        shardstore.remove_sharded_tensors(tmp_path / "c", "w")
    assert torch.equal(shardstore.load_plain_tensors(tmp_path / "c")["w"], torch.ones(3))


def test_tensors_with_files_of_their_own_are_removed(tmp_path: Path) -> None:
    """The files are named as Megatron-Core 0.15.3 names them."""
    place, common = tmp_path / "c", ("torch_dist", 1)
    state = sharded(**{name: torch.arange(4.0) for name in ("c.a", "c.b", "w")}) | {"step": 3}
    state["o"] = ShardedObject("c.o", {"x": 1}, (1,), (0,))
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
