"""Conversion between checkpoint formats: without ranks, piece by piece, resumable, verified.

Tensors pass through buffers of bounded size. The conversion writes beside the target, or in an
object store to a prefix without a commit, and keeps a journal. After a crash, the next call
continues from the journal. Before the result takes its place, it is read back and compared with the
source bit for bit. torch is imported only for formats and values of torch.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardstore.convert.formats import Read, Receipts, ShardstoreTarget, ZarrSource
from shardstore.convert.safetensors import SafetensorsSource, SafetensorsTarget, WithPlainTensors
from shardstore.core import maybe_load_config
from shardstore.errors import ArgumentError, DamagedCheckpointError, NotACheckpointError
from shardstore.hf.files import by_alignment, has_listing, is_file_name
from shardstore.hf.urls import locate
from shardstore.progress import Operation, ProgressArgument, callback_of, log_event, metered
from shardstore.storage.checkpoint import settled
from shardstore.storage.commit.identity import TORCH_NAMES, has_dcp_metadata, instead, what_else
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.names import DCP_METADATA_NAME, MODEL_COMMITS
from shardstore.storage.movers.chunk_bytes import as_bytes
from shardstore.storage.movers.chunks import ChunkWrite, RegionRead
from shardstore.storage.options import require_bool, require_number
from shardstore.storage.runtime.parallel import in_rounds
from shardstore.storage.stores.location import Location

if TYPE_CHECKING:
    from shardstore.convert import dcp  # imports torch

logger = logging.getLogger(__name__)

AnySource: TypeAlias = "ZarrSource | SafetensorsSource | dcp.DcpSource | WithPlainTensors"
AnyTarget: TypeAlias = "ShardstoreTarget | SafetensorsTarget | dcp.DcpTarget"
FORMATS = ("shardstore", "megatron-zarr", "torch_dist", "dcp", "safetensors", "zarr")
TARGET_FORMATS = ("shardstore", "safetensors", "dcp", "megatron")
DEFAULT_MEMORY_BUDGET = 512 * 1024 * 1024
DEFAULT_FILE_BYTES = 5 * 1000**3
MOST_CHUNKS = 4 * 1024 * 1024
SLAB_BYTES = 1024 * 1024
SHOWN = 8
_Chunk = tuple[ArrayMeta, tuple[int, ...]]
"""An array of the target, and the index of a chunk of it."""

ROOTS = ("zarr.json", *MODEL_COMMITS)
"""Files that are looked for on a web server, which lists none."""


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion.

    Attributes:
        source_format: format of the source.
        target_format: format of the target.
        tensors: number of tensors.
        total_bytes: bytes of all tensors.
        resumed_bytes: bytes of these that an earlier run wrote.
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
    progress: ProgressArgument = None,
    overwrite: bool = False,
    resume: bool = True,
    verify: bool = True,
    file_bytes: int = DEFAULT_FILE_BYTES,
    source_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
) -> Conversion:
    """Convert a checkpoint to another format. One process calls it; it needs no ranks.

    Args:
        source: path or URL of a folder, a safetensors file or its index, see
            :func:`shardstore.hf.load` for models of the Hub and of web servers.
        target: path or URL of a folder, or of a file ``NAME.safetensors``.
        source_format: one of :data:`FORMATS`; default: detected.
        target_format: one of :data:`TARGET_FORMATS`; default: safetensors for a target named
            ``*.safetensors``, else shardstore.
        memory_budget: largest number of bytes of tensors in memory (but at least one chunk).
        progress: called with a :class:`shardstore.progress.Progress`; or ``"bar"``. The operation
            is ``"convert"``, and then ``"verify"``.
        overwrite: replace a checkpoint at the target (only for the target format shardstore).
        resume: continue an interrupted conversion of the same source.
        verify: read the result back and compare it with the source, bit for bit, before it takes
            its place: tensors, common values and sharded objects.
        file_bytes: approximate size of each of several safetensors files.
        source_options: storage options of the source.
        target_options: storage options of the target.

    Returns:
        Formats, numbers of tensors and bytes, and whether the result was verified.

    Raises:
        NotACheckpointError, DamagedCheckpointError: the source is missing or incomplete.
        CheckpointExistsError: the target exists.
        ArgumentError: the target is the source, or one of them is inside of the other.
        DTypeMismatchError: the target's format lacks a data type.
        UnsafeObjectError: a pickled class of the source is not allowed.
        StorageError: a disk or a store failed. The next run continues the work.
    """
    for name, flag in (("overwrite", overwrite), ("resume", resume), ("verify", verify)):
        require_bool(name, flag)
    for name, number in (("memory_budget", memory_budget), ("file_bytes", file_bytes)):
        require_number(name, number)
    callback_of(progress, shows=False)
    place = settled(locate(source, source_options))
    output = Location.of(target, target_options)
    _require_apart(place, output)
    if (beside := output.parent()) is None:
        raise output.error(" is a whole store: name a folder in it as the target", ArgumentError)
    found = source_format or detect(place)
    if target_format is None and output.name.endswith(TORCH_NAMES):
        text = " is named as a file of torch.save, which is not written: name a folder or a file "
        text += "NAME.safetensors, or give target_format='shardstore' for a folder of this name"
        raise output.error(text, ArgumentError)
    by_name = "safetensors" if output.name.endswith(".safetensors") else "shardstore"
    wanted = target_format or by_name
    formats = ("source_format", found, FORMATS), ("target_format", wanted, TARGET_FORMATS)
    for option, given, known_formats in formats:
        if given not in known_formats:
            raise ArgumentError(f"{option}={given!r} is not one of {', '.join(known_formats)}")
    # Verification needs two buffers of a batch at a time.
    batch_bytes = max(1, memory_budget // 2)
    work = beside.child(f".{output.name}.convert")
    built: AnyTarget
    if wanted == "shardstore":
        built = ShardstoreTarget(output, found, overwrite, batch_bytes)
    elif wanted == "safetensors":
        built = SafetensorsTarget(work, output, file_bytes, batch_bytes)
    else:
        from shardstore.convert.dcp import DcpTarget, MegatronTarget  # imports torch

        built = (DcpTarget if wanted == "dcp" else MegatronTarget)(work, output)
    about = {"source": place.url, "source_format": found, "target_format": wanted}
    log_event(logger, "convert_begin", f"{output.url}: converting", url=output.url, **about)
    started = perf_counter()
    opened: AnySource = open_source(place, found)
    if wanted in ("safetensors", "dcp"):
        opened = WithPlainTensors(opened)
    if left_out := opened.left_out:
        shown, count = ", ".join(map(repr, left_out[:SHOWN])), len(left_out)
        why = "the index leaves out" if found == "safetensors" else "this version does not read"
        text = f"{why} {count} tensor(s), which are not converted: {shown}"
        logger.warning(f"{place.url}: {text}")
    stages = _Stages(place, output, opened, built, batch_bytes, progress)
    stamps = [opened.location.stamp(name) for name in opened.roots]
    same = [about, stamps, int(memory_budget), int(file_bytes), "by alignment"]
    journal = _Journal(beside.child(f".{output.name}.convert.journal"), json.dumps(same))
    resumed = stages.run(journal, resume=resume, verify_as=found if verify else None)
    seconds, total, count = perf_counter() - started, stages.total, len(stages.arrays)
    done = {"tensors": count, "bytes": total, "resumed_bytes": resumed, "verified": verify}
    text = f"{output.url}: converted, {total} bytes in {seconds:.3f} s"
    log_event(logger, "convert", text, url=output.url, **about, **done, seconds=seconds)
    return Conversion(found, wanted, count, total, resumed, verify)


@dataclass
class _Stages:
    """The stages of a conversion: write every chunk, compare them with the source, publish.

    Attributes:
        place: location of the source.
        output: location of the target.
        source: the source.
        target: the target.
        batch_bytes: bytes of the chunks that are in memory together.
        progress: see :func:`convert`.
        arrays: the arrays of the target.
        total: bytes of their chunks.

    Raises:
        DamagedCheckpointError: the source describes too many chunks.
    """

    place: Location
    output: Location
    source: AnySource
    target: AnyTarget
    batch_bytes: int
    progress: ProgressArgument

    def __post_init__(self) -> None:
        source, target = self.source, self.target
        self._sources = {target.key_of(key): meta for key, meta in source.arrays.items()}
        self.arrays = [
            target.array(replace(meta, key=key), source.boxes(meta.key), self.batch_bytes)
            for key, meta in sorted(
                self._sources.items(), key=lambda item: (by_alignment(item[1]), item[0])
            )
        ]
        if (count := sum(array.grid.size for array in self.arrays)) > MOST_CHUNKS:
            raise self.place.error(
                f" describes arrays of {count} chunks, more than the {MOST_CHUNKS} that a "
                "conversion takes: its documents are damaged, or its chunks are much too small",
                DamagedCheckpointError,
            )
        self._chunks: list[_Chunk] = [
            (array, array.grid.index_at(i)) for array in self.arrays for i in range(array.grid.size)
        ]
        self.total = sum(map(_chunk_bytes, self._chunks))

    def run(self, journal: _Journal, *, resume: bool, verify_as: str | None) -> int:
        """Do all stages. Delete the journal at the end.

        Args:
            journal: the journal.
            resume: whether to continue an interrupted conversion.
            verify_as: format of the source, if the target is to be compared with it.

        Returns:
            Bytes that an earlier run wrote.
        """
        target = self.target
        target.prepare(self.arrays, self.source.rest())
        try:
            state, known = journal.open()
            if not resume or known is None or not target.resume(state):
                journal.start(target.start(state))
                known = {}
            receipts = target.begin(known)
            left = [one for one in self._chunks if (one[0].key, one[1]) not in receipts]
            self._each("convert", left, partial(self._write, journal, receipts))
            read_copy = target.finish(receipts)
            if verify_as is not None:
                self._each("verify", self._chunks, partial(self._compare, read_copy))
                # Open the source anew, because the first object may have cached what it read.
                anew = open_source(self.place, verify_as)
                for what, expected, stored in target.documents(anew.rest()):
                    if expected != stored:
                        raise _differs(f"the content of {what!r}", self.place, self.output)
            target.publish()
        except BaseException:
            target.stop()
            raise
        journal.place.delete()
        return self.total - sum(map(_chunk_bytes, left))

    def _each(
        self, operation: Operation, left: Sequence[_Chunk], work: Callable[[list[ChunkWrite]], None]
    ) -> None:
        """Read chunks from the source, batch by batch, and do the work of a stage with them."""
        with metered(operation, self.output.url, self.progress) as meter:
            meter.tell("move", bytes_total=self.total, chunks_total=len(left))
            meter.count(self.total - sum(map(_chunk_bytes, left)), 0)
            for batch in in_rounds(left, _chunk_bytes, self.batch_bytes):
                work(_read(batch, self.source.read, self._sources))
                meter.count(sum(map(_chunk_bytes, batch)), len(batch))

    def _write(self, journal: _Journal, receipts: Receipts, batch: list[ChunkWrite]) -> None:
        """Write a batch to the target, and its receipts to the journal."""
        places = [(chunk.array.key, chunk.index) for chunk in batch]
        written = dict(zip(places, self.target.write(batch), strict=True))
        journal.add([(*place, receipt) for place, receipt in written.items()])
        receipts.update(written)

    def _compare(self, read_copy: Read, batch: list[ChunkWrite]) -> None:
        """Compare a batch of the source with what the target holds, bit for bit."""
        copies = _read([(chunk.array, chunk.index) for chunk in batch], read_copy)
        for chunk, copy in zip(batch, copies, strict=True):
            if not _equal(as_bytes(chunk.data()), as_bytes(copy.data())):
                what = f"chunk {chunk.index} of key {chunk.array.key!r}"
                about = {"key": chunk.array.key, "chunk": chunk.index}
                raise _differs(what, self.place, self.output, **about)


def detect(place: Location) -> str:
    """Return the format of the checkpoint at a place.

    Raises:
        NotACheckpointError: there is no checkpoint of a known format.
        StorageError: the store failed.
    """
    if is_file_name(place.name) or place.is_file():
        return "safetensors"
    listed = has_listing(place)  # else a read tells why a server gives no file
    names = place.listing() if listed else [n for n in ROOTS if place.read_range(n, 0, 1)]
    if not names and not place.is_dir():
        what = " does not exist" if listed else f" holds none of {', '.join(ROOTS)}"
        raise place.error(what, NotACheckpointError)
    config = maybe_load_config(place.place)
    if config is not None and config.sharded_backend == "torch_dist":
        return "torch_dist"
    if DCP_METADATA_NAME in names and has_dcp_metadata(place):  # it wrote last
        return "dcp"
    if "zarr.json" in names:
        return "shardstore" if config is not None or what_else(place) is None else "zarr"
    if config is not None:
        return "megatron-zarr"
    if DCP_METADATA_NAME in names:
        return "dcp"
    if not {".zgroup", ".zarray"}.isdisjoint(names):
        return "zarr"
    if any(is_file_name(name) for name in names):
        return "safetensors"
    found = instead(place) or f"it has none of the formats {', '.join(FORMATS)}"
    raise place.error(f" is not a checkpoint: {found}", NotACheckpointError)


def open_source(place: Location, source_format: str) -> AnySource:
    """Open a checkpoint of one of :data:`FORMATS` for reading.

    Raises:
        NotACheckpointError, DamagedCheckpointError: the place holds no checkpoint of that format,
            or a damaged one.
    """
    if source_format in ("torch_dist", "dcp"):
        from shardstore.convert.dcp import DcpSource  # imports torch

        return DcpSource.open(place)
    return SafetensorsSource.open(place) if source_format == "safetensors" else ZarrSource(place)


def _require_apart(source: Location, target: Location) -> None:
    """Raise :class:`ArgumentError` if source and target are the same or one lies inside the other,
    also through links."""
    is_inside, is_around = target.is_within(source), source.is_within(target)
    if is_inside or is_around:
        where = "lies inside the source" if is_inside else "holds the source"
        where = "is the source itself" if is_inside and is_around else where
        raise ArgumentError(
            f"the target {target.url} {where} {source.url}: nothing was converted; convert to a "
            "folder beside the source",
            url=target.url,
        )


class _Journal:
    """Journal of the chunks that a conversion has written, so that a later run can continue.

    It consists of one document for each batch.

    Args:
        place: folder of the documents.
        same: JSON text that identifies the conversion.
    """

    def __init__(self, place: Location, same: str) -> None:
        self.place, self._same, self._count = place, same, 0

    def open(self) -> tuple[Any, Receipts | None]:
        """Return the target's state of an earlier run, and the receipts of its chunks.

        The state is ``None`` if there is no journal. The receipts are ``None`` if there is no
        journal, or it belongs to another conversion.
        """
        documents: list[Any] = []
        with suppress(ValueError, RecursionError):  # the last one was cut short
            for name in self.place.listing():
                documents.append(json.loads(self.place.read(name)))
        self._count = len(documents)
        with suppress(ValueError, TypeError, IndexError):  # no journal, or another program's files
            same, state = documents[0]
            rows = [row for document in documents[1:] for row in document]
            found = {(key, tuple(index)): receipt for key, index, receipt in rows}
            return state, found if same == self._same else None
        return None, None

    def start(self, state: Any) -> None:
        """Begin an empty journal."""
        self.place.delete()
        self._count = 0
        self.add([self._same, state])

    def add(self, document: Any) -> None:
        """Add a document: key, index and receipt of each chunk of a batch.

        Raises:
            StorageError: the store failed.
        """
        self.place.write(f"{self._count:08d}.json", json.dumps(document).encode())
        self._count += 1


def _read(
    chunks: Sequence[_Chunk], read: Read, arrays: Mapping[str, ArrayMeta] | None = None
) -> list[ChunkWrite]:
    """Read chunks of the target's grid, by default from the target.

    Args:
        chunks: array and index of each chunk.
        read: reads regions, from the source or the target.
        arrays: arrays of the source by the target's keys, if ``read`` reads from the source.
    """
    out, reads = [], []
    for array, index in chunks:
        box = array.grid.box(index)
        data = np.empty(box.shape, dtypes.numpy_dtype(array.dtype))
        out.append(ChunkWrite(array, index, data))
        reads.append(RegionRead(arrays[array.key] if arrays else array, box, data))
    read(reads)
    return out


def _chunk_bytes(chunk: _Chunk) -> int:
    array, index = chunk
    return array.grid.box(index).size * dtypes.itemsize(array.dtype)


def _equal(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> bool:
    """Return whether two arrays are equal. Compare in slabs, because NumPy allocates the result."""
    slabs = range(0, len(a), SLAB_BYTES)
    return all(np.array_equal(a[i : i + SLAB_BYTES], b[i : i + SLAB_BYTES]) for i in slabs)


def _differs(what: str, source: Location, target: Location, **about: Any) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"{what} differs between {source.url} and the copy written for {target.url}; the target "
        "was not changed. Convert again with resume=False (--no-resume), and check the disk",
        url=target.url,
        **about,
    )
