"""Reads chunks that lie in packs. Near chunks of a pack are read with one request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardstore.storage.movers.chunks import BadChunkError, ChunkPart, GetManifest, ReadDone
from shardstore.storage.movers.ranges import REQUEST_BYTES, REQUESTS, grouped
from shardstore.storage.movers.verify import ChunkVerifier, chunk_error, require_stored_size
from shardstore.storage.runtime.counters import counters
from shardstore.storage.runtime.parallel import run_batched
from shardstore.storage.stores.location import Location


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
