"""Threads and CUDA devices: copies come behind the caller's work, on the caller's device alone."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

import shardstore
from shardstore import ShardedTensor
from shardstore.storage.movers.device import (
    PORTABLE,
    _cudart,
    behind,
    host_memory,
    on_host,
    stream_of,
)
from shardstore.strategies.zarr import ZarrSaveShardedStrategy


def test_the_host_has_no_streams() -> None:
    tensor = torch.arange(8.0)
    assert stream_of(tensor.device) is None
    with behind(None):
        assert on_host(tensor[::2], None).tolist() == [0, 2, 4, 6]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("flat", [False, True])
def test_a_save_reads_behind_the_callers_stream(tmp_path: Path, flat: bool) -> None:
    """Its threads have streams of their own, which do not wait for the caller's."""
    side = torch.cuda.Stream()
    rows = torch.zeros(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(500_000_000)  # cycles; keeps the stream at work
        rows.fill_(7)
        tensor = ShardedTensor.from_rank_offsets("w", rows)
        if flat:
            whole = slice(0, rows.numel())
            tensor = ShardedTensor.from_rank_offsets_flat(
                "w", rows.reshape(-1), tuple(rows.shape), flattened_range=whole
            )
        strategy = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=1 << 20, threads=4)
        shardstore.save({"w": tensor}, tmp_path / "c", strategy)
    assert bool((shardstore.load_plain_tensors(tmp_path / "c")["w"] == 7).all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_memory_that_can_not_be_locked_leaves_no_error_behind() -> None:
    """The trainer's next kernel must not raise what a save has dealt with."""
    device = torch.device("cuda", torch.cuda.current_device())
    memory = host_memory(1 << 20, device)
    assert _cudart(device, "cudaHostRegister", memory.ctypes.data, len(memory), PORTABLE) != 0
    assert torch.ones(4, device=device).tolist() == [1, 1, 1, 1]


def _contexts_after_saves(root: str) -> list[bool]:
    torch.cuda.set_device(1)
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(1 << 22, device="cuda"))}
    strategy = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=1 << 20, threads=4)
    shardstore.save(state, f"{root}/a", strategy)
    for overlap in (False, True):
        handle = shardstore.async_save(
            state, f"{root}/b-{overlap}", strategy, overlap_staging=overlap
        )
        handle.wait_staged()
        handle.result()
    shardstore.load(state, f"{root}/a")
    has = torch._C._cuda_hasPrimaryContext
    return [has(number) for number in range(2)]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_a_rank_uses_no_device_but_its_own(tmp_path: Path) -> None:
    """A thread that looks at device 0 takes some hundred megabytes there, for every rank."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert pool.submit(_contexts_after_saves, str(tmp_path)).result() == [False, True]
