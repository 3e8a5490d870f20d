"""Checkpoints that are being loaded: documents that one rank read for all, while the load runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.location import Location

__all__ = ["handed_out", "open_checkpoint", "read_document"]

_documents: ContextVar[Mapping[tuple[str, str], bytes | None]] = ContextVar("documents")
_checkpoints: ContextVar[dict[str, StoredCheckpoint]] = ContextVar("checkpoints")


@contextmanager
def handed_out(documents: Mapping[tuple[str, str], bytes | None]) -> Iterator[None]:
    """Within, documents are taken from ``(url, name) -> bytes`` where they are there.

    ``None``: does not exist.
    """
    tokens = (_documents.set(documents), _checkpoints.set({}))
    try:
        yield
    finally:
        _documents.reset(tokens[0])
        _checkpoints.reset(tokens[1])


def read_document(location: Location, name: str) -> bytes:
    """Read a document, from those handed out or from the store.

    Raises:
        FileNotFoundError: there is none.
    """
    known = _documents.get({})
    if (location.url, name) in known:
        data = known[location.url, name]
        if data is None:
            raise FileNotFoundError(f"{location.url}/{name}")
        return data
    return location.read(name)


def open_checkpoint(place: str | Path | Location) -> StoredCheckpoint:
    """The stored checkpoint at a place; within a load, always the same object."""
    location = Location.of(place)
    opened = _checkpoints.get({})
    if location.url not in opened:
        opened[location.url] = StoredCheckpoint(location, read_document=read_document)
    return opened[location.url]
