"""A prefix of an object store as a store of checkpoints.

fsspec reads and writes documents, lists, deletes and copies (:mod:`.remote`). TensorStore moves the
bytes of S3 and of Google Cloud Storage (:mod:`.tensorstore`). Both are
imported on first use: local checkpoints need neither.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from shardstore.errors import StorageError
from shardstore.storage.runtime.parallel import run_batched, run_together
from shardstore.storage.stores.location import Location, StoreUrl, require_size
from shardstore.storage.stores.object_io import ObjectIO

if TYPE_CHECKING:
    from shardstore.storage.stores.remote import RemoteStore

THREADS, DOCUMENT_THREADS = 16, 64
"""Threads that read chunks, and small documents. Each thread has one request at a time."""

logger = logging.getLogger(__name__)

_DRIVERS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""TensorStore's drivers, by protocol."""


class ObjectPrefix(Location):
    """A prefix of an object store, or of any other store that fsspec knows."""

    copied = "copied"
    copy_requests = 32  # they need no memory for data
    least_copied_bytes = 1024 * 1024  # a small object is sent sooner than the requests of a copy

    @property
    def driver(self) -> str | None:
        """See :attr:`Location.driver`."""
        return _DRIVERS.get(self.url.partition("://")[0])

    @property
    def place(self) -> str:
        """See :attr:`Location.place`."""
        return StoreUrl(self.url, self.options)

    @property
    def remote(self) -> RemoteStore:
        """See :attr:`Location.remote`."""
        # Imported here: local checkpoints do not need fsspec and its dependencies.
        from shardstore.storage.stores.remote import RemoteStore

        return RemoteStore(self.url, self.options)

    def io(self) -> ObjectIO:
        """Return the client for single objects: TensorStore's if it has a :attr:`driver` that
        supports the settings, else fsspec's.

        Raises:
            StorageError: the store cannot be used.
        """
        from shardstore.storage.stores.remote import FileSystemIO

        remote, why = self.remote, "a store other than s3:// and gs://"
        if self.driver:
            why = remote.driver_settings().unsupported
        if not why:
            from shardstore.storage.stores.tensorstore import KvStoreIO

            return KvStoreIO(self.url, self.options)
        _say_once("/".join(self.url.split("/")[:3]), why)
        return FileSystemIO(remote)

    def read_range(self, name: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """See :meth:`Location.read_range`."""
        return self.remote.read_range(name, start, stop, (stop or start) - start)

    def read_many(
        self, names: Sequence[str], sizes: Sequence[int | None] = ()
    ) -> list[bytes | None]:
        """See :meth:`Location.read_many`."""
        if not names:
            return []
        io, found = self.io(), list[bytes | None]([None] * len(names))

        def read(numbers: Sequence[int]) -> None:
            for number in numbers:
                name, size = names[number], sizes[number] if sizes else None
                data = io.get(name, stop=io.end_of(size))
                require_size(data, f"{self.url}/{name}", size)
                found[number] = None if data is None else bytes(data)

        run_batched(range(len(names)), read, threads=io.small_requests)
        return found

    def read_ahead(self, names: Sequence[str], size: int) -> dict[str, bytes | None]:
        """See :meth:`Location.read_ahead`."""
        reads = (partial(self.read_range, name, 0, size) for name in names)
        return dict(zip(names, run_together(*reads), strict=True))

    def threads(self, size_bytes: int = 0, count: int = 1) -> int:
        """See :meth:`Location.threads`."""
        return THREADS if size_bytes else DOCUMENT_THREADS

    def is_damage(self, error: BaseException) -> bool:
        """See :meth:`Location.is_damage`."""
        return not isinstance(error, StorageError)

    def exists(self, name: str = "") -> bool:
        """See :meth:`Location.exists`."""
        return self.remote.exists(name)

    def stamp(self, name: str) -> tuple[int, object] | None:
        """See :meth:`Location.stamp`."""
        return self.remote.stamp(name)

    def sizes(self, names: Iterable[str] = ()) -> Mapping[str, int]:
        """See :meth:`Location.sizes`."""
        return {name: size for name, size, _ in self.remote.details()}

    def listing(self, name: str = "") -> list[str]:
        """See :meth:`Location.listing`."""
        return self.remote.listing(name)

    def walk(self, name: str = "", *, strict: bool = True) -> list[str]:
        """See :meth:`Location.walk`."""
        return self.remote.walk(name)

    def is_within(self, other: Location) -> bool:
        """See :meth:`Location.is_within`."""
        return f"{self.url}/".startswith(f"{other.url}/")

    def write(self, name: str, data: bytes) -> None:
        """See :meth:`Location.write`."""
        self.remote.write(name, data)

    def create(self, name: str, data: bytes) -> bool:
        """See :meth:`Location.create`."""
        return self.remote.create(name, data)

    def is_free(self, last: str) -> bool:
        """See :meth:`Location.is_free`."""
        return not self.exists(last)

    def staging(self, work: Location, last: str) -> Location:
        """See :meth:`Location.staging`."""
        return self if last else work

    def publish(self, made: Location) -> None:
        """See :meth:`Location.publish`."""
        self.remote.become_copy_of(made.remote)

    def delete(self, name: str = "") -> None:
        """See :meth:`Location.delete`."""
        store = self.remote
        store.delete(store.walk(name))

    def delete_all(self, names: Sequence[str], folders: Sequence[str] = ()) -> None:
        """See :meth:`Location.delete_all`."""
        self.remote.delete(names)

    def shares_store(self, source: Location) -> bool:
        """See :meth:`Location.shares_store`."""
        return super().shares_store(source) and self.remote.is_same_store(source.remote)

    def copy_from(self, source: Location, name: str) -> bool:
        """See :meth:`Location.copy_from`."""
        return self.remote.copy_from(source.remote, name)

    def kvstore(self, document: str | None = None) -> dict[str, Any]:
        """See :meth:`Location.kvstore`."""
        if not self.driver:
            raise self.error(
                ": arrays of other programs can be read from local folders, s3:// and gs:// alone; "
                "copy the checkpoint there"
            )
        from shardstore.storage.stores.tensorstore import KvStoreIO

        io = KvStoreIO(self.url, self.options)
        if document is not None:
            io.require_seen(document)
        return io.opened().spec

    def wait(self, future: Any, size: int) -> Any:
        """See :meth:`Location.wait`."""
        from shardstore.storage.stores.tensorstore import shared_context, wait

        return wait(future, self.remote, shared_context(), size)

    def require_absent(self, name: str) -> None:
        """See :meth:`Location.require_absent`."""
        if self.driver:
            from shardstore.storage.stores.tensorstore import require_absent

            require_absent(self.remote, name)

    def forget_listings(self) -> None:
        """See :meth:`Location.forget_listings`."""
        with suppress(Exception):  # no such file system: the program has no cached listings of it
            import fsspec  # type: ignore[import-untyped]

            file_system, path = fsspec.core.url_to_fs(self.url)
            file_system.invalidate_cache(path)


@cache
def _say_once(root: str, why: str) -> None:
    logger.info("%s: fsspec moves chunks too, as TensorStore does not take %s", root, why)
