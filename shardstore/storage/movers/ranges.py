"""Reads ranges of files, near ones with one request: chunks that lie in packs, and what a box of an
array needs of a file of another format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from numpy.typing import NDArray

from shardstore.storage.movers.chunks import BadChunkError, ChunkPart, GetManifest, ReadDone
from shardstore.storage.movers.verify import ChunkVerifier, chunk_error, require_stored_size
from shardstore.storage.runtime.counters import counters
from shardstore.storage.runtime.parallel import run_batched
from shardstore.storage.stores.location import Location

GAP_BYTES = 1024 * 1024
"""Ranges with gaps up to this size are read from a store with one request: the gap takes less time
than another request."""
REQUEST_BYTES = 8 * 1024 * 1024
REQUESTS = 8
"""Concurrent requests for ranges. They use at most 8 times :data:`REQUEST_BYTES` of memory."""

R = TypeVar("R", bound=tuple[Any, ...])

FilePosition = tuple[str, int]
"""Name of the file that holds an array in C order, and the byte offset of the array in it."""


class Slab(NamedTuple):
    """A slab of a box, see :func:`~.chunk_bytes.slabs`: its bytes in a file, its destination, and
    the shape of the array."""

    name: str
    first: int
    last: int
    out: NDArray[Any]
    shape: tuple[int, ...]


def grouped(ranges: Iterable[R], most_bytes: int = REQUEST_BYTES) -> Iterator[list[R]]:
    """Yield the ranges of each request: ranges of a file with small gaps, of ``most_bytes`` in all.
    A longer range is alone. A range begins with the name of the file, the first byte, and one past
    the last byte."""
    group: list[R] = []
    start = end = 0
    for one in sorted(ranges, key=itemgetter(0, 1, 2)):
        name, first, last = one[:3]
        if group and (name != group[0][0] or first - end > GAP_BYTES or last - start > most_bytes):
            yield group
            group, end = [], 0
        group.append(one)
        start, end = group[0][1], max(end, last)
    if group:
        yield group


def read_bytes(location: Location, name: str, start: int, stop: int) -> bytes:
    """Return bytes ``start:stop`` of a file, fewer if the file ends before ``stop``.

    Raises:
        FileNotFoundError: there is no such file.
        StorageError: the store failed, or does not read ranges.
    """
    found = location.read_range(name, start, stop) if start < stop else b""
    if found is None:
        raise FileNotFoundError(f"{location.url}/{name}")
    return found


class PackedPart(NamedTuple):
    """A part of a chunk, and where the chunk lies."""

    name: str
    first: int
    last: int
    part: ChunkPart


def read_packed(
    location: Location,
    parts: Sequence[ChunkPart],
    manifest: GetManifest,
    done: ReadDone,
    budget_bytes: int,
) -> None:
    """Read parts of packed chunks, see :meth:`Mover.read`. Each chunk is read whole, and verified.

    Args:
        location: root of the checkpoint.
        parts: the parts.
        manifest, done: see :meth:`Mover.read`.
        budget_bytes: memory for the requests.
    """

    def read(batch: Sequence[list[PackedPart]]) -> None:
        for group in batch:
            _read_group(location, group, manifest, done)

    found = []
    for part in parts:
        array = part.array
        assert array.places is not None
        place = array.places.of(part.number)
        try:  # before memory is taken for it
            require_stored_size(array, part.number, place.last - place.first)
        except BadChunkError as problem:
            url = f"{location.url}/{place.name}"
            raise chunk_error(array, part.index, url, problem, manifest) from None
        found.append(PackedPart(*place, part))
    most = min(REQUEST_BYTES, budget_bytes // (2 * REQUESTS))
    threads = min(REQUESTS, location.threads(sum(one.last - one.first for one in found)))
    run_batched(list(grouped(found, most)), read, threads=threads)


def _read_group(
    location: Location, group: Sequence[PackedPart], manifest: GetManifest, done: ReadDone
) -> None:
    name, start, *_ = group[0]
    data = location.read_range(name, start, max(one.last for one in group))
    for _, first, last, part in group:
        array, crc = part.array, part.array.expected_crc(part.number)
        verifier = ChunkVerifier(array, part.number, 0, array.chunk_bytes, crc=crc)
        try:
            if data is None:
                raise BadChunkError("missing", "lies in a pack that is missing")
            stored = memoryview(data)[first - start : last - start]
            verifier.receive(part, iter([stored]))
        except BadChunkError as problem:
            url = f"{location.url}/{name} (bytes {first} to {last})"
            raise chunk_error(array, part.index, url, problem, manifest) from None
        done(part.out.nbytes, 1)
    counters.add(bytes_read=len(data or b""), chunks_read=len(group))
