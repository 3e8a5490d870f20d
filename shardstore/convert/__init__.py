"""Conversion between checkpoint formats: without ranks, piece by piece, resumable, verified.

Tensors go through buffers of a bounded size and never exist as a whole. What is written lies in a
work folder beside the target, with a journal of what is done; a conversion that died goes on from
there when it is started again. Before the result takes its place it is read back and compared with
the source to the bit.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardstore.convert.sources import FORMATS, Source, detect, open_source
from shardstore.convert.targets import (
    DcpTarget,
    SafetensorsTarget,
    ShardstoreTarget,
    Target,
    Written,
)
from shardstore.errors import CheckpointExistsError, CheckpointingException, DamagedCheckpointError
from shardstore.storage import dtypes
from shardstore.storage.chunks import RegionRead, as_bytes
from shardstore.storage.commit import is_checkpoint
from shardstore.storage.documents import ArrayMeta
from shardstore.storage.location import Location

__all__ = ["FORMATS", "TARGET_FORMATS", "Conversion", "Progress", "convert", "detect"]

TARGET_FORMATS = ("shardstore", "safetensors", "dcp")
DEFAULT_MEMORY_BUDGET = 512 * 1024 * 1024
DEFAULT_FILE_BYTES = 5 * 1000**3
SLAB_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Progress:
    """How far a conversion is.

    Attributes:
        stage: ``"write"`` or ``"verify"``.
        done_bytes: of the tensors, in this stage; what an earlier run did counts.
        total_bytes: of all tensors.
        key: tensor that was dealt with last.
    """

    stage: str
    done_bytes: int
    total_bytes: int
    key: str


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
    progress: Callable[[Progress], None] | None = None,
    overwrite: bool = False,
    resume: bool = True,
    verify: bool = True,
    file_bytes: int = DEFAULT_FILE_BYTES,
) -> Conversion:
    """Convert a checkpoint. Called by one process; it needs no ranks.

    Args:
        source: a checkpoint: a folder, a safetensors file or its index. Local.
        target: where to: a folder, or for safetensors a file ``NAME.safetensors``. Local.
        source_format: one of :data:`FORMATS`; default: what it looks like.
        target_format: one of :data:`TARGET_FORMATS`; default: safetensors for a target of such a
            name, else shardstore.
        memory_budget: bytes of tensors in memory at a time, at most; at least one chunk is.
        progress: called now and then with how far it is, from this thread.
        overwrite: replace a checkpoint at the target (shardstore only).
        resume: go on with a conversion of the same source that died.
        verify: read the result back and compare it with the source before it takes its place.
        file_bytes: size of each of several safetensors files, about.

    Returns:
        What was done.

    Raises:
        NotACheckpointError, DamagedCheckpointError: the source is not there, or not whole.
        CheckpointExistsError: something is at the target.
        DTypeMismatchError: the target's format lacks a data type.
        UnsafeObjectError: an object of the source needs a class that was not allowed.
        StorageError: the disk refused. What was done is kept for the next run.
    """
    if memory_budget < 1:
        raise CheckpointingException(f"memory_budget={memory_budget} must be at least 1 byte")
    place, goal = _local(source), _local(target)
    found = source_format or detect(place)
    wanted = _target_format(goal, target_format)
    _check_free(goal, wanted, overwrite)
    opened = open_source(place, found)
    work = goal.parent / f".{goal.name}.convert"
    journal = _Journal(goal.parent / f".{goal.name}.convert.journal")
    head = {
        "source": str(place),
        "formats": [found, wanted],
        "identity": opened.identity(),
        "memory_budget": memory_budget,
        "file_bytes": file_bytes,
    }
    receipts = journal.open(head) if resume and work.is_dir() else {}
    if not receipts:
        shutil.rmtree(work, ignore_errors=True)
        journal.start(head)
    work.mkdir(parents=True, exist_ok=True)
    built: Target
    if wanted == "shardstore":
        built = ShardstoreTarget(work, goal, overwrite=overwrite, source=found)
    elif wanted == "safetensors":
        built = SafetensorsTarget(work, goal, file_bytes=file_bytes)
    else:
        built = DcpTarget(work, goal)
    run = _Run(opened, built, memory_budget, progress)
    resumed = run.write(journal, receipts)
    read = built.reader()
    if verify:
        run.compare(read, str(place), str(goal))
    built.publish()
    journal.remove()
    return Conversion(found, wanted, len(run.arrays), run.total_bytes, resumed, verify)


def _local(place: str | os.PathLike[str]) -> Path:
    location = Location.of(place)
    location.require_local("converting")
    return location.path


def _target_format(target: Path, given: str | None) -> str:
    wanted = given or ("safetensors" if target.name.endswith(".safetensors") else "shardstore")
    if wanted not in TARGET_FORMATS:
        raise CheckpointingException(
            f"target_format={wanted!r} is not one of {', '.join(TARGET_FORMATS)}"
        )
    return wanted


def _check_free(target: Path, wanted: str, overwrite: bool) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if overwrite and wanted == "shardstore" and is_checkpoint(Location.of(target)):
        return
    raise CheckpointExistsError(
        f"{target} already exists; convert to elsewhere"
        + (
            ", or pass overwrite=True (--overwrite) to replace a checkpoint"
            if wanted == "shardstore"
            else ""
        ),
        url=str(target),
    )


class _Journal:
    """What is done, line by line; a last line that was cut short does not count."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self, head: dict[str, Any]) -> dict[tuple[str, int], Any]:
        """Receipts of an earlier run of the same conversion, by key and position of the chunk."""
        try:
            lines = self._path.read_bytes().split(b"\n")[:-1]
            if not lines or json.loads(lines[0]) != json.loads(json.dumps(head)):
                return {}
            rows = [json.loads(line) for line in lines[1:]]
            found = {(str(key), int(chunk)): receipt for row in rows for key, chunk, receipt in row}
        except (OSError, ValueError, TypeError):
            return {}
        size = sum(len(line) + 1 for line in lines)
        os.truncate(self._path, size)
        return found

    def start(self, head: dict[str, Any]) -> None:
        """A journal with nothing done."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(head) + "\n")

    def add(self, rows: Sequence[tuple[str, int, Any]]) -> None:
        """Note chunks that are written."""
        with open(self._path, "a") as file:
            file.write(json.dumps(rows) + "\n")

    def remove(self) -> None:
        """The conversion is complete."""
        self._path.unlink(missing_ok=True)


class _Run:
    """The chunks of a conversion, in batches within the budget."""

    def __init__(
        self,
        source: Source,
        target: Target,
        memory_budget: int,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._source, self._target = source, target
        self._progress = progress
        # Where a result is verified, two buffers of a batch exist at a time.
        self._batch_bytes = max(1, memory_budget // 2)
        self.arrays = [
            target.array(meta, source.boxes(key), self._batch_bytes)
            for key, meta in sorted(source.arrays.items())
        ]
        self.total_bytes = sum(_chunk_bytes(a, i) for a in self.arrays for i in _chunks(a))

    def write(self, journal: _Journal, receipts: dict[tuple[str, int], Any]) -> int:
        """Write what is not written yet. Returns the bytes that were."""
        self._target.begin(self.arrays, self._source.extras())
        resumed = 0
        left: list[tuple[ArrayMeta, int]] = []
        for array in self.arrays:
            for i in _chunks(array):
                if (array.key, i) in receipts:
                    self._target.restore(array, array.grid.index(i), receipts[array.key, i])
                    resumed += _chunk_bytes(array, i)
                else:
                    left.append((array, i))
        done = resumed
        for batch in self._batches(left):
            # In a function of its own: nothing of a batch is left when the next one begins.
            done += self._write_batch(batch, journal)
            self._report("write", done, batch[-1][0].key)
        return resumed

    def _write_batch(self, batch: Sequence[tuple[ArrayMeta, int]], journal: _Journal) -> int:
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
                    "with resume=False, and check the disk",
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
