"""A committed checkpoint, read only: its arrays by key, its manifest when it is needed, its chunks
through a mover."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardstore.errors import DamagedCheckpointError, NotACheckpointError
from shardstore.storage.commit.identity import instead
from shardstore.storage.format.documents import (
    CHUNK_SUMS,
    ArrayMeta,
    RootDocument,
    parse_array,
    parse_root,
    parse_v2_array,
    root_document,
)
from shardstore.storage.format.names import (
    COMMON_STATE_NAME,
    CONFIG_NAME,
    MANIFEST_NAME,
    is_object_file,
    key_of,
)
from shardstore.storage.movers.collector import collector_paused
from shardstore.storage.stores.location import Location

if TYPE_CHECKING:
    # What reads chunks brings NumPy; a listing reads none.
    from shardstore.storage.format.manifest import Manifest
    from shardstore.storage.movers.chunks import ReadDone, RegionRead

__all__ = ["OWN_FILES", "StoredCheckpoint"]

OWN_FILES = ("zarr.json", CONFIG_NAME, COMMON_STATE_NAME, MANIFEST_NAME, ".owner.json")
"""What the checkpoint itself keeps beside its arrays."""
LAYOUT = ("zarr", 2)
"""Backend and version, as ``metadata.json`` has them, of checkpoints with a root document."""


class StoredCheckpoint:
    """What is stored at a location.

    Args:
        location: root of the checkpoint.
        documents: small documents that were read before, by name; ``None`` where there is none of
            that name. All others are read from the store.
        threads: threads for reading.
    """

    def __init__(
        self,
        location: Location,
        *,
        documents: Mapping[str, bytes | None] | None = None,
        threads: int | None = None,
    ) -> None:
        self.location = location
        self.documents = documents or {}
        self._threads = threads
        self._lock = threading.Lock()

    def document(self, name: str) -> bytes:
        """Return a small document.

        Raises:
            FileNotFoundError: there is none of that name.
            StorageError: the store refused.
        """
        if name not in self.documents:
            return self.location.read(name)
        if (data := self.documents[name]) is None:
            raise FileNotFoundError(f"{self.location.url}/{name}")
        return data

    def has_document(self, name: str) -> bool:
        """Whether there is a document of that name."""
        known = name in self.documents
        return self.documents[name] is not None if known else self.location.exists(name)

    @cached_property
    def root(self) -> RootDocument | None:
        """The root document; ``None`` for the Zarr v2 layout, which has none.

        Raises:
            DamagedCheckpointError: it is gone, and was there by what ``metadata.json`` says.
        """
        try:
            text = self.document("zarr.json")
        except FileNotFoundError:
            self._require_no_root()
            return None
        with collector_paused():
            return parse_root(text, f"{self.location.url}/zarr.json")

    def _require_no_root(self) -> None:
        try:
            config = json.loads(self.document(CONFIG_NAME))
            layout = config["sharded_backend"], config["sharded_backend_version"]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return
        if layout == LAYOUT:
            url = f"{self.location.url}/zarr.json"
            raise DamagedCheckpointError(
                f"{url}, the root document, is missing from a checkpoint whose {CONFIG_NAME} says "
                f"that it has one (backend {LAYOUT}): the checkpoint is damaged, as by a deletion "
                "that was cut short; load an earlier one",
                url=url,
            )

    @cached_property
    def arrays(self) -> Mapping[str, ArrayMeta]:
        """All arrays by key.

        Raises:
            NotACheckpointError: nothing of ours is there.
            FormatVersionError, DTypeMismatchError: this version does not read what is there.
        """
        root = self.root
        if root is not None and root.consolidated:
            with collector_paused():
                return root.arrays()
        name = ".zarray" if root is None else "zarr.json"
        documents = self._documents(name) if self.location.is_local else self._objects(name)
        found = {}
        for node, text in documents:
            if root is None and node.endswith(".sync") and not text.strip():
                continue  # "KEY.sync", a lock that the zarr library left behind for Megatron-Core
            url = f"{self.location.url}/{node}/{name}"
            parse = parse_v2_array if root is None else parse_array
            if (meta := parse(node, text, url)) is not None:
                found[meta.key] = meta
        return found

    def _documents(self, name: str) -> Iterator[tuple[str, bytes]]:
        """Node and document of each array in a folder."""
        nodes = self.location.listing()
        while nodes:
            node = nodes.pop()
            try:
                text = self.location.read(f"{node}/{name}")
                yield node, text
                has_more = b'"group"' in text
            except FileNotFoundError:
                has_more = self.root is None
            # Groups of other programs are nested, and the old layout took keys as paths: "a/b" is a
            # folder in a folder.
            if has_more and self.location.is_dir(node):
                nodes += [f"{node}/{below}" for below in self.location.listing(node)]

    def _objects(self, name: str) -> Iterator[tuple[str, bytes]]:
        """The same in an object store: one listing, then all documents at once."""
        from shardstore.storage.stores.object_io import read_objects

        wanted = [entry for entry in self.location.remote.walk() if entry.endswith(f"/{name}")]
        for entry, text in zip(wanted, read_objects(self.location, wanted), strict=True):
            if text is not None:
                yield entry.rpartition("/")[0], text

    @cached_property
    def manifest(self) -> Manifest | None:
        """What each chunk was when it was written; ``None`` where there is no manifest."""
        try:
            data = self.document(MANIFEST_NAME)
        except FileNotFoundError:
            return None
        from shardstore.storage.format.manifest import Manifest

        return Manifest.from_bytes(data, f"{self.location.url}/{MANIFEST_NAME}")

    def read(self, reads: Sequence[RegionRead], done: ReadDone | None = None) -> None:
        """Read regions into their destinations, every byte that has a checksum verified; ``done``
        as for :meth:`Mover.read`.

        Raises:
            ChunkMissingError, ChunkCorruptError: name key, chunk and the rank that wrote it.
        """
        own = [read for read in reads if read.array.codecs is not None]
        other = [read for read in reads if read.array.codecs is None]
        # Each mover is imported where it is needed: TensorStore alone takes half a second.
        if own and self.location.is_local:
            from shardstore.storage.movers.files import FileMover

            FileMover(self.location, threads=self._threads).read(own, self._manifest, done)
        elif own:
            from shardstore.storage.movers.object_mover import ObjectMover

            ObjectMover(self.location).read(own, self._manifest, done)
        if other:
            from shardstore.storage.movers.tensorstore_reader import TensorStoreReader

            TensorStoreReader(self.location).read(other, self._manifest, done)

    def _manifest(self) -> Manifest | None:
        with self._lock:  # one of the threads that read asks the store, the others wait
            return self.manifest

    def remove(self, key_prefix: str) -> None:
        """Remove arrays whose keys begin so: from the root document first, so that no reader meets
        a hole, then their chunks, and then from the manifest, by which what is left of them is
        found if this is cut short: by a deletion of all, and by the same removal again (but for
        arrays whose names were shortened).

        Raises:
            NotACheckpointError: nothing of ours is there.
            StorageError: a symbolic link leads to an array; nothing was removed.
        """
        listed = {meta.node for key, meta in self.arrays.items() if key.startswith(key_prefix)}
        manifest = None if self.root is None else self.manifest
        doomed = set(listed)
        if self.root is not None and manifest is not None:
            unlisted = {node for node, _, _ in manifest.arrays} - set(self.root.texts)
            doomed |= {node for node in unlisted if (key_of(node) or "").startswith(key_prefix)}
        for node in doomed:
            self.location.require_no_link_to(node)
        if self.root is not None and listed:
            texts = self.root.texts.items()
            kept = [(node, text.decode()) for node, text in texts if node not in listed]
            root = root_document(kept, self._attributes_without(listed))
            self.location.replace("zarr.json", root.encode())
        self._delete_arrays(sorted(doomed))
        if manifest is not None and doomed:
            self.location.replace(MANIFEST_NAME, manifest.without(doomed).to_bytes())
        for name in ("root", "arrays", "manifest"):
            self.__dict__.pop(name, None)

    def _delete_arrays(self, nodes: Sequence[str]) -> None:
        """Delete documents and chunks; sharded objects of the same keys, in the same folders,
        stay."""
        if not self.location.is_local:
            store = self.location.remote
            files = [name for node in nodes for name in store.walk(node)]
            store.delete([name for name in files if not is_object_file(name.rpartition("/")[2])])
            return
        for node in nodes:
            if not self.location.is_link(node):  # of which the link alone is removed
                for name in self.location.listing(node):
                    if not is_object_file(name):
                        self.location.delete(f"{node}/{name}")
                if self.location.listing(node):
                    continue
            self.location.delete(node)

    def _attributes_without(self, nodes: set[str]) -> dict[str, Any]:
        """Attributes of the root group, less the checksums of some arrays."""
        assert self.root is not None
        sums = self.root.chunk_sums
        if not sums:
            return self.root.attributes
        kept = {node: crcs for node, crcs in sums.items() if node not in nodes}
        about = {**self.root.attributes["shardstore"], CHUNK_SUMS: kept}
        if isinstance(about.get("commit"), dict):
            # Of all arrays together: it does not hold for those that stay.
            about["commit"] = {n: v for n, v in about["commit"].items() if n != "content"}
        return {**self.root.attributes, "shardstore": about}

    def check_file(self, name: str, data: bytes) -> bool:
        """Hold a file that is no chunk against what the commit says of it, if it says anything.

        Returns:
            Whether it does.

        Raises:
            DamagedCheckpointError: it is another than the one that was committed.
        """
        known = None if self.root is None else self.root.file_sums.get(name)
        if not isinstance(known, int):
            return False
        # A listing checks nothing, and need not wait for the library that would.
        from shardstore.storage.movers.checksums import crc32c

        found = crc32c(data, 0)
        if known == found:
            return True
        url = f"{self.location.url}/{name}"
        raise DamagedCheckpointError(
            f"{url} is not the file that was committed (crc32c {found:08x}, in the commit "
            f"{known:08x}): it was damaged, or written again by a save that was given up; load an "
            "earlier checkpoint",
            url=url,
        )

    def require(self) -> None:
        """Raise :class:`NotACheckpointError` unless there is a checkpoint with arrays of ours."""
        if self.root is not None or self.has_document(CONFIG_NAME):
            return
        url, found = self.location.url, "it has neither zarr.json nor metadata.json"
        if self.location.is_local and not self.location.exists():
            found = "it does not exist"
        elif other := instead(self.location):
            found = other
        elif self.location.is_local and self.location.path.is_file():
            found = "it is a file: give the folder that save() wrote"
        raise NotACheckpointError(f"{url} is not a distributed checkpoint: {found}", url=url)
