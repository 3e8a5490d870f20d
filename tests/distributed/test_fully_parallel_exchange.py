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
from tests.helpers.scenarios import gathered

WORLD = 4


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


def each_shard_is_saved_by_one_rank_and_read_by_one(rank: int, folder: Path) -> None:
    of_ranks = (_state(number, WORLD, True) for number in range(WORLD))
    everything = {shard.key for state in of_ranks for shard in nested_values(state)}
    for how in ("at once", "later"):
        (folder / how).mkdir(exist_ok=True)
        state = _state(rank, WORLD, True)
        if how == "later":
            wrapper = FullyParallelSaveStrategyWrapper(_SaveAsync())
            wrapper.async_save(state, folder / how).execute_sync()
        else:
            FullyParallelSaveStrategyWrapper(_Save()).save(state, folder / how)
        shards = list(nested_values(state))
        assert {shard.replica_id for shard in shards} <= {0, 1}
        saved = gathered([shard.key for shard in shards if shard.replica_id == 0])
        assert sorted(key for keys in saved for key in keys) == sorted(everything)
        assert all(saved), "every rank has a part in it"
    for given in (True, False):
        keys = [key for keys in gathered(_loaded(rank, folder / how, given)) for key in keys]
        assert sorted(keys) == sorted(everything), "nothing is read twice"


def _loaded(rank: int, folder: Path, given: bool) -> list[str]:
    """Load twice by one wrapper, which keeps who reads what; the keys that this rank has read."""
    base = _Load()
    wrapper = FullyParallelLoadStrategyWrapper(base, None, True)
    sent = 0
    original = dist.broadcast

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += 1
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "broadcast", counted)
        for _ in range(2):
            wanted = _state(rank, WORLD, False)
            shards = list(nested_values(wanted))
            if not given:
                for shard in shards:
                    shard.data = None
            got = wrapper.load({**wanted, "plain": ["left", "alone"]}, folder)
            assert got.pop("plain") == ["left", "alone"]
            expected = _state(rank, WORLD, True)
            assert list(got) == list(expected)
            for tensor, asked, stored in zip(
                nested_values(got), shards, nested_values(expected), strict=True
            ):
                assert tensor.dtype == stored.dtype
                assert torch.equal(_bytes(tensor), _bytes(stored.data))
                if given:
                    assert tensor.data_ptr() == asked.data.data_ptr(), "where it was asked for"
    # "one" is held by a single rank: there is nobody to send it to.
    assert sent == 2 * 9
    return base.keys[: len(base.keys) // 2]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def groups_save_once_in_all_and_load_once_each(rank: int, folder: Path) -> None:
    """Two groups of two; the main replicas of everything are in the first."""
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    state = {f"t{n}": _tensor(f"t{n}", 20, rank, True) for n in range(4)}
    FullyParallelSaveStrategyWrapper(_Save(), group).save(state, folder)
    saved = gathered([key for key, shard in state.items() if shard.replica_id == 0])
    assert [len(keys) for keys in saved] == [2, 2, 0, 0]
    base = _Load()
    wanted = {f"t{n}": _tensor(f"t{n}", 20, rank, False) for n in range(4)}
    got = FullyParallelLoadStrategyWrapper(base, group).load(wanted, folder)
    for n in range(4):
        assert torch.equal(got[f"t{n}"], _tensor(f"t{n}", 20, 0, True).data)
    read = gathered(base.keys)
    assert [len(keys) for keys in read] == [2, 2, 2, 2]
    for first in (0, 2):
        assert sorted(read[first] + read[first + 1]) == ["t0", "t1", "t2", "t3"]


def a_kept_distribution_is_used_and_renewed(rank: int, folder: Path) -> None:
    gathers = 0
    original = dist.all_gather_object

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal gathers
        gathers += 1
        return original(*args, **kwargs)

    wrapper = FullyParallelSaveStrategyWrapper(_Save(), None, True)
    assert wrapper.cached_distribution is None
    history = []
    for step in range(4):
        state = {"a": _tensor("a", 8, rank, True), "b": _tensor("b", 8, rank, True)}
        if step >= 2 and rank == 1:
            # The structure changes on one rank only: it must not be lost, nor hang.
            state["new"] = _tensor("new", 3, 0, True)
        target = folder / str(step)
        target.mkdir(exist_ok=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_gather_object", counted)
            wrapper.save(state, target)
        assert wrapper.cached_distribution is not None
        history.append(gathers)
        dist.barrier()
        assert len(list(target.iterdir())) == len(wrapper.cached_distribution.main_rank_for_shard)
    assert ("new", (0,), None) in wrapper.cached_distribution.shards_in_this_group
    assert history == [1, 1, 2, 2]


def objects_are_loaded_once_and_handed_out(rank: int, world_size: int, folder: Path) -> None:
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
    assert (got["shared"], got["own"]) == ({"x": 5}, rank)
    assert gathered(base.keys.count("shared")) == [1, 0, 0, 0]
    orphan = {"o": ShardedObject("orphan", None, (1,), (0,), 1)}
    with pytest.raises(CheckpointingException, match="orphan"):
        wrapper.load(orphan, folder)


def a_failure_to_read_reaches_all_ranks(rank: int, folder: Path) -> None:
    _Save().save({"a": _tensor("a", 8, rank, True)}, folder)
    dist.barrier()
    wanted = {"a": _tensor("a", 8, rank, False), "gone": _tensor("gone", 9, rank, False)}
    with pytest.raises((RanksError, FileNotFoundError), match="gone") as caught:
        FullyParallelLoadStrategyWrapper(_Load()).load(wanted, folder)
    assert sorted(gathered(caught.typename)) == ["FileNotFoundError", *["RanksError"] * 3]


def a_loaded_dtype_that_does_not_fit_is_an_error_on_all(rank: int, folder: Path) -> None:
    _Save().save({"a": _tensor("a", 8, rank, True, dtype=torch.float64)}, folder)
    dist.barrier()
    wanted = {"a": _tensor("a", 8, rank, False)}
    wanted["a"].data = None
    with pytest.raises(CheckpointingException, match=r"float64.*float32|float32.*float64"):
        FullyParallelLoadStrategyWrapper(_Load()).load(wanted, folder)


def test_a_scenario_holds_on_all_ranks(held: list[list[str]], scenario: str) -> None:
    assert all(scenario in names for names in held)


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
