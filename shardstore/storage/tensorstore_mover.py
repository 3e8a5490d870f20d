"""The mover for every store and codec that TensorStore knows.

Arrays are opened with assumed metadata (no document is read), reads are strict (a missing chunk is an error, not the fill
value), and data moves straight from and into the given memory.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorstore as ts
import xxhash

from shardstore.errors import ChunkCorruptError, ChunkMissingError, StorageError
from shardstore.storage import documents, dtypes
from shardstore.storage.chunks import ChunkWrite, RegionRead
from shardstore.storage.counters import counters
from shardstore.storage.documents import ArrayMeta
from shardstore.storage.files import _checksums, _pieces
from shardstore.storage.grid import block_bytes
from shardstore.storage.location import Location
from shardstore.storage.manifest import ChunkRecord, Manifest, running_length

__all__ = ["TensorStoreMover", "open_array"]

IN_FLIGHT_BYTES = 256 * 1024 * 1024

_context: ts.Context | None = None


def _shared_context() -> ts.Context:
    """No chunk cache (chunks are moved once, whole) and one pool of threads for the process."""
    global _context
    if _context is None:
        _context = ts.Context({"cache_pool": {"total_bytes_limit": 0}, "file_io_sync": False})
    return _context


def open_array(location: Location, array: ArrayMeta, *, strict: bool = True) -> Any:
    """A TensorStore handle on an array, opened without reading anything.

    Args:
        location: root of the checkpoint.
        array: its metadata.
        strict: missing chunks are errors on reading.
    """
    dtypes.numpy_dtype(array.dtype)  # TensorStore aborts the process on some unknown names
    document = array.document or json.loads(documents.array_document(array))
    metadata = {name: value for name, value in document.items() if name != "attributes"}
    if array.zarr_format == 2:
        metadata = {name: value for name, value in metadata.items() if name != "zarr_format"}
    spec = {
        "driver": "zarr" if array.zarr_format == 2 else "zarr3",
        "kvstore": location.kvstore(array.node),
        "metadata": metadata,
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": not strict,
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
    }
    return ts.open(spec, context=_shared_context(), open=True, assume_metadata=True).result()


class TensorStoreMover:
    """Moves chunks between memory and any location.

    Args:
        location: root of the checkpoint.
        in_flight_bytes: bytes that may be under way at a time.
    """

    def __init__(self, location: Location, *, in_flight_bytes: int = IN_FLIGHT_BYTES) -> None:
        self.location = location
        self.in_flight_bytes = in_flight_bytes
        self._done = threading.Lock()

    def write(
        self, writes: Sequence[ChunkWrite], done: Callable[[ChunkWrite, ChunkRecord], None]
    ) -> None:
        """See :meth:`Mover.write`."""
        stores: dict[str, Any] = {}
        pending: list[tuple[ChunkWrite, ChunkRecord, Any]] = []
        flying = 0
        for item in writes:
            array = item.array
            store = stores.get(array.key)
            if store is None:
                store = stores[array.key] = open_array(self.location, array)
            data = item.data()
            record = self._record(array, data)
            box = array.grid.box(item.index)
            target = store[box.slices] if box.shape else store
            future = target.write(data, can_reference_source_data_indefinitely=True)
            pending.append((item, record, future))
            flying += array.chunk_bytes
            while pending and flying >= self.in_flight_bytes:
                flying -= self._finish(pending.pop(0), done)
        while pending:
            self._finish(pending.pop(0), done)

    def _record(self, array: ArrayMeta, data: Any) -> ChunkRecord:
        total = array.chunk_bytes
        crc = position = 0
        running: list[int] = []
        hasher = xxhash.xxh3_128()
        for piece in _pieces(data, array.grid.chunk_shape):
            crc, found = _checksums(piece, block_bytes(total), crc, position)
            running += found
            hasher.update(piece)
            position += len(piece)
        stored = total + (4 if array.has_crc else 0)
        return ChunkRecord(stored, crc, hasher.digest(), running[: running_length(total)])

    def _finish(
        self,
        entry: tuple[ChunkWrite, ChunkRecord, Any],
        done: Callable[[ChunkWrite, ChunkRecord], None],
    ) -> int:
        item, record, future = entry
        array = item.array
        try:
            future.result()
        except Exception as error:
            url = f"{self.location.url}/{array.node}/{array.chunk_key(item.index)}"
            raise StorageError(
                f"writing chunk {item.index} of key {array.key!r} to {url} failed: {error}",
                key=array.key,
                chunk=item.index,
                url=url,
            ) from error
        counters.add(bytes_written=record.stored_bytes, chunks_written=1)
        with self._done:
            done(item, record)
        return array.chunk_bytes

    def read(self, reads: Sequence[RegionRead], manifest: Callable[[], Manifest | None]) -> None:
        """See :meth:`Mover.read`."""
        stores: dict[str, Any] = {}
        pending: list[tuple[RegionRead, Any]] = []
        flying = 0
        for read in reads:
            if not read.box.size:
                continue
            array = read.array
            store = stores.get(array.key)
            if store is None:
                store = stores[array.key] = open_array(self.location, array)
            source = store[read.box.slices] if read.box.shape else store
            pending.append((read, ts.array(read.out).write(source)))
            flying += read.out.nbytes
            while pending and flying >= self.in_flight_bytes:
                flying -= self._finish_read(pending.pop(0), manifest)
        while pending:
            self._finish_read(pending.pop(0), manifest)

    def _finish_read(
        self, entry: tuple[RegionRead, Any], manifest: Callable[[], Manifest | None]
    ) -> int:
        read, future = entry
        array = read.array
        try:
            future.result()
        except Exception as error:
            raise self._explained(read, str(error), manifest) from error
        touched = sum(1 for _ in array.grid.overlapping(read.box))
        counters.add(bytes_read=touched * array.chunk_bytes, chunks_read=touched)
        return read.out.nbytes

    def _explained(
        self, read: RegionRead, text: str, manifest: Callable[[], Manifest | None]
    ) -> Exception:
        """TensorStore says what and which file in its text alone: find the chunk, its key and its writer."""
        array = read.array
        for index in array.grid.overlapping(read.box):
            url = f"{self.location.url}/{array.node}/{array.chunk_key(index)}"
            if array.chunk_key(index) + '"' in text or url in text:
                found = manifest()
                rank = None if found is None else found.writer(array, index)
                by = "" if rank is None else f" (written by rank {rank})"
                about: dict[str, Any] = {"key": array.key, "chunk": index, "rank": rank, "url": url}
                if "missing" in text or "NOT_FOUND" in text:
                    return ChunkMissingError(
                        f"chunk {index} of key {array.key!r} is missing: {url}{by}; the checkpoint is damaged, "
                        "load an earlier one",
                        **about,
                    )
                return ChunkCorruptError(
                    f"chunk {index} of key {array.key!r} is damaged: {url}{by} ({text}); load an earlier checkpoint",
                    **about,
                )
        if "missing" in text or "NOT_FOUND" in text:
            return ChunkMissingError(
                f"a chunk of key {array.key!r} is missing below {self.location.url}/{array.node} ({text})",
                key=array.key,
            )
        return StorageError(
            f"reading key {array.key!r} from {self.location.url}/{array.node} failed: {text}",
            key=array.key,
            url=self.location.url,
        )


