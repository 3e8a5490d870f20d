"""The reader of chunks with codecs of other programs: TensorStore's zarr drivers.

Arrays are opened with assumed metadata (no document is read), reads are strict (a missing chunk is
an error, not the fill value), and data moves straight into the given memory.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import tensorstore as ts

from shardstore.errors import FormatVersionError, StorageError
from shardstore.storage.format import documents, dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.manifest import Manifest
from shardstore.storage.movers.chunks import ReadDone, RegionRead
from shardstore.storage.movers.counters import counters
from shardstore.storage.movers.verify import MISSING, Problem, chunk_error
from shardstore.storage.stores.location import Location
from shardstore.storage.stores.tensorstore import kvstore_spec, plain_words, s3_context

__all__ = ["TensorStoreReader", "open_array", "shared_context"]

IN_FLIGHT_BYTES = 256 * 1024 * 1024

_DAMAGE = ("DATA_LOSS", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "OUT_OF_RANGE")
"""How errors about a chunk's content begin; all others are about the store."""

_context: ts.Context | None = None


def shared_context() -> ts.Context:
    """No chunk cache (chunks are moved once, whole) and one pool of threads for the process."""
    global _context
    if _context is None:
        _context = ts.Context(
            {"cache_pool": {"total_bytes_limit": 0}, "file_io_sync": False, **s3_context()}
        )
    return _context


def open_array(location: Location, array: ArrayMeta, *, strict: bool = True) -> Any:
    """A TensorStore handle on an array, opened without reading anything.

    Args:
        location: root of the checkpoint.
        array: its metadata.
        strict: missing chunks are errors on reading.
    """
    dtypes.numpy_dtype(array.dtype)  # TensorStore aborts the process on some unknown names
    document = json.loads(array.document or documents.array_document(array))
    metadata = {name: value for name, value in document.items() if name != "attributes"}
    if array.zarr_format == 2:
        metadata = {name: value for name, value in metadata.items() if name != "zarr_format"}
    spec = {
        "driver": "zarr" if array.zarr_format == 2 else "zarr3",
        "kvstore": kvstore_spec(location.child(array.node)),
        "metadata": metadata,
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": not strict,
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
    }
    try:
        return ts.open(spec, context=shared_context(), open=True, assume_metadata=True).result()
    except ValueError as error:
        url = f"{location.url}/{array.node}"
        raise FormatVersionError(
            f"key {array.key!r} ({url}) is described in a way that TensorStore can not open "
            f"({str(error).splitlines()[0]}): the document is damaged, or was written by a newer "
            "program; upgrade, or load an earlier checkpoint",
            key=array.key,
            url=url,
        ) from error


class TensorStoreReader:
    """Reads regions of arrays at any location.

    Args:
        location: root of the checkpoint.
        in_flight_bytes: bytes that may be under way at a time.
    """

    def __init__(self, location: Location, *, in_flight_bytes: int = IN_FLIGHT_BYTES) -> None:
        self.location = location
        self.in_flight_bytes = in_flight_bytes

    def read(
        self,
        reads: Sequence[RegionRead],
        manifest: Callable[[], Manifest | None],
        done: ReadDone | None = None,
    ) -> None:
        """See :meth:`Mover.read`."""
        stores = _Stores(self.location)
        pending: deque[tuple[RegionRead, Any]] = deque()
        flying = 0
        try:
            for read in reads:
                if not read.box.size:
                    continue
                source = stores[read.array][read.box.slices]
                target = ts.array(read.out, copy=False, write=True)
                pending.append((read, target.write(source)))
                flying += read.out.nbytes
                while pending and flying >= self.in_flight_bytes:
                    flying -= self._finish_read(pending.popleft(), manifest, done)
            while pending:
                self._finish_read(pending.popleft(), manifest, done)
        finally:
            _wait(future for _, future in pending)

    def _finish_read(
        self,
        entry: tuple[RegionRead, Any],
        manifest: Callable[[], Manifest | None],
        done: ReadDone | None,
    ) -> int:
        read, future = entry
        array = read.array
        error = _failure_of(future)
        if error is not None:
            text = plain_words(str(error)) if not self.location.is_local else str(error)
            raise self._explained(read, text, manifest) from self._cause(error)
        touched = sum(1 for _ in array.grid.overlapping(read.box))
        counters.add(bytes_read=touched * array.chunk_bytes, chunks_read=touched)
        if done is not None:
            done(read.out.nbytes, touched)
        return read.out.nbytes

    def _cause(self, error: Exception) -> Exception | None:
        """What is shown as the cause: a store's own answer in it may have the access key."""
        return error if self.location.is_local else None

    def _explained(
        self, read: RegionRead, text: str, manifest: Callable[[], Manifest | None]
    ) -> Exception:
        """TensorStore says what and which file in its text alone: find the chunk and its writer."""
        array = read.array
        missing, damaged = text.startswith("NOT_FOUND"), text.startswith(_DAMAGE)
        if missing or damaged:
            for index in array.grid.overlapping(read.box):
                name = f"{array.node}/{array.chunk_key(index)}"
                if f'/{name}"' in text:
                    problem = MISSING if missing else Problem("crc", f"is damaged ({text})")
                    url = f"{self.location.url}/{name}"
                    return chunk_error(array, index, url, problem, manifest)
        return StorageError(
            f"reading key {array.key!r} from {self.location.url}/{array.node} failed: {text}",
            key=array.key,
            url=f"{self.location.url}/{array.node}",
        )


class _Stores(dict[ArrayMeta, Any]):
    """Handles on arrays, opened when they are first asked for."""

    def __init__(self, location: Location) -> None:
        super().__init__()
        self._location = location

    def __missing__(self, array: ArrayMeta) -> Any:
        store = self[array] = open_array(self._location, array)
        return store


def _failure_of(future: Any) -> Exception | None:
    """Why it failed, not being handled any more: it is not to be the context of what is raised."""
    try:
        future.result()
    except Exception as error:
        return error
    return None


def _wait(futures: Iterable[Any]) -> None:
    """After an error: what is under way still uses the caller's memory, so wait until it ends."""
    for future in futures:
        with suppress(Exception):
            future.result()
