"""Models loaded by four ranks under meshes, with replicas that read once, and with an error on one
rank that reaches all before a tensor changes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardstore import hf
from shardstore.errors import CheckpointingException, RanksError
from shardstore.hf import loading
from shardstore.hf.rules import concat, part, stack
from shardstore.mapping import ShardedTensor
from shardstore.storage.runtime.counters import counters
from tests.helpers.range_server import range_server
from tests.helpers.scenarios import gathered, raised

WORLD = 4
E, D = 6, 64
WHOLE: dict[str, torch.Tensor] = {}
for _name, _shape in {
    "w": (1000, 64),
    "cube": (12, 10, 8),
    "norm": (37,),
    "q": (64, D),
    "k": (16, D),
    "v": (16, D),
    "qkv": (96, D),
    **{f"experts.{e}.{n}": (32, D) for e in range(E) for n in ("gate", "up")},
}.items():
    _count = torch.Size(_shape).numel()
    _start = sum(t.numel() for t in WHOLE.values())
    WHOLE[_name] = torch.arange(_start, _start + _count).reshape(_shape).float()
EXPERTS = torch.stack(
    [torch.cat([WHOLE[f"experts.{e}.{n}"] for n in ("gate", "up")]) for e in range(E)]
)
RULES = {
    "experts": stack(concat("experts.{e}.gate", "experts.{e}.up"), over="e"),
    "fused": concat("q", "k", "v", groups=4),
    "key": part("qkv", 1, (4, 1, 1)),
}
EXPECTED = {
    **{key: WHOLE[key] for key in ("w", "cube")},
    "experts": EXPERTS,
    "fused": torch.cat([WHOLE[n].chunk(4)[g] for g in range(4) for n in "qkv"]),
    "key": WHOLE["qkv"][64:80],
}


def _written(folder: Path, rank: int) -> Path:
    """The model in three files."""
    place = folder / "model"
    if rank == 0:
        place.mkdir(exist_ok=True)
        files = {key: f"model-{n % 3}.safetensors" for n, key in enumerate(WHOLE)}
        for file in set(files.values()):
            save_file({k: t for k, t in WHOLE.items() if files[k] == file}, place / file)
        (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    dist.barrier()
    return place


def _empty(whole: torch.Tensor, mesh: Any, placements: Any) -> Any:
    return distribute_tensor(torch.zeros_like(whole), mesh, placements)


def _everywhere() -> list[tuple[Any, Any]]:
    flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    return [
        (square, [Shard(0), Shard(1)]),  # such as experts, each cut along its rows
        *((flat, [Shard(axis)]) for axis in range(2)),
        (square, [Replicate(), Shard(0)]),
        (square, [Shard(1), Shard(0)]),
        (square, [Shard(0), Shard(0)]),
        (square, [Shard(0), Replicate()]),
    ]


def _load(
    place: Path | str, expected: dict[str, torch.Tensor], mesh: Any, placements: Any, **options: Any
) -> tuple[int, int]:
    """Load and check these tensors; the bytes that this rank has read, and those of its shards."""
    state = {key: _empty(whole, mesh, placements) for key, whole in expected.items()}
    before = counters["bytes_read"]
    hf.load(state, place, rules=RULES, **options)
    read, own = counters["bytes_read"] - before, 0
    for key, whole in expected.items():
        want = distribute_tensor(whole, mesh, placements).to_local()
        assert torch.equal(state[key].to_local(), want), (key, placements)
        own += want.numel() * 4  # whatever they are cast to
    return read, own


def any_mesh_and_axis(rank: int, folder: Path) -> None:
    """Each rank reads no byte but those of its shards, also through rules."""
    place = _written(folder, rank)
    for mesh, placements in _everywhere():
        read, own = _load(place, EXPECTED, mesh, placements)
        assert read == own, placements


def rows_that_ranks_divide_are_read_once_from_a_store(rank: int, folder: Path) -> None:
    """By one rank of the host, for all of them; also with casts, scales and rules."""
    place = _written(folder, rank)
    scaled = torch.arange(1.0, 17.0).reshape(4, 4)
    values = WHOLE["w"][:512].reshape(64, 512).to(torch.float8_e4m3fn)
    large = {"large": (2048, 1024), "cubes": (4, 512, 1024)}
    if rank == 0:
        save_file({"f8": values, "f8_scale_inv": scaled}, place / "f8.safetensors")
        save_file({k: _counted(shape) for k, shape in large.items()}, place / "large.safetensors")
    dist.barrier()
    scaled = scaled.repeat_interleave(16, 0).repeat_interleave(128, 1)
    square = init_device_mesh("cpu", (2, 2))
    meshes = [(square, [Replicate(), Shard(1)]), *_everywhere()]
    with range_server(place) as server:
        url = gathered(f"{server.url}/model")[0]
        for name, expected in (
            ("", {**EXPECTED, "w": WHOLE["w"].bfloat16()}),
            ("/f8.safetensors", {"f8": (values.float() * scaled).bfloat16()}),
            ("/large.safetensors", {k: _counted(shape) for k, shape in large.items()}),
        ):
            for mesh, placements in meshes if name == "" else meshes[:3]:
                how: dict[str, Any] = {"cast": True, "dequantize": (16, 128)}
                totals = torch.tensor(_load(url + name, expected, mesh, placements, **how))
                dist.all_reduce(totals)
                assert name != "/large.safetensors" or totals[0] <= 1.05 * totals[1], placements


def _counted(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def a_web_server_that_dies_is_an_error_on_all(rank: int, folder: Path) -> None:
    """Between the headers and the tensors, for a rank that reads for itself, and for one that reads
    a block of which others wait for their parts."""
    place = _written(folder, rank)
    mesh = init_device_mesh("cpu", (4,))
    shared = {k: _empty(WHOLE[k], mesh, [Shard(1)]) for k in ("w", "cube", "q", "qkv")}
    own = {"w": torch.zeros(1000, 64)}
    with range_server(place) as server:
        url = f"{gathered(server.url)[0]}/model"
        for state, method in ((shared, "read_range"), (own, "read")):
            with pytest.MonkeyPatch.context() as patch:
                if rank == 2:
                    patch.setattr(loading.WeightFiles, method, _refuse)
                error = raised(partial(hf.load, state, url))
            assert "refused" in str(error)
            assert isinstance(error, RanksError) == (rank != 2)
        dist.barrier()


def only_one_rank_reads_the_headers(rank: int, folder: Path) -> None:
    place = _written(folder, rank)
    calls = []
    opened = loading.WeightFiles.open
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading.WeightFiles, "open", lambda at: calls.append(at) or opened(at))
        hf.load({"norm": torch.zeros(37)}, place)
    assert len(calls) == (rank == 0)


def replicas_read_once(rank: int, folder: Path) -> None:
    """Two groups of two ranks, each of which reads each byte of its shards once; also with casts,
    rules, quantised weights and small budgets."""
    place = _written(folder, rank)
    if rank == 0:
        quantised = {
            "f8": WHOLE["w"][:256].to(torch.float8_e4m3fn),
            "f8_scale_inv": torch.tensor([[2.0], [3.0]]),
        }
        save_file(quantised, folder / "f8.safetensors")
    dist.barrier()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    group = mesh.get_group("dp")
    replicate = [Replicate(), Shard(1)]
    options = {"replica_group": group, "share_replicas": "always"}
    wanted = {key: EXPECTED[key] for key in ("w", "experts", "key")}
    for dtype, budget in ((torch.float32, 1 << 28), (torch.bfloat16, 40_000)):
        expected = {key: whole.to(dtype) for key, whole in wanted.items()}
        how: dict[str, Any] = {**options, "cast": True, "exchange_budget_bytes": budget}
        read, own = _load(place, expected, mesh, replicate, **how)
        found: list[Any] = [None, None]
        dist.all_gather_object(found, read, group=group)
        assert sum(found) == own
    state = {"f8": torch.zeros(256, 64, dtype=torch.bfloat16)}
    hf.load(state, folder / "f8.safetensors", **options)
    scale = torch.tensor([2.0, 3.0]).repeat_interleave(128)[:, None]
    assert torch.equal(
        state["f8"], (WHOLE["w"][:256].to(torch.float8_e4m3fn).float() * scale).bfloat16()
    )


def replicas_that_want_different_parts(rank: int, folder: Path) -> None:
    place = _written(folder, rank)
    rows = (0, 500), (100, 700), (0, 1000), (999, 1000)
    start, stop = rows[rank]
    data = torch.zeros(stop - start, 64)
    shard = ShardedTensor("w", data, data.dtype, tuple(data.shape), (1000, 64), (start, 0), None)
    hf.load({"w": shard}, place, replica_group=dist.group.WORLD, share_replicas="always")
    assert torch.equal(data, WHOLE["w"][start:stop])


def an_error_of_one_rank_reaches_all(rank: int, world_size: int, folder: Path) -> None:
    """Before any tensor changes."""
    place = _written(folder, rank)
    mesh = init_device_mesh("cpu", (world_size,))
    inside = DTensor.from_local(torch.zeros(37), mesh, [Replicate()], run_check=False)
    bad: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"w": torch.zeros(10, 64)}, {}, "shape mismatch"),
        ({"x": torch.zeros(3)}, {}, "'x' is not in"),
        ({"w": torch.zeros(1000, 64, dtype=torch.int32)}, {}, "float32"),
        ({"w": torch.zeros(1, 64).expand(1000, 64)}, {}, "share memory"),
        ({"at": [(1, inside)]}, {}, "a DTensor inside the tuple at ('at', 0)"),
        ({"w": torch.zeros(1000, 64)}, {"strict": "all"}, "strict"),
        ({"w": torch.zeros(1000, 64)}, {"cast": "all"}, "cast"),
        ({"w": torch.zeros(1000, 64)}, {"progress": "all"}, "progress='all'"),
        ({"norm": torch.zeros(37)}, {}, "both have the name 'norm'"),
        ({"x": torch.zeros(37)}, {"strict": "raise_unexpected"}, "['x']"),
        ({"w": torch.zeros(1000, 64)}, {"replica_group": "all"}, "replica_group"),
    ]
    for state, options, text in bad:
        good = torch.zeros(37)
        names = options.get("names", {"good": "norm"})
        mine = {"good": good, **state} if rank == 2 else {"good": good}
        own = {**options, "names": names} if rank == 2 else {"names": {"good": "norm"}}
        error = raised(partial(hf.load, mine, place, **own))
        assert (rank == 2) != isinstance(error, RanksError)
        assert text.lower() in str(error).lower(), (text, str(error))
        assert not good.any()


def a_damaged_model_is_an_error_on_all(rank: int, folder: Path) -> None:
    place = _written(folder, rank)
    if rank == 0:
        path = place / "model-1.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
    dist.barrier()
    data = torch.zeros(37)
    error = raised(lambda: hf.load({"norm": data}, place))
    assert "model-1.safetensors is not a complete safetensors file" in str(error)
    assert not data.any()


def ranks_with_different_places(rank: int, folder: Path) -> None:
    place = _written(folder, rank)
    other = place if rank else place / "model-2.safetensors"
    error = raised(lambda: hf.load({"norm": torch.zeros(37)}, other))
    assert "different places" in str(error)


def tied_dtensors_on_the_meta_device_stay_tied(rank: int, folder: Path) -> None:
    """Those of a model that is built there and cut by FSDP2."""
    place = _written(folder, rank)
    mesh = init_device_mesh("cpu", (4,))
    meta = distribute_tensor(WHOLE["norm"].to("meta"), mesh, [Shard(0)])
    loaded: Any = hf.load({"norm": meta, "tied": meta.detach()}, place)
    assert torch.equal(loaded["tied"].full_tensor(), WHOLE["norm"])
    assert loaded["tied"].to_local().data_ptr() == loaded["norm"].to_local().data_ptr()


def missing_names_are_those_of_no_rank(rank: int, folder: Path) -> None:
    place = _written(folder, rank)
    keys = sorted(WHOLE)[rank::WORLD]
    state = {key: torch.zeros_like(WHOLE[key]) for key in keys if key != "cube"}
    own = {**state, f"only-{rank}": torch.zeros(2)}
    _, missing, unexpected = hf.load(own, place, strict="return_all")
    assert (missing, unexpected) == ({"cube"}, {f"only-{rank}"})
    assert all(torch.equal(value, WHOLE[key]) for key, value in state.items())


def a_process_group_loads_alone(rank: int, folder: Path) -> None:
    place = _written(folder, rank)
    group = dist.new_group([1, 2])
    if rank in (1, 2):
        data = torch.zeros(37)
        hf.load({"norm": data}, place, process_group=group)
        assert torch.equal(data, WHOLE["norm"])


def _refuse(*_: object) -> None:
    raise CheckpointingException("refused")


def test_scenarios(held: list[list[str]], scenario: str) -> None:
    assert all(scenario in names for names in held)
