"""Where safetensors files are written: a folder, an S3 bucket, another object store.

The coordinator begins, commits or abandons; every rank joins, writes ranges of files and finishes.
A model becomes visible at the commit.

- **Folder**: an attempt beside the target, which the commit exchanges with it, as in a save.
- **S3**: each file is a multipart upload whose parts the ranks write (Amazon S3 user guide,
  "Multipart upload"). The commit completes them, the index last. Until then no key exists. The IDs
  of the uploads are recorded in an object of the place; if the program dies, the next export to the
  place aborts them, and deletes those that were completed without the index.
- **Other stores**: one rank writes each file from its beginning to its end, and it appears when it
  is closed. The commit writes the index, or closes the only file, which the coordinator writes. The
  record holds a random ID, so that of two exports to the place at the same time one gets an error.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any, Protocol, cast
from uuid import uuid4

import msgspec

from shardstore.errors import CheckpointExistsError, StorageError
from shardstore.hf.files import ALIGNMENT, SINGLE_NAME, FileLayout
from shardstore.storage.commit import checkpoints, folder
from shardstore.storage.commit.inventory import model_files
from shardstore.storage.format.names import COMMITS, MODEL_COMMITS
from shardstore.storage.movers.chunks import SmallFiles
from shardstore.storage.movers.files import WRITEBACK_FROM, allocate, start_writeback
from shardstore.storage.options import SaveOptions
from shardstore.storage.runtime.parallel import default_threads, run_batched
from shardstore.storage.stores.errors import code_of, remedy
from shardstore.storage.stores.folder import fsync, store_errors
from shardstore.storage.stores.location import Location
from shardstore.storage.stores.remote import RemoteStore
from shardstore.storage.stores.s3 import S3Settings
from shardstore.storage.stores.s3_uploads import upload_part

PART_BYTES = 16 * 1024 * 1024
REQUESTS = 8
"""Parts that a rank uploads at a time. A thread mostly waits for the store."""
MOST_PARTS = 9000
"""Parts of an upload; S3 allows 10,000 (Amazon S3 user guide, "Multipart upload limits")."""
RECORD_NAME = ".shardstore-uploads.json"
"""Name of the object that records the uploads of an export to an object store."""

Receipt = Mapping[str, Sequence[Mapping[str, Any]]]
"""Name of a file -> number, tag and checksum of each part that a rank has uploaded."""

logger = logging.getLogger(__name__)


class Place(Protocol):
    """A place for the files of a model, seen from one rank.

    Attributes:
        in_order: whether one rank must write each file, from its beginning to its end.
        threads: number of threads of a rank that write.
    """

    in_order: bool
    threads: int

    def part_bytes(self, layout: FileLayout) -> int | None:
        """Return the size of the parts that the files are cut into; ``None``: any."""

    def begin(self, layout: FileLayout) -> object:
        """Begin, and return what the other ranks need to join.

        Raises:
            CheckpointExistsError: the place is not free.
        """

    def join(self, state: Any, layout: FileLayout) -> None:
        """Join what the coordinator began. Every rank calls it."""

    def write(self, name: str, start: int, parts: Sequence[memoryview]) -> None:
        """Write a range of a file, given in parts in order. Several threads may call it."""

    def finish(self) -> Receipt:
        """End this rank's writing, and return its receipt for the coordinator."""

    def commit(
        self, layout: FileLayout, receipts: Sequence[Receipt], documents: SmallFiles
    ) -> None:
        """Make the model visible; the last document is the index, if there are several files."""

    def abandon(self) -> None:
        """Remove what was written."""


def part_bytes(size: int, least: int = PART_BYTES) -> int:
    """Return the size of the parts of an upload of ``size`` bytes, at least ``least``."""
    return max(least, -(-size // (MOST_PARTS * ALIGNMENT)) * ALIGNMENT)


def place_for(target: Location, *, overwrite: bool, durable: bool) -> Place:
    """Return the place of a model."""
    if target.is_local:
        return FolderPlace(target, SaveOptions(overwrite=overwrite, durable=durable))
    if hasattr(target.remote.fs, "_call_s3"):
        return S3Place(target, overwrite)
    return StorePlace(target, overwrite)


class FolderFiles:
    """Files of a folder, of which any range can be written.

    Args:
        url: path of the folder.
        durable: start the writeback of large ranges, because a sync follows.
    """

    def __init__(self, url: str, *, durable: bool = False) -> None:
        self._url, self._durable = url, durable

    def create(self, layout: FileLayout) -> None:
        """Create the files with their headers and full sizes; the content of others stays."""
        for name, head in layout.heads.items():
            self.write(name, 0, memoryview(head), layout.sizes[name])

    def write(self, name: str, start: int, data: memoryview, create_bytes: int = 0) -> None:
        """Write a range of a file. Several threads may call it.

        Args:
            name: name of the file.
            start: byte offset of the range.
            data: the bytes.
            create_bytes: create the file, with this size; 0: it exists.
        """
        path, size = f"{self._url}/{name}", len(data)
        with store_errors("writing", path):
            file = os.open(
                path, os.O_WRONLY | os.O_NOFOLLOW | (os.O_CREAT if create_bytes else 0), 0o666
            )
            try:
                if create_bytes:
                    allocate(file, create_bytes)
                while data:
                    written = os.pwrite(file, data, start)
                    data, start = data[written:], start + written
                if self._durable and size >= WRITEBACK_FROM:
                    start_writeback(file, start - size, size)
            finally:
                os.close(file)


class StreamedFiles:
    """Files of an object store, each written from its beginning to its end, one at a time. A file
    appears when it is complete.

    Args:
        remote: the store.
        sizes: name -> size in bytes.
        least_part_bytes: size of the parts of an upload, which are larger for very large files.
        held: name of a file that :meth:`complete` completes, and not its end.

    Attributes:
        is_whole: whether the last file has been written to its end.
    """

    is_whole = True

    def __init__(
        self, remote: RemoteStore, sizes: Mapping[str, int], least_part_bytes: int, held: str = ""
    ) -> None:
        self._remote, self._sizes, self._least, self._held = remote, sizes, least_part_bytes, held
        self._stream: Any = None

    def write(self, name: str, start: int, data: memoryview) -> None:
        """Begin a file, or write the next range of it, which completes it at its end."""
        with self._remote.errors("writing", name):
            if start == 0:
                size = part_bytes(self._sizes[name], self._least)
                self._stream = self._remote.stream(name, size)
            # Small pieces, so that the stream sends full parts in between.
            for begin in range(0, len(data), PART_BYTES):
                self._stream.write(data[begin : begin + PART_BYTES])
        self.is_whole = start + len(data) == self._sizes[name]
        if self.is_whole and name != self._held:
            self.complete(name)

    def complete(self, name: str) -> None:
        """Complete the open file."""
        with self._remote.errors("writing", name):
            self._stream.close()
        self._stream = None

    def discard(self) -> None:
        """Abort the upload of the open file, so that the store does not keep its parts."""
        if self._stream is not None:
            with suppress(Exception):
                self._stream.discard()
            with suppress(AttributeError):
                self._stream.closed = True  # else the garbage collector completes it
            self._stream = None


class FolderPlace:
    """A folder of a local or shared file system."""

    in_order = False

    def __init__(self, target: Location, options: SaveOptions) -> None:
        self._target, self._options, self.threads = target, options, default_threads()
        self._attempt: Any = None
        self._written: set[str] = set()

    def part_bytes(self, layout: FileLayout) -> int | None:
        """See :class:`Place`."""
        return None

    def begin(self, layout: FileLayout) -> object:
        """Begin an attempt, and create the files with their headers and full sizes."""
        if folder.is_taken(self._target):
            raise self._target.error(
                " holds a checkpoint, which a model does not replace; save the model elsewhere",
                CheckpointExistsError,
            )
        commits = (*COMMITS, *MODEL_COMMITS)
        self._attempt = folder.begin(self._target, self._options, commits)
        FolderFiles(self._attempt.location.url).create(layout)
        return self._attempt.id

    def join(self, state: Any, layout: FileLayout) -> None:
        """Look for the folder, which another machine may show late."""
        if self._attempt is None:
            self._attempt = checkpoints.join(self._target, state, self._options)
            self._attempt.require_seen()

    def write(self, name: str, start: int, parts: Sequence[memoryview]) -> None:
        """See :class:`Place`."""
        url = self._attempt.location.url
        for data in parts:
            FolderFiles(url, durable=self._options.durable).write(name, start, data)
            start += len(data)
        self._written.add(f"{url}/{name}")

    def finish(self) -> Receipt:
        """Wait until what this rank wrote is on the disk."""
        for path in self._written if self._options.durable else ():
            with store_errors("writing", path):
                fsync(path)
        return {}

    def commit(
        self, layout: FileLayout, receipts: Sequence[Receipt], documents: SmallFiles
    ) -> None:
        """Exchange the attempt with the target."""
        self._attempt.commit(documents, durable=self._options.durable)

    def abandon(self) -> None:
        """Remove the attempt."""
        if self._attempt is not None:
            self._attempt.abandon()


class StorePlace:
    """A prefix of an object store that fsspec knows."""

    in_order, threads = True, 1

    def __init__(self, target: Location, overwrite: bool) -> None:
        self._target, self._overwrite = target, overwrite
        self._remote = target.remote
        self._uploads: dict[str, str] = {}
        self._names = set[str]()
        self._files: StreamedFiles | None = None
        self._is_committing = False

    def part_bytes(self, layout: FileLayout) -> int | None:
        """See :class:`Place`."""
        return part_bytes(max(layout.sizes.values()))

    def begin(self, layout: FileLayout) -> object:
        """Remove the model that is replaced, and record the export."""
        self._clear()
        self._names = {*layout.heads}
        self._uploads = {"": uuid4().hex}  # these stores have no IDs of uploads by file
        self._remote.write(RECORD_NAME, json.dumps(self._uploads).encode())
        return self._uploads

    def _clear(self) -> None:
        """Remove the model that is replaced: first what completes it."""
        names = self._remote.listing()
        old = model_files(self._target, names)
        taken = [name for name in names if name in COMMITS] or old
        if taken and not (self._overwrite and old == taken):
            more = "pass overwrite=True to replace it, or " if old == taken else ""
            raise self._target.error(
                f" holds {', '.join(taken[:3])} already; {more}save elsewhere",
                CheckpointExistsError,
            )
        completing = [name for name in old if name in MODEL_COMMITS]
        for some in (completing, [name for name in old if name not in completing]):
            if some:
                self._remote.delete(some)

    def join(self, state: Any, layout: FileLayout) -> None:
        """Take the ID of the export."""
        self._uploads = state
        self._files = StreamedFiles(self._remote, layout.sizes, PART_BYTES, held=SINGLE_NAME)

    def write(self, name: str, start: int, parts: Sequence[memoryview]) -> None:
        """See :class:`Place`."""
        assert self._files is not None  # it has joined
        if start == 0:
            self._require_own()
        for data in parts:
            self._files.write(name, start, data)
            start += len(data)

    def finish(self) -> Receipt:
        """Discard a file whose end is missing, because this rank has failed."""
        if self._files is not None and not self._files.is_whole:
            self._files.discard()
        return {}

    def commit(
        self, layout: FileLayout, receipts: Sequence[Receipt], documents: SmallFiles
    ) -> None:
        """Write the documents, the index last, or complete the only file after them."""
        self._require_own()
        self._is_committing = True
        for name, data in documents:
            self._remote.write(name, data)
        if self._files is not None and SINGLE_NAME in layout.heads:
            self._files.complete(SINGLE_NAME)
        self._end()

    def _end(self) -> None:
        """Remove the record."""
        self._uploads.clear()
        try:
            self._remote.delete([RECORD_NAME])
        except StorageError as error:
            text = "%s: the model is committed, but its record %s could not be removed: %s"
            logger.warning(text, self._target.url, RECORD_NAME, error)

    def abandon(self) -> None:
        """Discard the open file, and remove the others, unless another export has begun or the
        model is complete."""
        if self._files is not None:
            self._files.discard()
        with suppress(StorageError):  # the record stays
            if self._uploads and self._recorded() == self._uploads:
                names = self._remote.listing()
                if not (self._is_committing and set(MODEL_COMMITS).intersection(names)):
                    self._remote.delete([name for name in names if name in self._names])
                self._remote.delete([RECORD_NAME])

    def _require_own(self) -> None:
        """Raise :class:`StorageError` if another export to this place has begun."""
        if self._recorded() != self._uploads:
            raise self._target.error(f"/{RECORD_NAME} has other uploads: {remedy('NoSuchUpload')}")

    def _recorded(self) -> dict[str, str]:
        """Return name -> upload of the export that the record is of; empty without a record."""
        try:
            text = self._target.read_if_there(RECORD_NAME) or b"{}"
            return msgspec.json.decode(text, type=dict[str, str])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            what = f"/{RECORD_NAME} is no record of uploads ({error}): remove it"
            raise self._target.error(what) from None


class S3Place(StorePlace):
    """A prefix of an S3 bucket."""

    in_order, threads = False, REQUESTS

    def __init__(self, target: Location, overwrite: bool) -> None:
        super().__init__(target, overwrite)
        self._bucket, _, self._prefix = target.url.partition("://")[2].partition("/")
        self._parts: dict[str, list[Mapping[str, Any]]] = {}
        self._part_bytes = PART_BYTES

    def begin(self, layout: FileLayout) -> object:
        """Clear away an export that died, and begin an upload for each file."""
        if recorded := self._recorded():
            self._uploads = recorded
            self.abandon()
        self._clear()
        for name in layout.heads:
            self._uploads[name] = self._call("create_multipart_upload", name, {})["UploadId"]
            self._remote.write(RECORD_NAME, json.dumps(self._uploads).encode())
        return self._uploads

    def join(self, state: Any, layout: FileLayout) -> None:
        """Take the IDs of the uploads."""
        self._uploads = state
        self._part_bytes = part_bytes(max(layout.sizes.values()))

    def write(self, name: str, start: int, parts: Sequence[memoryview]) -> None:
        """Upload a part."""
        number = start // self._part_bytes + 1
        part = {"UploadId": self._uploads[name], "PartNumber": number}
        settings = self._remote.driver_settings()  # botocore renews credentials
        if settings.unsupported:
            data = b"".join(parts)
            answer = self._call("upload_part", name, {**part, "Body": data}, len(data))
        else:
            tag = upload_part(self._remote, cast(S3Settings, settings), name, parts, **part)
            answer = {"ETag": tag}
        sums = {key: text for key, text in answer.items() if key.startswith(("ETag", "Checksum"))}
        self._parts.setdefault(name, []).append({"PartNumber": number, **sums})

    def finish(self) -> Receipt:
        """Return the tags of the parts."""
        return self._parts

    def commit(
        self, layout: FileLayout, receipts: Sequence[Receipt], documents: SmallFiles
    ) -> None:
        """Complete the uploads, then write the documents, the index last. A single file of weights
        comes after the documents instead."""
        parts: dict[str, list[Mapping[str, Any]]] = {name: [] for name in layout.heads}
        for receipt in receipts:
            for name, some in receipt.items():
                parts[name] += some
        self._require_own()
        for name, data in documents if SINGLE_NAME in parts else ():
            self._remote.write(name, data)

        def complete(names: Sequence[str]) -> None:
            for name in names:
                parts[name].sort(key=itemgetter("PartNumber"))
                self._complete(name, layout.sizes[name], parts[name])

        run_batched(list(parts), complete, threads=REQUESTS)
        for name, data in documents if SINGLE_NAME not in parts else ():
            self._remote.write(name, data)
        self._end()

    def _complete(self, name: str, size: int, parts: Sequence[Mapping[str, Any]]) -> None:
        about = {"UploadId": self._uploads[name], "MultipartUpload": {"Parts": parts}}
        what = f"/{name}: the store does not say that it completed the upload; export again"
        failure: OSError = self._target.error(what)
        try:
            if "ETag" in self._call("complete_multipart_upload", name, about):
                return
        except (StorageError, FileNotFoundError) as error:
            failure = error
        # The answer to an earlier try may have been lost.
        found = self._remote.stamp(name)
        if found is None or found[0] != size:
            raise failure

    def abandon(self) -> None:
        """Abort the uploads, so that the store does not keep their parts, and delete the files of
        those that were completed, unless the model is."""
        ended = []

        def abort(names: Sequence[str]) -> None:
            for name in names:
                try:
                    self._call("abort_multipart_upload", name, {"UploadId": self._uploads[name]})
                except StorageError as error:
                    if code_of(error) in ("NoSuchUpload", "404"):  # else the file is of others
                        ended.append(name)

        run_batched(list(self._uploads), abort, threads=REQUESTS)
        with suppress(StorageError):  # the record stays, and the next export tries again
            recorded = self._recorded()
            if recorded and recorded.items() <= self._uploads.items():  # of no other export
                names = self._remote.listing()
                if not set(MODEL_COMMITS).intersection(names):
                    self._remote.delete([name for name in names if name in ended])
                self._remote.delete([RECORD_NAME])
        self._uploads.clear()

    def _call(
        self, method: str, name: str, about: Mapping[str, Any], size: int = 0
    ) -> Mapping[str, Any]:
        """Send a request about an object that transfers ``size`` bytes."""
        key = f"{self._prefix}/{name}" if self._prefix else name
        with self._remote.errors(method.replace("_", " "), name):
            found: Mapping[str, Any] = self._remote.call(
                "call_s3", method, Bucket=self._bucket, Key=key, size=size, **about
            )
            return found
