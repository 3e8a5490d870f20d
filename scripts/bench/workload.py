"""The state dicts that are measured: keys, shapes, how ranks share them, and their values.

Every client gets the same entries and tensors; the module runs under each client's interpreter.
Values are random, so that no file system or codec gains from zeros, and depend on the key alone, or
on key and rank for cut tensors: two runs of one workload hold the same bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod, sqrt

import torch

LAYERS = 10
HIDDEN = 1280
VOCABULARY = 12800
POSITIONS = 1024

UNIFORM = {
    "small": (20_000, (256,)),
    "chunks": (64, (8192, 1024)),
    "arrays": (2_000, (64, 64)),
    "replicas": (3, (20, 2**21)),
    "tiny": (1, (1024,)),
}
"""Workloads of fp32 tensors of one shape, replicated on all ranks: number at scale 1, and shape."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a state dict as one rank holds it.

    Attributes:
        key: name of the global tensor.
        dtype: element type.
        global_shape: shape of the whole tensor.
        axis: the axis that is cut evenly over the ranks; None where every rank holds all of it.
        flat: half-open range of the flattened tensor that this rank holds as a 1-D tensor; None
            for an ordinary shard.
    """

    key: str
    dtype: torch.dtype
    global_shape: tuple[int, ...]
    axis: int | None = None
    flat: tuple[int, int] | None = None

    @property
    def replicated(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return self.axis is None and self.flat is None

    def local_shape(self, world: int) -> tuple[int, ...]:
        """Shape of the tensor that one of `world` ranks holds in memory."""
        if self.flat is not None:
            return (self.flat[1] - self.flat[0],)
        return tuple(n // world if i == self.axis else n for i, n in enumerate(self.global_shape))

    def nbytes(self, world: int) -> int:
        """Size of that tensor."""
        return prod(self.local_shape(world)) * self.dtype.itemsize


def entries_of(workload: str, rank: int, world: int, scale: float) -> list[Entry]:
    """The entries of one rank in a workload."""
    if workload == "gpt":
        return gpt(scale)
    if workload == "flattened":
        return flattened(rank, world, scale)
    number, size = UNIFORM[workload]
    return [
        Entry(key=f"block_{i // 100}.item_{i % 100}", dtype=torch.float32, global_shape=size)
        for i in range(max(1, round(number * scale)))
    ]


def _parameters(scale: float) -> list[tuple[str, tuple[int, ...], int | None]]:
    """Name, shape and cut axis of each parameter of a GPT with `scale` of the full size."""
    side = sqrt(scale)
    h = max(64, round(HIDDEN * side / 64) * 64)
    vocabulary = max(64, round(VOCABULARY * side / 64) * 64)
    layer: dict[str, tuple[tuple[int, ...], int | None]] = {
        "norm_1.weight": ((h,), None),
        "norm_1.bias": ((h,), None),
        "attention.qkv.weight": ((3 * h, h), 0),
        "attention.qkv.bias": ((3 * h,), 0),
        "attention.out.weight": ((h, h), 1),
        "attention.out.bias": ((h,), None),
        "norm_2.weight": ((h,), None),
        "norm_2.bias": ((h,), None),
        "mlp.up.weight": ((4 * h, h), 0),
        "mlp.up.bias": ((4 * h,), 0),
        "mlp.down.weight": ((h, 4 * h), 1),
        "mlp.down.bias": ((h,), None),
    }
    return [
        ("embedding.word.weight", (vocabulary, h), 0),
        *((f"layers.{i}.{name}", *of) for i in range(LAYERS) for name, of in layer.items()),
        ("final_norm.weight", (h,), None),
        ("final_norm.bias", (h,), None),
    ]


def gpt(scale: float) -> list[Entry]:
    """Parameters in bf16 and two Adam moments in fp32: 370 tensors, 2 GiB at scale 1.

    The parameters number 123; with two moments each and one table of positions that makes 370,
    from 2.5 KB (a norm) to 64 MB (a moment of the embedding). Matrices are cut along axis 0 or
    axis 1 as tensor parallelism cuts them, norms and output biases are whole on every rank.
    """
    parameters = _parameters(scale)
    width = parameters[0][1][1]
    entries = [Entry(key="positions", dtype=torch.float32, global_shape=(POSITIONS, width))]
    for prefix, dtype in (
        ("model.", torch.bfloat16),
        ("optimizer.exp_avg.", torch.float32),
        ("optimizer.exp_avg_sq.", torch.float32),
    ):
        entries += [
            Entry(key=prefix + name, dtype=dtype, global_shape=shape, axis=axis)
            for name, shape, axis in parameters
        ]
    return entries


def flattened(rank: int, world: int, scale: float) -> list[Entry]:
    """Optimizer state of the GPT as a distributed optimizer cuts it: flat ranges, one a rank.

    The parameters of a layer lie one after the other in a bucket, and each bucket is cut into
    `world` equal ranges. A large matrix belongs to several ranks, with borders at any element, and
    most small tensors lie whole on one. Master weights and both moments, all fp32.
    """
    buckets: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name, shape, _ in _parameters(scale):
        layer = ".".join(name.split(".")[:2]) if name.startswith("layers.") else name.split(".")[0]
        buckets.setdefault(layer, []).append((name, shape))
    entries: list[Entry] = []
    for bucket in buckets.values():
        total = sum(prod(shape) for _, shape in bucket)
        low, high = total * rank // world, total * (rank + 1) // world
        start = 0
        for name, shape in bucket:
            stop = start + prod(shape)
            first, last = max(low, start), min(high, stop)
            if first < last:
                place = (first - start, last - start)
                entries += [
                    Entry(f"optimizer.{part}.{name}", torch.float32, shape, flat=place)
                    for part in ("master", "exp_avg", "exp_avg_sq")
                ]
            start = stop
    return entries


def build(
    entries: Sequence[Entry], rank: int, world: int, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """The tensors of one rank, touched and filled with normally distributed values."""
    tensors: dict[str, torch.Tensor] = {}
    generator = torch.Generator(device)
    for entry in entries:
        owner = 0 if entry.replicated else rank
        generator.manual_seed(zlib.crc32(f"{entry.key}/{owner}".encode()))
        values = torch.empty(entry.local_shape(world), dtype=torch.float32, device=device)
        tensors[entry.key] = values.normal_(generator=generator).to(entry.dtype)
    return tensors
