"""How many requests to an object store are under way at a time, with how much memory, and for how
long one is tried."""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import shardstore
from shardstore.errors import StorageError
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box, Grid
from shardstore.storage.movers.chunks import ChunkWrite, RegionRead
from shardstore.storage.movers.mover import Mover
from shardstore.storage.options import SaveOptions
from shardstore.storage.runtime.parallel import kept_memory
from shardstore.storage.stores.location import Location
from shardstore.storage.stores.prefix import ObjectPrefix
from shardstore.storage.stores.remote import FileSystemIO

UnderWay = Callable[[str, int], AbstractContextManager[None]]


class Watched(FileSystemIO):
    """Runs each request in a context, which is given its key and its size in bytes."""

    def __init__(self, place: Location, under_way: UnderWay) -> None:
        super().__init__(place.remote)
        self._under_way = under_way

    def put(self, key: str, parts: Sequence[bytes | memoryview], *, create: bool) -> bool:
        with self._under_way(key, sum(map(len, parts))):
            return super().put(key, parts, create=create)

    def get(
        self, key: str, start: int = 0, stop: int | None = None, *, size: int = 0
    ) -> bytes | memoryview | None:
        with self._under_way(key, size):
            return super().get(key, start, stop, size=size)


@pytest.fixture
def place() -> Location:
    return Location.of(f"memory://{uuid.uuid4().hex}/c")


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[UnderWay, int, int], None]:
    """Watch all requests, with these limits of requests and of small ones."""

    def work(under_way: UnderWay, requests: int, small_requests: int) -> None:
        monkeypatch.setattr(Watched, "requests", requests)
        monkeypatch.setattr(Watched, "small_requests", small_requests)
        monkeypatch.setattr(ObjectPrefix, "io", lambda place: Watched(place, under_way))

    return work


SMALL = ArrayMeta("small", "small", Grid((400,), (4,)), "float32")
LARGE = ArrayMeta("large", "large", Grid((20, 1 << 18), (1, 1 << 18)), "float32")


def small_writes(count: int) -> list[ChunkWrite]:
    return [ChunkWrite(SMALL, (i,), np.zeros(4, np.float32)) for i in range(count)]


def large_writes(count: int) -> list[ChunkWrite]:
    return [ChunkWrite(LARGE, (i, 0), np.zeros((1, 1 << 18), np.float32)) for i in range(count)]


def test_requests_stay_within_the_budget(place: Location, watch: Any) -> None:
    """Counted at the object interface: bytes of all requests that are under way."""
    chunk = 65540
    flying, peak = 0, 0
    lock = threading.Lock()

    @contextmanager
    def count(_: str, __: int) -> Iterator[None]:
        nonlocal flying, peak
        with lock:
            flying += chunk
            peak = max(peak, flying)
        time.sleep(0.01)
        yield
        with lock:
            flying -= chunk

    watch(count, 32, 32)
    meta = ArrayMeta("w", "w", Grid((64, 16384), (1, 16384)), "float32")
    array = np.random.default_rng(0).random((64, 32768), np.float32)[:, ::2]  # to be gathered
    out = np.zeros((64, 32768), np.float32)[:, ::2]
    mover = Mover.of(place, SaveOptions(budget_bytes=1 << 20))
    writes = [ChunkWrite(meta, (i, 0), array[i : i + 1]) for i in range(64)]
    for work in (
        lambda: mover.write(writes, lambda item, record: None),
        lambda: mover.read([RegionRead(meta, Box((0, 0), array.shape), out)], lambda: None),
    ):
        peak = 0
        work()
        assert flying == 0
        assert 4 * chunk <= peak <= 1 << 20
    assert np.array_equal(out, array)


@pytest.mark.parametrize("writing", [True, False])
def test_small_objects_wait_for_no_large_one(place: Location, watch: Any, writing: bool) -> None:
    """Large objects end only when all small ones have gone."""
    changed = threading.Condition()
    small_gone = ended = 0
    watching = False

    @contextmanager
    def under_way(key: str, _: int) -> Iterator[None]:
        nonlocal small_gone, ended
        is_chunk, is_small = watching and "/c." in key, key.startswith("small")
        if is_chunk and not is_small:
            with changed:
                assert changed.wait_for(lambda: small_gone == 12, timeout=60)
        yield
        with changed:
            small_gone += is_chunk and is_small
            ended += is_chunk and not is_small
            changed.notify_all()

    watch(under_way, 4, 4)
    state = {
        **{f"large{i}": torch.full((512, 512), float(i)) for i in range(3)},
        **{f"small{i}": torch.full((4,), float(i)) for i in range(12)},
    }
    watching = writing
    shardstore.save(shardstore.shard(state), place.place)
    watching = not writing
    zeros = {key: torch.zeros_like(value) for key, value in state.items()}
    loaded = shardstore.load(shardstore.shard(zeros), place.place)
    assert all(torch.equal(loaded[key], value) for key, value in state.items())
    assert ended == 3


def test_small_objects_have_more_requests(place: Location, watch: Any) -> None:
    """Two requests of large objects at a time, and up to eight of small ones."""
    changed = threading.Condition()
    under_way, most = Counter[str](), Counter[str]()

    @contextmanager
    def count(key: str, _: int) -> Iterator[None]:
        kind = key[:5]
        with changed:
            under_way[kind] += 1
            most[kind] = max(most[kind], under_way[kind])
            changed.notify_all()
            if kind == "small":
                assert changed.wait_for(lambda: most["small"] >= 6, timeout=60)
        time.sleep(0.01)
        yield
        with changed:
            under_way[kind] -= 1

    watch(count, 2, 8)
    writes = small_writes(100)
    writes[50:50] = large_writes(8)
    Mover.of(place).write(writes, lambda item, record: None)
    assert most["large"] <= 2
    assert 6 <= most["small"] <= 8


def test_after_an_error_none_that_waits_is_begun(place: Location, watch: Any) -> None:
    """Two large objects may go at a time, six threads wait with others: these stay where they are,
    or each would try for as long as the first."""
    begun: list[str] = []
    both = threading.Barrier(2)

    @contextmanager
    def refuse(key: str, _: int) -> Iterator[None]:
        is_large = key.startswith("large")
        if is_large:
            begun.append(key)
        both.wait(60)
        if is_large:
            time.sleep(0.05)  # the others do come to wait
            raise StorageError(f"{place.url}/{key} is refused", url=place.url)
        yield

    watch(refuse, 2, 8)
    writes = [*small_writes(22), *large_writes(20)]
    with pytest.raises(StorageError, match="is refused") as caught:
        Mover.of(place).write(writes, lambda item, record: None)
    assert caught.value.key == "large"
    assert len(begun) == 2


def test_gathered_chunks_keep_no_memory_of_threads_that_wait(place: Location, watch: Any) -> None:
    """What a chunk with gaps is gathered in is given back before it is sent."""
    kept: list[bool] = []

    @contextmanager
    def look(_: str, __: int) -> Iterator[None]:
        kept.append(hasattr(kept_memory, "scratch"))
        yield

    watch(look, 2, 2)
    data = np.zeros((4, 1 << 19), np.float32)[:, ::2]
    writes = [ChunkWrite(LARGE, (i, 0), data[i : i + 1]) for i in range(4)]
    Mover.of(place).write(writes, lambda item, record: None)
    assert kept == [False] * 4
