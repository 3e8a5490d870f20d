"""States on simulated devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from shardstore import ShardedTensor
from shardstore.strategies.zarr import ZarrSaveShardedStrategy

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def random_tensor(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    """Return a page-locked host tensor of random bits."""
    generator = torch.Generator().manual_seed(seed)
    most = 2 if dtype == torch.bool else 256
    size = math.prod(shape) * dtype.itemsize
    bits = torch.randint(0, most, (size,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).reshape(shape).pin_memory()


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host, after all work of the device."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return tensor.detach().cpu()


def is_equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of any devices have the same bits."""
    one, two = (on_host(t).contiguous().reshape(-1).view(torch.uint8) for t in (tensor, other))
    return tensor.shape == other.shape and torch.equal(one, two)


def differing(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the keys of ``wanted`` with other bits in ``found``."""
    return [key for key, value in wanted.items() if not is_equal(found[key], value)]


def sharded(tensors: Mapping[str, torch.Tensor], replica_id: int = 0) -> dict[str, ShardedTensor]:
    """Return a state of unsharded tensors."""
    return {
        key: ShardedTensor.from_rank_offsets(key, value, replica_id=replica_id)
        for key, value in tensors.items()
    }


def queue(
    tensors: Iterable[torch.Tensor], sources: Iterable[torch.Tensor], *, busy_ms: float
) -> None:
    """Queue copies to device tensors on the current stream of each one's device, after work that
    takes ``busy_ms``."""
    pairs = list(zip(tensors, sources, strict=True))
    for device in {tensor.device for tensor, _ in pairs}:
        with torch.cuda.device(device):
            torch.cuda._sleep(int(busy_ms * 1e6))
    for tensor, source in pairs:
        tensor.copy_(source, non_blocking=True)


def sevens(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return page-locked tensors of other values, to overwrite the given ones with."""
    return [torch.full(t.shape, 7).to(t.dtype).pin_memory() for t in tensors]


def strategy(chunk_bytes: int = 1 << 14, threads: int = 4) -> ZarrSaveShardedStrategy:
    """Return a save strategy with small chunks."""
    return ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=chunk_bytes, threads=threads)


def set_streams(streams: Iterable[torch.cuda.Stream]) -> None:
    """Make streams the current ones of their devices; the current device stays."""
    device = torch.cuda.current_device()
    for stream in streams:
        torch.cuda.set_stream(stream)  # also sets the device
    torch.cuda.set_device(device)


@contextmanager
def side_streams(*devices: int, current: int = 0) -> Iterator[list[torch.cuda.Stream]]:
    """Make new streams the current streams of devices, and ``current`` the current device."""
    made = [torch.cuda.Stream(device) for device in devices]
    before = [torch.cuda.current_stream(device) for device in devices]
    set_streams(made)
    torch.cuda.set_device(current)
    try:
        yield made
    finally:
        set_streams(before)
        torch.cuda.set_device(0)
