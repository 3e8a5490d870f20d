"""Reads chunks with codecs of other programs through TensorStore's zarr drivers, or through zarr
where TensorStore has no driver for the store or does not know a codec.

Arrays open with assumed metadata (TensorStore reads no document), and reads are strict (a missing
chunk is an error, not the fill value).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import Any

import tensorstore as ts

from shardstore.errors import FormatVersionError, StorageError
from shardstore.storage.format import documents, dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.movers.chunks import BadChunkError, GetManifest, ReadDone, RegionRead
from shardstore.storage.movers.verify import chunk_error
from shardstore.storage.runtime.counters import counters
from shardstore.storage.runtime.parallel import in_rounds
from shardstore.storage.stores.errors import explained
from shardstore.storage.stores.location import Location
from shardstore.storage.stores.s3 import has_forked
from shardstore.storage.stores.tensorstore import plain_words, shared_context

IN_FLIGHT_BYTES = 256 * 1024 * 1024
"""Limit on the bytes of concurrent reads."""

_DAMAGE = ("DATA_LOSS", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "OUT_OF_RANGE")
"""Prefixes of errors about the content of a chunk; all other errors are about the store."""


def open_array(
    location: Location, array: ArrayMeta, *, write: bool = True, fill_missing: bool = False
) -> Any:
    """Return a TensorStore handle of an array. Opening reads nothing from the store.

    Args:
        location: root of the checkpoint.
        array: metadata of the array.
        write: whether the handle may write.
        fill_missing: whether a missing chunk reads as the fill value instead of raising an error.

    Raises:
        FormatVersionError: TensorStore does not understand the metadata.
        StorageError: TensorStore has no driver for the store, or does not reach the server that
            s3fs reaches; or this process was forked after the import of TensorStore.
    """
    url = f"{location.url}/{array.node}"
    if has_forked():
        raise StorageError(
            f"key {array.key!r} ({url}) has codecs that TensorStore decodes, and this process was "
            "forked from one that had imported it, where using it would abort; start the process "
            "by spawn or forkserver (multiprocessing_context='spawn' of a DataLoader)",
            key=array.key,
            url=url,
        )
    dtypes.numpy_dtype(array.dtype)  # some unknown names make TensorStore abort the process
    metadata = json.loads(array.document or documents.array_document(array))
    metadata.pop("attributes", None)
    if array.zarr_format == 2:
        metadata.pop("zarr_format", None)
    # At another server, every chunk would read as the fill value.
    known = f"{array.node}/{array.document_name}" if fill_missing else None
    kvstore = location.kvstore(known)
    store = {**kvstore, "path": f"{kvstore['path']}{array.node}/"}
    if array.constant is not None:
        store = {"driver": "memory", "path": f"{array.node}/"}  # a chunk there would be of others
    if array.places is not None:
        name, *others = sorted(array.places.names())
        if others:
            raise StorageError(
                f"key {array.key!r} lies in {1 + len(others)} packs of {location.url}, and "
                "TensorStore opens an array in one: index the array itself, or take its zarr",
                key=array.key,
                url=url,
            )
        base = {**kvstore, "path": f"{kvstore['path']}{name}"}
        store = {"driver": "zip", "base": base, "path": f"{array.node}/"}
    spec = {
        "driver": "zarr" if array.zarr_format == 2 else "zarr3",
        "kvstore": store,
        "metadata": metadata,
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": fill_missing or array.constant is not None,
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
    }
    try:
        how: dict[str, Any] = {"open": True, "assume_metadata": True, "read": True, "write": write}
        return ts.open(spec, context=shared_context(), **how).result()
    except (ValueError, TypeError, OverflowError) as error:
        raise FormatVersionError(
            f"key {array.key!r} ({url}) is described in a way that TensorStore cannot open "
            f"({str(error).splitlines()[0]}): another or a newer program wrote it; upgrade, or "
            "load an earlier checkpoint",
            key=array.key,
            url=url,
        ) from error


def open_zarr(location: Location, array: ArrayMeta) -> Any:
    """Return an array as ``zarr.Array``, opened for reading.

    Raises:
        ValueError: it has the codec ``pickle`` of numcodecs, which runs code from the file.
    """
    import zarr

    from shardstore import zarr_dtypes  # noqa: F401 (teaches zarr bfloat16 and float8)

    if "pickle" in documents.codec_names(array.document or b"{}"):
        raise ValueError("the codec 'pickle' runs code from the file")
    how: dict[str, Any] = {"mode": "r", "zarr_format": array.zarr_format}
    how["storage_options"] = dict(location.options) or None
    if location.exists(f"{array.node}/{array.document_name}"):
        return zarr.open_array(f"{location.url}/{array.node}", **how)
    return zarr.open_group(location.url, **how)[array.node]


def open_decoded(location: Location, array: ArrayMeta, *, fill_missing: bool = False) -> Any:
    """Return the TensorStore handle of an array, or zarr's if TensorStore cannot open it.

    Raises:
        FormatVersionError: neither decodes the codecs; the text names them.
        StorageError: the store failed.
    """
    url, reason = f"{location.url}/{array.node}", "it has no driver for this store"
    try:
        if location.driver is not None:
            return open_array(location, array, fill_missing=fill_missing)
    except FormatVersionError as error:
        reason = str(error.__cause__).splitlines()[0]
    try:
        return open_zarr(location, array)
    except OSError as error:
        raise explained("opening", url, error) from None
    except Exception as error:  # zarr and its codecs raise many kinds
        names = ", ".join(documents.codec_names(array.document or b"{}"))
        raise FormatVersionError(
            f"neither TensorStore ({reason}) nor zarr ({_first_line(error)}) decodes key "
            f"{array.key!r} ({url}; codecs: {names or 'none'}) here: install the package that "
            "registers the codec with zarr, or write the array with another one",
            key=array.key,
            url=url,
        ) from error


def read_decoded(
    location: Location,
    reads: Sequence[RegionRead],
    manifest: GetManifest = lambda: None,
    done: ReadDone = lambda *_: None,
    *,
    fill_missing: bool = False,
) -> None:
    """Read regions of arrays whose codecs TensorStore decodes, see :meth:`Mover.read`.

    Args:
        location: root of the checkpoint.
        reads: the regions.
        manifest: returns the manifest, for the rank that wrote a missing or damaged chunk.
        done: see :meth:`Mover.read`.
        fill_missing: see :func:`open_array`.
    """
    wanted = [read for read in reads if read.box.size]
    arrays = {read.array for read in wanted}
    stores = {array: open_decoded(location, array, fill_missing=fill_missing) for array in arrays}

    def count(read: RegionRead) -> None:
        touched = sum(1 for _ in read.array.grid.overlapping(read.box))
        counters.add(bytes_read=touched * read.array.chunk_bytes, chunks_read=touched)
        done(read.out.nbytes, touched)

    by_zarr = [read for read in wanted if not isinstance(stores[read.array], ts.TensorStore)]
    for read in by_zarr:
        _read_by_zarr(location, stores[read.array], read, manifest, fill_missing=fill_missing)
        count(read)
    wanted = [read for read in wanted if isinstance(stores[read.array], ts.TensorStore)]
    for batch in in_rounds(wanted, lambda read: read.out.nbytes, IN_FLIGHT_BYTES):
        futures = deque(stores[read.array][read.box.slices].read() for read in batch)
        for read in batch:
            failure, future = None, futures.popleft()
            try:
                read.out[...] = location.wait(future, read.out.nbytes)
            except ValueError as error:
                failure = _explained(location, read, plain_words(str(error)), manifest)
            if failure is not None:
                # Raised outside of the handler: the store's answer may contain the access key.
                raise failure
            count(read)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _read_by_zarr(
    location: Location, store: Any, read: RegionRead, manifest: GetManifest, *, fill_missing: bool
) -> None:
    """Read a region chunk by chunk, because zarr reads missing chunks as fill values."""
    array = read.array
    for index in array.grid.overlapping(read.box):
        part, name = array.grid.box(index).intersect(read.box), array.chunk_name(index)
        url, problem = f"{location.url}/{name}", BadChunkError("missing", "is missing")
        if not fill_missing and not location.exists(name):
            raise chunk_error(array, index, url, problem, manifest)
        assert part is not None
        try:
            where: Any = (..., *part.relative_to(read.box.offset).slices)
            read.out[where] = store[part.slices]
        except OSError as error:
            raise explained("reading", url, error) from None
        except Exception as error:  # codecs raise many kinds
            problem = BadChunkError("crc", f"cannot be decoded ({_first_line(error)})")
            raise chunk_error(array, index, url, problem, manifest) from error


def _explained(location: Location, read: RegionRead, text: str, manifest: GetManifest) -> Exception:
    """Return the error for a failed read. The name of the failed file and the reason are in
    TensorStore's error text only."""
    array, above = read.array, f"{location.url}/{read.array.node}"
    missing, damaged = text.startswith("NOT_FOUND"), text.startswith(_DAMAGE)
    for index in array.grid.overlapping(read.box) if missing or damaged else ():
        name = array.chunk_name(index)
        if f'/{name}"' in text:
            problem = BadChunkError("crc", f"is damaged ({text})")
            if missing:
                location.require_absent(name)
                problem = BadChunkError("missing", "is missing")
            return chunk_error(array, index, f"{location.url}/{name}", problem, manifest)
    return StorageError(
        f"reading key {array.key!r} from {above} failed: {text}", key=array.key, url=above
    )
