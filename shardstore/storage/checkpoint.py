"""Read access to a committed checkpoint: its documents, its arrays by key, its manifest and its
chunks; also the removal of arrays."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from shardstore import errors
from shardstore.storage.commit.identity import ATTEMPTS, instead, is_committed
from shardstore.storage.format.documents import (
    ArrayMeta,
    Refused,
    RootDocument,
    array_document,
    by_key,
    parse_array,
    parse_root,
    parse_v2_array,
)
from shardstore.storage.format.names import (
    CONFIG_NAME,
    MANIFEST_NAME,
    key_of,
    node_name,
    object_place,
)
from shardstore.storage.format.packs import PACKS, is_pack
from shardstore.storage.runtime.checksums import crc32c
from shardstore.storage.runtime.parallel import collector_paused
from shardstore.storage.stores.location import Location

if TYPE_CHECKING:
    # The modules that read chunks import NumPy, which a listing does not need.
    from shardstore.storage.format.manifest import Manifest
    from shardstore.storage.movers.chunks import ReadDone, RegionRead

SHOWN = 4
"""Number of arrays that an error names at most."""
MANY_CHUNKS = 100_000
"""Above this number of chunks of an array, its files are counted before a read allocates anything
for each chunk."""
LAYOUT = ("zarr", 2)
"""Backend and version in ``metadata.json`` of checkpoints with a root document."""

latest_save: dict[Location, Callable[[], object]] = {}
"""Target of the latest asynchronous save of this process -> waits for its end."""

T = TypeVar("T")


def settled(location: Location) -> Location:
    """Return a location after the end of this process's asynchronous save to it, or to a place that
    it is inside of, also through links, so that no older state is read, or committed last."""
    for target, wait in tuple(latest_save.items()):
        places = [os.path.realpath(p.url) if p.is_local else p.url for p in (location, target)]
        if f"{places[0]}/".startswith(f"{places[1]}/"):
            wait()
    return location


class unlocked_property(cached_property[T]):  # noqa: N801 (as functools names it)
    """A cached property without a lock. ``functools.cached_property`` of Python 3.11 has one lock
    for all instances, so a store that does not answer would block readers of other checkpoints."""

    def __init__(self, func: Callable[[Any], T]) -> None:
        super().__init__(func)
        self.lock = nullcontext()


class ReplacedError(errors.StorageError):
    """The checkpoint was replaced or deleted during a read."""


class UnfinishedError(ReplacedError, errors.NotACheckpointError):
    """A save or a deletion in an object store has begun, and no checkpoint is committed there."""


class StoredCheckpoint:
    """A checkpoint at a location.

    Args:
        location: root of the checkpoint.
        documents: small documents that were read before, by name; ``None`` for a document that does
            not exist. All other documents are read from the store.
        threads: number of threads for reads from a disk; ``None``: the default of the mover.

    Attributes:
        documents: the documents that are not read again: those given, and the root document.
        only: the node of a single array of another program, whose group counts for nothing.
    """

    def __init__(
        self,
        location: Location,
        *,
        documents: Mapping[str, bytes | None] | None = None,
        threads: int | None = None,
    ) -> None:
        self.location = location
        self.documents = dict(documents or {})
        self.refused: Refused | None = None
        self.only = ""
        self._threads = threads
        self._lock = threading.Lock()

    def document(self, name: str) -> bytes | None:
        """Return the content of a small document; ``None`` if there is no such document.

        Raises:
            DamagedCheckpointError: there is no such document, but the commit names it.
            StorageError: the store failed.
        """
        if name in self.documents:
            data = self.documents[name]
        else:
            root: RootDocument | None = vars(self).get("root")
            data = self.location.read_if_there(name, root.file_bytes.get(name) if root else None)
        if name == "zarr.json":
            self.documents[name] = data
        if data is None and name not in ("zarr.json", CONFIG_NAME, MANIFEST_NAME):
            self.check_file(name, None)
        return data

    def require_unchanged(self) -> None:
        """Raise :class:`ReplacedError` if the root document changed since it was read, or if an
        object store has none because a save or a deletion has begun."""
        place, begun = self.location, []
        try:
            # The root document is read last: a save that has committed by then is not unfinished.
            begun = place.listing(ATTEMPTS)
            if begun and is_committed(place):
                begun = []
            found = place.read_if_there("zarr.json")
        except errors.StorageError:
            return
        if begun and found is None:
            raise place.error(
                " is being replaced or deleted: a save or a deletion has begun there "
                f"({ATTEMPTS}/{begun[-1]}), and no checkpoint is committed. Read again after it "
                "has finished; if its process died, save again, or read another checkpoint",
                UnfinishedError,
            )
        if self.documents.get("zarr.json", found) != found:
            raise self._replaced()

    def _replaced(self) -> ReplacedError:
        how = "was replaced while it was read: another save wrote over it, or it was deleted"
        if self.location.is_missing():
            how += f"; or {socket.gethostname()} does not see it (is its file system mounted?)"
        remedy = "Read it again, or read a checkpoint that nobody writes over"
        return self.location.error(f" {how}. {remedy}", ReplacedError)

    @contextmanager
    def unless_replaced(self) -> Iterator[None]:
        """Raise :class:`ReplacedError` instead of any error whose cause is a replaced
        checkpoint."""
        try:
            yield
        except Exception:
            self.require_unchanged()
            raise

    def has_file(self, name: str) -> bool:
        """Return whether there is a document of that name."""
        known = name in self.documents
        return self.documents[name] is not None if known else self.location.exists(name)

    @unlocked_property
    def root(self) -> RootDocument | None:
        """The root document; ``None`` for the Zarr v2 layout, which has none.

        Raises:
            DamagedCheckpointError: the document fails its checksum; or ``metadata.json`` says that
                the checkpoint has a root document of shardstore, and the document is missing or
                lacks the attributes of shardstore.
        """
        if (text := self.document("zarr.json")) is None:
            self._require_other_layout("is missing from")
            return None
        with collector_paused():
            root = parse_root(text, f"{self.location.url}/zarr.json")
        if root.format_version is None:
            self._require_other_layout("has no attributes of shardstore, in")
        return root

    def _require_other_layout(self, found: str) -> None:
        """Raise :class:`DamagedCheckpointError` if ``metadata.json`` says that the checkpoint has a
        root document of shardstore. ``found`` is the actual state, for the error text."""
        try:
            config = json.loads(self.document(CONFIG_NAME) or b"{}")
            layout = config["sharded_backend"], config["sharded_backend_version"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return
        if layout == LAYOUT:
            self.require_unchanged()
            if not self.location.exists(CONFIG_NAME):
                raise self._replaced()  # deleted since it was read
            raise self.location.child("zarr.json").error(
                f", the root document, {found} a checkpoint whose {CONFIG_NAME} says that it is "
                f"ours (backend {LAYOUT}): the checkpoint is damaged, perhaps by a deletion (in an "
                "object store also by a save) that was interrupted or still runs; load an earlier "
                "one",
                errors.DamagedCheckpointError,
            )

    @unlocked_property
    def is_foreign(self) -> bool:
        """Whether another program wrote it: it may lack chunks that hold only the fill value."""
        if self.root is None:
            return not self.has_file(CONFIG_NAME)
        return self.root.format_version is None

    @unlocked_property
    def arrays(self) -> Mapping[str, ArrayMeta]:
        """All arrays by key.

        Raises:
            NotACheckpointError: a document is not valid JSON or no Zarr group.
            FormatVersionError, DTypeMismatchError: this version cannot read an array.
            DamagedCheckpointError: two nodes have the same key, or the root document lacks an array
                that it has checksums of.
        """
        root = self.root
        with collector_paused():
            if root is not None and root.consolidated:
                arrays = root.arrays(self.refused)
            else:
                arrays = by_key(list(self._listed_arrays(root)), self.location.url)
        nodes = {meta.node for meta in arrays.values()}
        if root is not None and (lost := sorted(set(root.chunk_sums) - nodes)):
            shown = ", ".join(lost[:SHOWN])
            raise root.damaged(
                f"has checksums of {len(lost)} array(s) that it lacks, such as {shown}"
            )
        if root is not None and not root.is_rewritten:
            for meta in arrays.values():
                if meta.crcs is None and meta.node in root.chunk_sums:
                    raise root.damaged(f"has no checksum for each chunk of key {meta.key!r}")
        return arrays

    def require_chunks(self, array: ArrayMeta) -> None:
        """Raise :class:`ChunkMissingError` if an array's document claims more than
        :data:`MANY_CHUNKS` chunks, the commit does not list them, and fewer than one in 100 exists.
        A read would allocate memory for each chunk."""
        if array.crcs is not None or (count := array.grid.size) <= MANY_CHUNKS:
            return
        files = len(self.location.walk(array.node))
        if count > 100 * files:
            url = f"{self.location.url}/{array.node}"
            raise errors.ChunkMissingError(
                f"at least {count - files} of {count} chunks of key {array.key!r} are missing: "
                f"{url}; the checkpoint is damaged, load an earlier one",
                key=array.key,
                url=url,
            )

    def _listed_arrays(self, root: RootDocument | None) -> Iterator[ArrayMeta]:
        """Yield all arrays, each from its own document."""
        name = ".zarray" if root is None else "zarr.json"
        wanted = [entry for entry in self.location.walk() if entry.endswith(f"/{name}")]
        for entry, text in zip(wanted, self.location.read_many(wanted), strict=True):
            node = entry.rpartition("/")[0]
            if text is None:
                continue  # deleted in the meantime
            if root is None and node.endswith(".sync") and not text.strip():
                continue  # "KEY.sync", a lock that the zarr library left behind for Megatron-Core
            url = f"{self.location.url}/{entry}"
            parse = parse_v2_array if root is None else parse_array
            try:
                if (meta := parse(node, text, url)) is not None:
                    yield meta
            except (errors.FormatVersionError, errors.DTypeMismatchError) as error:
                if self.refused is None:
                    raise
                self.refused[key_of(node) or node] = error

    def check_root(self) -> None:
        """Compare the root document with the manifest and the commit record. This detects damage to
        a root document without a checksum. Skip a document that another program rewrote.

        Raises:
            DamagedCheckpointError: they disagree, or :attr:`arrays` raises it.
        """
        root, metas = self.root, self.arrays.values()
        if root is None or root.format_version is None or root.is_rewritten:
            return
        renamed = [meta for meta in metas if node_name(meta.key) != meta.node]
        if renamed:
            raise root.damaged(f"has the key {renamed[0].key!r} at {renamed[0].node!r}")
        if (manifest := self.manifest) is None:
            return
        from shardstore.storage.format.manifest import content_digest

        sums = manifest.by_node(manifest.crc)
        differing = [
            meta.key
            for meta in metas
            if manifest.rows(meta) is None
            or root.chunk_sums.get(meta.node, sums[meta.node]) != sums[meta.node]
        ]
        content = root.commit.get("content")
        if content is not None and content != content_digest(metas, manifest):
            differing = differing or ["the digest commit.content"]
        if differing:
            names = sorted(["zarr.json", MANIFEST_NAME], reverse=not root.is_summed)
            url, other = (f"{self.location.url}/{name}" for name in names)
            about = ", ".join(differing[:SHOWN])
            raise errors.damaged(
                url, f"disagrees with {other} about {about}: one of them is damaged"
            )

    @unlocked_property
    def manifest(self) -> Manifest | None:
        """The manifest; ``None`` if the checkpoint has none."""
        if (data := self.document(MANIFEST_NAME)) is None:
            return None
        from shardstore.storage.format.manifest import Manifest

        return Manifest.from_bytes(data, f"{self.location.url}/{MANIFEST_NAME}")

    def read(self, reads: Sequence[RegionRead], done: ReadDone = lambda *_: None) -> None:
        """Read regions into their destinations and verify every byte that has a checksum. For
        ``done``, see :meth:`Mover.read`.

        Raises:
            ChunkMissingError, ChunkCorruptError: a chunk is missing or damaged. The error names
                key, chunk and, if the manifest has it, the rank that wrote the chunk.
            ReplacedError: the checkpoint was replaced or deleted during the read.
        """
        unknown = {read.array.node: read.array for read in reads if read.array.crcs is None}
        for array in unknown.values():
            self.require_chunks(array)
        from shardstore.storage.movers.mover import Mover
        from shardstore.storage.options import DEFAULTS, SaveOptions

        with self.unless_replaced():
            options = SaveOptions(threads=self._threads) if self._threads else DEFAULTS
            Mover.of(self.location, options).read(reads, self._manifest, done)

    def _manifest(self) -> Manifest | None:
        with self._lock:  # one reading thread reads the manifest, the others wait
            return self.manifest

    def remove(self, key_prefix: str) -> None:
        """Remove the arrays whose keys begin with ``key_prefix``.

        It first rewrites the root document, so that no reader finds an array without chunks, then
        deletes the chunks, then rewrites the manifest. If the removal is interrupted, the manifest
        still lists the leftovers: repeat the removal, or delete the checkpoint. A repeated removal
        does not find arrays whose node names were shortened.

        Raises:
            NotACheckpointError: a document is not valid JSON or no Zarr group.
            StorageError: a folder above an array is a symbolic link; nothing was removed.
        """
        listed = {meta.node for key, meta in self.arrays.items() if key.startswith(key_prefix)}
        manifest = None if self.root is None else self.manifest
        doomed = set(listed)
        if self.root is not None and manifest is not None:
            unlisted = {array.node for array in manifest.arrays} - self.root.nodes
            doomed |= {node for node in unlisted if (key_of(node) or "").startswith(key_prefix)}
        for name in (*doomed, f"{PACKS}/"):
            self.location.require_no_link_to(name)
        if self.root is not None and listed:
            self.location.replace("zarr.json", self.root.without(listed))
        self._delete_arrays(sorted(doomed))
        if self.root is not None and self.root.packs is not None:
            # A pack stays while an array needs it, with the chunks of those that were removed.
            used = self.root.used_packs(listed)
            packs = [name for name in self.location.walk(PACKS) if is_pack(name)]
            self.location.delete_all([name for name in packs if name not in used], [PACKS])
        if manifest is not None and doomed:
            self.location.replace(MANIFEST_NAME, manifest.without(doomed).to_bytes())
        self.documents.pop("zarr.json", None)
        for name in ("root", "arrays", "manifest"):
            self.__dict__.pop(name, None)

    def _delete_arrays(self, nodes: Sequence[str]) -> None:
        """Delete documents and chunks of arrays. Keep the files of sharded objects in the same
        folders."""
        location = self.location
        links = {node for node in nodes if location.is_link(node)}  # removed, not their targets
        files = [name for node in nodes if node not in links for name in location.walk(node)]
        files = [name for name in files if not object_place(name.rpartition("/")[2])]
        location.delete_all(files, nodes)

    def check_file(self, name: str, data: bytes | None) -> None:
        """Compare the content of a file other than a chunk with its checksum in the commit, if it
        has one.

        Args:
            name: name of the file below the root.
            data: its content; ``None`` if there is no such file.

        Raises:
            DamagedCheckpointError: the checksums differ, or the file is missing and the commit
                names it.
            ReplacedError: they do because the checkpoint was replaced or deleted.
        """
        known = None if self.root is None else self.root.file_sums.get(name)
        found = None if data is None else crc32c(data, 0)
        if not isinstance(known, int) or known == found:
            return
        self.require_unchanged()
        what = "is missing, and the commit names it: the checkpoint is damaged"
        if found is not None:
            what = (
                f"is not the file that was committed (crc32c {found:08x}, in the commit "
                f"{known:08x}): it was damaged, or overwritten by an abandoned save"
            )
        raise errors.damaged(f"{self.location.url}/{name}", what)

    def object_files(self) -> dict[str, str]:
        """Return unique key (``rng/shard_0_4``) -> name below the root, for all files of sharded
        objects.

        Raises:
            DamagedCheckpointError: a file that the commit names is missing.
        """
        names = self.location.walk()
        committed = () if self.root is None else self.root.file_sums
        for name in {name for name in committed if "/" in name}.difference(names):
            self.check_file(name, None)
        split = ((*name.partition("/")[::2], name) for name in names)
        return {
            f"{key_of(node) or node}/{file.rpartition('.')[0]}": name
            for node, file, name in split
            if object_place(file)
        }

    def require(self) -> None:
        """Raise :class:`NotACheckpointError` if there is neither a root document nor
        ``metadata.json``, and :class:`ReplacedError` if another process writes or deletes them."""
        if self.root is not None or self.has_file(CONFIG_NAME):
            return
        self.require_unchanged()
        found = "it has neither zarr.json nor metadata.json"
        if self.location.is_missing():
            found = "it does not exist"
        elif other := instead(self.location):
            found = other
        elif self.location.is_file():
            found = "it is a file: give the folder that save() wrote"
        what = f" is not a distributed checkpoint: {found}"
        raise self.location.error(what, errors.NotACheckpointError)


def read_array_meta(location: Location, key: str) -> ArrayMeta:
    """Return the array of a key from its own document, or from the root document if it has none.

    Raises:
        MissingKeyError: there is no such array.
    """
    for node in dict.fromkeys((node_name(key), key)):
        url = f"{location.url}/{node}"
        old, text = location.read_many([f"{node}/.zarray", f"{node}/zarr.json"])
        if old is not None:
            return parse_v2_array(node, old, url)
        found = None if text is None else parse_array(node, text, url, constants=True)
        if found is not None and found.constant is not None:
            found = StoredCheckpoint(location).arrays.get(found.key)  # if the commit says so
        if found is not None:
            return found
    if (meta := root_arrays(location).get(key)) is not None:
        return meta
    raise errors.MissingKeyError(
        f"there is no array of key {key!r} below {location.url}", key=key, url=location.url
    )


def root_arrays(location: Location) -> Mapping[str, ArrayMeta]:
    """Return, by key, the arrays that only the root document describes; empty if arrays have
    documents of their own."""
    root = StoredCheckpoint(location).root
    if root is None:
        return {}
    return {key: array for key, array in root.arrays().items() if not root.has_document_of(array)}


def create_array(location: Location, meta: ArrayMeta) -> None:
    """Write the document of an array.

    Raises:
        CheckpointExistsError: the array exists.
    """
    document, url = f"{meta.node}/{meta.document_name}", f"{location.url}/{meta.node}"
    if meta.key in root_arrays(location) or location.exists(document):
        raise errors.CheckpointExistsError(
            f"Array {url} already exists; save to an empty folder", key=meta.key, url=url
        )
    location.write(document, array_document(meta).encode())
