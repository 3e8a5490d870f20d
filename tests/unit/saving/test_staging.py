"""Staging: the copy is the state's bits whatever its layout, memory stays within the budget and is
reused, what has no room is written meanwhile, and errors reach who waits for the copy."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardstore.saving import staging as module
from shardstore.saving.plan import DevicePart
from shardstore.saving.staging import Staging
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Grid
from shardstore.storage.movers.chunks import ChunkWrite
from shardstore.storage.movers.device import stream_of


def writes_of(count: int, size: int) -> list[ChunkWrite]:
    """Chunks of ``size`` bytes, number i filled with i."""
    array = ArrayMeta("w", "w", Grid((count * size,), (size,)), "uint8")
    return [ChunkWrite(array, (i,), np.full(size, i, np.uint8)) for i in range(count)]


def test_the_copy_does_not_follow_the_state() -> None:
    writes = writes_of(5, 1000)
    staging = Staging(writes)
    for item in writes:
        item.data()[:] = 99
    assert [int(item.data()[0]) for item in staging.copies()] == [0, 1, 2, 3, 4]
    staging.close()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.complex128, np.bool_, np.float16])
def test_strides_and_data_types_keep_their_bits(dtype: type) -> None:
    raw = np.random.default_rng(0).integers(0, 2, (6, 10, 16), dtype=np.uint8)
    name = {"bool_": "bool"}.get(dtype.__name__, np.dtype(dtype).name)
    whole = raw.view(np.uint8).repeat(np.dtype(dtype).itemsize, -1).view(dtype)
    view = whole[::2, ::-3]
    array = ArrayMeta("w", "w", Grid(view.shape, view.shape), name)
    staging = Staging([ChunkWrite(array, (0, 0, 0), view)])
    assert staging.copies()[0].data().tobytes() == view.tobytes()
    staging.close()


def test_memory_is_reused_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = deque[Any](maxlen=1)
    monkeypatch.setattr(module, "POOL", pool)
    places = set()
    for _ in range(3):
        staging = Staging(writes_of(4, 4096))
        places.add(staging.copies()[0].data().ctypes.data)
        staging.close()
    assert len(places) == 1
    (arena,) = pool
    assert len(arena.memory) == 4 * 4096
    staging = Staging(writes_of(1, 4096))
    assert not pool
    staging.close()


@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=40),
    budget=st.integers(64, 8000),
    overlap=st.booleans(),
)
def test_any_staging_budget_copies_every_chunk(
    sizes: list[int], budget: int, overlap: bool
) -> None:
    """Each chunk arrives whole, though its memory is used again as soon as it is written."""
    state = [np.random.default_rng(i).integers(0, 256, n, np.uint8) for i, n in enumerate(sizes)]
    metas = [ArrayMeta(f"w{i}", f"w{i}", Grid((n,), (n,)), "uint8") for i, n in enumerate(sizes)]
    writes = [ChunkWrite(m, (0,), a) for m, a in zip(metas, state, strict=True)]
    found: list[bytes] = []

    def write(copies: Sequence[ChunkWrite]) -> None:
        found.extend(item.data().tobytes() for item in copies)

    staging = Staging(writes, write, overlap=overlap, budget_bytes=budget)
    assert staging.arena_bytes <= max(budget, 64 * -(-max(sizes) // 64))
    write(staging.copies())
    staging.close()
    assert found == [a.tobytes() for a in state]


def test_an_error_of_the_writer_ends_the_copying() -> None:
    def refuse(_: object) -> None:
        raise OSError("disk full")

    staging = Staging(writes_of(10, 1024), refuse, budget_bytes=2048)
    assert staging.wait(0)  # the state may be changed
    with pytest.raises(OSError, match="disk full"):
        staging.copies()
    staging.close()


def test_an_error_of_the_copier_reaches_who_waits_for_the_copy() -> None:
    items = writes_of(3, 1024)

    def broken() -> np.ndarray:
        raise ValueError("device lost")

    items[1] = ChunkWrite(items[1].array, (1,), broken)
    staging = Staging(items, overlap=True)
    with pytest.raises(ValueError, match="device lost"):
        staging.copies()
    assert isinstance(staging.error, ValueError)
    staging.close()


def test_a_copy_that_is_stopped_while_it_is_made() -> None:
    begun, stopped = threading.Event(), threading.Event()

    def slow() -> np.ndarray:
        begun.set()
        assert stopped.wait(30)
        return np.zeros(1024, np.uint8)

    items = writes_of(3, 1024)
    items[0] = ChunkWrite(items[0].array, (0,), slow)
    staging = Staging(items, overlap=True, threads=1)
    assert begun.wait(30)
    assert not staging.wait(0)
    staging.fail(RuntimeError("aborted"))
    stopped.set()
    with pytest.raises(RuntimeError, match="aborted"):
        staging.copies()
    staging.close()


def test_a_chunk_larger_than_the_budget_raises_it(caplog: pytest.LogCaptureFixture) -> None:
    staging = Staging(writes_of(2, 4096), lambda _: None, budget_bytes=100)
    assert staging.arena_bytes == 4096
    assert "4096 bytes is larger than the staging budget of 100 bytes" in caplog.text
    staging.close()


def test_nothing_to_copy() -> None:
    staging = Staging([], budget_bytes=10)
    assert staging.copies() == []
    staging.close()


def test_parts_of_host_tensors_as_device_parts_are_fetched() -> None:
    """What is on a device that is not CUDA is fetched chunk by chunk."""
    array = ArrayMeta("w", "w", Grid((4,), (4,)), "float32")
    item = ChunkWrite(array, (0,), DevicePart(torch.arange(8.0)[::2]))
    staging = Staging([item])
    assert staging.copies()[0].data().tolist() == [0, 2, 4, 6]
    staging.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("budget", [None, 3 << 20])
def test_device_chunks_are_copied_behind_the_callers_stream(budget: int | None) -> None:
    """The copy sees what was queued before it, and not what is queued after wait()."""
    count, size = 8, 1 << 20
    tensor = torch.zeros(count * size // 4, device="cuda")
    array = ArrayMeta("w", "w", Grid((count * size // 4,), (size // 4,)), "float32")
    torch.cuda._sleep(500_000_000)  # cycles; keeps the stream at work
    tensor.fill_(7)
    stream = stream_of(tensor.device)
    items = [
        ChunkWrite(array, (i,), DevicePart(tensor[i * size // 4 : (i + 1) * size // 4], stream))
        for i in range(count)
    ]
    seen: list[bool] = []

    def write(copies: Sequence[ChunkWrite]) -> None:
        seen.extend(bool((item.data() == 7).all()) for item in copies)

    staging = Staging(items, write, overlap=True, budget_bytes=budget)
    staging.wait(host=False)
    tensor.fill_(9)
    write(staging.copies())
    assert seen == [True] * count
    staging.close()
