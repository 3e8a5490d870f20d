"""Verifies a stored checkpoint: every chunk, every document, every file that should be there.

Answers for what is wrong with the files of one checkpoint, in parallel and without torch: checksums
of all chunks, array documents against the root's copy; what lies beside the arrays is
:mod:`verify_files`'s. Damage is reported, not raised, so that one run finds all of it. It does not
know what to do about it.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from time import perf_counter
from typing import Any, Literal

from shardstore import progress as bars
from shardstore.errors import ArgumentError, CheckpointingException, DamagedCheckpointError
from shardstore.inspection.findings import Finding, Findings, Verified
from shardstore.inspection.small_arrays import COMPILED, SmallArrays, document_texts
from shardstore.inspection.verify_files import OtherFiles
from shardstore.progress import log_event
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.commit.object_files import object_place
from shardstore.storage.format.documents import ArrayMeta, RootDocument, parse_array
from shardstore.storage.format.grid import Box
from shardstore.storage.format.manifest import MANIFEST_NAME, Manifest
from shardstore.storage.format.names import key_of
from shardstore.storage.movers.chunk_bytes import free_scratch
from shardstore.storage.movers.collector import collector_paused
from shardstore.storage.movers.parallel import default_threads, run_batched
from shardstore.storage.movers.verify import ChunkChecker
from shardstore.storage.options import require_number
from shardstore.storage.stores.location import Location

__all__ = ["Finding", "Verified", "callback_of", "verify"]

Callback = Callable[[int, int], None]


@contextmanager
def callback_of(progress: Callback | Literal["bar"] | None, url: str) -> Iterator[Callback | None]:
    """The callback that a ``progress`` argument stands for; a bar ends with the context.

    Args:
        progress: a callback, ``"bar"``, or nothing.
        url: the checkpoint.

    Raises:
        ArgumentError: something else.
    """
    if progress != "bar":
        if progress is not None and not callable(progress):
            raise ArgumentError(f"progress={progress!r} must be a callable, 'bar' or None")
        yield progress
        return
    drawn = bars.bar()
    done, total = 0, 0

    def draw(bytes_done: int, bytes_total: int) -> None:
        nonlocal done, total
        done, total = bytes_done, bytes_total
        drawn(bars.Progress("verify", "move", url, done, total))

    drawn(bars.Progress("verify", "begin", url))
    phase: bars.Phase = "failed"
    try:
        yield draw
        phase = "done"
    finally:
        drawn(bars.Progress("verify", phase, url, done, total))


logger = logging.getLogger(__name__)

BATCH_BYTES = 64 * 1024 * 1024
RUN_BYTES = 32 * 1024 * 1024
"""Chunks of one array are shared out to the threads in runs of about this size."""
RUN_CHUNKS = 256
SMALL_BATCH = 1024
"""Small arrays that are looked at in one call: after each a thread waits for the interpreter."""
REMOTE_THREADS = 16
SHOWN = 4
"""Arrays that a finding about many of them names."""


def verify(
    stored: StoredCheckpoint,
    found: Callable[[Finding], None],
    *,
    keys: Sequence[str] = (),
    hashes: bool = False,
    threads: int | None = None,
    progress: Callable[[int, int], None] | Literal["bar"] | None = None,
) -> Verified:
    """Verify a checkpoint. One process calls it; it changes nothing.

    Args:
        stored: the checkpoint.
        found: called for each finding, from any thread, one call at a time.
        keys: patterns (``fnmatch``) of the keys to look at; all, and foreign files too, if empty.
        hashes: compare the 128-bit hashes of the manifest beside the checksums.
        threads: threads that read; default: one a processor, more where the store is far away.
        progress: called with ``(bytes done, bytes in all)``, one call at a time; or ``"bar"``,
            which is drawn on standard error.

    Raises:
        ArgumentError: ``threads`` or ``progress`` is nothing of that kind.
        NotACheckpointError: nothing like a checkpoint is there.
        StorageError: the store refused to list it.
    """
    require_number("threads", threads, none=True)
    url = stored.location.url
    log_event(logger, "verify_begin", f"{url}: verifying", url=url)
    with callback_of(progress, url) as told:
        result = _Verification(stored, found, keys, hashes, threads, told).run()
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
        self._findings = Findings(self.location.url, found)
        self._keys = keys
        self._hashes = hashes
        self._progress = progress
        self._done = self._total = 0
        self._manifest: Manifest | None = None
        self._consolidated: dict[str, dict[str, Any]] = {}
        self._array_documents = True
        self._described = True
        self._files = OtherFiles(
            stored,
            self._findings,
            self._wants,
            everything=not keys,
            threads=1 if self.location.is_local else self.threads,
        )
        # All names of an object store's checkpoint, in order: one listing, not one an array.
        self._listed: list[str] | None = None

    def run(self) -> Verified:
        start = perf_counter()
        with collector_paused():
            runs = self._planned(self._small_ones())
        run_batched(
            runs,
            self._work,
            threads=self.threads,
            weight=lambda run: run.weight,
            batch_weight=BATCH_BYTES if self.location.is_local else 1,
            batch_items=64 if self.location.is_local else 1,
        )
        self._findings.result.seconds = perf_counter() - start
        return self._findings.result

    def _planned(self, proved: Mapping[str, int]) -> list[_Run]:
        """Look at everything but the arrays; what is to be looked at of those.

        Args:
            proved: nodes of arrays that are sound, and bytes of their chunks.
        """
        top = self.location.listing()
        if not {"zarr.json", "metadata.json"} & set(top):
            self.stored.require()
        arrays = self._arrays(top, proved)
        self._files.config(top)
        self._manifest = self._read_manifest(arrays)
        self._checker = ChunkChecker(self.stored, self._manifest, hashes=self._hashes)
        if not self.location.is_local:
            self._listed = self.location.remote.walk()
        nodes = [*proved, *(meta.node for meta in arrays)]
        if not self._described:
            nodes += self._undescribed(set(nodes))
        self._files.whole(top, {node.partition("/")[0] for node in nodes}, self._listed)
        wanted = [meta for meta in arrays if self._wants(meta.key)]
        self._findings.result.arrays = len(wanted) + len(proved)
        runs = [run for meta in wanted for run in _runs(meta)]
        self._total = sum(run.weight for run in runs)
        self._count(proved)
        return runs

    def _count(self, proved: Mapping[str, int]) -> None:
        """Add what is known to be sound to the result."""
        manifest = self._manifest
        if not proved or manifest is None:
            return
        places = [place for node in proved if (place := manifest.place(node)) is not None]
        self._findings.result.chunks += sum(chunks for _, chunks, _ in places)
        self._findings.result.bytes += sum(proved.values())
        self._done += sum(chunks * size for _, chunks, size in places)
        self._total += self._done
        if self._progress is not None:
            self._progress(self._done, self._total)

    # -- what there is ------------------------------------------------------------------------

    def _arrays(self, top: Sequence[str], proved: Mapping[str, int]) -> list[ArrayMeta]:
        """All arrays but those that are sound; from their own documents where the root's can not
        be used."""
        if "zarr.json" not in top and "manifest.npz" in top:
            self._findings.report(
                "root-missing",
                f"{self.location.url}/zarr.json is missing: without it the checkpoint does not "
                "open",
                "zarr.json",
            )
            return self._arrays_alone(top)
        try:
            if self.stored.root is not None:
                self._consolidated = self.stored.root.documents
                self._array_documents = self.stored.root.array_documents
                self._find_undescribed(self.stored.root)
                if proved:
                    return list(self.stored.root.arrays(without=proved).values())
                return list(self.stored.arrays.values())
        except CheckpointingException as error:
            self._findings.report("root-damaged", str(error), "zarr.json")
            return self._arrays_alone(top)
        return list(self.stored.arrays.values())

    def _find_undescribed(self, root: RootDocument) -> None:
        """Arrays that were committed, and that the root does not describe any more: programs that
        consolidate it anew leave out what has no document of its own."""
        lost = sorted(set(root.chunk_sums) - set(root.documents))
        if lost and root.consolidated:
            text = (
                f"{self.location.url}/zarr.json has checksums of {len(lost)} array(s) that it does "
                f"not describe: {', '.join(lost[:SHOWN])}; another program has consolidated its "
                "metadata anew. Load an earlier checkpoint, or put back the saved zarr.json"
            )
            self._findings.report("arrays-undescribed", text, "zarr.json")

    def _arrays_alone(self, top: Sequence[str]) -> list[ArrayMeta]:
        self._described = False
        found = []
        for node in top:
            url = f"{self.location.url}/{node}/zarr.json"
            try:
                text = self.location.read(f"{node}/zarr.json")
                if (meta := parse_array(node, text, url)) is not None:
                    found.append(meta)
            except FileNotFoundError:
                continue
            except CheckpointingException as error:
                self._findings.report(
                    "document-damaged", str(error), f"{node}/zarr.json", key=key_of(node)
                )
        return found

    def _undescribed(self, nodes: Collection[str]) -> list[str]:
        """Nodes that the manifest has beside those whose own documents were found."""
        manifest = self._manifest
        if manifest is None:
            return []
        lost = [node for node, _, _ in manifest.arrays if node not in nodes]
        if lost and not self._keys:
            text = (
                f"{len(lost)} array(s) of {self.location.url}/{MANIFEST_NAME} have no document but "
                f"the root's, and their chunks were not looked at: {', '.join(lost[:SHOWN])}"
            )
            self._findings.report("arrays-unread", text, MANIFEST_NAME, severity="note")
        return lost

    def _read_manifest(self, arrays: Sequence[ArrayMeta]) -> Manifest | None:
        path = f"{self.location.url}/{MANIFEST_NAME}"
        try:
            manifest = self.stored.manifest
        except DamagedCheckpointError as error:
            self._findings.report("manifest-damaged", str(error), MANIFEST_NAME)
            return None
        if manifest is None:
            if self._consolidated and self._files.stored_by_us:
                text = f"{path} is missing: chunks are held against their own checksums alone"
                self._findings.report("manifest-missing", text, MANIFEST_NAME, severity="note")
            return None
        for meta in arrays:
            if manifest.first_row(meta) is None:
                self._findings.report(
                    "manifest-stale",
                    f"{path} does not know key {meta.key!r} as it is now; another program "
                    "rewrote or added it, and it is held against its own checksums alone",
                    MANIFEST_NAME,
                    severity="note",
                    key=meta.key,
                )
        return manifest

    def _wants(self, key: str) -> bool:
        return not self._keys or any(fnmatchcase(key, pattern) for pattern in self._keys)

    # -- arrays ---------------------------------------------------------------------------------

    def _small_ones(self) -> dict[str, int]:
        """Look at the small arrays first, with little more than the system calls that it takes.

        Returns:
            Node -> bytes of the chunks of each that is sound.
        """
        if self._keys or not self.location.is_local:
            return {}
        try:
            root, manifest = self.stored.root, self.stored.manifest
        except CheckpointingException:
            return {}  # reported by others
        if root is None or manifest is None or not root.documents:
            return {}
        texts = document_texts(self.location.read("zarr.json"), root.documents)
        look = SmallArrays(
            self.location.url,
            root.documents,
            texts,
            manifest,
            hashes=self._hashes,
            array_documents=root.array_documents,
        )
        arrays = look.known(texts)
        proved: dict[str, int] = {}
        # Without the compiled part threads would only wait for the interpreter, and for each other.
        run_batched(
            arrays,
            lambda batch: proved.update(look.prove(batch)),
            threads=self.threads if COMPILED else 1,
            weight=lambda _: 1,
            batch_weight=SMALL_BATCH,
            batch_items=SMALL_BATCH,
        )
        return proved

    def _work(self, batch: Sequence[_Run]) -> None:
        try:
            for run in batch:
                self._check_run(run)
        finally:
            free_scratch()

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
        manifest = self._manifest
        checked = array.has_crc or (manifest is not None and manifest.first_row(array) is not None)
        with self._findings.lock:
            result = self._findings.result
            result.chunks += run.last - run.first
            result.bytes += size
            result.unchecked += 0 if checked else run.last - run.first
            self._done += run.weight
            if self._progress is not None:
                self._progress(self._done, self._total)

    def _report_chunk(self, array: ArrayMeta, index: tuple[int, ...], kind: str, text: str) -> None:
        name = f"{array.node}/{array.chunk_key(index)}"
        rank = None if self._manifest is None else self._manifest.writer(array, index)
        by = "" if rank is None else f", written by rank {rank}"
        path = f"{self.location.url}/{name}"
        message = f"chunk {index} of key {array.key!r} {text}: {path}{by}"
        self._findings.report(f"chunk-{kind}", message, name, key=array.key, chunk=index, rank=rank)

    def _check_document(self, array: ArrayMeta) -> None:
        if array.node not in self._consolidated:
            return
        name = f"{array.node}/{array.document_name}"
        path = f"{self.location.url}/{name}"
        if not self._array_documents and not self._is_listed(name):
            return
        try:
            own = json.loads(self.location.read(name))
        except FileNotFoundError:
            if not self._array_documents:
                return
            text = f"{path} is missing: readers that open key {array.key!r} alone do not find it"
            self._findings.report("document-missing", text, name, key=array.key)
            return
        except (OSError, ValueError) as error:
            text = f"{path} (key {array.key!r}) is damaged: {error}"
            self._findings.report("document-damaged", text, name, key=array.key)
            return
        copy = self._consolidated[array.node]
        if own != copy:
            parts = sorted(set(own) | set(copy)) if isinstance(own, dict) else []
            differ = [part for part in parts if own.get(part) != copy.get(part)]
            text = (
                f"{path} (key {array.key!r}) differs from the root's copy in "
                f"{', '.join(differ) or 'everything'}"
            )
            self._findings.report("document-differs", text, name, key=array.key)
        elif not self._array_documents:
            text = (
                f"{path} (key {array.key!r}) is no part of the checkpoint, which was saved without "
                "documents of arrays; it says what the root does"
            )
            self._findings.report("foreign", text, name, "note", key=array.key)

    def _check_folder(self, array: ArrayMeta) -> None:
        if array.codecs is None:
            return  # codecs of others may keep chunks under names of their own
        names = set(self._names_below(array.node))
        names.discard(array.document_name)
        indices = array.grid.overlapping(Box((0,) * len(array.shape), array.shape))
        names.difference_update(array.chunk_key(index) for index in indices)
        objects = sorted(name for name in names if object_place(name))
        if objects:
            self._files.objects(array.node, array.key, objects)
        for name in sorted(names.difference(objects, (".zattrs", ".zarray"))):
            text = f"{self.location.url}/{array.node}/{name} is no chunk of key {array.key!r}"
            self._findings.report("foreign", text, f"{array.node}/{name}", "note", key=array.key)

    def _is_listed(self, name: str) -> bool:
        """Whether a name is there, as far as that is known without asking."""
        if self._listed is None:
            return True
        at = bisect_left(self._listed, name)
        return self._listed[at : at + 1] == [name]

    def _names_below(self, node: str) -> Iterable[str]:
        if self._listed is None:
            return _names_below(self.location, node)
        first = bisect_left(self._listed, f"{node}/")
        last = bisect_left(self._listed, f"{node}0")  # "0" is the character after "/"
        return (name[len(node) + 1 :] for name in self._listed[first:last])


def _runs(array: ArrayMeta) -> Iterator[_Run]:
    size, count = array.chunk_bytes, array.grid.size
    step = max(1, min(RUN_CHUNKS, RUN_BYTES // size))
    if count <= step:
        yield _Run(array, 0, count, count * size)
        return
    for first in range(0, count, step):
        last = min(first + step, count)
        yield _Run(array, first, last, (last - first) * size)


def _names_below(location: Location, node: str, prefix: str = "") -> Iterator[str]:
    """Names of all files below a node, relative to it."""
    for name in location.listing(f"{node}/{prefix}".rstrip("/")):
        is_chunk = "." in name or name.isdigit() or name == "c"
        if (prefix or name == "c" or not is_chunk) and location.is_dir(f"{node}/{prefix}{name}"):
            yield from _names_below(location, node, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}"
