"""Writes the golden checkpoints shardstore-0.1.0/NAME; refuses to write them again.

The state of each checkpoint is defined here and shared with ``test_shardstore_golden.py``. The
checkpoints depend on it: add to it, never change what is there. README.md lists the versions.

Run from the root of the repository; without names, every checkpoint that is missing is written::

    python -m tests.golden.make_shardstore [NAME ...]
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
import io
import itertools
import math
import pathlib
import random
import shutil
import sys
import types
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import shardstore
from shardstore import ShardedObject, ShardedTensor
from tests.helpers.ranks_helper import run_ranks

TARGET = Path(__file__).parent / "shardstore-0.1.0"
SCRATCH = Path("/tmp/checkpoints")
"""Where they are written first: DCP's ``.metadata`` holds the absolute path of the save."""
SEED = 100
CONTENT_METADATA = {"iteration": 7, "sharding": "tp", "betas": [0.9, 0.95], "nested": {"a": None}}
METRICS = {"loss": 1.5, "accuracy": float("nan")}

State = dict[str, Any]
Part = tuple[tuple[int, ...], tuple[int, ...], slice | None]
"""Offset and shape of a box of the global tensor, and the range of the flattened box, if any."""


@dataclass(frozen=True)
class Tensor:
    """A global tensor and how it is cut.

    Attributes:
        dtype: of the elements.
        cuts: lengths of the parts along each axis.
        prepended: number of leading axes that the local tensors do not have.
        ranges: number of flattened ranges that each box is cut into; 0 for whole boxes.
    """

    dtype: torch.dtype
    cuts: tuple[tuple[int, ...], ...]
    prepended: int = 0
    ranges: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(sum(lengths) for lengths in self.cuts)

    @property
    def fragmentations(self) -> tuple[int, ...] | None:
        """Number of parts of each axis; None for parts of different lengths."""
        even = all(len(set(lengths)) == 1 for lengths in self.cuts)
        return tuple(len(lengths) for lengths in self.cuts) if even else None

    def parts(self) -> Iterator[Part]:
        starts = [list(itertools.accumulate((0, *lengths[:-1]))) for lengths in self.cuts]
        both = zip(itertools.product(*starts), itertools.product(*self.cuts), strict=True)
        for offset, shape in both:
            if not self.ranges:
                yield offset, shape, None
                continue
            size = math.prod(shape)
            borders = [size * i // self.ranges for i in range(self.ranges + 1)]
            for start, stop in itertools.pairwise(borders):
                if start < stop:
                    yield offset, shape, slice(start, stop)

    def recut(self) -> Tensor:
        """The same tensor in another layout: boxes where it has flattened ranges, else ranges."""
        cuts = tuple(
            lengths if axis < self.prepended or sum(lengths) < 3 else _thirds(sum(lengths))
            for axis, lengths in enumerate(self.cuts)
        )
        flat = not self.ranges and math.prod(self.shape) > 20
        return replace(self, cuts=cuts, ranges=3 if flat else 0)


def _thirds(length: int) -> tuple[int, int]:
    return length // 3, length - length // 3


DTYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
DTYPES += ["float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz"]
DTYPES += ["float8_e5m2", "float8_e5m2fnuz", "complex64", "complex128"]
EACH_DTYPE = {f"dtype.{name}": Tensor(getattr(torch, name), ((3,), (5,))) for name in DTYPES}
BOXES = {
    "scalar": Tensor(torch.float32, ()),
    "empty": Tensor(torch.float32, ((0,), (4,))),
    "empty.inside": Tensor(torch.bfloat16, ((2,), (0,), (3,))),
    "even": Tensor(torch.bfloat16, ((4, 4), (3, 3))),
    "uneven": Tensor(torch.float32, ((4, 2), (2, 2, 1))),
    "layers": Tensor(torch.float16, ((1, 1, 1), (2, 2), (5,)), prepended=1),
    "mask": Tensor(torch.bool, ((3, 3), (7,))),
    "scale": Tensor(torch.float8_e4m3fn, ((5,), (4, 4))),
}
NAMES = {
    name: Tensor(torch.int32, ((4,),))
    for name in ("layers/0.bias", "zarr.json", "__init__", ".hidden", "größe 1/√d")
}
LONG_NAME = {"n" * 230: Tensor(torch.int32, ((4,),))}
LONG = {"long": Tensor(torch.float32, ((1500, 1500),))}
COUNTING = {"counting": Tensor(torch.int64, ((1000, 1000),))}
FLAT = {
    "flat.rows": Tensor(torch.float32, ((6,), (5,)), ranges=4),
    "flat.boxes": Tensor(torch.bfloat16, ((2, 2), (9,)), ranges=3),
    "flat.layers": Tensor(torch.float32, ((1, 1), (4,), (3,)), prepended=1, ranges=2),
    "flat.long": Tensor(torch.float32, ((3000,),), ranges=3),
}


@dataclass(frozen=True)
class Golden:
    """How a checkpoint is written.

    Attributes:
        tensors: by key.
        objects: whether there are sharded objects.
        values: whether the common state has a value of each type, or a few plain ones.
        options: of :func:`shardstore.save`.
        world_size: number of ranks; a rank is the main replica of each second part if there are 2.
        how: ``"save"``, ``"dcp"`` (torch's DCP) or ``"manager"``.
        base: name of the checkpoint beside it that this one is saved upon.
        changed: keys whose values are others than in the base.
        chunk_bytes: size that chunks are cut to.
    """

    tensors: dict[str, Tensor]
    objects: bool = False
    values: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    world_size: int = 1
    how: str = "save"
    base: str | None = None
    changed: tuple[str, ...] = ()
    chunk_bytes: int | None = None


GOLDEN = {
    "plain": Golden({**EACH_DTYPE, **BOXES, **NAMES, **LONG_NAME, **LONG}),
    "chunked": Golden({**LONG, **FLAT, **BOXES}, chunk_bytes=4096),
    "flattened": Golden(FLAT),
    "objects": Golden({"even": BOXES["even"]}, objects=True),
    "common": Golden({"even": BOXES["even"]}, values=True),
    "zstd": Golden({**BOXES, **LONG, **COUNTING}, options={"compression": "zstd"}),
    "no-array-documents": Golden(
        {**BOXES, **FLAT}, objects=True, options={"array_documents": False}
    ),
    "zarr-v2": Golden(
        {**EACH_DTYPE, **BOXES, **NAMES, **FLAT},
        objects=True,
        options={"sharded_strategy": ("zarr", 1)},
    ),
    "ranks": Golden({**BOXES, **FLAT, **LONG}, objects=True, world_size=2),
    "zarr-v2-ranks": Golden(
        {**BOXES, **FLAT}, options={"sharded_strategy": ("zarr", 1)}, world_size=2
    ),
    "torch_dist": Golden(
        {**BOXES, **FLAT}, objects=True, options={"sharded_strategy": ("torch_dist", 1)}
    ),
    "base/first": Golden({**BOXES, **LONG}),
    "base/second": Golden({**BOXES, **LONG}, base="first", changed=("even", "mask")),
    "steps/step-7": Golden(BOXES, how="manager"),
    "dcp": Golden({"rows": BOXES["uneven"], **LONG}, values=True, how="dcp", world_size=2),
    "early": Golden({**EACH_DTYPE, **BOXES, **LONG, **FLAT}, objects=True),
}
"""``early`` has been written by an earlier state of 0.1.0, see README.md."""


def whole(name: str, key: str) -> torch.Tensor:
    """The whole tensor of a key in a checkpoint: any bit patterns, but for one to be compressed."""
    golden = GOLDEN[name]
    tensor = golden.tensors[key]
    if key == "counting":
        return torch.arange(math.prod(tensor.shape), dtype=tensor.dtype)
    seed = f"{SEED}:{key}:{'changed' if key in golden.changed else ''}"
    count = math.prod(tensor.shape)
    data = bytearray(random.Random(seed).randbytes(count * tensor.dtype.itemsize))
    if tensor.dtype == torch.bool:
        data = bytearray(byte & 1 for byte in data)
    if not count:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    return torch.frombuffer(data, dtype=tensor.dtype).reshape(tensor.shape)


def part_of(tensor: torch.Tensor, layout: Tensor, part: Part) -> torch.Tensor:
    """The part of a whole tensor that a rank holds, as a tensor of its own."""
    offset, shape, flat = part
    box = tensor[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
    if flat is not None:
        return box.reshape(-1)[flat].clone()
    return box.reshape(shape[layout.prepended :]).clone()


def sharded(
    name: str, rank: int = 0, world_size: int = 1, *, recut: bool = False, empty: bool = False
) -> State:
    """The sharded tensors and objects of a rank.

    Args:
        name: of the checkpoint.
        rank: of the caller; the ranks take turns as main replica, and all hold copies.
        world_size: number of ranks.
        recut: in another layout than the one that was saved.
        empty: without data, to be loaded.
    """
    state: State = {}
    for key, stored in GOLDEN[name].tensors.items():
        layout, tensor = stored.recut() if recut else stored, whole(name, key)
        for number, part in enumerate(layout.parts()):
            offset, shape, flat = part
            state[f"{key}#{number}"] = ShardedTensor(
                key,
                None if empty else part_of(tensor, layout, part),
                layout.dtype,
                shape[layout.prepended :],
                layout.shape,
                offset,
                layout.fragmentations,
                0 if number % world_size == rank else 1,
                layout.prepended,
                False,
                flat,
            )
    if GOLDEN[name].objects:
        for number, (key, data, shape, offset) in enumerate(_objects()):
            replica = 0 if number % world_size == rank else 1
            state[f"object.{number}"] = ShardedObject(
                key, None if empty else data, shape, offset, replica
            )
    return state


def _objects() -> Iterator[tuple[str, Any, tuple[int, ...], tuple[int, ...]]]:
    for i in range(2):
        yield "rng", {"seed": 100 + i, "states": [torch.arange(4) * (i + 1), "cpu"]}, (2,), (i,)
        yield "fp8/meta", io.BytesIO(bytes(range(i, i + 40))), (1, 2), (0, i)
    yield "amax", torch.arange(6, dtype=torch.float32).reshape(2, 3), (1,), (0,)


def common(name: str) -> State:
    """The common state of a checkpoint."""
    plain: State = {
        "iteration": 7,
        "lr": 1.5e-4,
        "run": "größe",
        "groups": [{"betas": (0.9, 0.95), "eps": 1e-8}, {"betas": (0.9, 0.99), "eps": 1e-6}],
        "nothing": None,
    }
    if not GOLDEN[name].values:
        return plain
    # In tuples, each of which DCP keeps as one value: it takes dicts and lists apart. The long one
    # has a file of its own there.
    state = {**plain, "values": (values(),), "long": (bytes(range(256)) * 200,)}
    # Torch's ``weights_only`` refuses it in common.pt.
    return {**state, "frozen": frozenset({5})} if GOLDEN[name].how == "dcp" else state


def values() -> State:
    """A value of each type that both ``torch.save`` and JSON forms are made for."""
    zone = datetime.timezone(datetime.timedelta(hours=2))
    return {
        "numbers": [True, -1, 2**70, 0.1, -0.0, float("inf"), float("nan"), 1 - 2j],
        "text": ["", "größe\n", "\U0001f600"],
        "bytes": [b"\x00\xff", bytearray(b"abc"), io.BytesIO(b"a stream")],
        "containers": [(), (1, (2,)), {3, 4}, [], {}],
        "keys": {1: "int", None: "none", (1, 2): "tuple", "$type": "text"},
        "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
        "counter": collections.Counter({"x": 3, "y": -1}),
        "default": collections.defaultdict(list, {"a": [1]}),
        "last": collections.deque([1.5, 2.5], maxlen=2),
        "arguments": argparse.Namespace(lr=1e-3, layers=[1, 2]),
        "simple": types.SimpleNamespace(a=1, b={"c": "d"}),
        "ranges": [range(1, 10, 3), slice(None, 4, 2)],
        "times": [
            datetime.date(2026, 1, 31),
            datetime.datetime(2026, 1, 31, 12, 30, 1, 5),
            datetime.datetime(2026, 1, 31, 12, 30, tzinfo=zone),
            datetime.time(1, 2, 3),
            datetime.timedelta(days=1, seconds=2, microseconds=3),
        ],
        "exact": [decimal.Decimal("1.10"), fractions.Fraction(1, 3), uuid.UUID(int=7)],
        "paths": [pathlib.PurePosixPath("a/b"), pathlib.Path("c/d")],
        "numpy": [
            np.float32(1.5),
            np.int64(-3),
            np.dtype("<i2"),
            np.arange(6, dtype=np.int16).reshape(2, 3),
            np.array([True, False]),
            np.array([1 + 2j], dtype=np.complex64),
        ],
        "torch": [torch.float8_e5m2, torch.device("cpu"), torch.Size([2, 3])],
        "tensors": (
            torch.arange(6).reshape(2, 3),
            torch.tensor(1.5, dtype=torch.bfloat16),
            torch.zeros(0, 3),
            torch.nn.Parameter(torch.ones(2), requires_grad=False),
        ),
    }


def write(rank: int, world_size: int, name: str, place: Path) -> None:
    """Write one checkpoint. Called by each of its ranks."""
    golden = GOLDEN[name]
    if golden.how == "dcp":
        _write_dcp(name, place)
        return
    state = {**sharded(name, rank, world_size), **common(name)}
    options: dict[str, Any] = {**golden.options, "content_metadata": CONTENT_METADATA}
    if golden.how == "manager":
        prefix, _, step = place.name.rpartition("-")
        with shardstore.CheckpointManager(place.parent, prefix=f"{prefix}-") as manager:
            manager.save(int(step), state, metrics=METRICS, **options)
        return
    if golden.base is not None:
        options["base"] = place.parent / golden.base
    if golden.chunk_bytes is not None:
        from shardstore.strategies.zarr import ZarrSaveShardedStrategy

        options["sharded_strategy"] = ZarrSaveShardedStrategy(
            "zarr", 2, target_chunk_bytes=golden.chunk_bytes
        )
    shardstore.save(state, place, **options)


def _write_dcp(name: str, place: Path) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from shardstore.dcp import StorageWriter

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = {key: whole(name, key) for key in GOLDEN[name].tensors}
    cut = {key: distribute_tensor(tensor, mesh, [Shard(0)]) for key, tensor in tensors.items()}
    state = {"model": cut, "same": tensors["rows"] + 1, **common(name)}
    dcp.save(state, storage_writer=StorageWriter(place))


def write_several(rank: int, world_size: int, names: list[str], folder: Path) -> None:
    """Write checkpoints below a folder. Called by each of their ranks."""
    for name in names:
        write(rank, world_size, name, folder / name)


def write_all(names: list[str], folder: Path) -> None:
    """Write checkpoints below a folder, each by as many ranks as it has."""
    write_several(0, 1, [name for name in names if GOLDEN[name].world_size == 1], folder)
    by_two = [name for name in names if GOLDEN[name].world_size == 2]
    if by_two:
        run_ranks(write_several, 2, by_two, folder)


def main(names: list[str]) -> None:
    """Command line: names of checkpoints, or none for all that are missing."""
    for name in names:
        if (TARGET / name).exists():
            sys.exit(f"{TARGET / name} exists: golden checkpoints are never written again")
    names = names or [name for name in GOLDEN if not (TARGET / name).exists()]
    SCRATCH.mkdir()
    try:
        write_all(names, SCRATCH)
        for name in names:
            shutil.copytree(SCRATCH / name, TARGET / name)
    finally:
        shutil.rmtree(SCRATCH)


if __name__ == "__main__":
    # Imported by its name: the ranks are given functions of this module.
    from tests.golden import make_shardstore

    make_shardstore.main(sys.argv[1:])
