"""Documents that were read before: while handed out, nobody asks the store for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from shardstore.storage.stores.location import Location

__all__ = ["document_exists", "handed_documents", "is_handed", "read_document"]

_documents: ContextVar[Mapping[tuple[str, str], bytes | None]] = ContextVar("documents")


@contextmanager
def handed_documents(documents: Mapping[tuple[str, str], bytes | None]) -> Iterator[None]:
    """Within, documents come from ``(url, name) -> bytes`` where they are there; ``None``: there is
    no such document."""
    token = _documents.set(documents)
    try:
        yield
    finally:
        _documents.reset(token)


def is_handed(location: Location, name: str) -> bool:
    """Whether a document is handed out, be it that there is none."""
    return (location.url, name) in _documents.get({})


def read_document(location: Location, name: str) -> bytes:
    """Read a document, from those handed out or from the store.

    Raises:
        FileNotFoundError: there is none.
        StorageError: the store refused.
    """
    known = _documents.get({})
    if (location.url, name) in known:
        data = known[location.url, name]
        if data is None:
            raise FileNotFoundError(f"{location.url}/{name}")
        return data
    return location.read(name)


def document_exists(location: Location, name: str) -> bool:
    """Whether there is a document, judged by those handed out or by the store."""
    known = _documents.get({})
    if (location.url, name) in known:
        return known[location.url, name] is not None
    return location.exists(name)
