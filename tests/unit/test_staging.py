"""Staging: the copy is the state's bits whatever its layout, memory stays within the budget and is
reused, copying and writing overlap in any order of completion, and errors end both sides."""

from __future__ import annotations

import random
import threading

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardstore.saving.sources import DevicePart
from shardstore.saving.staging import HostPool, StagedChunk, Staging
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Grid
from shardstore.storage.movers.chunks import ChunkWrite


def writes_of(count: int, size: int, pool: list[np.ndarray] | None = None) -> list[ChunkWrite]:
    """Chunks of ``size`` bytes, number i filled with i."""
    array = ArrayMeta("w", "w", Grid((count * size,), (size,)), "uint8")
    made = [ChunkWrite(array, (i,), np.full(size, i, np.uint8)) for i in range(count)]
    if pool is not None:
        pool += [item.source for item in made]  # type: ignore[misc]
    return made


def source_of(item: ChunkWrite) -> StagedChunk:
    assert isinstance(item.source, StagedChunk)
    return item.source


def test_the_copy_does_not_follow_the_state() -> None:
    state: list[np.ndarray] = []
    staging = Staging(writes_of(5, 1000, state), pool=HostPool())
    staging.run()
    assert staging.wait()
    for array in state:
        array[:] = 99
    assert [int(item.data()[0]) for item in staging.writes] == [0, 1, 2, 3, 4]
    staging.close()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.complex128, np.bool_, np.float16])
def test_strides_and_data_types_keep_their_bits(dtype: type) -> None:
    raw = np.random.default_rng(0).integers(0, 2, (6, 10, 16), dtype=np.uint8)
    name = {"bool_": "bool"}.get(dtype.__name__, np.dtype(dtype).name)
    whole = raw.view(np.uint8).repeat(np.dtype(dtype).itemsize, -1).view(dtype)
    view = whole[::2, ::-3]
    array = ArrayMeta("w", "w", Grid(view.shape, view.shape), name)
    staging = Staging([ChunkWrite(array, (0, 0, 0), view)], pool=HostPool())
    staging.run()
    assert staging.writes[0].data().tobytes() == view.tobytes()
    staging.close()


def test_memory_is_reused_and_given_back() -> None:
    pool = HostPool()
    places = set()
    for _ in range(3):
        staging = Staging(writes_of(4, 4096), pool=pool)
        staging.run()
        places.add(staging.writes[0].data().ctypes.data)
        staging.close()
    assert len(places) == 1
    assert pool.kept_bytes == 4 * 4096
    pool.clear()
    assert pool.kept_bytes == 0


@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=40),
    budget=st.integers(64, 8000),
    writers=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_any_budget_any_order_of_completion(
    sizes: list[int], budget: int, writers: int, seed: int
) -> None:
    """Each chunk arrives whole, though its memory is used again as soon as it is released."""
    state = [np.random.default_rng(i).integers(0, 256, n, np.uint8) for i, n in enumerate(sizes)]
    metas = [ArrayMeta(f"w{i}", f"w{i}", Grid((n,), (n,)), "uint8") for i, n in enumerate(sizes)]
    staging = Staging(
        [ChunkWrite(m, (0,), a) for m, a in zip(metas, state, strict=True)],
        pool=HostPool(),
        budget_bytes=budget,
    )
    assert staging.arena_bytes <= max(budget, 64 * -(-max(sizes) // 64))
    copier = threading.Thread(target=staging.run)
    copier.start()
    found: dict[int, bytes] = {}
    numbers = iter(range(len(sizes)))
    lock = threading.Lock()
    rng = random.Random(seed)

    def write() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            item = staging.writes[number]
            data = item.data()
            if rng.random() < 0.3:
                threading.Event().wait(0.0005)
            found[number] = data.tobytes()
            source_of(item).release()

    threads = [threading.Thread(target=write) for _ in range(writers)]
    for thread in threads:
        thread.start()
    for thread in [*threads, copier]:
        thread.join(30)
        assert not thread.is_alive()
    staging.close()
    assert found == {i: a.tobytes() for i, a in enumerate(state)}


@pytest.mark.parametrize("round_", [1, 2, 3])
def test_chunks_that_are_brought_go_through_the_same_memory(round_: int) -> None:
    """Sizes that leave no room at the ring's end, where a round taken piece by piece would stay."""
    items, brought = writes_of(16, 192), 12
    staging = Staging(items, pool=HostPool(), budget_bytes=5 * 128, brought=brought)
    assert staging.arena_bytes == 5 * 128
    found: list[bytes] = []

    def write() -> None:
        for item in staging.writes:
            found.append(item.data().tobytes())
            source_of(item).release()

    writer = threading.Thread(target=write)
    writer.start()
    for start in range(0, brought, round_):
        memory = staging.room(round_)
        assert [len(part) for part in memory] == [192] * round_
        for number, part in enumerate(memory, start):
            part[:] = number
        staging.filled(memory)
    staging.run()
    writer.join(30)
    assert not writer.is_alive()
    expected = [bytes([number]) * 192 for number in range(brought)]
    assert found == expected + [item.data().tobytes() for item in items[brought:]]
    staging.close()


def test_an_error_of_the_writer_ends_the_waiting_for_room() -> None:
    staging = Staging(writes_of(4, 1024), pool=HostPool(), budget_bytes=2048, brought=4)
    staging.filled(staging.room(2))
    staging.fail(OSError("disk full"))
    with pytest.raises(OSError, match="disk full"):
        staging.room(2)
    staging.run()
    staging.close()


def test_an_error_of_the_writer_ends_the_copier() -> None:
    staging = Staging(writes_of(10, 1024), pool=HostPool(), budget_bytes=2048)
    copier = threading.Thread(target=staging.run)
    copier.start()
    staging.writes[0].data()
    staging.fail(OSError("disk full"))
    copier.join(30)
    assert not copier.is_alive()
    assert staging.wait(0)  # the state may be changed
    with pytest.raises(OSError, match="disk full"):
        staging.writes[5].data()
    staging.close()


def test_an_error_of_the_copier_reaches_the_writer() -> None:
    items = writes_of(3, 1024)

    def broken() -> np.ndarray:
        raise ValueError("device lost")

    items[1] = ChunkWrite(items[1].array, (1,), broken)
    staging = Staging(items, pool=HostPool(), budget_bytes=1024)
    copier = threading.Thread(target=staging.run)
    copier.start()
    source_of(staging.writes[0])()
    source_of(staging.writes[0]).release()
    with pytest.raises(ValueError, match="device lost"):
        staging.writes[1].data()
    copier.join(30)
    assert isinstance(staging.error, ValueError)
    staging.close()


def test_a_chunk_larger_than_the_budget_raises_it(caplog: pytest.LogCaptureFixture) -> None:
    staging = Staging(writes_of(2, 4096), pool=HostPool(), budget_bytes=100)
    assert staging.arena_bytes == 4096
    assert "4096 bytes does not fit the staging budget of 100 bytes" in caplog.text
    staging.fail(RuntimeError("not needed"))
    staging.run()
    staging.close()


def test_nothing_to_copy() -> None:
    staging = Staging([], pool=HostPool(), budget_bytes=10)
    staging.run()
    assert staging.wait(0)
    assert staging.writes == []
    staging.close()


def test_parts_of_host_tensors_as_device_parts_are_fetched() -> None:
    """What is on a device that is not CUDA is fetched chunk by chunk."""
    array = ArrayMeta("w", "w", Grid((4,), (4,)), "float32")
    item = ChunkWrite(array, (0,), DevicePart(torch.arange(8.0)[::2]))
    staging = Staging([item], pool=HostPool())
    staging.run()
    assert staging.writes[0].data().tolist() == [0, 2, 4, 6]
    staging.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("budget", [None, 3 << 20])
def test_device_chunks_are_copied_behind_the_callers_stream(budget: int | None) -> None:
    """The copy sees what was queued before it, and not what is queued after wait()."""
    count, size = 8, 1 << 20
    tensor = torch.zeros(count * size // 4, device="cuda")
    array = ArrayMeta("w", "w", Grid((count * size // 4,), (size // 4,)), "float32")
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        busy = busy @ busy * 1e-3  # keeps the stream at work
    tensor.fill_(7)
    items = [
        ChunkWrite(array, (i,), DevicePart(tensor[i * size // 4 : (i + 1) * size // 4]))
        for i in range(count)
    ]
    staging = Staging(items, pool=HostPool(), budget_bytes=budget)
    seen: list[bool] = []

    def write() -> None:
        for item in staging.writes:
            seen.append(bool((item.data() == 7).all()))
            source_of(item).release()

    writer = threading.Thread(target=write)
    writer.start()
    staging.run()
    assert staging.wait(host=False)
    tensor.fill_(9)
    writer.join(60)
    assert seen == [True] * count
    staging.close()
