"""The state dicts that are measured: keys, shapes, how ranks share them, and their values.

Knows tensors and ranks, but no client: every client is handed the same entries and tensors, so
this file runs unchanged under each client's own interpreter. Values are random (a file system
or a codec gains nothing from zeros) and depend on the key alone, or on key and rank for cut
tensors, so two runs of one workload hold the same bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod, sqrt

import torch

LAYERS = 10
HIDDEN = 1280
VOCABULARY = 12800
POSITIONS = 1024
SMALL_ARRAYS = 20_000
OBJECT_ARRAYS = 2_000
METADATA_ARRAYS = 10_000


@dataclass(frozen=True, kw_only=True)
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

    def local_shape(self, world: int) -> tuple[int, ...]:
        """Shape of the tensor that one of `world` ranks holds in memory."""
        if self.flat is not None:
            return (self.flat[1] - self.flat[0],)
        if self.axis is None:
            return self.global_shape
        return tuple(n // world if i == self.axis else n for i, n in enumerate(self.global_shape))


def _parameters(scale: float) -> list[tuple[str, tuple[int, ...], int | None]]:
    """Name, shape and cut axis of each parameter of a GPT with `scale` of the full size."""
    side = sqrt(scale)
    h = max(64, round(HIDDEN * side / 64) * 64)
    vocabulary = max(64, round(VOCABULARY * side / 64) * 64)
    found: list[tuple[str, tuple[int, ...], int | None]] = [
        ("embedding.word.weight", (vocabulary, h), 0)
    ]
    for i in range(LAYERS):
        at = f"layers.{i}."
        found += [
            (at + "norm_1.weight", (h,), None),
            (at + "norm_1.bias", (h,), None),
            (at + "attention.qkv.weight", (3 * h, h), 0),
            (at + "attention.qkv.bias", (3 * h,), 0),
            (at + "attention.out.weight", (h, h), 1),
            (at + "attention.out.bias", (h,), None),
            (at + "norm_2.weight", (h,), None),
            (at + "norm_2.bias", (h,), None),
            (at + "mlp.up.weight", (4 * h, h), 0),
            (at + "mlp.up.bias", (4 * h,), 0),
            (at + "mlp.down.weight", (h, 4 * h), 1),
            (at + "mlp.down.bias", (h,), None),
        ]
    found += [("final_norm.weight", (h,), None), ("final_norm.bias", (h,), None)]
    return found


def gpt(rank: int, world: int, scale: float) -> list[Entry]:
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
    `world` equal ranges. So a large matrix belongs to several ranks, with borders at any element,
    and most small tensors lie whole on one. Master weights and both moments, all fp32.
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
                entries += [
                    Entry(
                        key=f"optimizer.{part}.{name}",
                        dtype=torch.float32,
                        global_shape=shape,
                        flat=(first - start, last - start),
                    )
                    for part in ("master", "exp_avg", "exp_avg_sq")
                ]
            start = stop
    return entries


def small(rank: int, world: int, scale: float) -> list[Entry]:
    """20,000 arrays of 1 KiB (at scale 1), all on rank 0 of a world of one."""
    return [
        Entry(key=f"block_{i // 100}.item_{i % 100}", dtype=torch.float32, global_shape=(256,))
        for i in range(max(100, round(SMALL_ARRAYS * scale)))
    ]


def chunks(rank: int, world: int, scale: float) -> list[Entry]:
    """2 GiB (at scale 1) in tensors of 32 MiB, all on rank 0 of a world of one."""
    return [
        Entry(key=f"part_{i}", dtype=torch.float32, global_shape=(8192, 1024))
        for i in range(max(2, round(64 * scale)))
    ]


def arrays(rank: int, world: int, scale: float) -> list[Entry]:
    """2,000 arrays of 16 KiB (at scale 1), all on rank 0 of a world of one."""
    return [
        Entry(key=f"block_{i // 100}.item_{i % 100}", dtype=torch.float32, global_shape=(64, 64))
        for i in range(max(10, round(OBJECT_ARRAYS * scale)))
    ]


def tiny(rank: int, world: int, scale: float) -> list[Entry]:
    """One tensor of 4 KiB a rank: what a client needs to import and start its threads."""
    return [Entry(key="tiny", dtype=torch.float32, global_shape=(world, 1024), axis=0)]


WORKLOADS: dict[str, Callable[[int, int, float], list[Entry]]] = {
    "gpt": gpt,
    "flattened": flattened,
    "small": small,
    "chunks": chunks,
    "arrays": arrays,
    "tiny": tiny,
}


def build(entries: Sequence[Entry], rank: int, world: int) -> dict[str, torch.Tensor]:
    """The tensors of one rank, touched and filled with normally distributed values."""
    tensors: dict[str, torch.Tensor] = {}
    generator = torch.Generator()
    for entry in entries:
        whole = entry.axis is None and entry.flat is None
        generator.manual_seed(zlib.crc32(f"{entry.key}/{0 if whole else rank}".encode()))
        values = torch.empty(entry.local_shape(world), dtype=torch.float32)
        values.normal_(generator=generator)
        tensors[entry.key] = values.to(entry.dtype)
    return tensors


def written_bytes(entries: Sequence[Entry], rank: int, world: int) -> int:
    """Bytes that a rank has to write: replicated tensors count on rank 0 only."""
    return sum(
        prod(entry.local_shape(world)) * entry.dtype.itemsize
        for entry in entries
        if rank == 0 or entry.axis is not None or entry.flat is not None
    )


def wanted_bytes(entries: Sequence[Entry], world: int) -> int:
    """Bytes that a rank wants to hold after a load."""
    return sum(prod(entry.local_shape(world)) * entry.dtype.itemsize for entry in entries)
