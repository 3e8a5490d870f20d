"""What some rank holds is saved, whoever holds it, or refused by key and rank."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardstore
from shardstore import CheckpointManager, ShardedTensor
from shardstore.dcp import StorageReader, StorageWriter
from shardstore.dict_utils import dict_list_map_outplace
from shardstore.errors import DTypeMismatchError, MissingKeyError, ShapeMismatchError
from tests.helpers.ranks_helper import run_ranks
from tests.helpers.scenarios import logged, raised, remains

WORLD = 2
State = dict[str, Any]
BACKENDS = [("zarr", 2), ("zarr", 1), ("torch_dist", 1)]


def zeroed(state: State) -> State:
    """Return the state of a load: new tensors, other values."""

    def changed(value: Any) -> Any:
        if isinstance(value, DTensor):
            return value.clone().zero_()
        return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value

    return dict_list_map_outplace(changed, state)


def plain(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().tolist()
    return value.tolist() if isinstance(value, torch.Tensor) else value


def loaded(place: str | Path, state: State) -> State:
    found = shardstore.load(zeroed(state), place)
    return dict_list_map_outplace(plain, found)


# -- who holds what --------------------------------------------------------------------------------


def stages(rank: int, world_size: int) -> State:
    """Stages of a pipeline with plain tensors, a data loader's state per rank."""
    return {
        "model": {f"layer{rank}": torch.full((2, 3), float(rank + 1))},
        "optim": {"state": {rank: {"exp_avg": torch.full((4,), -float(rank)), "n": 10 + rank}}},
        f"loader{rank}": {"position": 100 + rank, "seen": [(rank, 1)], "tokens": [rank, 2.5, "a"]},
        "step": 7,
    }


def beside_dtensors(rank: int, world_size: int) -> State:
    """DTensors on a mesh of all ranks, plain tensors that one rank holds."""
    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(8.0).reshape(4, 2)
    return {"w": distribute_tensor(whole, mesh, [Shard(0)]), **stages(rank, world_size)}


def only_one_rank_has_dtensors(rank: int, world_size: int) -> State:
    meshes = [init_device_mesh("cpu", (1,)) if world_size == 1 else None]
    mesh = meshes[0] or dist.device_mesh.DeviceMesh("cpu", [world_size - 1])
    state = stages(rank, world_size)
    if rank == world_size - 1:
        state["w"] = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    return state


def nothing_on_rank_0(rank: int, world_size: int) -> State:
    return {} if rank == 0 else stages(rank, world_size)


def empty_on_some_ranks(rank: int, world_size: int) -> State:
    """As get_model_state_dict(full_state_dict=True) returns, and as an optimizer without state."""
    last = rank == world_size - 1
    return {
        "model": {"w": torch.full((2,), 3.0), "inner": {"b": torch.ones(1)}} if last else {},
        "optim": {"state": {0: {"n": 4, "exp_avg": torch.ones(2)}} if rank == 0 else {}},
        "extra": {"loss": 0.5} if rank == 1 else {},
    }


HELD: dict[str, Callable[[int, int], State]] = {
    "stages": stages,
    "beside DTensors": beside_dtensors,
    "only one rank has DTensors": only_one_rank_has_dtensors,
    "nothing on rank 0": nothing_on_rank_0,
    "empty on some ranks": empty_on_some_ranks,
}


def _each_way(rank: int, world_size: int, folder: str) -> None:
    for name, make in HELD.items():
        wanted = dict_list_map_outplace(plain, make(rank, world_size))
        for backend in BACKENDS:
            place = f"{folder}/{name}-{backend[0]}{backend[1]}"
            shardstore.save(make(rank, world_size), place, backend)
            check(loaded(place, make(rank, world_size)), wanted, name)
            assert isinstance(shardstore.load({}, place), dict)
        described = shardstore.shard(make(rank, world_size))
        shardstore.async_save(described, f"{folder}/{name}-async").result()
        check(loaded(f"{folder}/{name}-async", make(rank, world_size)), wanted, name)
        asked = shardstore.shard(zeroed(make(rank, world_size)))
        found = shardstore.load(asked, f"{folder}/{name}-async")
        check(dict_list_map_outplace(plain, found), wanted, name)
        manager = CheckpointManager(f"{folder}/{name}-steps")
        manager.save(1, make(rank, world_size))
        restored = manager.restore(zeroed(make(rank, world_size)))
        check(dict_list_map_outplace(plain, restored.state), wanted, name)
        dcp.save(make(rank, world_size), storage_writer=StorageWriter(f"{folder}/{name}-dcp"))
        asked = zeroed(make(rank, world_size))
        dcp.load(asked, storage_reader=StorageReader(f"{folder}/{name}-dcp"))
        check(dict_list_map_outplace(plain, asked), wanted, name)


def check(found: Any, wanted: Any, what: str) -> None:
    """Check that what the rank holds came back; other ranks' values may be there too."""
    if isinstance(wanted, dict):
        for key, value in wanted.items():
            assert key in found, (what, key, found)
            check(found[key], value, f"{what}.{key}")
    else:
        assert found == wanted, (what, found, wanted)


def test_what_any_rank_holds_comes_back(tmp_path: Path) -> None:
    run_ranks(_each_way, 3, str(tmp_path), timeout_s=280)


# -- plain tensors beside those that shard() describes ---------------------------------------------


def plain_tensors_of_ranks_come_back_beside_described_ones(rank: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    whole = torch.arange(8.0).reshape(4, 2)
    models = {
        "plain": lambda: {"w": whole.clone()},
        "DTensors": lambda: {"w": distribute_tensor(whole, mesh, [Shard(0)])},
    }
    for name, model in models.items():
        for own in ({f"rng{rank}": torch.full((3,), rank)}, {"one": torch.ones(1)} if rank else {}):
            place = folder / f"{name}-{min(own, default='one')[:3]}"
            shardstore.save(
                {"model": shardstore.shard(model()), "same": torch.ones(2), **own}, place
            )
            given = {key: torch.zeros_like(value) for key, value in own.items()}
            same, asked = torch.zeros(2), shardstore.shard(zeroed(model()))
            found: Any = shardstore.load({"model": asked, "same": same, **given}, place)
            assert torch.equal(same, torch.ones(2))
            for key, value in own.items():
                assert torch.equal(given[key], value), (name, key)
                assert found[key].data_ptr() == given[key].data_ptr()
            check(plain(found["model"]["w"]), whole.tolist(), name)


def sparse_tensors_of_ranks_come_back(rank: int, world_size: int, folder: Path) -> None:
    """They are values, which no rank makes arrays of."""
    mesh, sparse = init_device_mesh("cpu", (world_size,)), torch.eye(2).to_sparse() * (rank + 1)
    beside: list[State] = [
        {},
        {"only": torch.ones(1)} if rank else {},
        {f"own{rank}": torch.ones(1)},
        {"w": distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]), f"own{rank}": torch.ones(1)},
    ]
    for number, more in enumerate(beside):
        shardstore.save({f"s{rank}": sparse, **more}, folder / str(number))
        found: Any = shardstore.load({f"s{rank}": sparse, **zeroed(more)}, folder / str(number))
        assert torch.equal(found[f"s{rank}"].to_dense(), sparse.to_dense())
        del found["s0"], found["s1"]
        check(dict_list_map_outplace(plain, found), dict_list_map_outplace(plain, more), "more")


# -- copies that differ ----------------------------------------------------------------------------


def differing(rank: int) -> State:
    return {
        "rng": torch.arange(3) + rank,
        "running_mean": torch.zeros(2),
        "loss": float(rank),
        "tags": {"a", "b", "c"},
        "tokens": [1, rank, "text"],
        "longer": [1, 2, 3][: rank + 1],
        "late": [1] if rank == 0 else [1, torch.ones(1) * rank],
        "step": 5,
    }


def _differ(rank: int, world_size: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    w = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    for name, beside in (("plain", {}), ("DTensors", {"w": w})):
        place, own = folder / name, {**differing(rank), **beside}
        with logged() as texts:
            shardstore.save(own, place / "c")
            state = loaded(place / "c", own)
        assert (state["rng"], state["loss"], state["tags"]) == ([0, 1, 2], 0.0, {"a", "b", "c"})
        assert (state["tokens"], state["longer"]) == ([1, 0, "text"], [1, 2, 3])
        assert state["late"] == ([1, [1.0]] if rank else [1])
        assert len(texts) == (rank == 0)
        differ = ("'rng' on ranks 1, 2", "'tokens' on ranks 1, 2", "'late.1' on ranks 2")
        for word in (*differ, ": 4 value(s)", "ShardedObject", "='equal'"):
            assert rank or word in texts[0], texts
        error = str(raised(lambda: shardstore.save(own, place / "d", replicas="equal")))  # noqa: B023
        for word in ("replicas='equal'", "'rng' on ranks 1, 2", "'loss' on ranks 1, 2"):
            assert word in error, error
        for same in ("running_mean", "tags", "step"):
            assert same not in error
        dist.barrier()
        assert remains(place) == ["c"]
        dist.barrier()
        shardstore.save({**differing(0), **beside}, place / "e", replicas="equal")


def test_the_lowest_ranks_copy_is_saved_and_the_others_are_named(tmp_path: Path) -> None:
    run_ranks(_differ, 3, tmp_path)


# -- states that do not fit together ---------------------------------------------------------------


CONFLICTS: list[tuple[State, State, str]] = [
    ({"x": 5}, {"x": {"y": 6}}, "x"),
    ({"x": {"y": torch.ones(1)}}, {"x": torch.ones(1)}, "x"),
    ({"x": 5}, {"x": torch.ones(1)}, "x"),
    ({"x": [1, 2]}, {"x": {"name": 1}}, "x"),
    ({"n": 1}, {"n": 1, "bad": {"f": print}}, "bad"),
]


def values_that_do_not_fit_together_are_refused_by_key_and_rank(rank: int, folder: Path) -> None:
    for *states, key in CONFLICTS:
        text = str(raised(partial(shardstore.save, dict(states[rank]), folder / "c")))
        assert f"'{key}" in text, text
        assert rank == 1 or "rank 1" in text, text
    dist.barrier()
    assert remains(folder) == []


# -- lists -----------------------------------------------------------------------------------------


def lists_of_different_lengths_come_back(rank: int, folder: Path) -> None:
    """Values are those of rank 0, as in Megatron-Core; no list is unloadable."""

    def shard(name: str) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(name, torch.full((2,), float(rank)))

    def state() -> State:
        rows = [{"w": shard(f"w{rank}.{i}"), "n": i} for i in range(rank + 1)]
        return {"rows": rows, "mixed": [shard(f"m{rank}"), "text"][: rank + 1]}

    expected: list[State] = [
        {"rows": [{"w": [0.0, 0.0], "n": 0}], "mixed": [[0.0, 0.0]]},
        {"rows": [{"w": [1.0, 1.0], "n": 0}, {"w": [1.0, 1.0]}], "mixed": [[1.0, 1.0]]},
    ]
    for number, backend in enumerate(BACKENDS):
        shardstore.save(state(), folder / str(number), backend)
        found = shardstore.load(state(), folder / str(number))
        assert dict_list_map_outplace(plain, found) == expected[rank]


def test_a_scenario_holds_on_all_ranks(held: list[list[str]], scenario: str) -> None:
    assert all(scenario in names for names in held)


# -- any states ------------------------------------------------------------------------------------


def any_state(chance: random.Random, rank: int, depth: int = 0) -> Any:
    """Return nested containers; some values are equal on all ranks, some differ."""
    kind = chance.choice(["dict", "dict", "list", "tensor", "value", "own", "empty"])
    if depth == 0 or (kind == "dict" and depth < 3):
        names = chance.sample(["a", "b", "c", "d", "e"], chance.randint(0, 3))
        held = {name: any_state(chance, rank, depth + 1) for name in names}
        keeps = {name: chance.random() < 0.6 for name in names for _ in range(4)}
        return {n: v for n, v in held.items() if rank == 0 or keeps[n]}
    if kind == "list" and depth < 3:
        return [any_state(chance, rank, depth + 1) for _ in range(chance.randint(0, 3))]
    if kind == "tensor":
        return torch.full((chance.randint(0, 3),), float(chance.randint(0, 9)))
    return {"value": chance.randint(0, 9), "own": rank}.get(kind, [])


def _any(rank: int, world_size: int, folder: str, seeds: range) -> list[str]:
    outcomes = []
    for seed in seeds:
        backend = BACKENDS[seed % 3]
        own = any_state(random.Random(seed), rank)
        place = f"{folder}/{seed}"
        error = None
        try:
            shardstore.save(own, place, backend)
        except shardstore.CheckpointingException as problem:
            error = problem
        outcomes.append("refused" if error else "saved")
        if error is not None:
            continue
        again = loaded(place, own)
        every: list[State] = [{} for _ in range(world_size)]
        dist.all_gather_object(every, dict_list_map_outplace(plain, own))
        check_lowest(again, own, every, ())
        assert isinstance(shardstore.load({}, place), dict)
    return outcomes


def check_lowest(found: Any, own: Any, every: list[Any], path: tuple[Any, ...]) -> None:
    """Check each value that this rank holds against that of the lowest rank that holds its path."""
    for key, value in own.items() if isinstance(own, dict) else enumerate(own):
        here = (*path, key)
        if isinstance(value, dict | list) and value:
            check_lowest(found[key], value, every, here)
            continue
        lowest = next(one for s in every if (one := at(s, here)) is not MISSING)
        if isinstance(value, dict | list):
            assert isinstance(found[key], type(value)), (here, found[key])
        elif not isinstance(lowest, dict | list) or not isinstance(value, torch.Tensor):
            assert found[key] == lowest, (here, found[key], lowest)


MISSING = object()


def at(state: Any, path: tuple[Any, ...]) -> Any:
    for name in path:
        try:
            state = state[name]
        except (LookupError, TypeError):
            return MISSING
    return state


@pytest.mark.parametrize("first", [0, pytest.param(1000, marks=pytest.mark.long)])
def test_any_states_are_saved_and_loaded_or_refused_on_every_rank(
    tmp_path: Path, first: int
) -> None:
    results = run_ranks(_any, 3, str(tmp_path), range(first, first + 30), timeout_s=280)
    assert results[0] == results[1] == results[2]
    assert results[0].count("saved") > 10


# -- a checkpoint of one process -------------------------------------------------------------------


def _of_one_process(rank: int, world_size: int, place: str) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(24.0).reshape(6, 4)

    def sharded(shape: tuple[int, ...], axis: int, dtype: torch.dtype = torch.float32) -> Any:
        return distribute_tensor(torch.zeros(shape, dtype=dtype), mesh, [Shard(axis)])

    for axis in (0, 1):
        given = {"m": {"w": sharded((6, 4), axis), "list": [sharded((3,), 0), torch.zeros(2)]}}
        found: Any = shardstore.load({**given, "step": 0}, place)
        assert found["m"]["w"] is given["m"]["w"]
        assert not found["m"]["w"].requires_grad
        assert torch.equal(given["m"]["w"].full_tensor(), whole)
        assert found["m"]["list"][0].full_tensor().tolist() == [0, 1, 2]
        assert given["m"]["list"][1].tolist() == [1, 1]
        assert found["step"] == 3
    half = sharded((6, 4), 0, torch.bfloat16)
    found = shardstore.load({"m": {"w": half}}, place, cast=True, strict="raise_unexpected")
    assert torch.equal(half.full_tensor(), whole.bfloat16())
    for wrong, kind in [
        (sharded((6, 4), 0, torch.float64), DTypeMismatchError),
        (sharded((6, 5), 0), ShapeMismatchError),
    ]:
        error = raised(lambda w=wrong: shardstore.load({"m": {"w": w}}, place))  # type: ignore[misc]
        assert isinstance(error, kind), error
        assert "'m.w'" in str(error)
        assert not wrong.full_tensor().any()
    error = raised(lambda: shardstore.load({"m": {"other": sharded((6, 4), 0)}}, place))
    assert isinstance(error, MissingKeyError)


def test_ranks_load_their_parts_of_what_one_process_saved_whole(tmp_path: Path) -> None:
    """Its tensors are common values."""
    listed = [torch.arange(3.0), torch.ones(2)]
    weight = torch.nn.Parameter(torch.arange(24.0).reshape(6, 4))
    state = {"m": {"w": weight, "list": listed}, "step": 3}
    shardstore.save(state, tmp_path / "c")
    assert list(shardstore.open(tmp_path / "c")) == []
    run_ranks(_of_one_process, 2, str(tmp_path / "c"))


def _of_fewer_elements(rank: int, world_size: int, places: list[str]) -> None:
    every, first = init_device_mesh("cpu", (world_size,)), DeviceMesh("cpu", [0])

    def one(mesh: DeviceMesh) -> DTensor:
        """Return a tensor of one element, which rank 0 holds."""
        about = {"run_check": False, "shape": (1,), "stride": (1,)}
        return DTensor.from_local(torch.zeros(int(rank == 0)), mesh, [Shard(0)], **about)

    for place in places:
        for mesh in (every, first):  # the other rank is not in the second mesh
            for strict, more in (("assume_ok_unexpected", {}), ("ignore_all", {"x": one(mesh)})):
                given = {"w": one(mesh), "list": [one(mesh)], "step": 0, **more}
                found: Any = shardstore.load(given, place, strict=strict)
                assert found.keys() == {"w", "list", "step"}  # what is stored nowhere is left out
                assert found["w"] is given["w"]
                assert found["list"][0] is given["list"][0]
                if rank == 0:
                    assert found["w"].to_local().tolist() == [5]
                    assert found["list"][0].to_local().tolist() == [7]


def test_ranks_that_hold_no_element_load_what_one_process_saved(tmp_path: Path) -> None:
    state = {"w": torch.tensor([5.0]), "list": [torch.tensor([7.0])], "step": 3}
    shardstore.save(state, tmp_path / "common")
    shardstore.save(shardstore.shard(state), tmp_path / "arrays")
    run_ranks(_of_fewer_elements, 2, [str(tmp_path / "common"), str(tmp_path / "arrays")])
