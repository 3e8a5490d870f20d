"""Verifies every chunk, document and file of a stored checkpoint.

Damage is reported, not raised, so that one run finds all damage. It needs neither ranks nor torch.
"""

from __future__ import annotations

import json
import logging
import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any, Literal

from shardstore.core import parse_config
from shardstore.errors import CheckpointingException, DamagedCheckpointError, StorageError
from shardstore.inspection.opened import codec_error, matcher
from shardstore.progress import Meter, ProgressArgument, log_event, metered
from shardstore.storage.checkpoint import ReplacedError, StoredCheckpoint
from shardstore.storage.commit.folder import OWNER_NAME
from shardstore.storage.format.documents import ArrayMeta, RootDocument, parse_array
from shardstore.storage.format.grid import Grid
from shardstore.storage.format.manifest import Manifest
from shardstore.storage.format.names import (
    COMMON_STATE_NAME,
    CONFIG_NAME,
    MANIFEST_NAME,
    OWN_FILES,
    key_of,
    object_place,
)
from shardstore.storage.format.packs import PackedRange
from shardstore.storage.movers.mover import Mover
from shardstore.storage.options import require_number
from shardstore.storage.runtime.parallel import collector_paused, run_batched
from shardstore.values.record import StateRecord
from shardstore.values.torch_archive import verify_archive

logger = logging.getLogger(__name__)

Severity = Literal["damage", "note"]

RUN_BYTES = 32 * 1024 * 1024
"""Size of the runs of chunks that threads verify."""
RUN_CHUNKS = 256
GROUP_DOCUMENTS = ("zarr.json", ".zgroup", ".zattrs", ".zmetadata")
"""Documents of groups in Zarr of other programs."""
SHOWN_ARRAYS = 4
SHOWN_OBJECTS = 10
"""Largest number of missing objects reported for a key, because a file name may claim any grid."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A difference between the stored checkpoint and the saved one.

    Attributes:
        kind: name of the finding, such as ``chunk-missing``; the same in all versions.
        severity: ``damage``, or ``note`` if it does not disturb readers (such as a foreign file).
        message: one sentence that names key, chunk, writer and path.
        path: path of the file or object.
        key: key of the tensor or object.
        chunk: chunk index in the array's grid.
        rank: global rank that wrote the chunk, if the manifest has it.
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
    """The result of a verification.

    Attributes:
        arrays, chunks, objects: number of each that were verified.
        bytes: bytes of chunks that were read.
        unchecked: number of chunks without a checksum (the Zarr v2 layout): only their presence and
            size were checked.
        damage, notes: number of findings of each severity.
        seconds: duration.
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
        """Whether no damage was found."""
        return self.damage == 0


def verify(
    stored: StoredCheckpoint,
    found: Callable[[Finding], None],
    *,
    keys: Sequence[str] = (),
    hashes: bool = False,
    threads: int | None = None,
    progress: ProgressArgument = None,
) -> Verified:
    """Verify a checkpoint. One process calls it; it changes nothing.

    Args:
        stored: the checkpoint.
        found: called for each finding, from any thread, one call at a time.
        keys: keys to verify, prefixes of them up to a dot or slash, or shell patterns; all, and
            foreign files too, if empty.
        hashes: compare the 128-bit hashes of the manifest in addition to the checksums.
        threads: number of reading threads; default: one per processor, more for an object store.
        progress: called with a :class:`~shardstore.progress.Progress`, one call at a time; or
            ``"bar"``: a bar on standard error.

    Returns:
        The numbers of verified items and of findings.

    Raises:
        ArgumentError: ``threads`` or ``progress`` has a wrong value.
        NotACheckpointError: there is no checkpoint.
        StorageError: the store cannot be listed, or the checkpoint was replaced twice during the
            call.
    """
    require_number("threads", threads, none=True)
    url = stored.location.url
    log_event(logger, "verify_begin", f"{url}: verifying", url=url)
    with metered("verify", url, progress) as meter:
        try:
            result = _Verification(stored, found, keys, hashes, threads, meter).run()
        except ReplacedError as error:
            logger.warning("%s; verifying the new checkpoint", error)
            stored = StoredCheckpoint(stored.location)
            result = _Verification(stored, found, keys, hashes, threads, meter).run()
        if not result.ok:
            meter.tell("failed")
    about = {name: n for name, n in asdict(result).items() if name != "unchecked"}
    state = "no damage" if result.ok else f"{result.damage} finding(s) of damage"
    log_event(logger, "verify", f"{url}: verified, {state}", url=url, **about)
    return result


_Job = Callable[[], None]
"""Verifies some chunks, or another file."""
_Index = tuple[int, ...]
"""Index of a sharded object, or the shape of its grid."""


@dataclass
class _Verification:
    """One run of :func:`verify`, with its arguments."""

    stored: StoredCheckpoint
    found: Callable[[Finding], None]
    keys: Sequence[str]
    hashes: bool
    threads: int | None
    meter: Meter

    def __post_init__(self) -> None:
        self.location = self.stored.location
        self.url = self.location.url
        self.wants = matcher(self.keys)
        self.root: RootDocument | None = None
        self.root_is_damaged = False
        self.refused = self.stored.refused = self.stored.refused or {}
        self.manifest: Manifest | None = None
        with suppress(CheckpointingException):  # _read_arrays() reports it
            _ = self.stored.root  # read before the listing, to detect a replacement between the two
        # All files, sorted: in an object store one listing instead of one per array.
        only = self.stored.only
        place = self.location.child(only) if only else self.location
        self.names = sorted(f"{only}/{name}".lstrip("/") for name in place.walk_all())
        self.result = Verified()
        self.unwritten = Counter[ArrayMeta]()
        self.lock = threading.Lock()

    def run(self) -> Verified:
        start = perf_counter()
        with collector_paused():
            jobs = self._plan()

        def work(batch: Sequence[_Job]) -> None:
            for job in batch:
                job()

        total = self.meter.now
        threads = self.location.threads(max(1, total.bytes_total), total.chunks_total)
        run_batched(jobs, work, threads=self.threads or threads)
        for array, count in self.unwritten.items():
            text = (
                f"{count} of {array.grid.size} chunks of key {array.key!r} are missing: PATH; Zarr "
                "reads them as the fill value, which other programs do not store"
            )
            self._report("chunk-missing", array.node, text, "note", key=array.key)
        if not self.result.ok:
            self.stored.require_unchanged()
        self.result.seconds = perf_counter() - start
        return self.result

    def _plan(self) -> list[_Job]:
        """Verify the documents of the checkpoint, and return jobs that verify the rest."""
        top = sorted({name.partition("/")[0] for name in self.names})
        if not (self.stored.only or {"zarr.json", ".zgroup", CONFIG_NAME} & set(top)):
            self.stored.require()
        arrays = self._read_arrays(top)
        unknown: Severity = "damage" if self._is_ours else "note"  # saves write what loads read
        for key, error in self.refused.items():
            text = f"{error}; its chunks were not verified"
            self._report("type-unknown", key, text, unknown, key=key)
        self._read_manifest(arrays)
        nodes = {meta.node for meta in arrays}
        jobs = self._common_jobs(top) + self._object_jobs(nodes)
        self._report_foreign(nodes | self._undescribed(nodes) | self.refused.keys())
        wanted = [meta for meta in arrays if self.wants(meta.key)]
        self.result.arrays = len(wanted)
        size = sum(meta.chunk_bytes * meta.grid.size for meta in wanted)
        count = sum(meta.grid.size for meta in wanted)
        self.meter.tell("move", bytes_total=size, chunks_total=count)
        in_packs: dict[str, list[tuple[ArrayMeta, int, PackedRange]]] = defaultdict(list)
        for array in wanted:
            if unread := codec_error(self.location, array):
                text = f"{unread}; its chunks were not verified"
                self._report("codec-unknown", array.node, text, unknown, key=array.key)
                self.result.arrays -= 1
                continue
            if array.places is not None:
                for number, place in enumerate(map(array.places.of, range(array.grid.size))):
                    in_packs[place.name].append((array, number, place))
                continue
            count, step = array.grid.size, max(1, min(RUN_CHUNKS, RUN_BYTES // array.chunk_bytes))
            with self._reporting("chunk-missing", array.node, array.key):
                self.stored.require_chunks(array)
                for first in range(0, count or 1, step):
                    jobs.append(partial(self._check_run, array, first, min(first + step, count)))
        return jobs + [partial(self._check_pack, name, held) for name, held in in_packs.items()]

    def _report(
        self, kind: str, name: str, text: str, severity: Severity = "damage", **about: Any
    ) -> None:
        """Report a :class:`Finding` with the fields ``about`` for the file ``name`` below the
        checkpoint. The file's path replaces ``PATH`` in the text."""
        path = f"{self.url}/{name}"
        text = text.replace("\n", " ").replace("PATH", path, 1)
        with self.lock:
            if severity == "damage":
                if self.result.damage.bit_count() <= 1:  # after 0, 1, 2, 4, 8 ... findings
                    self.stored.require_unchanged()
                self.result.damage += 1
            else:
                self.result.notes += 1
            self.found(Finding(kind, severity, text, path, **about))

    @contextmanager
    def _reporting(self, kind: str, name: str, key: str | None = None) -> Iterator[None]:
        """Report an error in the file ``name`` that is raised inside, as damage."""
        try:
            yield
        except (CheckpointingException, OSError, ValueError, TypeError, RecursionError) as error:
            if not self.location.is_damage(error):
                raise  # the store failed, or refused: that is no damage
            about = "" if key is None else f" (key {key!r})"
            is_ours = isinstance(error, CheckpointingException)
            text = str(error) if is_ours else f"PATH{about} is damaged: {error}"
            self._report(kind, name, text, key=key)

    def _names_below(self, node: str) -> set[str]:
        """Return the names of all files below a node, relative to it."""
        first = bisect_left(self.names, f"{node}/")
        last = bisect_left(self.names, f"{node}0")  # "0" is the character after "/"
        return {name[len(node) + 1 :] for name in self.names[first:last]}

    # -- documents of the whole checkpoint ------------------------------------------------------

    def _read_arrays(self, top: Sequence[str]) -> list[ArrayMeta]:
        """Return all arrays, from their own documents if the root document is unusable."""
        if "zarr.json" in top or MANIFEST_NAME not in top:
            try:
                self.root = self.stored.root
                return list(self.stored.arrays.values())
            except CheckpointingException as error:
                if isinstance(error, StorageError) and "root" in vars(self.stored):
                    raise  # the folders of the arrays cannot be listed
                lost = self.root is not None and set(self.root.chunk_sums) - self.root.nodes
                kind, text = "arrays-undescribed" if lost else "root-damaged", str(error)
        else:
            kind = "root-missing"
            text = "PATH is missing: the checkpoint cannot be opened without it"
        self._report(kind, "zarr.json", text)
        self.root_is_damaged = True
        found: list[ArrayMeta | None] = []
        for node in top:
            name = f"{node}/zarr.json"
            with self._reporting("document-damaged", name, key_of(node)):
                if (data := self.location.read_range(name)) is not None:
                    url = f"{self.url}/{name}"
                    found.append(parse_array(node, data, url, constants=True))
        return [meta for meta in found if meta is not None]

    @property
    def _is_ours(self) -> bool:
        """Whether it is a checkpoint, and not Zarr of another program. With a damaged root
        document it counts as one."""
        return self.root_is_damaged or not self.stored.is_foreign

    def _read_manifest(self, arrays: Sequence[ArrayMeta]) -> None:
        try:
            root, self.manifest = self.root, self.stored.manifest
            if not self.root_is_damaged:
                self.stored.check_root()
            if self.manifest is None and self._is_ours and root is not None and root.nodes:
                text = "PATH is missing: chunks are compared with their own checksums only"
                self._report("manifest-missing", MANIFEST_NAME, text, "note")
        except DamagedCheckpointError as error:
            name = str(error.url).rpartition("/")[2]
            kind = "manifest-damaged" if name == MANIFEST_NAME else "root-damaged"
            self._report(kind, name, str(error))
        for meta in arrays:
            if self.manifest is not None and self.manifest.rows(meta) is None:
                text = (
                    f"PATH has no matching entry for key {meta.key!r}: another program rewrote "
                    "or added it; its chunks are compared with their own checksums only"
                )
                self._report("manifest-stale", MANIFEST_NAME, text, "note", key=meta.key)

    def _undescribed(self, nodes: set[str]) -> set[str]:
        """Return the nodes in the manifest that no document describes any more."""
        arrays = self.manifest.arrays if self.manifest and self.root_is_damaged else ()
        lost = [array.node for array in arrays if array.node not in nodes]
        if lost and not self.keys:
            text = (
                f"only the damaged root document describes {len(lost)} array(s) of PATH; their "
                f"chunks were not verified: {', '.join(lost[:SHOWN_ARRAYS])}"
            )
            self._report("arrays-unread", MANIFEST_NAME, text, "note")
        return set(lost)

    # -- files that do not belong to arrays -----------------------------------------------------

    def _common_jobs(self, top: Sequence[str]) -> list[_Job]:
        """Verify ``metadata.json``, which names the backend of the common values, and common values
        in a root document that has no checksum. Return the job that verifies ``common.pt``."""
        backend = "torch"
        if CONFIG_NAME in top:
            with self._reporting("config-damaged", CONFIG_NAME):
                document = json.loads(self.location.read(CONFIG_NAME))
                backend = parse_config(document, f"{self.url}/{CONFIG_NAME}").common_backend
        elif self._is_ours:
            text = "PATH is missing: load() does not accept the folder as a checkpoint"
            self._report("config-missing", CONFIG_NAME, text)
        if self.keys:
            return []
        if COMMON_STATE_NAME in top:
            return [partial(self._check_file, COMMON_STATE_NAME, "common-damaged")]
        if self._is_ours and backend == "torch":
            text = "PATH is missing: the common values of the state are lost"
            self._report("common-missing", COMMON_STATE_NAME, text)
        elif self.root is not None and not self.root.is_summed:
            with self._reporting("common-damaged", "zarr.json"):
                record = StateRecord.from_root(self.root.attributes, self.url) or StateRecord()
                record.nested(self.url, {})
        return []

    def _object_jobs(self, nodes: set[str]) -> list[_Job]:
        """Return jobs that verify the sharded objects. Report the objects that are missing: those
        that the commit names, and those that the grid of a key lacks.

        Args:
            nodes: folders of arrays, which may hold objects too.
        """
        there = set(self.names)
        committed = () if self.root is None else self.root.file_sums
        objects: dict[tuple[str, _Index], dict[_Index, str]] = {}
        for name in sorted(there.union(committed)):
            node, _, file = name.rpartition("/")
            place = object_place(file)
            if place is not None and node and ("/" not in node or node in nodes):
                index, shape = place
                objects.setdefault((node, shape), {})[index] = name
            elif name not in there and name != COMMON_STATE_NAME and self.wants(_key(node)):
                self._report("file-missing", name, "PATH is missing, and the commit names it")
        jobs: list[_Job] = []
        for (node, shape), named in objects.items():
            key = _key(node)
            if not self.wants(key):
                continue
            grid = Grid(shape, (1,) * len(shape))
            indices = map(grid.index_at, range(grid.size))
            for index in islice((i for i in indices if i not in named), SHOWN_OBJECTS):
                file = f"shard_{'.'.join(map(str, index))}_{'.'.join(map(str, shape))}.pt"
                named[index] = f"{node}/{file}"
            for index, name in named.items():
                if name in there:
                    jobs.append(partial(self._check_file, name, "object-damaged", key))
                else:
                    text = f"object {index} of key {key!r} is missing: PATH"
                    self._report("object-missing", name, text, key=key)
        self.result.objects = len(jobs)
        return jobs

    def _report_foreign(self, nodes: set[str]) -> None:
        """Report files outside of the folders of arrays that are not part of the checkpoint."""
        known = {node.partition("/")[0] for node in nodes}.union(OWN_FILES, {OWNER_NAME})
        parts = (name.split("/") for name in self.names)
        for name in sorted({"/".join(part[:2]) for part in parts if part[0] not in known}):
            folder, _, file = name.partition("/")
            # Megatron-Core left locks behind.
            is_known = object_place(file) or (self.root is None and folder.endswith(".sync"))
            is_known = is_known or (self.root is not None and name in self.root.file_sums)
            is_known = is_known or (not self._is_ours and name.endswith(GROUP_DOCUMENTS))
            if not is_known and self.wants(_key(folder)):
                self._report("foreign", name, "PATH is not part of the checkpoint", "note")

    def _check_file(self, name: str, kind: str, key: str | None = None) -> None:
        with self._reporting(kind, name, key):
            data = self.stored.document(name) or b""
            if name.endswith(".json"):
                json.loads(data)
            else:
                verify_archive(data)
            if not self.root_is_damaged:
                self.stored.check_file(name, data)
            if name == COMMON_STATE_NAME and self.root is not None and not self.root.is_summed:
                # Imported here: it imports torch, which newer checkpoints do not need.
                from shardstore.strategies.common import require_same_content

                require_same_content(self.stored, data)

    # -- arrays -----------------------------------------------------------------------------------

    def _check_run(self, array: ArrayMeta, first: int, last: int) -> None:
        """Verify consecutive chunks. The first run of an array also verifies its document and
        folder."""
        if first == 0:
            names = self._names_below(array.node)
            self._check_document(array, names)
            self._check_folder(array, names)
        for number in range(first, last):
            self._check_chunk(array, number, array.chunk_name(array.grid.index_at(number)))

    def _check_chunk(
        self, array: ArrayMeta, number: int, name: str, stored: memoryview | None = None
    ) -> None:
        """Verify a chunk in the file ``name``. ``stored``: its bytes, if it is packed."""
        index, manifest, mover = array.grid.index_at(number), self.manifest, Mover.of(self.location)
        read, problem = mover.verify(array, index, manifest, hashes=self.hashes, stored=stored)
        if problem is not None and problem.kind == "missing" and not self._is_ours:
            self.unwritten[array] += 1
        elif problem is not None:
            rank = None if manifest is None else manifest.writer(array, index)
            by = "" if rank is None else f", written by rank {rank}"
            text = f"chunk {index} of key {array.key!r} {problem.text}: PATH{by}"
            kind = f"chunk-{problem.kind}"
            self._report(kind, name, text, key=array.key, chunk=index, rank=rank)
        checked = array.has_crc or (manifest is not None and manifest.rows(array) is not None)
        with self.lock:
            self.result.chunks += 1
            self.result.bytes += read
            self.result.unchecked += not checked
        self.meter.count(array.chunk_bytes, 1)

    def _check_pack(self, name: str, chunks: Sequence[tuple[ArrayMeta, int, PackedRange]]) -> None:
        """Verify a pack as a file, and chunks that lie in it."""
        data: bytes | None = None
        with self._reporting("pack-damaged", name):
            data = self.stored.document(name)
            if not self.root_is_damaged:
                self.stored.check_file(name, data)
        for array, number, (_, first, last) in chunks:
            stored = None if data is None else memoryview(data)[first:last]
            self._check_chunk(array, number, name, stored)

    def _check_document(self, array: ArrayMeta, names: set[str]) -> None:
        """Compare an array's own document with the root's copy."""
        root, name, key = self.root, f"{array.node}/{array.document_name}", array.key
        if root is None or (saved := root.texts.get(array.node)) is None:
            return
        expected = root.has_document_of(array)
        if array.document_name not in names and not expected:
            return
        path = f"PATH (key {key!r})"
        with self._reporting("document-damaged", name, key):
            data = self.location.read_range(name)
            if data is None:
                text = f"{path} is missing: readers that open the array by its path do not find it"
                self._report("document-missing", name, text, key=key)
                return
            if data == saved and expected:
                return
            # zarr adds empty transformers to the copy in the root document.
            own, copy = ({"storage_transformers": [], **json.loads(t)} for t in (data, saved))
            if differ := [p for p in own | copy if own.get(p, ...) != copy.get(p, ...)]:
                text = f"{path} differs from the root's copy in {', '.join(sorted(differ))}"
                self._report("document-differs", name, text, key=key)
            elif not expected:
                text = (
                    f"{path} is not part of the checkpoint, which was saved without array "
                    "documents; it equals the root's copy"
                )
                self._report("foreign", name, text, "note", key=key)

    def _check_folder(self, array: ArrayMeta, names: set[str]) -> None:
        """Find foreign files in an array's folder."""
        if array.codecs is None:
            return  # other programs may use other names for chunks
        count = 0 if array.constant is not None else array.grid.size
        indices = map(array.grid.index_at, range(count))
        chunks = {array.chunk_name(index).removeprefix(f"{array.node}/") for index in indices}
        own = (array.document_name, ".zattrs", ".zarray")
        for name in sorted(names.difference(chunks, own)):
            if array.constant is not None and name.startswith("c"):
                text = f"PATH is beside the constant {array.key!r}, and zarr reads it: remove it"
                self._report("chunk-extra", f"{array.node}/{name}", text, key=array.key)
            elif not object_place(name):
                text = f"PATH is not a chunk of key {array.key!r}"
                self._report("foreign", f"{array.node}/{name}", text, "note", key=array.key)


def _key(node: str) -> str:
    """Return the key of a node; its name if that was shortened."""
    return key_of(node) or node
