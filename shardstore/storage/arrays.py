"""Writes and reads the documents of arrays, opens arrays with zarr, and chooses a mover."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from shardstore.errors import CheckpointExistsError, MissingKeyError
from shardstore.storage.commit.attempt import Attempt
from shardstore.storage.format import documents
from shardstore.storage.format.documents import ArrayMeta, parse_root
from shardstore.storage.format.names import node_name
from shardstore.storage.movers.chunks import Mover
from shardstore.storage.movers.files import FileMover
from shardstore.storage.movers.object_mover import ObjectMover
from shardstore.storage.movers.parallel import default_threads, run_batched
from shardstore.storage.options import SaveOptions
from shardstore.storage.stores.location import Location, store_errors


def _create(location: Location, meta: ArrayMeta, text: str | None) -> None:
    """Create an array's folder and write its document, if there is one. One process creates the
    array; the others only write chunks.

    Raises:
        StorageError: the store failed.
    """
    if not location.is_local:
        if text is not None:
            location.write(f"{meta.node}/{meta.document_name}", text.encode())
        return
    folder = f"{location.url}/{meta.node}"
    with store_errors("creating", folder, key=meta.key):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
        if text is not None:
            # File objects would take a tenth of the time of a save of thousands of small arrays.
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            fd = os.open(f"{folder}/{meta.document_name}", flags, 0o666)
            try:
                data = text.encode()
                while data:  # a disk that fills up writes a part first, and then refuses
                    data = data[os.write(fd, data) :]
            finally:
                os.close(fd)


def write_documents(
    attempt: Attempt, options: SaveOptions, created: Sequence[tuple[ArrayMeta, str]]
) -> None:
    """Write the documents of the arrays that this writer creates, if ``options.array_documents``.
    In a local folder, create the arrays' folders in any case.

    Raises:
        StorageError: the store failed.
    """
    own = options.array_documents
    if not attempt.location.is_local:
        if own:
            documents = [(f"{meta.node}/{meta.document_name}", t.encode()) for meta, t in created]
            attempt.put_all(documents)
        return

    def work(batch: Sequence[tuple[ArrayMeta, str]]) -> None:
        for meta, text in batch:
            _create(attempt.location, meta, text if own else None)

    threads = options.threads or default_threads()
    run_batched(created, work, threads=threads, weight=lambda _: 1, batch_weight=64)


def read_array_meta(location: Location, key: str) -> ArrayMeta:
    """Return the array of a key from its own document, or from the root document if it has none.

    Raises:
        MissingKeyError: there is no such array.
    """
    for node in dict.fromkeys((node_name(key), key)):
        url = f"{location.url}/{node}"
        try:
            return documents.parse_v2_array(node, location.read(f"{node}/.zarray"), url)
        except FileNotFoundError:
            pass
        try:
            text = location.read(f"{node}/zarr.json")
        except FileNotFoundError:
            continue
        if (found := documents.parse_array(node, text, url)) is not None:
            return found
    if (meta := root_arrays(location).get(key)) is not None:
        return meta
    raise MissingKeyError(
        f"there is no array of key {key!r} below {location.url}", key=key, url=location.url
    )


def root_arrays(location: Location) -> dict[str, ArrayMeta]:
    """Return, by key, the arrays that only the root document describes; empty if arrays have
    documents of their own."""
    try:
        text = location.read("zarr.json")
    except FileNotFoundError:
        return {}
    root = parse_root(text, f"{location.url}/zarr.json")
    return {} if root.array_documents else root.arrays()


def create_array(location: Location, meta: ArrayMeta) -> None:
    """Create an array.

    Raises:
        CheckpointExistsError: the array exists.
    """
    url = f"{location.url}/{meta.node}"
    described = meta.key in root_arrays(location)
    if described or location.exists(f"{meta.node}/{meta.document_name}"):
        raise CheckpointExistsError(
            f"Array {url} already exists; save to an empty folder", key=meta.key, url=url
        )
    _create(location, meta, documents.array_document(meta))


def mover_for(location: Location, options: SaveOptions, attempt: Attempt | None = None) -> Mover:
    """Return the mover that writes chunks to a location, as part of an attempt."""
    if not location.is_local:
        return ObjectMover(location, attempt=attempt, budget_bytes=options.budget_bytes)
    return FileMover(location, threads=options.threads, durable=options.durable)
