"""The context of a load: the opened checkpoint and the caller's options."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from shardstore.distributed.groups import Group, raise_together
from shardstore.errors import CheckpointingException
from shardstore.progress import Meter
from shardstore.storage.checkpoint import StoredCheckpoint, settled
from shardstore.storage.commit.inventory import check_integrity
from shardstore.storage.format.documents import RootDocument
from shardstore.storage.format.names import CONFIG_NAME
from shardstore.storage.options import DEFAULT_BUDGET_BYTES
from shardstore.storage.runtime.checksums import crc32c
from shardstore.storage.stores.location import Location
from shardstore.strategies.base import running

CONTENT_METADATA_KEY = "content_metadata"
START_BYTES = 1024 * 1024
"""A document up to this size takes one request. About 2,000 arrays have a root document of this
size."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadContext:
    """One load on one rank.

    Attributes:
        stored: the checkpoint.
        cast: fill tensors of another data type than the stored one, see :func:`shardstore.load`.
        budget_bytes: host memory for chunks that are sent to other ranks, copied to a device or
            cast.
        group: process group whose ranks share the reading; ``None``: no sharing.
        meter: counts the read bytes.
    """

    stored: StoredCheckpoint
    cast: bool | Literal["warn"] = False
    budget_bytes: int = DEFAULT_BUDGET_BYTES
    group: Group = None
    meter: Meter = field(default_factory=partial(Meter, "load", ""))

    def together(self) -> AbstractContextManager[None]:
        """Raise an error of the block on every rank that shares the reading."""
        if self.group is None:
            return nullcontext()
        return raise_together(self.group, f"loading {self.stored.location.url} together")

    @property
    def place(self) -> str | Path:
        """The folder or URL of the checkpoint, for strategies of other programs."""
        return self.stored.location.place


def context_of(place: str | Path | Location | LoadContext) -> LoadContext:
    """Return the context of the load that calls a strategy.

    Args:
        place: the checkpoint. It is opened again if the current load reads another checkpoint, or
            if a strategy is called without a load.
    """
    if isinstance(place, LoadContext):
        return place
    location, current = Location.of(place), running.get()
    if not isinstance(current, LoadContext):
        return LoadContext(stored=StoredCheckpoint(location))
    if current.stored.location.url == location.url:
        return current
    return replace(current, stored=StoredCheckpoint(location))


def read_documents(
    location: Location, names: Sequence[str], *, verify_integrity: bool = False
) -> StoredCheckpoint:
    """Open a checkpoint, and read small documents of it.

    From an object store, the first :data:`START_BYTES` of all documents are requested at once. A
    document that the root document does not confirm is read again after it, because it is
    larger, or may be that of another checkpoint at the same place.

    Args:
        location: the checkpoint.
        names: names of the documents. The first is the root document, which has the checksums and
            sizes of the others, and the content of ``metadata.json``.
        verify_integrity: first compare each file with ``integrity.json``.

    Returns:
        The checkpoint with these documents.

    Raises:
        DamagedCheckpointError: a document is larger than the commit says.
        ReplacedError: the checkpoint was replaced during the read.
        StorageError: the store failed.
    """
    if verify_integrity:
        check_integrity(location)
    root, ahead = names[0], location.read_ahead(names, START_BYTES)
    stored, commit = StoredCheckpoint(location), None
    if root in ahead and len(ahead[root] or b"") < START_BYTES:
        stored.documents[root] = ahead[root]
    if stored.document(root) is not None:
        with suppress(CheckpointingException):  # raised by what needs the root document
            commit = stored.root
    known = {} if commit is None else commit.file_bytes
    for name in names[1:]:
        if commit is not None and name in ahead and _is_confirmed(commit, name, ahead[name]):
            stored.documents[name] = ahead[name]
    others = [name for name in names if name not in stored.documents]
    with stored.unless_replaced():
        texts = location.read_many(others, [known.get(name) for name in others])
    stored.documents.update(zip(others, texts, strict=True))
    return stored


def _is_confirmed(commit: RootDocument, name: str, start: bytes | None) -> bool:
    """Return whether the start of a document is the whole document that a commit names."""
    config, sums = commit.about.get("config"), commit.file_sums
    if config is None:
        return False
    if start is None:  # older root documents name no files
        return name != CONFIG_NAME and bool(sums) and name not in sums
    if name == CONFIG_NAME:
        with suppress(ValueError, RecursionError):
            return bool(json.loads(start) == config)
    return name in sums and crc32c(start, 0) == sums[name]


@contextmanager
def opened(
    checkpoint_dir: str | Path | LoadContext, storage_options: Mapping[str, Any] | None = None
) -> Iterator[LoadContext]:
    """Open a checkpoint for a query. An error of a replaced checkpoint says so.

    In an object store, the root document is requested once, or twice if it is larger than
    :data:`START_BYTES`.
    """
    if isinstance(checkpoint_dir, LoadContext):
        with checkpoint_dir.stored.unless_replaced():
            yield checkpoint_dir
        return
    location = settled(Location.of(checkpoint_dir, storage_options))
    context = context_of(location)
    if context is not running.get():
        documents = location.read_ahead(["zarr.json"], START_BYTES)
        if len(documents.get("zarr.json") or b"") == START_BYTES:
            (documents["zarr.json"],) = location.read_many(["zarr.json"])
        context = replace(context, stored=StoredCheckpoint(location, documents=documents))
    with context.stored.unless_replaced():
        yield context
