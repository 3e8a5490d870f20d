"""Verifies a stored checkpoint: every chunk, every document, every file that should be there.

Answers for what is wrong with the files of one checkpoint, in parallel and without torch: checksums
of all chunks, array documents against the root's copy, files that are missing or do not belong,
checksums inside ``common.pt`` and the sharded objects. Damage is reported, not raised, so that one
run finds all of it. It does not know what to do about it.
"""

from __future__ import annotations

import json
import logging
import resource
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from time import perf_counter
from typing import Any

from shardstore.errors import CheckpointingException, DamagedCheckpointError
from shardstore.events import log_event
from shardstore.storage import documents
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.chunk_check import ChunkChecker, free_memory
from shardstore.storage.documents import ArrayMeta
from shardstore.storage.findings import Finding, Severity, Verified
from shardstore.storage.grid import Box
from shardstore.storage.location import Location
from shardstore.storage.manifest import MANIFEST_NAME, Manifest
from shardstore.storage.names import key_of
from shardstore.storage.object_files import beside_arrays, object_place
from shardstore.storage.parallel import default_threads, run_batched
from shardstore.storage.small_arrays import SMALL_CHUNK_BYTES, SmallArrays, document_texts
from shardstore.storage.torch_archive import verify_archive

__all__ = ["Finding", "Verified", "verify"]

logger = logging.getLogger(__name__)

BATCH_BYTES = 64 * 1024 * 1024
RUN_BYTES = 32 * 1024 * 1024
"""Chunks of one array are shared out to the threads in runs of about this size."""
RUN_CHUNKS = 256
SMALL_BATCH = 256
SHOWN_OBJECTS = 10
"""Of one key that are missing; a name alone can claim a grid of any size."""
REMOTE_THREADS = 16


def verify(
    stored: StoredCheckpoint,
    found: Callable[[Finding], None],
    *,
    keys: Sequence[str] = (),
    hashes: bool = False,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Verified:
    """Verify a checkpoint. One process calls it; it changes nothing.

    Args:
        stored: the checkpoint.
        found: called for each finding, from any thread, one call at a time.
        keys: patterns (``fnmatch``) of the keys to look at; all, and foreign files too, if empty.
        hashes: compare the 128-bit hashes of the manifest beside the checksums.
        threads: threads that read; default: one a processor, more where the store is far away.
        progress: called with ``(bytes done, bytes in all)``, one call at a time.

    Raises:
        NotACheckpointError: nothing like a checkpoint is there.
        StorageError: the store refused to list it.
    """
    url = stored.location.url
    log_event(logger, "verify_begin", f"{url}: verifying", url=url)
    result = _Verification(stored, found, keys, hashes, threads, progress).run()
    about = {name: n for name, n in result.as_dict().items() if name not in ("ok", "unchecked")}
    state = "sound" if result.ok else f"{result.damage} finding(s) of damage"
    log_event(logger, "verify", f"{url}: verified, {state}", url=url, **about)
    return result


@dataclass(frozen=True, slots=True)
class _Run:
    """Some consecutive chunks of an array, and with the first of them its document and folder."""

    array: ArrayMeta
    first: int
    last: int
    weight: int
    is_all: bool


@dataclass
class _Proved:
    """What the small arrays of a batch come to: one lock for all of them."""

    chunks: int = 0
    bytes: int = 0
    weight: int = 0


class _Verification:
    def __init__(
        self,
        stored: StoredCheckpoint,
        found: Callable[[Finding], None],
        keys: Sequence[str],
        hashes: bool,
        threads: int | None,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.stored = stored
        self.location = stored.location
        self.threads = threads or (default_threads() if self.location.is_local else REMOTE_THREADS)
        self.result = Verified()
        self._found = found
        self._keys = keys
        self._hashes = hashes
        self._progress = progress
        self._lock = threading.Lock()
        self._done = self._total = 0
        self._manifest: Manifest | None = None
        self._consolidated: dict[str, dict[str, Any]] = {}
        # Other backends keep what is not sharded elsewhere: ("json", 1) in the root document.
        self._common_backend: object = "torch"
        self._small: SmallArrays | None = None
        # All names of an object store's checkpoint, in order: one listing, not one an array.
        self._listed: list[str] | None = None

    def run(self) -> Verified:
        start = perf_counter()
        top = self.location.listing()
        if not {"zarr.json", "metadata.json"} & set(top):
            self.stored.require()
        arrays = self._arrays(top)
        self._config(top)
        self._manifest = self._read_manifest(arrays)
        self._checker = ChunkChecker(self.stored, self._manifest, hashes=self._hashes)
        if not self.location.is_local:
            self._listed = self.location.remote.walk()
        self._whole_files(top, {meta.node.split("/")[0] for meta in arrays})
        wanted = [meta for meta in arrays if self._wants(meta.key)]
        self.result.arrays = len(wanted)
        runs = [run for meta in wanted for run in _runs(meta)]
        self._total = sum(run.weight for run in runs)
        run_batched(
            self._small_ones(runs),
            self._work,
            threads=self.threads,
            weight=lambda run: run.weight,
            batch_weight=BATCH_BYTES if self.location.is_local else 1,
            batch_items=64 if self.location.is_local else 1,
        )
        self.result.seconds = perf_counter() - start
        return self.result

    # -- what there is ------------------------------------------------------------------------

    def _arrays(self, top: Sequence[str]) -> list[ArrayMeta]:
        """All arrays; from their own documents where the root's can not be used."""
        try:
            if self.stored.root is not None:
                self._consolidated = self.stored.root.documents
                return list(self.stored.arrays.values())
        except CheckpointingException as error:
            self._report("root-damaged", str(error), "zarr.json")
            return self._arrays_alone(top)
        if "manifest.npz" in top:
            self._report(
                "root-missing",
                f"{self.location.url}/zarr.json is missing: without it the checkpoint does not "
                "open",
                "zarr.json",
            )
            return self._arrays_alone(top)
        return list(self.stored.arrays.values())

    def _arrays_alone(self, top: Sequence[str]) -> list[ArrayMeta]:
        found = []
        for node in top:
            url = f"{self.location.url}/{node}/zarr.json"
            try:
                text = self.location.read(f"{node}/zarr.json")
                found.append(documents.parse_array_text(node, text, url))
            except FileNotFoundError:
                continue
            except CheckpointingException as error:
                self._report("document-damaged", str(error), f"{node}/zarr.json", key=key_of(node))
        return found

    def _config(self, top: Sequence[str]) -> None:
        name = "metadata.json"
        path = f"{self.location.url}/{name}"
        if name not in top:
            if self.stored_by_us:
                self._report(
                    "config-missing",
                    f"{path} is missing: load() takes the folder for no checkpoint",
                    name,
                )
            return
        try:
            document = json.loads(self.location.read(name))
            if not isinstance(document, dict) or "sharded_backend" not in document:
                raise ValueError("it names no sharded_backend")
            self._common_backend = document.get("common_backend", "torch")
        except (OSError, ValueError) as error:
            self._report("config-damaged", f"{path} is damaged: {error}", name)

    @property
    def stored_by_us(self) -> bool:
        """Whether the root says that shardstore wrote it (a damaged root counts as ours)."""
        try:
            return self.stored.root is None or self.stored.root.format_version is not None
        except CheckpointingException:
            return True

    def _read_manifest(self, arrays: Sequence[ArrayMeta]) -> Manifest | None:
        path = f"{self.location.url}/{MANIFEST_NAME}"
        try:
            manifest = self.stored.manifest
        except DamagedCheckpointError as error:
            self._report("manifest-damaged", str(error), MANIFEST_NAME)
            return None
        if manifest is None:
            if self._consolidated and self.stored_by_us:
                text = f"{path} is missing: chunks are held against their own checksums alone"
                self._report("manifest-missing", text, MANIFEST_NAME, severity="note")
            return None
        for meta in arrays:
            if not _knows(manifest, meta):
                self._report(
                    "manifest-stale",
                    f"{path} does not know key {meta.key!r} as it is now; another program "
                    "rewrote or added it, and it is held against its own checksums alone",
                    MANIFEST_NAME,
                    severity="note",
                    key=meta.key,
                )
        return manifest

    # -- files that are not chunks -------------------------------------------------------------

    def _whole_files(self, top: Sequence[str], nodes: set[str]) -> None:
        if not self._keys:
            if "common.pt" in top:
                self._check_archive("common.pt", "common-damaged")
            elif self.stored_by_us and self._common_backend == "torch":
                path = f"{self.location.url}/common.pt"
                text = f"{path} is missing: the non-sharded part of the state is gone"
                self._report("common-missing", text, "common.pt")
        for found in beside_arrays(self.location, top, nodes, self._wants):
            self._objects(found.name, found.key, found.objects)
            self._foreign(found.name, found.entries, found.objects)

    def _objects(self, node: str, key: str, names: Sequence[str]) -> None:
        with self._lock:
            self.result.objects += len(names)
        shapes = {place[1] for name in names if (place := object_place(name))}
        for name in names:
            self._check_archive(f"{node}/{name}", "object-damaged", key=key)
        places = {place for name in names if (place := object_place(name))}
        for shape in shapes:
            missing = (index for index in _grid(shape) if (index, shape) not in places)
            for index in islice(missing, SHOWN_OBJECTS):
                name = f"shard_{'.'.join(map(str, index))}_{'.'.join(map(str, shape))}.pt"
                path = f"{self.location.url}/{node}/{name}"
                text = f"object {index} of key {key!r} is missing: {path}"
                self._report("object-missing", text, f"{node}/{name}", key=key)

    def _check_archive(self, name: str, kind: str, key: str | None = None) -> None:
        path = f"{self.location.url}/{name}"
        about = "" if key is None else f" (object of key {key!r})"
        try:
            data = self.location.read(name)
            if not data:
                raise ValueError("it is empty")
            if data[:1] not in (b"P", b"\x80"):
                raise ValueError("it is no file of torch.save")
            verify_archive(data)
        except (OSError, ValueError) as error:
            self._report(kind, f"{path}{about} is damaged: {error}", name, key=key)
            return
        try:
            self.stored.check_file(name, data)
        except DamagedCheckpointError as error:
            self._report(kind, str(error), name, key=key)
        except CheckpointingException:
            pass  # of the root document, which was reported before

    def _foreign(self, name: str, below: Sequence[str], objects: Sequence[str]) -> None:
        strangers = [f"{name}/{entry}" for entry in below if entry not in objects]
        if name.endswith(".sync") and self.stored.root is None:
            return  # locks that Megatron-Core left behind
        if not below:
            strangers = [name]
        for stranger in strangers:
            path = f"{self.location.url}/{stranger}"
            self._report("foreign", f"{path} is no part of the checkpoint", stranger, "note")

    # -- arrays ---------------------------------------------------------------------------------

    def _small_ones(self, runs: Sequence[_Run]) -> Sequence[_Run]:
        """Look at small arrays on this thread, for as long as it need not wait for the disk: the
        threads would only wait for the interpreter, and for each other. Returns the other runs."""
        small = [run for run in runs if run.is_all and run.array.chunk_bytes <= SMALL_CHUNK_BYTES]
        if self._manifest is None or not self._consolidated or not self.location.is_local:
            return runs
        texts = document_texts(self.location.read("zarr.json"), self._consolidated)
        self._small = SmallArrays(self.location.url, texts, self._manifest, hashes=self._hashes)
        done = 0
        while done < len(small):
            waits = _waits()
            self._work(small[done : done + SMALL_BATCH])
            done += SMALL_BATCH
            if _waits() - waits > SMALL_BATCH // 8:
                break
        looked_at = set(map(id, small[:done]))
        return [run for run in runs if id(run) not in looked_at]

    def _work(self, batch: Sequence[_Run]) -> None:
        try:
            proved = _Proved()
            for run in batch:
                if not self._proves(run, proved):
                    self._check_run(run)
            self._count(proved)
        finally:
            free_memory()

    def _proves(self, run: _Run, proved: _Proved) -> bool:
        """Whether the run is a whole small array, and sound; if so it is added to the sum."""
        if self._small is None or not run.is_all:
            return False
        size = self._small.proves(run.array)
        if size is None:
            return False
        proved.chunks += run.last
        proved.bytes += size
        proved.weight += run.weight
        return True

    def _count(self, proved: _Proved) -> None:
        with self._lock:
            self.result.chunks += proved.chunks
            self.result.bytes += proved.bytes
            self._done += proved.weight
            if self._progress is not None and proved.weight:
                self._progress(self._done, self._total)

    def _check_run(self, run: _Run) -> None:
        array = run.array
        if run.first == 0:
            self._check_document(array)
            self._check_folder(array)
        size = 0
        for index in map(array.grid.index, range(run.first, run.last)):
            read, problem = self._checker.check(array, index)
            size += read
            if problem is not None:
                self._report_chunk(array, index, problem.kind, problem.text)
        checked = array.has_crc or (self._manifest is not None and _knows(self._manifest, array))
        with self._lock:
            self.result.chunks += run.last - run.first
            self.result.bytes += size
            self.result.unchecked += 0 if checked else run.last - run.first
            self._done += run.weight
            if self._progress is not None:
                self._progress(self._done, self._total)

    def _report_chunk(self, array: ArrayMeta, index: tuple[int, ...], kind: str, text: str) -> None:
        name = f"{array.node}/{array.chunk_key(index)}"
        rank = None if self._manifest is None else self._manifest.writer(array, index)
        by = "" if rank is None else f", written by rank {rank}"
        path = f"{self.location.url}/{name}"
        message = f"chunk {index} of key {array.key!r} {text}: {path}{by}"
        self._report(f"chunk-{kind}", message, name, key=array.key, chunk=index, rank=rank)

    def _check_document(self, array: ArrayMeta) -> None:
        if array.node not in self._consolidated:
            return
        name = f"{array.node}/{array.document_name}"
        path = f"{self.location.url}/{name}"
        try:
            own = json.loads(self.location.read(name))
        except FileNotFoundError:
            text = f"{path} is missing: readers that open key {array.key!r} alone do not find it"
            self._report("document-missing", text, name, key=array.key)
            return
        except (OSError, ValueError) as error:
            text = f"{path} (key {array.key!r}) is damaged: {error}"
            self._report("document-damaged", text, name, key=array.key)
            return
        copy = self._consolidated[array.node]
        if own != copy:
            parts = sorted(set(own) | set(copy)) if isinstance(own, dict) else []
            differ = [part for part in parts if own.get(part) != copy.get(part)]
            text = (
                f"{path} (key {array.key!r}) differs from the root's copy in "
                f"{', '.join(differ) or 'everything'}"
            )
            self._report("document-differs", text, name, key=array.key)

    def _check_folder(self, array: ArrayMeta) -> None:
        if array.codecs is None:
            return  # codecs of others may keep chunks under names of their own
        names = set(self._names_below(array.node))
        names.discard(array.document_name)
        indices = array.grid.overlapping(Box((0,) * len(array.shape), array.shape))
        names.difference_update(array.chunk_key(index) for index in indices)
        objects = sorted(name for name in names if object_place(name))
        if objects:
            self._objects(array.node, array.key, objects)
        for name in sorted(names.difference(objects, (".zattrs", ".zarray"))):
            text = f"{self.location.url}/{array.node}/{name} is no chunk of key {array.key!r}"
            self._report("foreign", text, f"{array.node}/{name}", "note", key=array.key)

    def _names_below(self, node: str) -> Iterable[str]:
        if self._listed is None:
            return _names_below(self.location, node)
        first = bisect_left(self._listed, f"{node}/")
        last = bisect_left(self._listed, f"{node}0")  # "0" is the character after "/"
        return (name[len(node) + 1 :] for name in self._listed[first:last])

    def _wants(self, key: str) -> bool:
        return not self._keys or any(fnmatchcase(key, pattern) for pattern in self._keys)

    def _report(
        self,
        kind: str,
        message: str,
        name: str,
        severity: Severity = "damage",
        *,
        key: str | None = None,
        chunk: tuple[int, ...] | None = None,
        rank: int | None = None,
    ) -> None:
        path = f"{self.location.url}/{name}"
        finding = Finding(kind, severity, message.replace("\n", " "), path, key, chunk, rank)
        with self._lock:
            if severity == "damage":
                self.result.damage += 1
            else:
                self.result.notes += 1
            self._found(finding)


def _waits() -> int:
    """How often this thread gave up its processor to wait for something (Linux: getrusage(2));
    being put off it by others does not count."""
    of_thread = getattr(resource, "RUSAGE_THREAD", None)
    return 0 if of_thread is None else resource.getrusage(of_thread).ru_nvcsw


def _knows(manifest: Manifest, array: ArrayMeta) -> bool:
    return manifest.row(array, (0,) * len(array.shape)) is not None


def _grid(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not shape:
        yield ()
        return
    for first in range(shape[0]):
        for rest in _grid(shape[1:]):
            yield (first, *rest)


def _runs(array: ArrayMeta) -> Iterator[_Run]:
    size, count = array.chunk_bytes, array.grid.size
    step = max(1, min(RUN_CHUNKS, RUN_BYTES // size))
    if count <= step:
        yield _Run(array, 0, count, count * size, True)
        return
    for first in range(0, count, step):
        last = min(first + step, count)
        yield _Run(array, first, last, (last - first) * size, False)


def _names_below(location: Location, node: str, prefix: str = "") -> Iterator[str]:
    """Names of all files below a node, relative to it."""
    for name in location.listing(f"{node}/{prefix}".rstrip("/")):
        is_chunk = "." in name or name.isdigit() or name == "c"
        if (prefix or name == "c" or not is_chunk) and location.is_dir(f"{node}/{prefix}{name}"):
            yield from _names_below(location, node, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}"
