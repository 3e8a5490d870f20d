"""Replicas share out saving and loading, on real ranks, over a store that is a real directory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardstore.dict_utils import dict_list_map_outplace, nested_values
from shardstore.errors import CheckpointingException, RanksError
from shardstore.mapping import ShardedObject, ShardedTensor, is_main_replica
from shardstore.strategies.async_utils import AsyncRequest
from shardstore.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
    SaveShardedStrategy,
)
from shardstore.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
    distribute_main_replicas_with_precomputed_distribution,
)
from tests.helpers.ranks_helper import run_ranks


def _path(folder: str | Path, item: ShardedTensor | ShardedObject) -> Path:
    flat = getattr(item, "flattened_range", None)
    return Path(folder, re.sub(r"\W+", "_", f"{item.key} {item.global_offset} {flat}"))


class _Save(SaveShardedStrategy):
    """One file for each main replica; refuses to write a file twice."""

    def __init__(self) -> None:
        super().__init__("files", 1)

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        for item in nested_values(sharded_state_dict):
            if is_main_replica(item.replica_id):
                with _path(checkpoint_dir, item).open("xb") as file:
                    torch.save(item.data, file)


class _SaveAsync(_Save, AsyncSaveShardedStrategy):
    def async_save(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path
    ) -> AsyncRequest:
        return AsyncRequest(_Save().save, (sharded_state_dict, checkpoint_dir), [])


class _Load(LoadShardedStrategy):
    def __init__(self, objects: bool = False) -> None:
        self.objects = objects
        self.keys: list[str] = []

    @property
    def can_handle_sharded_objects(self) -> bool:
        return self.objects

    def check_backend_compatibility(self, loaded_backend: str) -> None: ...
    def check_version_compatibility(self, loaded_version: int) -> None: ...

    def load(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path
    ) -> dict[str, Any]:
        def read(item: Any) -> Any:
            value = torch.load(_path(checkpoint_dir, item), weights_only=True)
            self.keys.append(item.key)
            if isinstance(value, torch.Tensor) and item.data is not None:
                item.data.copy_(value)
                return item.data
            return value

        return dict(dict_list_map_outplace(read, sharded_state_dict))

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        return {"asked": checkpoint_dir}


def _tensor(key: str, size: int, replica: int, fill: bool, **kwargs: Any) -> ShardedTensor:
    dtype = kwargs.pop("dtype", torch.float32)
    truth = (torch.arange(size) % 5 + len(key)).to(dtype)
    data = truth if fill else torch.zeros(size, dtype=dtype)
    return ShardedTensor.from_rank_offsets(key, data, replica_id=replica, **kwargs)


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64]


def _state(rank: int, world_size: int, fill: bool) -> dict[str, Any]:
    """Tensors that all hold, one that two hold, one that one holds, a flat one, a strided one and a
    scalar."""
    state: dict[str, Any] = {
        f"all.{n}": _tensor(f"all.{n}", 10 + n, rank, fill, dtype=DTYPES[n]) for n in range(5)
    }
    if rank < 2:
        state["two"] = [_tensor("two", 300, rank, fill)]
    if rank == world_size - 1:
        state["one"] = {"deep": _tensor("one", 7, 0, fill)}
    flat = torch.arange(4.0) if fill else torch.zeros(4)
    state["flat"] = ShardedTensor.from_rank_offsets_flat(
        "flat", flat, (2, 3), flattened_range=slice(1, 5), replica_id=rank
    )
    scalar = torch.tensor(3.5) if fill else torch.tensor(0.0)
    # One element, which counts as contiguous though it has a stride.
    strided = (torch.full((3,), 6.5) if fill else torch.zeros(3))[::2][:1]
    state["strided"] = ShardedTensor.from_rank_offsets("strided", strided, replica_id=rank)
    state["scalar"] = ShardedTensor.from_rank_offsets("scalar", scalar, replica_id=(0, rank))
    return state


def _save(rank: int, world_size: int, folder: str, how: str) -> list[str]:
    state = _state(rank, world_size, True)
    if how == "async":
        FullyParallelSaveStrategyWrapper(_SaveAsync()).async_save(state, folder).execute_sync()
    else:
        FullyParallelSaveStrategyWrapper(_Save()).save(state, folder)
    shards = list(nested_values(state))
    assert {shard.replica_id for shard in shards} <= {0, 1}
    return [shard.key for shard in shards if shard.replica_id == 0]


@pytest.mark.parametrize("how", ["sync", "async"])
def test_each_shard_is_saved_by_one_rank(tmp_path: Path, how: str) -> None:
    saved = run_ranks(_save, 3, str(tmp_path), how)
    everything = sorted(_.key for r in range(3) for _ in nested_values(_state(r, 3, True)))
    assert sorted(key for keys in saved for key in keys) == sorted(set(everything))
    assert all(saved), "every rank has a part in it"


def _load_all_ways(rank: int, world_size: int, folder: str) -> list[dict[str, Any]]:
    return [_load(rank, world_size, folder, given) for given in (True, False)]


def _load(rank: int, world_size: int, folder: str, given: bool) -> dict[str, Any]:
    base = _Load()
    wrapper = FullyParallelLoadStrategyWrapper(base, None, True)
    moved: list[int] = []
    original = torch.distributed.broadcast

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        moved.append(tensor.nbytes)
        return original(tensor, *args, **kwargs)

    torch.distributed.broadcast = counted
    for round_number in range(2):
        wanted = _state(rank, world_size, False)
        wanted["plain"] = ["left", "alone"]
        if not given:
            for shard in nested_values({k: v for k, v in wanted.items() if k != "plain"}):
                shard.data = None
        got = wrapper.load(wanted, folder)
        if round_number == 0:
            result = {"keys": sorted(base.keys), "sent": list(moved)}
        assert got.pop("plain") == ["left", "alone"]
        expected = _state(rank, world_size, True)
        assert list(got) == list(expected)
        pairs = zip(nested_values(got), nested_values(expected), strict=True)
        for tensor, shard in pairs:
            assert tensor.dtype == shard.dtype
            assert torch.equal(_bytes(tensor), _bytes(shard.data))
        if given:
            for tensor, shard in zip(
                nested_values(got),
                nested_values({k: v for k, v in wanted.items() if k != "plain"}),
                strict=True,
            ):
                assert tensor.data_ptr() == shard.data.data_ptr(), "loaded where it was asked for"
    torch.distributed.broadcast = original
    return result


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def test_each_shard_is_read_once_and_reaches_all(tmp_path: Path) -> None:
    run_ranks(_save, 3, str(tmp_path), "sync")
    for results in zip(*run_ranks(_load_all_ways, 3, str(tmp_path)), strict=True):
        keys = sorted(key for result in results for key in result["keys"])
        assert keys == sorted(set(keys)), "nothing is read twice"
        for result in results:
            # "one" is held by a single rank: there is nobody to send it to.
            assert len(result["sent"]) == 9


def _groups(rank: int, world_size: int, folder: str) -> tuple[list[str], list[str]]:
    """Two groups of two; the main replicas of everything are in the first."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank // 2]
    state = {f"t{n}": _tensor(f"t{n}", 20, rank, True) for n in range(4)}
    saver = FullyParallelSaveStrategyWrapper(_Save(), group)
    saver.save(state, folder)
    dist.barrier()
    base = _Load()
    wanted = {f"t{n}": _tensor(f"t{n}", 20, rank, False) for n in range(4)}
    got = FullyParallelLoadStrategyWrapper(base, group).load(wanted, folder)
    for n in range(4):
        assert torch.equal(got[f"t{n}"], _tensor(f"t{n}", 20, 0, True).data)
    return [key for key, shard in state.items() if shard.replica_id == 0], sorted(base.keys)


def test_groups_save_once_in_all_and_load_once_each(tmp_path: Path) -> None:
    results = run_ranks(_groups, 4, str(tmp_path))
    assert [len(saved) for saved, _ in results] == [2, 2, 0, 0]
    assert [len(read) for _, read in results] == [2, 2, 2, 2]
    for first in (0, 2):
        assert sorted(results[first][1] + results[first + 1][1]) == ["t0", "t1", "t2", "t3"]


def _cached(rank: int, world_size: int, folder: str) -> list[int]:
    gathers = 0
    original = torch.distributed.all_gather_object

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal gathers
        gathers += 1
        return original(*args, **kwargs)

    torch.distributed.all_gather_object = counted
    wrapper = FullyParallelSaveStrategyWrapper(_Save(), None, True)
    assert wrapper.cached_distribution is None
    history = []
    for step in range(4):
        state = {"a": _tensor("a", 8, rank, True), "b": _tensor("b", 8, rank, True)}
        if step >= 2 and rank == 1:
            # The structure changes on one rank only: it must not be lost, nor hang.
            state["new"] = _tensor("new", 3, 0, True)
        target = Path(folder, str(step))
        target.mkdir(exist_ok=True)
        wrapper.save(state, target)
        assert wrapper.cached_distribution is not None
        history.append(gathers)
        dist.barrier()
        assert len(list(target.iterdir())) == len(wrapper.cached_distribution.main_rank_for_shard)
    assert ("new", (0,), None) in wrapper.cached_distribution.shards_in_this_group
    return history


def test_cached_distribution_is_used_and_renewed(tmp_path: Path) -> None:
    assert run_ranks(_cached, 2, str(tmp_path)) == [[1, 1, 2, 2]] * 2


def _objects(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    state: dict[str, Any] = {
        "shared": ShardedObject("shared", {"x": 5}, (1,), (0,), rank),
        "own": ShardedObject("own", rank, (world_size,), (rank,), 0),
        "t": _tensor("t", 4, rank, True),
    }
    _Save().save(state, folder)
    dist.barrier()
    base = _Load(objects=True)
    wrapper = FullyParallelLoadStrategyWrapper(base)
    assert wrapper.can_handle_sharded_objects
    state["t"] = _tensor("t", 4, rank, False)
    got = wrapper.load(state, folder)
    assert torch.equal(got["t"], _tensor("t", 4, 0, True).data)
    orphan = {"o": ShardedObject("orphan", None, (1,), (0,), 1)}
    with pytest.raises(CheckpointingException, match="orphan"):
        wrapper.load(orphan, folder)
    return {"shared": got["shared"], "own": got["own"], "read": base.keys.count("shared")}


def test_objects_are_loaded_once_and_handed_out(tmp_path: Path) -> None:
    results = run_ranks(_objects, 3, str(tmp_path))
    assert [result["own"] for result in results] == [0, 1, 2]
    assert [result["shared"] for result in results] == [{"x": 5}] * 3
    assert [result["read"] for result in results] == [1, 0, 0]


def _fails(rank: int, world_size: int, folder: str) -> str:
    _Save().save({"a": _tensor("a", 8, rank, True)}, folder)
    dist.barrier()
    wanted = {"a": _tensor("a", 8, rank, False), "gone": _tensor("gone", 9, rank, False)}
    try:
        FullyParallelLoadStrategyWrapper(_Load()).load(wanted, folder)
    except (RanksError, FileNotFoundError) as error:
        return f"{type(error).__name__} {error}"
    return "nothing"


def test_read_failure_on_one_rank_reaches_all(tmp_path: Path) -> None:
    texts = run_ranks(_fails, 3, str(tmp_path), timeout_s=60)
    assert all("gone" in text for text in texts)
    assert sum(text.startswith("FileNotFoundError") for text in texts) == 1
    assert sum(text.startswith("RanksError") for text in texts) == 2


def _mismatch(rank: int, world_size: int, folder: str) -> str:
    _Save().save({"a": _tensor("a", 8, rank, True, dtype=torch.float64)}, folder)
    dist.barrier()
    wanted = {"a": _tensor("a", 8, rank, False)}
    wanted["a"].data = None
    try:
        FullyParallelLoadStrategyWrapper(_Load()).load(wanted, folder)
    except CheckpointingException as error:
        return str(error)
    return "nothing"


def test_loaded_dtype_that_does_not_fit_is_an_error_on_all(tmp_path: Path) -> None:
    for text in run_ranks(_mismatch, 2, str(tmp_path), timeout_s=60):
        assert "float64" in text
        assert "float32" in text


def test_one_rank_saves_and_loads_through_the_wrappers(tmp_path: Path) -> None:
    FullyParallelSaveStrategyWrapper(_Save(), None, True).save(_state(0, 1, True), tmp_path)
    wrapper = FullyParallelLoadStrategyWrapper(_Load(), do_cache_distribution=True)
    for _ in range(2):
        got = wrapper.load(_state(0, 1, False), tmp_path)
        assert torch.equal(got["two"][0], _tensor("two", 300, 0, True).data)
    whole = _state(0, 1, True)
    tensors = {("all.0", (0,), None): torch.ones(10)}
    FullyParallelLoadStrategyWrapper.fill_in_deferred_sharded_tensors(
        asked := {"deep": [whole["all.0"], 3]}, tensors
    )
    assert asked["deep"] == [whole["all.0"].data, 3]
    with pytest.raises(CheckpointingException, match=r"'all\.1'"):
        FullyParallelLoadStrategyWrapper.fill_in_deferred_sharded_tensors(whole, tensors)
    assert wrapper.load_tensors_metadata("x") == {"asked": "x"}
    assert wrapper.load_sharded_metadata("x") == {"asked": "x"}
    state = _state(0, 1, True)
    state["two"][0].replica_id = (3, 4)
    distribute_main_replicas_with_precomputed_distribution(state, None, None)
    assert state["two"][0].replica_id == (3, 4)


def test_exchange_algorithms_have_known_names() -> None:
    for name in ("broadcast", "gather_rounds", "gather_object", "chunks"):
        assert FullyParallelLoadStrategyWrapper(_Load(), exchange_algo=name).exchange_algo == name
    with pytest.raises(NotImplementedError, match="gather_rounds"):
        FullyParallelLoadStrategyWrapper(_Load(), exchange_algo="telepathy")


def test_async_needs_an_async_strategy(tmp_path: Path) -> None:
    wrapper = FullyParallelSaveStrategyWrapper(_Save())
    assert (wrapper.backend, wrapper.version) == ("files", 1)
    with pytest.raises(CheckpointingException, match=r"_Save\(files, 1\)"):
        wrapper.async_save({}, tmp_path)
