"""The place of a checkpoint: its URL, and the protocol of its store.

:class:`Location` is the protocol. :class:`~.folder.LocalFolder` implements it by the operating
system, :class:`~.prefix.ObjectPrefix` by the clients of object stores.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from urllib.parse import unquote_to_bytes

from shardstore.errors import ArgumentError, CheckpointingException, StorageError, damaged

if TYPE_CHECKING:
    from shardstore.storage.stores.remote import RemoteStore

E = TypeVar("E", bound=CheckpointingException)

_FILE = "file://"
# A scheme has at least two letters: a single letter is a Windows drive.
_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):(?P<slashes>/+)(?P<rest>.*)", re.DOTALL)
_CHAINED = ("zip::", "tar::", "reference::", "simplecache::", "filecache::", "blockcache::")
_OF_BUCKETS = ("s3", "s3a", "gs", "gcs")
_VERSION = re.compile(r"\?(?:.*&)?(?:versionid|generation)=.*", re.DOTALL | re.IGNORECASE)


def shown(place: object) -> str:
    """Return a path or URL for error texts and logs, with the user and password part hidden."""
    return re.sub(r"(?s)(:/+)[^/]*:.*@", r"\1***@", str(place))


def url_of(place: object) -> str:
    """Return an absolute path, or a URL without a slash at its end.

    Args:
        place: a path (``~`` is the home folder) or a URL.

    Raises:
        ArgumentError: ``place`` is neither a path nor a supported URL. The text says what to give.
    """
    try:
        url = os.fspath(place)  # type: ignore[call-overload]
    except TypeError:
        url = None
    if not isinstance(url, str):
        raise ArgumentError(
            f"the place of a checkpoint must be a path or URL, not of type {type(place).__name__} "
            f"({place!r:.100})"
        )
    if not url.strip():
        raise _wrong(place, "is empty: give a path or a URL")
    if url != url.lstrip() and "://" in url:
        raise _wrong(place, "begins with a blank: remove it")
    # RFC 3986, section 3.1: schemes are case-insensitive.
    url = re.sub(r"^[A-Za-z][A-Za-z0-9+.-]+:/", lambda found: found[0].lower(), url)
    if url.startswith(_FILE):
        # RFC 8089: an empty host is the local one, as is localhost; escapes stand for bytes.
        url = re.sub("^localhost(?=/)", "", url[len(_FILE) :])
        url = os.fsdecode(unquote_to_bytes(os.fsencode(url)))
        if not url:
            raise _wrong(place, "is empty: give a path or a URL")
    elif parts := _SCHEME.match(url):
        _check_store_url(place, parts["scheme"], parts["slashes"], parts["rest"].strip("/"))
    if "\0" in url:
        raise _wrong(place, "has a NUL character, which no path may contain")
    # A file system of a chain may answer from a cache, or keep many names in one file, but claims
    # and commits need the store itself.
    if "::" in url and ("://" in url or url.startswith(_CHAINED)):
        raise _wrong(place, "is a chain of URLs, which cannot hold one: give the store's URL")
    if "://" not in url:
        try:
            url = os.path.abspath(os.path.expanduser(url))
        except OSError as error:
            what = f"is relative to a working directory that is gone ({error.strerror})"
            raise _wrong(place, f"{what}: give an absolute path") from error
    scheme, separator, path = url.rpartition("://")
    return f"{scheme}{separator}{path.rstrip('/')}" or "/"


def _check_store_url(place: object, scheme: str, slashes: str, rest: str) -> None:
    """Raise the errors of :func:`url_of` for a URL: its scheme, the slashes and what follows."""
    has_bucket = scheme in _OF_BUCKETS
    # A secret key may contain slashes; bucket names contain no colon, except for ARNs.
    if has_bucket and re.match(r"(?!arn:)[^/]*:", rest):
        raise _wrong(
            f"{scheme}://***",
            "has a colon where the name of the bucket is expected: credentials are no part of "
            "such a URL; give them as storage_options={'key': ..., 'secret': ...}, or as AWS_* "
            "variables or a profile",
        )
    if not rest and scheme != "memory":  # memory:// has no buckets
        raise _wrong(place, "names no bucket; give a URL such as s3://bucket/run/step-100")
    if has_bucket and not {"", ".", ".."}.isdisjoint(rest.split("/")):
        raise _wrong(
            place,
            "has a part between slashes that is empty, '.' or '..', which not every client of "
            "object stores accepts: leave it out",
        )
    whole = f"{scheme}://{'/' * (scheme == 'file')}{rest}"
    if slashes == "/":
        what = "has lost a slash, as URLs do in pathlib.Path"
        raise _wrong(place, f"{what}: give {whole!r} as a string")
    plain = _VERSION.sub("", whole)
    if plain != whole or (has_bucket and slashes != "//"):
        raise _wrong(
            place,
            "names a version of an object, or has three slashes before the bucket, which not "
            f"every client reads as a part of the name: give {plain!r}",
        )


def _wrong(place: object, what: str) -> ArgumentError:
    return ArgumentError(f"the place of a checkpoint, {shown(place)!r}, {what}", url=shown(place))


def checked_options(options: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return storage options; empty for ``None``.

    Raises:
        ArgumentError: they are not a mapping. The text does not show them: they may contain a
            secret.
    """
    if not isinstance(options, Mapping | None):
        raise ArgumentError(
            f"storage_options must be a dict, such as {{'endpoint_url': 'http://host:9000'}}, "
            f"not of type {type(options).__name__}"
        )
    return options or {}


class StoreUrl(str):
    """A URL string that carries its storage options.

    ``repr``, ``str`` and a pickle omit the options, because they may contain credentials.
    """

    options: Mapping[str, Any]

    def __new__(cls, url: str, options: Mapping[str, Any]) -> StoreUrl:
        """Return a URL with options."""
        self = super().__new__(cls, url)
        self.options = options
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return str, (str(self),)


def require_size(data: bytes | memoryview | None, url: str, most: int | None) -> None:
    """Raise :class:`DamagedCheckpointError` if a file or object has more bytes than the commit
    says."""
    if data is not None and most is not None and len(data) > most:
        what = f"has more than {most} bytes, its size in the commit: the checkpoint is damaged"
        raise damaged(url, what)


@dataclass(frozen=True)
class Location(ABC):
    """A folder on a disk, or a prefix in an object store: where a checkpoint is, and its store.

    Names are relative to the location; "" is the location itself. Any thread may call any method.
    Errors of the store are :class:`~shardstore.errors.StorageError`.

    Attributes:
        url: as given; a plain path for local disks.
        options: storage options of fsspec. ``repr`` omits them: they may contain credentials.
        copied: what :meth:`copy_from` does to an object, for logs: "linked" or "copied".
        copy_requests: useful number of concurrent copies; 0: one on each thread.
        least_copied_bytes: smaller objects are written sooner than copied.
    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    kinds: ClassVar[tuple[type[Location], type[Location]]]
    """The class of folders, and that of prefixes; set by the package."""
    copied: ClassVar[str]
    copy_requests: ClassVar[int] = 0
    least_copied_bytes: ClassVar[int] = 1

    @staticmethod
    def of(
        place: str | os.PathLike[str] | Location, options: Mapping[str, Any] | None = None
    ) -> Location:
        """Return a location from a path, a URL (``file://``, ``memory://``, ``s3://`` ...) or a
        location. A leading ``~`` is the home folder.

        Args:
            place: path, URL or location.
            options: storage options of fsspec, in addition to those of ``place``.

        Raises:
            ArgumentError: ``place`` is neither a path nor a supported URL, or ``options`` is not a
                mapping.
        """
        given = checked_options(options)
        if isinstance(place, Location):
            return place.at(place.url, given) if given else place
        url, own = url_of(place), place.options if isinstance(place, StoreUrl) else {}
        if not hasattr(Location, "kinds"):  # another thread imports the package: wait for it
            import_module(__package__)
        folder, prefix = Location.kinds
        return (prefix if "://" in url else folder)(url, {**own, **given})

    # -- names -------------------------------------------------------------------------------------

    @property
    def is_local(self) -> bool:
        """Whether the location is a folder of the operating system."""
        return "://" not in self.url

    @property
    @abstractmethod
    def driver(self) -> str | None:
        """Name of TensorStore's driver for the store; ``None`` if it has none."""

    @property
    @abstractmethod
    def place(self) -> str | Path:
        """The local folder, or the URL with its options; the argument of strategies."""

    @property
    def path(self) -> Path:
        """The local folder."""
        return Path(self.url)

    @property
    def name(self) -> str:
        """Last component of the URL."""
        return self.url.rsplit("/", 1)[-1]

    @property
    def remote(self) -> RemoteStore:
        """The fsspec client of an object prefix.

        Raises:
            StorageError: it is a local folder, which has none; or fsspec does not know the store,
                or its package is missing.
        """
        raise self.error(" is a local folder, not a prefix of an object store")

    def at(self, url: str, options: Mapping[str, Any] | None = None) -> Location:
        """Return the location of another URL of the same store, with ``options`` in addition."""
        return type(self)(url, {**self.options, **(options or {})})

    def child(self, *names: str) -> Location:
        """Return the location below this one."""
        return type(self)("/".join([self.url, *names]), self.options)

    def parent(self) -> Location | None:
        """Return the location above this one; ``None`` for the root of a disk or a whole bucket."""
        above, _, name = self.url.rpartition("/")
        return None if not name or above.endswith("/") else self.at(above or "/")

    def error(self, text: str, kind: type[E] = StorageError) -> E:  # type: ignore[assignment]
        """Return an error about this location. Its message is the URL, followed by ``text``."""
        return kind(f"{self.url}{text}", url=self.url)

    def require_no_file(self) -> None:
        """Raise :class:`StorageError` if the location is a file instead of a folder."""
        if self.is_file():
            raise self.error(" is a file; give the folder below which checkpoints are saved")

    def require_shared(self, processes: int) -> None:
        """Raise :class:`StorageError` if several processes cannot all see the location."""
        if processes > 1 and self.url.startswith("memory://"):
            raise self.error(
                f" is the memory of one process, but {processes} ranks save; give a folder or an "
                "object store that all of them see"
            )

    # -- reading -----------------------------------------------------------------------------------

    def read(self, name: str, most: int | None = None) -> bytes:
        """Return the content of a small document, of at most ``most`` bytes.

        Raises:
            FileNotFoundError: there is no such document.
            DamagedCheckpointError: a FIFO, a device or a socket has its name, or it is too large.
            StorageError: the store failed.
        """
        found = self.read_if_there(name, most)
        if found is None:
            raise FileNotFoundError(f"{self.url}/{name}")
        return found

    def read_if_there(self, name: str, most: int | None = None) -> bytes | None:
        """See :meth:`read`; ``None`` if there is no such document."""
        found = self.read_range(name, 0, None if most is None else most + 1)
        require_size(found, f"{self.url}/{name}", most)
        return found

    @abstractmethod
    def read_range(self, name: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """Return bytes ``start:stop`` of a file, fewer if it ends before ``stop``; ``None`` if
        there is no such file. Raises the other errors of :meth:`read`."""

    @abstractmethod
    def read_many(
        self, names: Sequence[str], sizes: Sequence[int | None] = ()
    ) -> list[bytes | None]:
        """Read small documents, concurrently from an object store.

        Args:
            names: their names.
            sizes: their sizes, if the commit has them.

        Returns:
            Their contents; ``None`` for each document that does not exist.

        Raises:
            DamagedCheckpointError: a document is larger than its size; or a FIFO, a device or a
                socket has its name.
            StorageError: the store failed.
        """

    def read_ahead(self, names: Sequence[str], size: int) -> dict[str, bytes | None]:
        """Return the first ``size`` bytes of documents if one round trip for all of them saves
        others: name -> bytes, ``None`` if there is no such document. A folder returns nothing."""
        return {}

    @abstractmethod
    def threads(self, size_bytes: int = 0, count: int = 1) -> int:
        """Return the useful number of threads that read ``count`` files of ``size_bytes`` in all;
        0: small documents."""

    def buffer_bytes(self, budget_bytes: int) -> int:
        """Return the useful size of the buffers of a load that may take ``budget_bytes``."""
        return budget_bytes

    def is_damage(self, error: BaseException) -> bool:
        """Return whether an error of reading a file is damage of the file. A disk has lost it; an
        object store that failed, or refused, may have it."""
        return True

    # -- what is there -----------------------------------------------------------------------------

    @abstractmethod
    def exists(self, name: str = "") -> bool:
        """Return whether there is a document or folder of that name."""

    def is_dir(self) -> bool:
        """Return whether this location is a folder of the operating system."""
        return False

    def is_file(self) -> bool:
        """Return whether this location is a file of the operating system, not a folder."""
        return False

    def is_missing(self) -> bool:
        """Return whether this folder does not exist. A prefix without objects is an empty
        folder."""
        return False

    def is_link(self, name: str = "") -> bool:
        """Return whether a name is a symbolic link."""
        return False

    @abstractmethod
    def stamp(self, name: str) -> tuple[int, object] | None:
        """Return the size of a file in bytes, and a value that changes when the file is replaced;
        ``None`` if there is no such file.

        Raises:
            StorageError: the store failed.
        """

    def sizes(self, names: Iterable[str]) -> Mapping[str, int]:
        """Return the sizes in bytes of those of the files that exist, and maybe of others."""
        return {name: found[0] for name in names if (found := self.stamp(name)) is not None}

    @abstractmethod
    def listing(self, name: str = "") -> list[str]:
        """Return the names directly below a folder; empty if there is none.

        Raises:
            StorageError: the store refused.
        """

    @abstractmethod
    def walk(self, name: str = "", *, strict: bool = True) -> list[str]:
        """Return the names of all files below a folder. Symbolic links to folders are not
        followed. Folders that cannot be read are errors; unless ``strict``, they are left out."""

    def walk_all(self) -> list[str]:
        """Return the names of all files below this location, also behind the links directly in
        it, and of folders that are empty or cannot be read."""
        return self.walk()

    @abstractmethod
    def is_within(self, other: Location) -> bool:
        """Return whether this place is another one, or lies inside it, also through links."""

    def device(self) -> int | None:
        """Return the number of the device that the folder is on, or is to be on; ``None`` for a
        store."""
        return None

    # -- writing -----------------------------------------------------------------------------------

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write a small document and create its folders. Never write through a symbolic link.

        Raises:
            StorageError: the store failed.
        """

    def replace(self, name: str, data: bytes) -> None:
        """Replace a small document in one atomic step, as each write of an object store is.

        Raises:
            StorageError: the store refused; the old document is unchanged.
        """
        self.write(name, data)

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Write a document if none of its name exists; in one atomic step if the store supports it
        (on S3 a PUT with If-None-Match).

        Returns:
            Whether this call wrote the document. It may be ``False`` after a successful write if
            the answer to an earlier try was lost: read the document to find out.

        Raises:
            StorageError: the store refused, or did not answer.
        """

    @abstractmethod
    def is_free(self, last: str) -> bool:
        """Return whether a checkpoint that the file ``last`` completes may be written here; "": one
        that is a single file."""

    @abstractmethod
    def staging(self, work: Location, last: str) -> Location:
        """Return where the files of such a checkpoint are written before it is complete: ``work``
        if :meth:`publish` moves it here, else this place."""

    def make_empty_folder(self) -> None:  # noqa: B027
        """Remove this folder, and create it; do nothing in a store."""

    @abstractmethod
    def publish(self, made: Location) -> None:
        """Make a finished folder or file of the same store visible here, in one step: rename it, or
        let the store copy the one object.

        Raises:
            OSError: the store refused, or did not answer.
        """

    @abstractmethod
    def delete(self, name: str = "") -> None:
        """Remove a document, or a folder with its content. Remove a symbolic link itself, not its
        target. A missing name is no error.

        Raises:
            StorageError: the store refused, or a folder above the name is a symbolic link.
        """

    @abstractmethod
    def delete_all(self, names: Sequence[str], folders: Sequence[str] = ()) -> None:
        """Remove documents, in bulk requests if the store has them; then those of ``folders`` that
        are links, or have no files. Raises the errors of :meth:`delete`."""

    def shares_store(self, source: Location) -> bool:
        """Return whether :meth:`copy_from` may copy from there."""
        return type(source) is type(self)

    @abstractmethod
    def copy_from(self, source: Location, name: str) -> bool:
        """Copy a file within the store if there is none of its name here; on a disk by a hard link.
        Many object stores ignore the condition and overwrite. This folder must exist: one that
        another process removed is not made again.

        Returns:
            Whether the file was copied.

        Raises:
            FileNotFoundError, NotADirectoryError: the file to copy does not exist.
            OSError: the store refused, or did not answer.
        """

    def require_no_link_to(self, name: str) -> None:
        """Raise :class:`StorageError` if a folder between this location and a name below it is a
        symbolic link: saves and deletions do not follow symbolic links."""
        parts = name.split("/")
        for above in ("/".join(parts[:n]) for n in range(1, len(parts))):
            if self.is_link(above):
                raise self.child(above).error(
                    " is a symbolic link, and nothing is written or removed behind one: put the "
                    f"folder that it leads to in its place, or remove {above}"
                )

    # -- TensorStore -------------------------------------------------------------------------------

    @abstractmethod
    def kvstore(self, document: str | None = None) -> dict[str, Any]:
        """Return the specification of the key-value store (TensorStore documentation, "file
        Key-Value Store driver", "s3 Key-Value Store driver").

        Args:
            document: an object that TensorStore must find if :meth:`exists` does.

        Raises:
            StorageError: TensorStore has no driver for it, or there are no credentials, or
                TensorStore does not find the document.
        """

    def wait(self, future: Any, size: int) -> Any:
        """Return the result of a read of ``size`` bytes by TensorStore, within the deadline of the
        store.

        Raises:
            StorageError: no answer came in time.
            ValueError: any other error of TensorStore.
        """
        return future.result()

    def require_absent(self, name: str) -> None:  # noqa: B027
        """Raise :class:`StorageError` if there is an object that TensorStore did not find."""

    def forget_listings(self) -> None:  # noqa: B027 (a folder has none)
        """Make the program's own fsspec file system list the folders above a place again. It caches
        listings without a limit, so a trainer that looks for its steps would not see new ones."""

    def __str__(self) -> str:
        return self.url

    def __reduce__(self) -> tuple[object, ...]:
        # As with StoreUrl, a pickle omits the storage options, which may contain credentials.
        return type(self), (self.url,)
