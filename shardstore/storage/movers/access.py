"""Chooses the mover for a location, and the reader for an array; verifies single chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from shardstore.errors import DamagedCheckpointError
from shardstore.storage.commit.attempt import Attempt
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.manifest import Manifest
from shardstore.storage.movers.chunk_bytes import as_bytes, whole_chunk
from shardstore.storage.movers.chunks import Mover, ReadDone, RegionRead
from shardstore.storage.movers.codecs import most_stored_bytes
from shardstore.storage.movers.files import FileMover, read_at_once, read_file
from shardstore.storage.movers.verify import MISSING, ChunkVerifier, Problem
from shardstore.storage.options import SaveOptions
from shardstore.storage.stores.location import Location


def mover_for(location: Location, options: SaveOptions, attempt: Attempt | None = None) -> Mover:
    """Return the mover of a location, which writes chunks as part of an attempt."""
    if location.is_local:
        return FileMover(location, threads=options.threads, durable=options.durable)
    from shardstore.storage.movers.object_mover import ObjectMover

    return ObjectMover(location, attempt=attempt, budget_bytes=options.budget_bytes)


def read_regions(
    location: Location,
    reads: Sequence[RegionRead],
    manifest: Callable[[], Manifest | None] = lambda: None,
    done: ReadDone | None = None,
    *,
    threads: int | None = None,
) -> None:
    """Read regions of arrays of any codecs, see :meth:`Mover.read`. ``threads`` is the number of
    threads for reads from a disk."""
    own = [read for read in reads if read.array.codecs is not None]
    other = [read for read in reads if read.array.codecs is None]
    if own:
        mover_for(location, SaveOptions(threads=threads)).read(own, manifest, done)
    if other:
        # Imported where it is needed: TensorStore takes half a second.
        from shardstore.storage.movers.tensorstore_reader import read_decoded

        read_decoded(location, other, manifest, done)


def check_chunk(
    location: Location,
    array: ArrayMeta,
    index: Sequence[int],
    manifest: Manifest | None,
    *,
    hashes: bool = False,
) -> tuple[int, Problem | None]:
    """Verify one chunk and discard its data. Several threads may call it.

    Args:
        location: root of the checkpoint.
        array: the chunk's array.
        index: index of the chunk.
        manifest: the checkpoint's manifest, if it has one.
        hashes: whether to compare the 128-bit hash too, which takes a second pass over the bytes.

    Returns:
        Number of bytes read, and the problem; ``None`` if the chunk is intact.
    """
    number, name = array.grid.linear(index), array.chunk_name(index)
    rows = None if manifest is None else manifest.rows(array)
    crc, digest = None if rows is None else int(rows.crc[number]), None
    if rows is not None and hashes:
        digest = rows.digest[number].tobytes()
    verifier = ChunkVerifier(array, number, 0, array.chunk_bytes, crc=crc, digest=digest)
    data: bytes | memoryview | None
    try:
        if array.codecs is None:
            box = array.grid.box(index)
            out = np.empty(box.shape, dtypes.numpy_dtype(array.dtype))
            read_regions(location, [RegionRead(array, box, out)], lambda: manifest)
            data = as_bytes(whole_chunk(out, array.grid.chunk_shape)).data
        elif not location.is_local:
            data = location.read_range(name, 0, most_stored_bytes(array, number) + 1)
        elif not hashes and (size := read_at_once(f"{location.url}/{name}", array, crc)):
            return size, None
        else:
            return read_file(f"{location.url}/{name}", verifier)
    except FileNotFoundError:
        return 0, MISSING
    except DamagedCheckpointError as error:
        return 0, Problem("crc", f"cannot be decoded: {_first_line(error)}")
    except OSError as error:
        return 0, Problem("unreadable", f"cannot be read: {_first_line(error)}")
    if data is None:
        return 0, MISSING
    verifier.update(memoryview(data))
    return verifier.count, verifier.finish()


def _first_line(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0]
