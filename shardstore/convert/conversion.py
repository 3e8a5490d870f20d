"""Conversion between checkpoint formats: without ranks, piece by piece, resumable, verified.

Tensors go through buffers of a bounded size and never exist as a whole. What is written lies in a
work folder beside the target, or in an object store where no reader takes it for a checkpoint yet,
with a journal of what is done; a conversion that died goes on from there when it is started again.
Before the result takes its place it is read back and compared with the source to the bit. Torch is
imported where a format or a value is torch's, and else not.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardstore.convert.progress import Progress, callback_of
from shardstore.convert.safetensors_files import INDEX_SUFFIX, is_file_name
from shardstore.convert.safetensors_target import SafetensorsObjects, SafetensorsTarget
from shardstore.convert.shardstore_target import ShardstoreTarget
from shardstore.convert.sources import FORMATS, Source, detect, open_source
from shardstore.convert.targets import Journal, Receipts, Target, Written
from shardstore.convert.values import compare_values
from shardstore.errors import (
    ArgumentError,
    CheckpointExistsError,
    CheckpointingException,
    DamagedCheckpointError,
)
from shardstore.progress import log_event
from shardstore.storage.commit.folder import is_checkpoint
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
    "Progress",
    "convert",
    "detect",
    "require_apart",
]


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
    path, folder = os.path.realpath(inner.url), os.path.realpath(outer.url)
    while True:
        if path == folder or _is_same(path, folder):
            return True
        above = os.path.dirname(path)
        if above == path:
            return False
        path = above


def _is_same(a: str, b: str) -> bool:
    """Of folders under two names, as mounts make them."""
    try:
        return os.path.samefile(a, b)
    except OSError:
        return False  # one is not there


logger = logging.getLogger(__name__)

TARGET_FORMATS = ("shardstore", "safetensors", "dcp")
DEFAULT_MEMORY_BUDGET = 512 * 1024 * 1024
DEFAULT_FILE_BYTES = 5 * 1000**3
SLAB_BYTES = 1024 * 1024
_MISSING = object()


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
    progress: Callable[[Progress], None] | Literal["bar"] | None = None,
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
        progress: called now and then with how far it is, from this thread; or ``"bar"``.
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
    place = Location.given(source, source_options)
    goal = Location.given(target, target_options)
    require_apart(place, goal)
    found = source_format or detect(place)
    wanted = _target_format(goal, target_format)
    beside = _beside(goal)
    _check_free(goal, wanted, overwrite)
    about = {"source": place.url, "source_format": found, "target_format": wanted}
    log_event(logger, "convert_begin", f"{goal.url}: converting", url=goal.url, **about)
    started = perf_counter()
    opened = open_source(place, found)
    work = beside.child(f".{goal.name}.convert")
    journal = Journal(beside, f".{goal.name}.convert.journal")
    head = {
        "source": place.url,
        "formats": [found, wanted],
        "identity": opened.identity(),
        "memory_budget": memory_budget,
        "file_bytes": file_bytes,
    }
    built: Target
    # Where a result is verified, two buffers of a batch exist at a time.
    batch_bytes = max(1, memory_budget // 2)
    if wanted == "shardstore":
        built = ShardstoreTarget(
            work, goal, source=found, overwrite=overwrite, budget_bytes=batch_bytes
        )
    elif wanted == "safetensors" and goal.is_local:
        built = SafetensorsTarget(work, goal, file_bytes=file_bytes)
    elif wanted == "safetensors":
        built = SafetensorsObjects(work, goal, file_bytes=file_bytes, budget_bytes=batch_bytes)
    else:
        from shardstore.convert.dcp_target import DcpObjects, DcpTarget  # torch's own format

        built = DcpTarget(work, goal) if goal.is_local else DcpObjects(goal)
    with callback_of(progress, goal.url) as told:
        run = _Run(opened, built, batch_bytes, told)
        try:
            if wanted != "shardstore" and not goal.is_local and not journal.exists():
                _check_empty(goal)
            resumed = run.write(journal, _begun(built, journal, head, resume))
            read = built.reader()
            if verify:
                run.compare(read, place.url, goal.url)
                # Opened anew: what the first one has read it may have kept.
                again = open_source(place, found).extras()
                between = (place.url, goal.url)
                compare_values(again, built.written(), plain=built.plain, between=between)
            built.publish()
        except BaseException:
            built.stop()
            raise
    journal.remove()
    done = Conversion(found, wanted, len(run.arrays), run.total_bytes, resumed, verify)
    _log_end(goal, about, done, perf_counter() - started)
    return done


def _log_end(goal: Location, about: Mapping[str, str], done: Conversion, seconds: float) -> None:
    log_event(
        logger,
        "convert",
        f"{goal.url}: converted, {done.total_bytes} bytes in {seconds:.3f} s",
        url=goal.url,
        **about,
        tensors=done.tensors,
        bytes=done.total_bytes,
        resumed_bytes=done.resumed_bytes,
        seconds=seconds,
        verified=done.verified,
    )


def _begun(built: Target, journal: Journal, head: dict[str, Any], resume: bool) -> Receipts:
    """What an earlier run wrote that this one goes on with; nothing where it begins anew."""
    known = journal.open(head)
    if resume and known is not None and built.resume(known[1]):
        return known[0]
    journal.start(head, built.start())
    return {}


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


def _check_free(target: Location, wanted: str, overwrite: bool) -> None:
    if target.is_local:
        taken = target.exists() and not (target.is_dir() and not target.listing())
    elif wanted == "shardstore":
        taken = is_checkpoint(target)
    else:
        # Files of an earlier run may be there already; what makes them a checkpoint may not.
        names = target.listing()
        taken = any(name == DCP_METADATA_NAME or name.endswith(INDEX_SUFFIX) for name in names)
        taken = taken or (is_file_name(target.name) and target.exists())
    if not taken or (overwrite and wanted == "shardstore" and is_checkpoint(target)):
        return
    raise _exists(target, wanted)


def _check_empty(target: Location) -> None:
    """Nothing at all may be where objects are written side by side that no attempt fences off."""
    names = target.listing()
    if names:
        raise CheckpointExistsError(
            f"{target.url} already holds {', '.join(names[:4])}; convert to elsewhere",
            url=target.url,
        )


def _exists(target: Location, wanted: str) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"{target.url} already exists; convert to elsewhere"
        + (
            ", or pass overwrite=True (--overwrite) to replace a checkpoint"
            if wanted == "shardstore"
            else ""
        ),
        url=target.url,
    )


class _Run:
    """The chunks of a conversion, in batches within the budget."""

    def __init__(
        self,
        source: Source,
        target: Target,
        batch_bytes: int,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._source, self._target = source, target
        self._progress = progress
        self._batch_bytes = batch_bytes
        self.arrays = [
            target.array(meta, source.boxes(key), self._batch_bytes)
            for key, meta in sorted(source.arrays.items())
        ]
        self.total_bytes = sum(_chunk_bytes(a, i) for a in self.arrays for i in _chunks(a))

    def write(self, journal: Journal, receipts: Receipts) -> int:
        """Write what is not written yet. Returns the bytes that were."""
        self._target.begin(self.arrays, self._source.extras())
        resumed = 0
        left: list[tuple[ArrayMeta, int]] = []
        for array in self.arrays:
            for i in _chunks(array):
                known = receipts.get((array.key, i), _MISSING)
                index = array.grid.index(i)
                if known is not _MISSING and self._target.has(array, index, known):
                    self._target.restore(array, index, known)
                    resumed += _chunk_bytes(array, i)
                else:
                    left.append((array, i))
        done = resumed
        for batch in self._batches(left):
            # In a function of its own: nothing of a batch is left when the next one begins.
            done += self._write_batch(batch, journal)
            self._report("write", done, batch[-1][0].key)
        return resumed

    def _write_batch(self, batch: Sequence[tuple[ArrayMeta, int]], journal: Journal) -> int:
        chunks = self._read(batch)
        receipts = self._target.write(chunks)
        places = zip(batch, receipts, strict=True)
        journal.add([(array.key, i, receipt) for (array, i), receipt in places])
        return sum(chunk.data.nbytes for chunk in chunks)

    def compare(
        self, read: Callable[[Sequence[RegionRead]], None], source: str, target: str
    ) -> None:
        """Compare what was written with the source.

        Raises:
            DamagedCheckpointError: they differ.
        """
        done = 0
        for batch in self._batches([(a, i) for a in self.arrays for i in _chunks(a)]):
            done += self._compare_batch(batch, read, source, target)
            self._report("verify", done, batch[-1][0].key)

    def _compare_batch(
        self,
        batch: Sequence[tuple[ArrayMeta, int]],
        read: Callable[[Sequence[RegionRead]], None],
        source: str,
        target: str,
    ) -> int:
        chunks = self._read(batch)
        copies = [Written(c.array, c.index, np.empty_like(c.data)) for c in chunks]
        read([RegionRead(c.array, c.array.grid.box(c.index), c.data) for c in copies])
        for chunk, copy in zip(chunks, copies, strict=True):
            if not _equal(as_bytes(chunk.data), as_bytes(copy.data)):
                raise DamagedCheckpointError(
                    f"chunk {chunk.index} of key {chunk.array.key!r} differs between {source} "
                    f"and what was written for {target}; nothing was put there. Convert again "
                    "with resume=False (--no-resume), and check the disk",
                    key=chunk.array.key,
                    chunk=chunk.index,
                    url=target,
                )
        return sum(chunk.data.nbytes for chunk in chunks)

    def _read(self, batch: Sequence[tuple[ArrayMeta, int]]) -> list[Written]:
        chunks = []
        reads = []
        for array, i in batch:
            index = array.grid.index(i)
            box = array.grid.box(index)
            data = np.empty(box.shape, dtypes.numpy_dtype(array.dtype))
            chunks.append(Written(array, index, data))
            reads.append(RegionRead(self._source.arrays[array.key], box, data))
        self._source.read(reads)
        return chunks

    def _batches(
        self, chunks: Sequence[tuple[ArrayMeta, int]]
    ) -> Iterator[list[tuple[ArrayMeta, int]]]:
        batch: list[tuple[ArrayMeta, int]] = []
        size = 0
        for array, i in chunks:
            nbytes = _chunk_bytes(array, i)
            if batch and size + nbytes > self._batch_bytes:
                yield batch
                batch, size = [], 0
            batch.append((array, i))
            size += nbytes
        if batch:
            yield batch

    def _report(self, stage: str, done: int, key: str) -> None:
        if self._progress is not None:
            self._progress(Progress(stage, done, self.total_bytes, key))


def _equal(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> bool:
    """Compared in slabs: a comparison of NumPy makes an array of its own."""
    slabs = range(0, len(a), SLAB_BYTES)
    return all(np.array_equal(a[i : i + SLAB_BYTES], b[i : i + SLAB_BYTES]) for i in slabs)


def _chunks(array: ArrayMeta) -> range:
    return range(array.grid.size)


def _chunk_bytes(array: ArrayMeta, i: int) -> int:
    return array.grid.box(array.grid.index(i)).size * dtypes.itemsize(array.dtype)
