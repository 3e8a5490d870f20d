"""Conversion between checkpoint formats: without ranks, piece by piece, resumable, verified.

Tensors go through buffers of a bounded size and never exist as a whole. What is written lies in a
work folder beside the target, or in an object store where no reader takes it for a checkpoint yet,
with a journal of what is done; a conversion that died goes on from there when it is started again.
Before the result takes its place it is read back and compared with the source to the bit. Torch is
imported where a format or a value is torch's, and else not.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardstore.convert.interfaces import Reader, Source, Target, Written, exists_error
from shardstore.convert.safetensors import (
    INDEX_SUFFIX,
    SafetensorsSource,
    SafetensorsTarget,
    is_file_name,
)
from shardstore.convert.values import compare_values
from shardstore.convert.zarr import ShardstoreTarget, ZarrSource
from shardstore.core import maybe_load_config
from shardstore.errors import (
    ArgumentError,
    CheckpointExistsError,
    CheckpointingException,
    DamagedCheckpointError,
    NotACheckpointError,
)
from shardstore.progress import Operation, ProgressCallback, callback_of, log_event, metered
from shardstore.storage.commit.identity import is_ours
from shardstore.storage.commit.inventory import is_checkpoint
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.names import DCP_METADATA_NAME
from shardstore.storage.movers.chunk_bytes import as_bytes
from shardstore.storage.movers.chunks import RegionRead
from shardstore.storage.stores.location import Location

__all__ = [
    "FORMATS",
    "TARGET_FORMATS",
    "Conversion",
    "convert",
    "detect",
    "require_apart",
]

logger = logging.getLogger(__name__)

FORMATS = ("shardstore", "megatron-zarr", "torch_dist", "dcp", "safetensors")
TARGET_FORMATS = ("shardstore", "safetensors", "dcp")
DEFAULT_MEMORY_BUDGET = 512 * 1024 * 1024
DEFAULT_FILE_BYTES = 5 * 1000**3
SLAB_BYTES = 1024 * 1024
_MISSING = object()
_Chunk = tuple[ArrayMeta, tuple[int, ...]]
"""An array of the target, and the index of a chunk of it."""
Receipts = dict[tuple[str, tuple[int, ...]], Any]
"""Key and index of a chunk -> its receipt."""


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Attributes:
        source_format: as found or given.
        target_format: as chosen or given.
        tensors: number of tensors.
        total_bytes: of all tensors.
        resumed_bytes: of these, what an earlier run had written.
        verified: whether the result was compared with the source.
    """

    source_format: str
    target_format: str
    tensors: int
    total_bytes: int
    resumed_bytes: int
    verified: bool


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    source_format: str | None = None,
    target_format: str | None = None,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
    progress: ProgressCallback | Literal["bar"] | None = None,
    overwrite: bool = False,
    resume: bool = True,
    verify: bool = True,
    file_bytes: int = DEFAULT_FILE_BYTES,
    source_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
) -> Conversion:
    """Convert a checkpoint. Called by one process; it needs no ranks.

    Args:
        source: a checkpoint: a folder, a safetensors file or its index; a path or a URL.
        target: where to: a folder, or for safetensors a file ``NAME.safetensors``; a path or a URL.
        source_format: one of :data:`FORMATS`; default: what it looks like.
        target_format: one of :data:`TARGET_FORMATS`; default: safetensors for a target of such a
            name, else shardstore.
        memory_budget: bytes of tensors in memory at a time, at most; at least one chunk is.
        progress: called with how far it is, see :class:`shardstore.progress.Progress`; or
            ``"bar"``. The operation is ``"convert"``, and then ``"verify"``.
        overwrite: replace a checkpoint at the target (shardstore only).
        resume: go on with a conversion of the same source that died.
        verify: read the result back and compare it with the source before it takes its place:
            tensors, common values and sharded objects, each to the bit.
        file_bytes: size of each of several safetensors files, about.
        source_options: storage options of the store behind the source's URL.
        target_options: the same of the target's.

    Returns:
        What was done.

    Raises:
        NotACheckpointError, DamagedCheckpointError: the source is not there, or not whole.
        CheckpointExistsError: something is at the target.
        ArgumentError: the target is the source, or one of them lies in the other.
        DTypeMismatchError: the target's format lacks a data type.
        UnsafeObjectError: an object of the source needs a class that was not allowed.
        StorageError: a disk or a store refused. What was done is kept for the next run.
    """
    for name, size in (("memory_budget", memory_budget), ("file_bytes", file_bytes)):
        if not isinstance(size, int) or size < 1:
            raise ArgumentError(f"{name}={size!r} must be a number of bytes, at least 1")
    callback_of(progress, shows=False)
    place = Location.given(source, source_options)
    goal = Location.given(target, target_options)
    require_apart(place, goal)
    found = source_format or detect(place)
    wanted = _target_format(goal, target_format)
    beside = _beside(goal)
    _require_free(goal, wanted, overwrite)
    about = {"source": place.url, "source_format": found, "target_format": wanted}
    log_event(logger, "convert_begin", f"{goal.url}: converting", url=goal.url, **about)
    started = perf_counter()
    opened = open_source(place, found)
    work = beside.child(f".{goal.name}.convert")
    journal = _Journal(beside.child(f".{goal.name}.convert.journal"))
    head = {
        "source": place.url,
        "formats": [found, wanted],
        "identity": opened.identity(),
        "memory_budget": memory_budget,
        "file_bytes": file_bytes,
    }
    # Where a result is verified, two buffers of a batch exist at a time.
    batch_bytes = max(1, memory_budget // 2)
    built: Target
    if wanted == "shardstore":
        built = ShardstoreTarget(
            work, goal, source=found, overwrite=overwrite, budget_bytes=batch_bytes
        )
    elif wanted == "dcp":
        from shardstore.convert.dcp import DcpTarget  # imports torch

        built = DcpTarget(work, goal)
    else:
        built = SafetensorsTarget(work, goal, file_bytes=file_bytes, budget_bytes=batch_bytes)
    run = _Run(opened, built, batch_bytes, (place.url, goal.url), progress)
    try:
        known = journal.open(head)
        # No attempt fences these objects off: nothing at all may be there.
        is_fenced = wanted == "shardstore" or goal.is_local or journal.exists()
        if not is_fenced and (names := goal.listing()):
            raise CheckpointExistsError(
                f"{goal.url} already holds {', '.join(names[:4])}; convert to elsewhere",
                url=goal.url,
            )
        if not (resume and known is not None and built.resume(known[1])):
            journal.start(head, built.start())
            known = {}, None
        resumed = run.write(journal, known[0])
        written = built.read_back()
        if verify:
            run.compare(written)
            # Opened anew: what the first one has read it may have kept.
            again = open_source(place, found).extras()
            between = (place.url, goal.url)
            compare_values(again, written.extras(), plain=built.plain, between=between)
        built.publish()
    except BaseException:
        built.stop()
        raise
    journal.remove()
    seconds = perf_counter() - started
    log_event(
        logger,
        "convert",
        f"{goal.url}: converted, {run.total_bytes} bytes in {seconds:.3f} s",
        url=goal.url,
        **about,
        tensors=len(run.arrays),
        bytes=run.total_bytes,
        resumed_bytes=resumed,
        seconds=seconds,
        verified=verify,
    )
    return Conversion(found, wanted, len(run.arrays), run.total_bytes, resumed, verify)


def detect(place: Location) -> str:
    """The format of what is at a place.

    Raises:
        NotACheckpointError: nothing that is known.
        StorageError: the store refused.
    """
    if is_file_name(place.name) or (place.is_local and place.path.is_file()):
        return "safetensors"
    names = place.listing()
    if not names and not (place.is_local and place.is_dir()):
        raise NotACheckpointError(f"{place.url} does not exist", url=place.url)
    config = maybe_load_config(place.place)
    if config is not None and config.sharded_backend == "torch_dist":
        return "torch_dist"
    if "zarr.json" in names and is_ours(place):
        return "shardstore"
    if config is not None:
        return "megatron-zarr"
    if DCP_METADATA_NAME in names:
        return "dcp"
    if any(is_file_name(name) for name in names):
        return "safetensors"
    raise NotACheckpointError(
        f"{place.url} is no checkpoint of a known format ({', '.join(FORMATS)}); if it is one, "
        "name its folder or file itself",
        url=place.url,
    )


def open_source(place: Location, source_format: str) -> Source:
    """Open a checkpoint of a known format for reading.

    Raises:
        NotACheckpointError, DamagedCheckpointError: it is not of that format, or damaged.
    """
    if source_format in ("shardstore", "megatron-zarr"):
        return ZarrSource(place)
    if source_format in ("torch_dist", "dcp"):
        from shardstore.convert.dcp import DcpSource  # imports torch

        return DcpSource(place)
    if source_format == "safetensors":
        return SafetensorsSource.open(place)
    raise CheckpointingException(
        f"source_format={source_format!r} is not one of {', '.join(FORMATS)}"
    )


def require_apart(source: Location, target: Location) -> None:
    """Raise :class:`ArgumentError` if one is, or lies in, the other, through links too."""
    if _within(target, source):
        same = _within(source, target)
        where = "is the source itself" if same else "lies inside the source"
    elif _within(source, target):
        where = "holds the source"
    else:
        return
    raise ArgumentError(
        f"the target {target.url} {where} {source.url}: nothing was converted; convert to a folder "
        "beside it",
        url=target.url,
    )


def _within(inner: Location, outer: Location) -> bool:
    if inner.is_local != outer.is_local:
        return False
    if not inner.is_local:
        return f"{inner.url}/".startswith(f"{outer.url}/")
    path, folder = Path(os.path.realpath(inner.url)), Path(os.path.realpath(outer.url))
    for above in (path, *path.parents):
        with suppress(OSError):  # one is not there
            if above == folder or above.samefile(folder):  # mounts give a folder two names
                return True
    return False


def _beside(goal: Location) -> Location:
    """The folder that a target is in."""
    parent, _, name = goal.url.rpartition("/")
    if not name or (not goal.is_local and parent.endswith("/")):
        raise CheckpointingException(
            f"{goal.url} is all of a store: name a folder in it to convert to", url=goal.url
        )
    return Location(parent or "/", goal.options)


def _target_format(target: Location, given: str | None) -> str:
    wanted = given or ("safetensors" if target.name.endswith(".safetensors") else "shardstore")
    if wanted not in TARGET_FORMATS:
        raise CheckpointingException(
            f"target_format={wanted!r} is not one of {', '.join(TARGET_FORMATS)}"
        )
    return wanted


def _require_free(target: Location, wanted: str, overwrite: bool) -> None:
    if wanted == "shardstore" and overwrite and is_checkpoint(target):
        return
    if target.is_local:
        taken = target.exists() and not (target.is_dir() and not target.listing())
    elif wanted == "shardstore":
        taken = is_checkpoint(target)
    else:
        # Files of an earlier run may be there already, but not those that complete a checkpoint.
        names = target.listing()
        taken = any(name == DCP_METADATA_NAME or name.endswith(INDEX_SUFFIX) for name in names)
        taken = taken or (is_file_name(target.name) and target.exists())
    if taken:
        remedy = ", or pass overwrite=True (--overwrite) to replace a checkpoint"
        raise exists_error(target, remedy if wanted == "shardstore" else "")


class _Journal:
    """What a conversion has done, so that another run can go on: a document a batch.

    Args:
        place: folder of the documents.
    """

    def __init__(self, place: Location) -> None:
        self._place = place
        self._count = 0

    def open(self, head: dict[str, Any]) -> tuple[Receipts, Any] | None:
        """What an earlier run of the same conversion did, and the state that its target had.

        Args:
            head: what tells one conversion from another.

        Returns:
            ``None`` where there was none, or another one.
        """
        documents: list[Any] = []
        with suppress(ValueError):  # the last one was cut short
            for name in self._place.listing():
                if name != _numbered(len(documents)):
                    break
                documents.append(json.loads(self._place.read(name)))
        try:
            if documents[0]["head"] != json.loads(json.dumps(head)):
                return None
            rows = [row for document in documents[1:] for row in document]
            found = {(str(key), tuple(index)): receipt for key, index, receipt in rows}
            state = documents[0]["state"]
        except (ValueError, TypeError, KeyError, IndexError):
            return None
        self._count = len(documents)
        return found, state

    def exists(self) -> bool:
        """Whether there is one, of this conversion or another."""
        return self._place.exists()

    def start(self, head: dict[str, Any], state: Any) -> None:
        """Begin with nothing done.

        Raises:
            StorageError: the store refused.
        """
        self.remove()
        self.add({"head": head, "state": state})

    def add(self, document: Any) -> None:
        """Note the chunks of a batch: key, index and receipt of each.

        Raises:
            StorageError: the store refused.
        """
        self._place.write(_numbered(self._count), json.dumps(document).encode())
        self._count += 1

    def remove(self) -> None:
        """The conversion is complete, or starts anew."""
        self._place.delete()
        self._count = 0


def _numbered(number: int) -> str:
    return f"{number:08d}.json"


class _Run:
    """The chunks of a conversion, in batches within the budget."""

    def __init__(
        self,
        source: Source,
        target: Target,
        batch_bytes: int,
        between: tuple[str, str],
        progress: ProgressCallback | Literal["bar"] | None,
    ) -> None:
        self._source, self._target = source, target
        self._batch_bytes = batch_bytes
        self._between = between
        self._progress = progress
        self.arrays = [
            target.array(meta, source.boxes(key), batch_bytes)
            for key, meta in sorted(source.arrays.items())
        ]
        self._chunks = [
            (array, array.grid.index(i)) for array in self.arrays for i in range(array.grid.size)
        ]
        self.total_bytes = sum(map(_chunk_bytes, self._chunks))

    def write(self, journal: _Journal, receipts: Receipts) -> int:
        """Write what is not written yet. Returns the bytes that an earlier run wrote."""
        self._target.begin(self.arrays, self._source.extras())
        left = []
        for array, index in self._chunks:
            known = receipts.get((array.key, index), _MISSING)
            if known is _MISSING or not self._target.restore(array, index, known):
                left.append((array, index))

        def write(chunks: Sequence[Written]) -> None:
            written = zip(chunks, self._target.write(chunks), strict=True)
            journal.add([(chunk.array.key, chunk.index, receipt) for chunk, receipt in written])

        return self._run("convert", left, write)

    def compare(self, reader: Reader) -> None:
        """Compare what was written with the source.

        Raises:
            DamagedCheckpointError: they differ.
        """

        def compare(chunks: Sequence[Written]) -> None:
            copies = [np.empty_like(chunk.data) for chunk in chunks]
            places = zip(chunks, copies, strict=True)
            reader.read(
                [RegionRead(c.array, c.array.grid.box(c.index), copy) for c, copy in places]
            )
            for chunk, copy in zip(chunks, copies, strict=True):
                if not _equal(as_bytes(chunk.data), as_bytes(copy)):
                    source, url = self._between
                    raise DamagedCheckpointError(
                        f"chunk {chunk.index} of key {chunk.array.key!r} differs between "
                        f"{source} and what was written for {url}; nothing was put "
                        "there. Convert again with resume=False (--no-resume), and check the disk",
                        key=chunk.array.key,
                        chunk=chunk.index,
                        url=url,
                    )

        self._run("verify", self._chunks, compare)

    def _run(
        self,
        operation: Operation,
        chunks: Sequence[_Chunk],
        work: Callable[[Sequence[Written]], None],
    ) -> int:
        """Read chunks from the source, batch by batch, and do the work of a stage with them.

        Returns:
            Bytes of those that are not among ``chunks``.
        """
        done = self.total_bytes - sum(map(_chunk_bytes, chunks))
        with metered(operation, self._between[1], self._progress) as meter:
            meter.expect(self.total_bytes, len(chunks))
            meter.count(done, 0)
            for batch in self._batches(chunks):
                work(self._read(batch))
                meter.count(sum(map(_chunk_bytes, batch)), len(batch))
        return done

    def _read(self, batch: Sequence[_Chunk]) -> list[Written]:
        chunks = []
        reads = []
        for array, index in batch:
            box = array.grid.box(index)
            data = np.empty(box.shape, dtypes.numpy_dtype(array.dtype))
            chunks.append(Written(array, index, data))
            reads.append(RegionRead(self._source.arrays[array.key], box, data))
        self._source.read(reads)
        return chunks

    def _batches(self, chunks: Sequence[_Chunk]) -> Iterator[list[_Chunk]]:
        batch: list[_Chunk] = []
        size = 0
        for chunk in chunks:
            nbytes = _chunk_bytes(chunk)
            if batch and size + nbytes > self._batch_bytes:
                yield batch
                batch, size = [], 0
            batch.append(chunk)
            size += nbytes
        if batch:
            yield batch


def _equal(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> bool:
    """Compared in slabs: a comparison of NumPy makes an array of its own."""
    slabs = range(0, len(a), SLAB_BYTES)
    return all(np.array_equal(a[i : i + SLAB_BYTES], b[i : i + SLAB_BYTES]) for i in slabs)


def _chunk_bytes(chunk: _Chunk) -> int:
    array, index = chunk
    return array.grid.box(index).size * dtypes.itemsize(array.dtype)
