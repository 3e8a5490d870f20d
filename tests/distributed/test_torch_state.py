"""State dicts of PyTorch, by shardstore.save/load and by DCP over our storage, under real FSDP2.

Four ranks save everything in one spawn, two ranks and a world of one load it.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import zarr
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.two_tensor import TwoTensor

import shardstore
from shardstore import hf
from shardstore.dcp import StorageReader, StorageWriter
from shardstore.dict_utils import leaves
from shardstore.dtensor import adoption
from shardstore.dtensor.layout import held_shards
from shardstore.errors import (
    AccessPatternError,
    ArgumentError,
    ChunkCorruptError,
    DTypeMismatchError,
    RanksError,
)
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.stores.location import Location
from tests.helpers import dtensor_states
from tests.helpers.cli_checkpoints import flip
from tests.helpers.programs import run_forked
from tests.helpers.ranks_helper import run_ranks
from tests.helpers.scenarios import Records, gathered, raised, remains_of_all, run_scenarios
from tests.helpers.weights import Weight

pytestmark = pytest.mark.filterwarnings("ignore")

WORLD = 4
TIMEOUT_S = 240
Value = dict[str, Any]


# -- a model under FSDP2 ---------------------------------------------------------------------------


class Net(nn.Module):
    """Odd sizes, a buffer, a parameter that is frozen and a scalar one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.norm = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """One step."""
        hidden = self.embed(tokens)
        hidden = self.norm(self.down(torch.relu(self.up(hidden))))
        out: torch.Tensor = hidden * self.scale
        return out


def trained(kind: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model sharded in a given way, after some steps; the same data on every rank."""
    model = Net()
    if kind == "tensor-parallel":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
    elif kind == "hybrid":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
    elif kind == "flat":
        fully_shard(model.up)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        tokens = torch.randint(0, 11, (4,), generator=generator)
        model(tokens).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def app_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Value:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": 3}


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Value:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    return {"model": model_state, "optimizer": optimizer_state}


def same(a: Any, b: Any, at: str = "") -> list[str]:
    """Places where two nested states differ, to the bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return [f"{at}: {sorted(map(str, a))} {sorted(map(str, b))}"]
        return [where for key in a for where in same(a[key], b[key], f"{at}.{key}")]
    if isinstance(a, torch.Tensor):
        return [] if torch.equal(a, b) and a.dtype == b.dtype else [at]
    return [] if a == b else [f"{at}: {a!r} {b!r}"]


KINDS = ("flat", "hybrid", "tensor-parallel")


def fsdp_saves(rank: int, folder: Path) -> None:
    for kind in KINDS:
        model, optimizer = trained(kind, 3)
        state = app_state(model, optimizer)
        shardstore.save(state, folder / f"{kind}-ours")
        dcp.save(state, storage_writer=StorageWriter(folder / f"{kind}-dcp"))
        full = full_state(model, optimizer)
        if rank == 0:
            torch.save(full, folder / f"{kind}.pt")


def resumed(kind: str, saved: str, how: str, folder: Path) -> list[str]:
    """What differs once a fresh model, sharded in one way, has loaded what another one saved."""
    model, optimizer = trained(kind, 1)
    state = app_state(model, optimizer)
    parameter = next(iter(state["model"].values()))
    if how == "ours":
        loaded = shardstore.load(state, folder / f"{saved}-ours")
    else:
        loaded = state
        dcp.load(loaded, storage_reader=StorageReader(folder / f"{saved}-dcp"))
    assert loaded["step"] == 3
    assert next(iter(loaded["model"].values())) is parameter or kind == "none"
    set_state_dict(
        model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )
    full = full_state(model, optimizer)
    if dist.is_initialized() and dist.get_rank():
        return []
    return same(full, torch.load(folder / f"{saved}.pt", weights_only=True))


def fsdp_resumes_otherwise(rank: int, world_size: int, folder: Path) -> None:
    place = folder.parent / "fsdp_saves"
    cases = [("tensor-parallel", "flat", "ours"), ("flat", "tensor-parallel", "dcp")]
    cases.append(("hybrid", "flat", "dcp"))
    if world_size == 2:
        cases = [("flat", "tensor-parallel", "ours"), ("flat", "hybrid", "ours")]
        cases.append(("flat", "flat", "dcp"))
    for case in cases:
        assert resumed(*case, place) == [], case


# -- every placement -------------------------------------------------------------------------------


def mixed(world_size: int, **options: Any) -> Value:
    state = dtensor_states.state(world_size, **options)
    return {
        "m": state,
        "list": [torch.ones(2), 5, state["rows"]["even"], {"deep": "x"}],
        "plain": torch.arange(3),
        "step": 3,
    }


def placements_save(rank: int, world_size: int, folder: Path) -> None:
    shardstore.save(mixed(world_size), folder / "ours")
    dcp.save(dtensor_states.state(world_size), storage_writer=StorageWriter(folder / "dcp"))
    # Loaded again in place, into the same placements.
    wanted = mixed(world_size, zero=True)
    tensor = wanted["m"]["grid"]["cube"]
    memory = tensor.to_local().data_ptr()
    loaded = shardstore.load(wanted, folder / "ours")
    assert dtensor_states.differences(loaded["m"]) == []
    assert loaded["m"]["grid"]["cube"] is tensor
    assert tensor.to_local().data_ptr() == memory
    assert loaded["step"] == 3
    assert loaded["list"][1] == 5
    assert loaded["list"][3] == {"deep": "x"}
    assert isinstance(loaded["list"][2], DTensor)
    assert torch.equal(loaded["plain"], torch.arange(3))


def placements_load_otherwise(rank: int, world_size: int, folder: Path) -> None:
    place = folder.parent / "placements_save"
    made = dtensor_states.state(world_size, zero=True)
    kinds = list(made)
    saved = list(dtensor_states.placements(4))
    for shift in range(0, len(kinds), 1 if os.environ.get("SHARDSTORE_TESTS") == "all" else 3):
        # In a long run, each saved placement is loaded into each placement that there is here.
        pairs = {name: kinds[(i + shift) % len(kinds)] for i, name in enumerate(saved)}
        wanted = {name: dtensor_states.state(world_size, zero=True)[k] for name, k in pairs.items()}
        loaded = shardstore.load({"m": wanted}, place / "ours")
        assert dtensor_states.differences(loaded["m"]) == [], (shift, pairs)
        if shift:
            continue
        wanted = {name: dtensor_states.state(world_size, zero=True)[k] for name, k in pairs.items()}
        wanted.pop("strided")  # uneven strided shards are beyond DCP itself
        dcp.load(wanted, storage_reader=StorageReader(place / "dcp"))
        assert dtensor_states.differences(wanted) == []


def dtensors_that_are_not_stored_are_left_out(rank: int, world_size: int, folder: Path) -> None:
    new = dtensor_states.state(world_size, zero=True)
    stored = next(iter(dtensor_states.placements(4)))
    here = {stored: dtensor_states.state(world_size, zero=True)["replica"]}
    state = {"m": here, "new": {"deep": new, "list": [*new.values()], "mixed": [{"d": new}, 5]}}
    place = folder.parent / "placements_save" / "ours"
    loaded, _, unexpected = shardstore.load(state, place, strict="return_all")
    assert {key.split(".")[0] for key in unexpected} == {"new"}
    # A rank without elements of a tensor has nothing to look for.
    assert all(tensor.to_local().numel() == 0 for _, tensor in leaves(loaded.get("new", {})))
    assert dtensor_states.differences(loaded["m"]) == []


def a_dtensor_is_described_once(rank: int, world_size: int, folder: Path) -> None:
    """However often the state is walked: for a plain tensor that comes first, whose kind the
    DTensors decide, and to leave out a key. The state of the caller stays as it is."""
    described: list[str] = []

    def counted(key: str, *args: Any) -> Any:
        described.append(key)
        return held_shards(key, *args)

    def state(fill: float) -> Value:
        return {"plain": torch.full((2,), fill), "list": [row_state(world_size, 5, fill)]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adoption, "held_shards", counted)
        own = state(1.0)
        shardstore.save(own, folder / "c")
        assert described == ["list.0"]
        assert isinstance(own["list"][0], DTensor)
        here = {**state(0.0), "new": row_state(world_size, 3, 0.0)}
        loaded, _, unexpected = shardstore.load(here, folder / "c", strict="return_all")
    assert described == ["list.0", "list.0", "new"]
    assert unexpected == {"new"} or not here["new"].to_local().numel()
    assert loaded["list"][0] is here["list"][0]
    assert torch.equal(loaded["plain"], torch.ones(2))
    assert torch.equal(here["plain"], torch.ones(2))
    assert here["list"][0].to_local().eq(1).all()


def partial_is_refused(rank: int, world_size: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    summand = DTensor.from_local(torch.ones(2, 2), mesh, [Partial()], run_check=False)
    save = partial(shardstore.save, {"a": {"w": summand}}, folder / "c")
    raised(save, "'a.w'", "redistribute", kind=AccessPatternError)
    assert remains_of_all(folder) == []


def sharded_tensors_of_fsdp1_are_refused(rank: int, world_size: int, folder: Path) -> None:
    spec = ChunkShardingSpec(0, [f"rank:{n}/cpu" for n in range(world_size)])
    state = {"m": [sharded_tensor.ones(spec, 8, 2)]}
    shardstore.save({"m": [torch.ones(8, 2)]}, folder / "plain")
    for call in (
        lambda: shardstore.save(state, folder / "c"),
        lambda: shardstore.load(state, folder / "plain"),
        lambda: shardstore.shard(state),
    ):
        raised(call, "'m.0' is torch's ShardedTensor: pass device_mesh=", kind=DTypeMismatchError)


def dtensors_of_wrappers_are_refused_with_the_remedy(
    rank: int, world_size: int, folder: Path
) -> None:
    """As the states of torchao's optimizers, most of whose operations fail."""
    mesh = init_device_mesh("cpu", (world_size,))

    def state(value: float) -> Any:
        local = TwoTensor(torch.full((1, 2), value), torch.full((1, 2), -value))
        about = TensorMeta(torch.Size((world_size, 2)), (2, 1), torch.float32)
        return DTensor(local, DTensorSpec(mesh, (Shard(0),), about), requires_grad=False)

    def held(t: Any) -> Value:
        local = t.to_local()
        return {str(rank): {name: getattr(local, name) for name in local.__tensor_flatten__()[0]}}

    saved, given = state(rank + 1.0), state(0.0)
    for call in (
        lambda: shardstore.save({"m": saved}, folder / "c"),
        lambda: shardstore.shard({"m": saved}),
    ):
        words = ("'m' is a DTensor of TwoTensor", "__tensor_flatten__()", "keys of its own")
        raised(call, *words, kind=DTypeMismatchError)
    shardstore.save({"m": held(saved)}, folder / "c")
    shardstore.load({"m": held(given)}, folder / "c")
    assert torch.equal(given._local_tensor.b, torch.full((1, 2), -rank - 1.0))


def dtensors_of_weights_for_low_precision_are_filled(
    rank: int, world_size: int, folder: Path
) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(float(5 * world_size - 2)).reshape(-1, 1)

    def state(values: torch.Tensor) -> Any:
        local = values.chunk(world_size)[rank].clone()
        about = TensorMeta(whole.shape, whole.stride(), whole.dtype)
        weight = Weight(local, torch.ones(()))
        return DTensor(weight, DTensorSpec(mesh, (Shard(0),), about), requires_grad=False)

    for number, describe in enumerate((dict, shardstore.shard)):
        shardstore.save(describe({"m": state(whole)}), folder / str(number))
        given = state(torch.zeros_like(whole))
        assert shardstore.load(describe({"m": given}), folder / str(number))["m"] is given
        assert torch.equal(given._local_tensor.held, state(whole)._local_tensor.held)
    plain = torch.zeros_like(whole)
    hf.save({"m": state(whole)}, folder / "hf")
    hf.load({"m": plain}, folder / "hf")
    hf.load({"m": given}, folder / "hf")
    assert torch.equal(plain, whole)
    assert torch.equal(given._local_tensor.held, state(whole)._local_tensor.held)


def other_experts_under_one_key_are_told(rank: int, world_size: int, folder: Path) -> None:
    """As of expert parallelism whose DTensors have the shape of one group's experts."""
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("ep", "dp"))
    group = rank // (world_size // 2)

    def experts(value: float) -> Value:
        """They end with equal rows, as those whose length is padded."""
        state: Value = {"norm": torch.ones(2)}
        for name, rows in (("experts", 2), ("large", 200)):
            local = torch.zeros(rows, 300)
            local[: rows // 2] = value
            state[name] = DTensor.from_local(local, mesh["dp"], [Shard(0)], run_check=False)
        return state

    records = Records()
    logging.getLogger("shardstore").addHandler(records)
    shardstore.save(experts(7.0), folder / "equal")
    assert records.texts == []
    shardstore.save(experts(7.0 + group), folder / "c")
    shardstore.save(experts(7.0 + group), folder / "unchecked", validate_access_integrity=False)
    logging.getLogger("shardstore").removeHandler(records)
    texts = [text for text in records.texts if "2 value(s) differ between ranks" in text]
    assert len(texts) == (rank == 0)
    for name in ("experts", "large"):
        assert all(f"'{name}' on ranks 2, 3 (that of rank 0 is saved)" in text for text in texts)
    save = partial(shardstore.save, experts(group), folder / "d", replicas="equal")
    raised(save, "'experts'", kind=AccessPatternError | RanksError)
    assert not (folder / "d").exists()


def an_order_of_shards_of_its_own(rank: int, world_size: int, folder: Path) -> None:
    """The second dimension of the mesh cuts first: what a rank holds lies elsewhere then."""
    mesh = init_device_mesh("cpu", (2, world_size // 2))
    whole = torch.arange(8.0 * 3).reshape(8, 3)
    spec = DTensorSpec(
        mesh,
        (Shard(0), Shard(0)),
        tensor_meta=TensorMeta(whole.shape, whole.stride(), whole.dtype),
        shard_order=(ShardOrderEntry(0, (1, 0)),),
    )
    first, second = mesh.get_coordinate() or ()
    mine = whole.chunk(mesh.size(1))[second].chunk(2)[first].clone()

    def state(fill: float | None = None) -> Value:
        local = mine.clone() if fill is None else torch.full_like(mine, fill)
        return {"w": DTensor(local, spec, requires_grad=False)}

    shardstore.save(state(), folder / "c")
    assert torch.equal(shardstore.load_plain_tensors(folder / "c")["w"], whole)
    meta = {"w": DTensor(mine.to("meta"), spec, requires_grad=False)}
    for wanted in (state(-1.0), meta):
        loaded = shardstore.load(wanted, folder / "c")
        assert torch.equal(loaded["w"].to_local(), mine)
        assert loaded["w"]._spec.shard_order == spec.shard_order


def no_rank_keeps_a_dtensor_on_the_meta_device(rank: int, world_size: int, folder: Path) -> None:
    """Not even one that holds no element: an operation of all ranks with it would never end."""
    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(6.0).reshape(3, 2)
    shardstore.save({"w": distribute_tensor(whole, mesh, [Shard(0)])}, folder / "c")
    meta: Value = {"w": distribute_tensor(whole.to("meta"), mesh, [Shard(0)])}
    loaded = shardstore.load(meta, folder / "c")["w"]
    assert not any(gathered(loaded.to_local().is_meta))
    assert torch.equal(loaded.full_tensor(), whole)


def a_local_tensor_of_several_shards(rank: int, world_size: int, folder: Path) -> None:
    """As torchrec holds tables of embeddings: the local tensor itself says which parts it has."""
    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(3.0 * 2 * world_size * 3).reshape(3, -1)

    def held(widths: list[int], *, zero: bool = False) -> Any:
        """Columns of these widths: all of the first rank first, and none on the last rank."""
        owned = [[0, 3], [1], [2], []][rank]
        starts = [sum(widths[:n]) for n in owned]
        parts = [
            whole[:, start : start + widths[n]].clone()
            for start, n in zip(starts, owned, strict=True)
        ]
        parts = [torch.zeros_like(part) for part in parts] if zero else parts
        local = LocalShardsWrapper(parts, [(0, start) for start in starts])
        about = TensorMeta(whole.shape, whole.stride(), whole.dtype)
        return DTensor(local, DTensorSpec(mesh, (Shard(1),), about), requires_grad=False)

    last = whole.shape[1]
    shardstore.save({"table": held([2, 5, 1, last - 8])}, folder / "c")
    if rank == 0:
        assert torch.equal(torch.from_numpy(zarr.open(folder / "c")["table"][...]), whole)
    dist.barrier()
    given = held([1, 1, 9, last - 11], zero=True)
    loaded = shardstore.load({"table": given}, folder / "c")["table"]
    assert loaded is given
    expected = held([1, 1, 9, last - 11])._local_tensor.local_shards()
    assert all(map(torch.equal, given._local_tensor.local_shards(), expected))


def a_local_tensor_that_says_where_it_is(rank: int, world_size: int, folder: Path) -> None:
    """As those of Megatron-FSDP, which cuts where its buffers end; a rank may hold nothing."""
    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(20.0).reshape(10, 2)

    def held(rows: list[int], source: torch.Tensor) -> Any:
        start = sum(rows[:rank])
        local = source[start : start + rows[rank]].clone()
        about = TensorMeta(whole.shape, whole.stride(), whole.dtype)
        made = DTensor(local, DTensorSpec(mesh, (Shard(0),), about), requires_grad=False)
        chunks = [ChunkStorageMetadata(torch.Size((start, 0)), local.shape)]
        made._local_tensor.__create_chunk_list__ = lambda: chunks  # type: ignore[attr-defined]
        return made

    for n, describe in enumerate((dict, shardstore.shard)):
        shardstore.save(describe({"w": held([1, 6, 0, 3], whole)}), folder / f"c{n}")
        assert torch.equal(shardstore.load_plain_tensors(folder / f"c{n}")["w"], whole)
        given = held([0, 3, 5, 2], torch.zeros_like(whole))
        assert shardstore.load(describe({"w": given}), folder / f"c{n}")["w"] is given
        assert torch.equal(given._local_tensor, held([0, 3, 5, 2], whole)._local_tensor)


def parts_of(source: torch.Tensor, parts: list[tuple[slice, slice]]) -> Any:
    """Blocks of a matrix, one below the other, with a row of -1 above each."""
    width = max((len(source[part][0]) for part in parts), default=0)
    local = torch.full((sum(len(source[part]) + 1 for part in parts), width), -1.0)
    made: Any = local
    made.global_shape = tuple(source.shape)
    made.global_offsets, made.local_offsets, made.local_sizes = [], [], []
    row = 1
    for part in parts:
        block = source[part]
        local[row : row + len(block), : block.shape[1]] = block
        made.global_offsets.append((part[0].start or 0, part[1].start or 0))
        made.local_offsets.append((row, 0))
        made.local_sizes.append(tuple(block.shape))
        row += len(block) + 1
    return made


def tensors_that_name_their_parts(rank: int, world_size: int, folder: Path) -> None:
    """As PyTorch's ``CheckpointableTensor``: ranks hold several parts, the same one, or none."""
    whole = torch.arange(30.0).reshape(10, 3)
    right, all_columns = slice(1, 3), slice(None)
    shared = (slice(2, 10), right)
    saved = [[(slice(0, 2), all_columns), (slice(2, 10), slice(0, 1))], [shared], [shared], []]
    above, below = slice(0, 5), slice(5, 10)
    first = [(above, all_columns)]
    wanted = [[], first, [(below, right), (below, slice(0, 1))], first]
    for n, describe in enumerate((dict, shardstore.shard)):
        state = {"w": parts_of(whole, saved[rank]), "plain": torch.ones(2)}
        shardstore.save(describe(state), folder / f"c{n}", replicas="equal")
        assert torch.equal(shardstore.load_plain_tensors(folder / f"c{n}")["w"], whole)
        given = parts_of(torch.zeros_like(whole), wanted[rank])
        loaded = shardstore.load(
            describe({"w": given, "plain": torch.zeros(2)}), folder / f"c{n}", strict="raise_all"
        )
        assert loaded["w"] is given
        assert torch.equal(given, parts_of(whole, wanted[rank]))
        assert torch.equal(loaded["plain"], torch.ones(2))
    hf.save({"w": parts_of(whole, saved[rank])}, folder / "hf")
    hf.load({"w": (given := parts_of(torch.zeros_like(whole), wanted[rank]))}, folder / "hf")
    assert torch.equal(given, parts_of(whole, wanted[rank]))
    nothing = torch.empty(0, 3)
    shardstore.save({"w": parts_of(nothing, [])}, folder / "nothing")
    assert shardstore.load_plain_tensors(folder / "nothing")["w"].shape == (0, 3)
    of_meta, short = parts_of(whole, saved[1]).to("meta"), parts_of(whole, saved[1])
    for name in ("global_shape", "global_offsets", "local_offsets", "local_sizes"):
        setattr(of_meta, name, getattr(short, name))
    short.local_sizes = []
    for load in (shardstore.load, hf.load):
        call = partial(load, {"w": of_meta}, folder / ("hf" if load is hf.load else "c0"))
        raised(call, "'w' names its parts", "meta device", kind=ArgumentError | RanksError)
    save = partial(shardstore.save, {"w": short}, folder / "d")
    raised(save, "'w' names [1, 1, 0] global_offsets", kind=AccessPatternError | RanksError)
    short.local_sizes = [3]
    raised(save, "'w' does not name its parts", "tuples", kind=AccessPatternError | RanksError)
    save = partial(shardstore.save, {"w": (parts_of(whole, saved[rank]),)}, folder / "d")
    raised(save, "a part of a tensor inside the tuple", kind=AccessPatternError | RanksError)


def a_described_dtensor_without_memory_is_named(rank: int, world_size: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    whole = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)], run_check=False)
    shardstore.save({"w": whole}, folder / "c")
    load = partial(shardstore.load, shardstore.shard({"w": whole.to("meta")}), folder / "c")
    raised(load, "'w'", "meta device", kind=ArgumentError | RanksError)


def a_plain_tensor_is_an_array_if_any_rank_has_dtensors(
    rank: int, world_size: int, folder: Path
) -> None:
    mesh = DeviceMesh("cpu", list(range(1, world_size)))
    value: Value = {"bias": torch.ones(3), "step": 1}
    if rank:
        local = torch.full((2, 2), float(rank))
        value["w"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    shardstore.save(value, folder / "c")
    assert list(StoredCheckpoint(Location.of(folder / "c")).arrays) == ["bias", "w"]
    assert set(shardstore.load_plain_tensors(folder / "c")) == {"bias", "w", "step"}


# -- DCP alone -------------------------------------------------------------------------------------


def row_state(world_size: int, rows: int, fill: float | None = None) -> DTensor:
    mesh = init_device_mesh("cpu", (world_size,))
    full = torch.arange(rows * 2.0).reshape(rows, 2)
    full = full if fill is None else torch.full_like(full, fill)
    return dtensor_states.cut(full, mesh, [Shard(0)])


def a_failing_rank_leaves_nothing(rank: int, world_size: int, folder: Path) -> None:
    class Broken(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if rank == 2:
                raise OSError("the memory of rank 2 is gone")
            return super().resolve_data(write_item)

    state = {"w": row_state(world_size, 8)}
    dcp.save(state, storage_writer=StorageWriter(folder / "c"))
    writer = StorageWriter(folder / "c", overwrite=True)
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"w": row_state(world_size, 8, 9)}, storage_writer=writer, planner=Broken())
    assert list(caught.value.failures) == [2]
    writer.reset()
    assert remains_of_all(folder) == ["c"]
    wanted = {"w": row_state(world_size, 8, -1)}
    dcp.load(wanted, storage_reader=StorageReader(folder / "c"))
    assert torch.equal(wanted["w"].to_local(), state["w"].to_local())


def cached_plans_save_what_is_there_now(rank: int, world_size: int, folder: Path) -> None:
    for step in range(3):
        state = {"w": row_state(world_size, 8, float(step)), "n": step}
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=StorageWriter(folder / f"{step}"), planner=planner)
    for step in range(3):
        wanted = {"w": row_state(world_size, 8, -1), "n": None}
        dcp.load(wanted, checkpoint_id=str(folder / f"{step}"), storage_reader=StorageReader())
        assert wanted["n"] == step
        assert bool((wanted["w"].to_local() == step).all())


def tiny_cells_are_put_together(rank: int, folder: Path) -> None:
    """20001 rows over 2 x 2 ranks: boundaries at 5001, 10001, 15001 have rows alone in common."""
    mesh = init_device_mesh("cpu", (2, 2))
    full = torch.arange(20001 * 3.0).reshape(20001, 3)
    axes = [Shard(0), Shard(0)]
    saved = dtensor_states.cut(full, mesh, axes)
    dcp.save({"w": saved}, storage_writer=StorageWriter(folder / "dcp"))
    shardstore.save({"w": saved}, folder / "ours")
    for place in ("dcp", "ours"):
        meta = StoredCheckpoint(Location.of(folder / place)).arrays["w"]
        assert meta.grid.size < 64
        wanted = dtensor_states.cut(full * 0, mesh, axes)
        if place == "dcp":
            dcp.load({"w": wanted}, storage_reader=StorageReader(folder / place))
        else:
            shardstore.load({"w": wanted}, folder / place)
        assert torch.equal(wanted.to_local(), saved.to_local())


@pytest.fixture(scope="module")
def saved(held: list[list[str]], folder: Path) -> Path:
    """What four ranks saved; all that they checked on the way held."""
    return folder


def test_a_scenario_holds_on_four_ranks(held: list[list[str]], scenario: str) -> None:
    assert all(scenario in names for names in held)


def test_two_ranks_load_what_four_saved(saved: Path) -> None:
    run_ranks(
        run_scenarios,
        2,
        str(saved),
        [
            fsdp_resumes_otherwise,
            placements_load_otherwise,
            dtensors_that_are_not_stored_are_left_out,
        ],
    )


def test_a_world_of_one_loads_into_a_model_that_is_not_sharded(saved: Path) -> None:
    for kind, how in (("flat", "ours"), ("hybrid", "dcp"), ("tensor-parallel", "ours")):
        assert resumed("none", kind, how, saved / "fsdp_saves") == [], (kind, how)


@pytest.mark.parametrize("how", ["ours", "dcp"])
def test_plain_zarr_reads_every_placement(saved: Path, how: str) -> None:
    group = zarr.open_group(str(saved / "placements_save" / how), mode="r")
    seen = 0
    for name, array in group.arrays():
        placement, _, key = name.rpartition(".")
        if key not in dtensor_states.SHAPES or (how == "dcp" and placement.endswith("strided")):
            continue
        values = torch.from_numpy(array[...].astype("float32"))
        assert torch.equal(values, dtensor_states.whole(key).float()), name
        seen += 1
    assert seen >= 6 * len(dtensor_states.SHAPES)


def test_dcp_saves_in_a_process_of_its_own(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    shutil.copy(Path(__file__).parents[1] / "helpers" / "dcp_in_a_process.py", program)
    # Otherwise PyTorch chooses a free port and opens it seconds later, when another may have it.
    ended = run_forked(program, 2, {"DCP_USE_PREFIX_STORE": "1"}, str(tmp_path))
    assert ended.returncode == 0, ended.stderr[-3000:]
    for step in range(2):
        group = zarr.open_group(str(tmp_path / f"{step}"), mode="r")
        assert group["w"][:, 0].tolist() == [10.0 * step] * 4 + [10.0 * step + 1] * 4


# -- a world of one --------------------------------------------------------------------------------


def cause(call: Callable[[], object]) -> BaseException:
    with pytest.raises(CheckpointException) as caught:
        call()
    (failure,) = caught.value.failures.values()
    found = failure[0]
    assert isinstance(found, BaseException)
    return found


def test_views_into_larger_tensors_are_read_and_written_in_place(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    dcp.save(
        {"w": base[:, 1:4], "t": base.T}, storage_writer=StorageWriter(tmp_path / "c"), no_dist=True
    )
    target, turned = torch.zeros(4, 6), torch.zeros(4, 6)
    wanted = {"w": target[:, 1:4], "t": turned.T}
    dcp.load(wanted, storage_reader=StorageReader(tmp_path / "c"), no_dist=True)
    assert torch.equal(target[:, 1:4], base[:, 1:4])
    assert target[:, 0].tolist() == [0] * 4
    assert torch.equal(turned, base)


def test_damage_is_found(tmp_path: Path) -> None:
    dcp.save({"w": torch.arange(4.0)}, storage_writer=StorageWriter(tmp_path / "c"), no_dist=True)
    flip(tmp_path / "c" / "w" / "c.0", 5)
    reader = StorageReader(tmp_path / "c")
    wanted = {"w": torch.zeros(4)}
    error = cause(lambda: dcp.load(wanted, storage_reader=reader, no_dist=True))
    assert isinstance(error, ChunkCorruptError)


def test_an_unstorable_tensor_leaves_nothing(tmp_path: Path) -> None:
    state = {"w": torch.zeros(2), "odd": torch.zeros(2, 2).to_sparse()}
    cause(lambda: dcp.save(state, storage_writer=StorageWriter(tmp_path / "c"), no_dist=True))
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_keys_that_meet_are_refused(tmp_path: Path) -> None:
    with pytest.raises(shardstore.CheckpointingException, match="rename"):
        shardstore.shard({"a": {"b.c": torch.zeros(1)}, "a.b": {"c": torch.zeros(1)}})
