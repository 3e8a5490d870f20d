"""Verification of a stored checkpoint: every chunk, every document, every file that belongs to it.

Damage is reported, not raised, so that one run finds all of it. Neither ranks nor torch are needed.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any, Literal, NamedTuple

from shardstore.errors import CheckpointingException, DamagedCheckpointError
from shardstore.progress import Meter, ProgressCallback, log_event, metered
from shardstore.storage.checkpoint import StoredCheckpoint, beside_arrays
from shardstore.storage.format.documents import ArrayMeta, RootDocument, parse_array
from shardstore.storage.format.grid import Grid
from shardstore.storage.format.manifest import MANIFEST_NAME, Manifest
from shardstore.storage.format.names import CONFIG_NAME, key_of, object_place
from shardstore.storage.movers.chunk_bytes import free_scratch
from shardstore.storage.movers.collector import collector_paused
from shardstore.storage.movers.parallel import default_threads, run_batched
from shardstore.storage.movers.verify import ChunkChecker
from shardstore.storage.options import require_number
from shardstore.values.torch_archive import verify_archive

__all__ = ["Finding", "Severity", "Verified", "verify"]

logger = logging.getLogger(__name__)

Severity = Literal["damage", "note"]

BATCH_BYTES = 64 * 1024 * 1024
"""Least work of a thread at a time: many small chunks are verified sooner by a single thread."""
RUN_BYTES = 32 * 1024 * 1024
"""The chunks of one array are shared out to the threads in runs of about this size."""
RUN_CHUNKS = 256
REMOTE_THREADS = 16
SHOWN_ARRAYS = 4
"""Arrays that a finding about many of them names."""
SHOWN_OBJECTS = 10
"""Missing objects of one key that are reported: a file name alone can claim a grid of any size."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it was saved.

    Attributes:
        kind: one word or two, such as ``chunk-missing``; does not change between versions.
        severity: ``damage``, or ``note`` for what hinders no reader (a foreign file).
        message: one sentence that names key, chunk, writer and path.
        path: file or object concerned.
        key: key of the tensor or object.
        chunk: chunk index in the array's grid.
        rank: global rank that wrote it, where the manifest knows.
    """

    kind: str
    severity: Severity
    message: str
    path: str
    key: str | None = None
    chunk: tuple[int, ...] | None = None
    rank: int | None = None


@dataclass
class Verified:
    """What a verification covered.

    Attributes:
        arrays, chunks, objects: how many were verified.
        bytes: bytes of chunks that were read.
        unchecked: chunks without any checksum (the Zarr v2 layout), of which only presence and
            size were compared.
        damage, notes: findings of each severity.
        seconds: time that it took.
    """

    arrays: int = 0
    chunks: int = 0
    objects: int = 0
    bytes: int = 0
    unchecked: int = 0
    damage: int = 0
    notes: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """No damage was found."""
        return self.damage == 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"ok": self.ok, **asdict(self)}


def verify(
    stored: StoredCheckpoint,
    found: Callable[[Finding], None],
    *,
    keys: Sequence[str] = (),
    hashes: bool = False,
    threads: int | None = None,
    progress: ProgressCallback | Literal["bar"] | None = None,
) -> Verified:
    """Verify a checkpoint. One process calls it; it changes nothing.

    Args:
        stored: the checkpoint.
        found: called for each finding, from any thread, one call at a time.
        keys: patterns (``fnmatch``) of the keys to verify; all, and foreign files too, if empty.
        hashes: compare the 128-bit hashes of the manifest beside the checksums.
        threads: threads that read; default: one a processor, more for an object store.
        progress: called with a :class:`~shardstore.progress.Progress`, one call at a time; or
            ``"bar"``, which is drawn on standard error.

    Raises:
        ArgumentError: ``threads`` or ``progress`` has a wrong value.
        NotACheckpointError: no checkpoint is there.
        StorageError: the store refused to list it.
    """
    require_number("threads", threads, none=True)
    url = stored.location.url
    log_event(logger, "verify_begin", f"{url}: verifying", url=url)
    with metered("verify", url, progress) as meter:
        result = _Verification(stored, found, keys, hashes, threads, meter).run()
        if not result.ok:
            meter.enter("failed")
    about = {name: n for name, n in result.as_dict().items() if name not in ("ok", "unchecked")}
    state = "sound" if result.ok else f"{result.damage} finding(s) of damage"
    log_event(logger, "verify", f"{url}: verified, {state}", url=url, **about)
    return result


class _Job(NamedTuple):
    """A file, or some consecutive chunks of an array, and the bytes of the chunks."""

    weight: int
    work: Callable[[], None]


@dataclass
class _Verification:
    """One run of :func:`verify`, whose arguments the first fields are."""

    stored: StoredCheckpoint
    found: Callable[[Finding], None]
    keys: Sequence[str]
    hashes: bool
    threads: int | None
    meter: Meter
    root: RootDocument | None = None
    root_is_damaged: bool = False
    manifest: Manifest | None = None
    listed: list[str] | None = None
    """All names in an object store, sorted: one listing, not one an array."""
    seen: set[str] = field(default_factory=set)
    """Names of the objects' files that were verified or reported."""
    result: Verified = field(default_factory=Verified)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.location = self.stored.location
        self.url = self.location.url

    def run(self) -> Verified:
        start = perf_counter()
        with collector_paused():
            jobs = self._plan()
        is_local = self.location.is_local
        run_batched(
            jobs,
            _do_all,
            threads=self.threads or (default_threads() if is_local else REMOTE_THREADS),
            weight=lambda job: job.weight,
            batch_weight=BATCH_BYTES if is_local else 1,
            batch_items=len(jobs) + 1 if is_local else 1,
        )
        self.result.seconds = perf_counter() - start
        return self.result

    def _plan(self) -> list[_Job]:
        """Verify the documents of the whole checkpoint, and list what else is to be verified."""
        top = self.location.listing()
        if not {"zarr.json", CONFIG_NAME} & set(top):
            self.stored.require()
        arrays = self._read_arrays(top)
        common_backend = self._check_config(top)
        self._read_manifest(arrays)
        self._checker = ChunkChecker(self.stored, self.manifest, hashes=self.hashes)
        if not self.location.is_local:
            self.listed = self.location.remote.walk()
        nodes = {meta.node for meta in arrays}
        if self.root_is_damaged:
            nodes |= self._undescribed(nodes)
        jobs = list(self._file_jobs(top, nodes, common_backend))
        wanted = [meta for meta in arrays if self._wants(meta.key)]
        self.result.arrays = len(wanted)
        for array in wanted:
            size, count = array.chunk_bytes, array.grid.size
            step = max(1, min(RUN_CHUNKS, RUN_BYTES // size))
            for first in range(0, count or 1, step):
                last = min(first + step, count)
                run = partial(self._check_run, array, first, last)
                jobs.append(_Job((last - first) * size, run))
        self.meter.expect(sum(job.weight for job in jobs), sum(meta.grid.size for meta in wanted))
        return jobs

    def _report(
        self, kind: str, message: str, name: str, severity: Severity = "damage", **about: Any
    ) -> None:
        """Report a :class:`Finding` with the fields ``about``, on the file of a name below the
        checkpoint."""
        text = message.replace("\n", " ")
        finding = Finding(kind, severity, text, f"{self.url}/{name}", **about)
        with self.lock:
            if severity == "damage":
                self.result.damage += 1
            else:
                self.result.notes += 1
            self.found(finding)

    def _wants(self, key: str) -> bool:
        return not self.keys or any(fnmatchcase(key, pattern) for pattern in self.keys)

    # -- documents of the whole checkpoint ------------------------------------------------------

    def _read_arrays(self, top: Sequence[str]) -> list[ArrayMeta]:
        """All arrays, from their own documents where the root document is unusable."""
        path = f"{self.url}/zarr.json"
        if "zarr.json" not in top and MANIFEST_NAME in top:
            text = f"{path} is missing: without it the checkpoint does not open"
            self._report("root-missing", text, "zarr.json")
            return self._arrays_alone(top)
        try:
            self.root = root = self.stored.root
            if root is not None:
                lost = sorted(set(root.chunk_sums) - set(root.texts))
                if lost and root.consolidated:
                    text = (
                        f"{path} has checksums of {len(lost)} array(s) that it does not describe: "
                        f"{', '.join(lost[:SHOWN_ARRAYS])}; another program has consolidated its "
                        "metadata anew. Load an earlier checkpoint, or put back the saved zarr.json"
                    )
                    self._report("arrays-undescribed", text, "zarr.json")
                return list(self.stored.arrays.values())
        except CheckpointingException as error:
            self._report("root-damaged", str(error), "zarr.json")
            return self._arrays_alone(top)
        return list(self.stored.arrays.values())

    def _arrays_alone(self, top: Sequence[str]) -> list[ArrayMeta]:
        self.root_is_damaged = True
        found = []
        for node in top:
            name = f"{node}/zarr.json"
            try:
                text = self.location.read(name)
                meta = parse_array(node, text, f"{self.url}/{name}")
                if meta is not None:
                    found.append(meta)
            except FileNotFoundError:
                continue
            except CheckpointingException as error:
                self._report("document-damaged", str(error), name, key=key_of(node))
        return found

    @property
    def _is_ours(self) -> bool:
        """Whether shardstore wrote the root; a damaged one counts as ours."""
        return self.root_is_damaged or self.root is None or self.root.format_version is not None

    def _check_config(self, top: Sequence[str]) -> object:
        """Verify ``metadata.json``; returns the name of the backend of the common state."""
        path = f"{self.url}/{CONFIG_NAME}"
        if CONFIG_NAME not in top:
            if self._is_ours:
                text = f"{path} is missing: load() does not take the folder for a checkpoint"
                self._report("config-missing", text, CONFIG_NAME)
            return "torch"
        try:
            document = json.loads(self.location.read(CONFIG_NAME))
            if not isinstance(document, dict) or "sharded_backend" not in document:
                raise ValueError("it names no sharded_backend")
        except (OSError, ValueError) as error:
            self._report("config-damaged", f"{path} is damaged: {error}", CONFIG_NAME)
            return "torch"
        return document.get("common_backend", "torch")

    def _read_manifest(self, arrays: Sequence[ArrayMeta]) -> None:
        path = f"{self.url}/{MANIFEST_NAME}"
        try:
            self.manifest = manifest = self.stored.manifest
        except DamagedCheckpointError as error:
            self._report("manifest-damaged", str(error), MANIFEST_NAME)
            return
        if manifest is None:
            if self.root is not None and self.root.texts and self._is_ours:
                text = f"{path} is missing: chunks are compared with their own checksums alone"
                self._report("manifest-missing", text, MANIFEST_NAME, "note")
            return
        for meta in arrays:
            if manifest.first_row(meta) is None:
                text = (
                    f"{path} does not know key {meta.key!r} as it is now: another program rewrote "
                    "or added it, and its chunks are compared with their own checksums alone"
                )
                self._report("manifest-stale", text, MANIFEST_NAME, "note", key=meta.key)

    def _undescribed(self, nodes: set[str]) -> set[str]:
        """Nodes in the manifest that have no document of their own."""
        arrays = () if self.manifest is None else self.manifest.arrays
        lost = [node for node, _, _ in arrays if node not in nodes]
        if lost and not self.keys:
            text = (
                f"{len(lost)} array(s) of {self.url}/{MANIFEST_NAME} have no document "
                "but the root's, and their chunks were not verified: "
                f"{', '.join(lost[:SHOWN_ARRAYS])}"
            )
            self._report("arrays-unread", text, MANIFEST_NAME, "note")
        return set(lost)

    # -- files that are no array's --------------------------------------------------------------

    def _file_jobs(
        self, top: Sequence[str], nodes: set[str], common_backend: object
    ) -> Iterator[_Job]:
        """Verification of the common state and of sharded objects; reports foreign files."""
        if not self.keys:
            if "common.pt" in top:
                yield _Job(0, partial(self._check_archive, "common.pt", "common-damaged"))
            elif self._is_ours and common_backend == "torch":
                path = f"{self.url}/common.pt"
                text = f"{path} is missing: the non-sharded part of the state is gone"
                self._report("common-missing", text, "common.pt")
        entries = None
        if self.listed is not None:
            entries = {
                name: sorted({below.partition("/")[0] for below in self._names_below(name)})
                for name in top
            }
        is_old_layout = self.root is None and not self.root_is_damaged
        folders = {node.partition("/")[0] for node in nodes}
        for beside in beside_arrays(self.location, top, folders, self._wants, entries):
            yield from self._object_jobs(beside.name, beside.key, beside.objects)
            if beside.name.endswith(".sync") and is_old_layout:
                continue  # a lock that Megatron-Core left behind
            foreign = set(beside.entries).difference(beside.objects)
            for name in sorted(f"{beside.name}/{entry}" for entry in foreign):
                self._foreign(name)
            if not beside.entries:
                self._foreign(beside.name)
        # Where no object of a key is left, only the commit tells that there were any.
        for name in () if self.root is None else self.root.file_sums:
            node, _, file = name.rpartition("/")
            key = key_of(node) or node
            place = object_place(file)
            if place is None or name in self.seen or not self._wants(key):
                continue
            if not self.location.exists(name):
                self._object_missing(name, place[0], key)

    def _foreign(self, name: str) -> None:
        text = f"{self.url}/{name} is no part of the checkpoint"
        self._report("foreign", text, name, "note")

    def _object_jobs(self, node: str, key: str, files: Sequence[str]) -> list[_Job]:
        """Verification of a key's objects, and reports of those that their file names miss."""
        paths = [f"{node}/{file}" for file in files]
        with self.lock:
            self.result.objects += len(paths)
            self.seen.update(paths)
        places = {place for file in files if (place := object_place(file)) is not None}
        for shape in {shape for _, shape in places}:
            grid = Grid(shape, (1,) * len(shape))
            indices = map(grid.index, range(grid.size))
            missing = (index for index in indices if (index, shape) not in places)
            for index in islice(missing, SHOWN_OBJECTS):
                file = f"shard_{'.'.join(map(str, index))}_{'.'.join(map(str, shape))}.pt"
                self._object_missing(f"{node}/{file}", index, key)
        check = partial(self._check_archive, kind="object-damaged", key=key)
        return [_Job(0, partial(check, path)) for path in paths]

    def _object_missing(self, name: str, index: tuple[int, ...], key: str) -> None:
        with self.lock:
            if name in self.seen:
                return
            self.seen.add(name)
        text = f"object {index} of key {key!r} is missing: {self.url}/{name}"
        self._report("object-missing", text, name, key=key)

    def _check_archive(self, name: str, kind: str, key: str | None = None) -> None:
        try:
            data = self.location.read(name)
            if not data:
                raise ValueError("it is empty")
            if name.endswith(".json"):
                json.loads(data)
            elif data[:1] not in (b"P", b"\x80"):
                raise ValueError("it is no file of torch.save")
            else:
                verify_archive(data)
        except (OSError, ValueError) as error:
            about = "" if key is None else f" (object of key {key!r})"
            text = f"{self.url}/{name}{about} is damaged: {error}"
            self._report(kind, text, name, key=key)
            return
        try:
            if not self.root_is_damaged:
                self.stored.check_file(name, data)
        except DamagedCheckpointError as error:
            self._report(kind, str(error), name, key=key)

    # -- arrays -----------------------------------------------------------------------------------

    def _check_run(self, array: ArrayMeta, first: int, last: int) -> None:
        """Verify consecutive chunks, and with the first of them the array's document and folder."""
        if first == 0:
            names = set(self._names_below(array.node))
            self._check_document(array, names)
            self._check_folder(array, names)
        size = 0
        for index in map(array.grid.index, range(first, last)):
            read, problem = self._checker.check(array, index)
            size += read
            if problem is not None:
                self._report_chunk(array, index, problem.kind, problem.text)
        manifest = self.manifest
        checked = array.has_crc or (manifest is not None and manifest.first_row(array) is not None)
        with self.lock:
            self.result.chunks += last - first
            self.result.bytes += size
            self.result.unchecked += 0 if checked else last - first
        if self.meter.add is not None:
            self.meter.add((last - first) * array.chunk_bytes, last - first)

    def _report_chunk(self, array: ArrayMeta, index: tuple[int, ...], kind: str, text: str) -> None:
        name = f"{array.node}/{array.chunk_key(index)}"
        rank = None if self.manifest is None else self.manifest.writer(array, index)
        by = "" if rank is None else f", written by rank {rank}"
        message = f"chunk {index} of key {array.key!r} {text}: {self.url}/{name}{by}"
        self._report(f"chunk-{kind}", message, name, key=array.key, chunk=index, rank=rank)

    def _check_document(self, array: ArrayMeta, names: set[str]) -> None:
        """Compare an array's own document with the root's copy."""
        root, name = self.root, f"{array.node}/{array.document_name}"
        if root is None or (saved := root.texts.get(array.node)) is None:
            return
        if array.document_name not in names and not root.array_documents:
            return
        about = f"{self.url}/{name} (key {array.key!r})"
        try:
            data = self.location.read(name)
            if data == saved and root.array_documents:
                return
            own, copy = json.loads(data), json.loads(saved)
        except FileNotFoundError:
            text = f"{about} is missing: readers that open the array alone do not find it"
            self._report("document-missing", text, name, key=array.key)
            return
        except (OSError, ValueError) as error:
            self._report("document-damaged", f"{about} is damaged: {error}", name, key=array.key)
            return
        if own != copy:
            parts = sorted(set(own) | set(copy)) if isinstance(own, dict) else []
            differ = ", ".join(part for part in parts if own.get(part) != copy.get(part))
            text = f"{about} differs from the root's copy in {differ or 'everything'}"
            self._report("document-differs", text, name, key=array.key)
        elif not root.array_documents:
            text = (
                f"{about} is no part of the checkpoint, which was saved without array documents; "
                "it says what the root does"
            )
            self._report("foreign", text, name, "note", key=array.key)

    def _check_folder(self, array: ArrayMeta, names: set[str]) -> None:
        """Find sharded objects and foreign files in an array's folder."""
        if array.codecs is None:
            return  # codecs of other programs may keep chunks under names of their own
        indices = map(array.grid.index, range(array.grid.size))
        others = names.difference(map(array.chunk_key, indices), [array.document_name])
        if not others:
            return
        objects = sorted(name for name in others if object_place(name))
        _do_all(self._object_jobs(array.node, array.key, objects))
        for name in sorted(others.difference(objects, (".zattrs", ".zarray"))):
            text = f"{self.url}/{array.node}/{name} is no chunk of key {array.key!r}"
            self._report("foreign", text, f"{array.node}/{name}", "note", key=array.key)

    def _names_below(self, node: str) -> Iterable[str]:
        """Names of all files below a node, relative to it."""
        if self.listed is not None:
            first = bisect_left(self.listed, f"{node}/")
            last = bisect_left(self.listed, f"{node}0")  # "0" is the character after "/"
            return (name[len(node) + 1 :] for name in self.listed[first:last])
        top = f"{self.url}/{node}"
        return (
            f"{folder}/{name}"[len(top) + 1 :]
            for folder, _, names in os.walk(top)
            for name in names
        )


def _do_all(jobs: Sequence[_Job]) -> None:
    try:
        for job in jobs:
            job.work()
    finally:
        free_scratch()
