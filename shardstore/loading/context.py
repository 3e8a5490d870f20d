"""Checkpoints that are being loaded: within one load, each is opened once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from shardstore.progress import Meter
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.handed import handed_documents, read_document
from shardstore.storage.stores.location import Location

__all__ = ["ROOT_DOCUMENT", "current_meter", "handed_out", "open_checkpoint", "watched"]

ROOT_DOCUMENT = "zarr.json"

_checkpoints: ContextVar[dict[str, StoredCheckpoint]] = ContextVar("checkpoints")


@contextmanager
def handed_out(documents: Mapping[tuple[str, str], bytes | None]) -> Iterator[None]:
    """One load: documents are handed out, and :func:`open_checkpoint` returns the same objects."""
    token = _checkpoints.set({})
    try:
        with handed_documents(documents):
            yield
    finally:
        _checkpoints.reset(token)


def open_checkpoint(place: str | Path | Location) -> StoredCheckpoint:
    """The stored checkpoint at a place; within a load, always the same object."""
    location = Location.of(place)
    opened = _checkpoints.get({})
    if location.url not in opened:
        opened[location.url] = StoredCheckpoint(location, read_document=read_document)
    return opened[location.url]


_meter: ContextVar[Meter | None] = ContextVar("meter", default=None)


@contextmanager
def watched(meter: Meter) -> Iterator[None]:
    """Within, :func:`current_meter` is this one; at the end it is told how the operation ended."""
    token = _meter.set(meter)
    try:
        yield
    except BaseException:
        meter.enter("failed")
        raise
    finally:
        _meter.reset(token)
    meter.enter("done")


def current_meter() -> Meter | None:
    """Of the load that is going on; ``None`` where a strategy is called by itself."""
    return _meter.get()
