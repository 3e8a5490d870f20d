"""How many requests to an object store are under way at a time, with how much memory, and for how
long one is tried."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch

import shardstore
from shardstore import ShardedTensor
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


def test_requests_stay_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted at the object interface: bytes of all requests that are under way."""
    place = Location.of(f"memory://{uuid.uuid4().hex}/c")
    flying, peak, most = 0, 0, 0
    lock = threading.Lock()

    class Counting(FileSystemIO):
        requests = small_requests = 32

        def __init__(self, location: Location) -> None:
            self.inner = FileSystemIO(location.remote)

        def put(self, key: str, parts: Sequence[bytes | memoryview], *, create: bool) -> bool:
            with self._count(sum(map(len, parts))):
                return self.inner.put(key, parts, create=create)

        def get(
            self, key: str, start: int = 0, stop: int | None = None, *, size: int = 0
        ) -> bytes | None:
            with self._count(65540):
                return self.inner.get(key, start, stop, size=size)

        @contextmanager
        def _count(self, size: int) -> Iterator[None]:
            nonlocal flying, peak, most
            with lock:
                flying += size
                peak = max(peak, flying)
                most = max(most, flying // size)
            time.sleep(0.01)
            yield
            with lock:
                flying -= size

    monkeypatch.setattr(ObjectPrefix, "io", lambda place: Counting(place))
    meta = ArrayMeta("w", "w", Grid((64, 16384), (1, 16384)), "float32")
    array = np.random.default_rng(0).random((64, 32768), np.float32)[:, ::2]  # to be gathered
    mover = Mover.of(place, SaveOptions(budget_bytes=1 << 20))
    mover.write(
        [ChunkWrite(meta, (i, 0), array[i : i + 1]) for i in range(64)], lambda item, record: None
    )
    assert flying == 0
    assert most >= 4
    assert peak <= 1 << 20
    peak = most = 0
    out = np.zeros((64, 32768), np.float32)[:, ::2]
    mover.read([RegionRead(meta, Box((0, 0), array.shape), out)], lambda: None)
    assert flying == 0
    assert most >= 4
    assert peak <= 1 << 20
    assert np.array_equal(out, array)


@pytest.mark.parametrize("writing", [True, False])
def test_small_objects_wait_for_no_large_one(
    writing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large objects end only when all small ones have gone."""
    place = Location.of(f"memory://{uuid.uuid4().hex}/c")
    changed = threading.Condition()
    small_gone = ended = 0
    watching = False

    class Waiting(FileSystemIO):
        requests = small_requests = 4

        def __init__(self, location: Location) -> None:
            self.inner = FileSystemIO(location.remote)

        def put(self, key: str, parts: Sequence[bytes | memoryview], *, create: bool) -> bool:
            with self._under_way(key):
                return self.inner.put(key, parts, create=create)

        def get(
            self, key: str, start: int = 0, stop: int | None = None, *, size: int = 0
        ) -> bytes | None:
            with self._under_way(key):
                return self.inner.get(key, start, stop, size=size)

        @contextmanager
        def _under_way(self, key: str) -> Iterator[None]:
            nonlocal small_gone, ended
            if not watching:
                yield
                return
            if key.startswith("small"):
                yield
                with changed:
                    small_gone += 1
                    changed.notify_all()
                return
            with changed:
                assert changed.wait_for(lambda: small_gone == 12, timeout=60)
            yield
            with changed:
                ended += 1

    monkeypatch.setattr(ObjectPrefix, "io", lambda place: Waiting(place))
    state = {
        **{f"large{i}": torch.full((512, 512), float(i)) for i in range(3)},
        **{f"small{i}": torch.full((4,), float(i)) for i in range(12)},
    }
    tensors = {key: ShardedTensor.from_rank_offsets(key, value) for key, value in state.items()}
    watching = writing
    shardstore.save(tensors, place.place)
    watching = not writing
    loaded = shardstore.load(
        {
            key: ShardedTensor.from_rank_offsets(key, torch.zeros_like(value))
            for key, value in state.items()
        },
        place.place,
    )
    assert all(torch.equal(loaded[key], value) for key, value in state.items())
    assert ended == 3


def test_small_objects_have_more_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests of large objects at a time, and up to eight of small ones."""
    changed = threading.Condition()
    under_way = {"large": 0, "small": 0}
    most = {"large": 0, "small": 0}

    class Counting(FileSystemIO):
        requests, small_requests = 2, 8

        def __init__(self, location: Location) -> None:
            pass

        def put(self, key: str, parts: Sequence[bytes | memoryview], *, create: bool) -> bool:
            kind = key[:5]
            with changed:
                under_way[kind] += 1
                most[kind] = max(most[kind], under_way[kind])
                changed.notify_all()
                if kind == "small":
                    assert changed.wait_for(lambda: most["small"] >= 6, timeout=60)
            time.sleep(0.01)
            with changed:
                under_way[kind] -= 1
            return True

    monkeypatch.setattr(ObjectPrefix, "io", lambda place: Counting(place))
    place = Location.of(f"memory://{uuid.uuid4().hex}/c")
    small = ArrayMeta("small", "small", Grid((400,), (4,)), "float32")
    large = ArrayMeta("large", "large", Grid((8, 1 << 18), (1, 1 << 18)), "float32")
    writes = [ChunkWrite(small, (i,), np.zeros(4, np.float32)) for i in range(100)]
    writes[50:50] = [
        ChunkWrite(large, (i, 0), np.zeros((1, 1 << 18), np.float32)) for i in range(8)
    ]
    Mover.of(place).write(writes, lambda item, record: None)
    assert most["large"] <= 2
    assert 6 <= most["small"] <= 8


def test_after_an_error_none_that_waits_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two large objects may go at a time, six threads wait with others: these stay where they are,
    or each would try for as long as the first."""
    place = Location.of(f"memory://{uuid.uuid4().hex}/c")
    begun: list[str] = []
    both = threading.Barrier(2)

    class Refusing(FileSystemIO):
        requests, small_requests = 2, 8

        def __init__(self, location: Location) -> None:
            self.url = location.url

        def put(self, key: str, parts: Sequence[bytes | memoryview], *, create: bool) -> bool:
            if not key.startswith("large"):
                both.wait(60)
                return True
            begun.append(key)
            both.wait(60)
            time.sleep(0.05)  # the others do come to wait
            raise StorageError(f"{self.url}/{key} is refused", url=self.url)

    monkeypatch.setattr(ObjectPrefix, "io", lambda place: Refusing(place))
    large = ArrayMeta("large", "large", Grid((20, 1 << 18), (1, 1 << 18)), "float32")
    small = ArrayMeta("small", "small", Grid((400,), (4,)), "float32")
    writes = [ChunkWrite(small, (i,), np.zeros(4, np.float32)) for i in range(22)]
    writes += [ChunkWrite(large, (i, 0), np.zeros((1, 1 << 18), np.float32)) for i in range(20)]
    with pytest.raises(StorageError, match="is refused") as caught:
        Mover.of(place).write(writes, lambda item, record: None)
    assert caught.value.key == "large"
    assert len(begun) == 2


def test_gathered_chunks_keep_no_memory_of_threads_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a chunk with gaps is gathered in is given back before it is sent."""
    kept: list[bool] = []

    class Looking(FileSystemIO):
        requests = small_requests = 2

        def __init__(self, location: Location) -> None:
            pass

        def put(self, key: str, parts: Sequence[bytes | memoryview], *, create: bool) -> bool:
            kept.append(hasattr(kept_memory, "scratch"))
            return True

    monkeypatch.setattr(ObjectPrefix, "io", lambda place: Looking(place))
    meta = ArrayMeta("w", "w", Grid((4, 1 << 18), (1, 1 << 18)), "float32")
    data = np.zeros((4, 1 << 19), np.float32)[:, ::2]
    place = Location.of(f"memory://{uuid.uuid4().hex}/c")
    writes = [ChunkWrite(meta, (i, 0), data[i : i + 1]) for i in range(4)]
    Mover.of(place).write(writes, lambda item, record: None)
    assert kept == [False] * 4
