"""References in the format of kerchunk: one Zarr view of packed and plain arrays, through fsspec.

The format is version 1 of fsspec's ``ReferenceFileSystem``: each name of a Zarr store has its text,
or the URL of a file and, for a part of it, the first byte and the size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardstore.storage.format.documents import ArrayMeta, array_document, root_document
from shardstore.storage.stores.location import Location


def references(location: Location, arrays: Iterable[ArrayMeta]) -> dict[str, Any]:
    """Return references to the chunks of arrays. Nothing is read.

    Args:
        location: root of the checkpoint.
        arrays: its arrays, with codecs of this package.

    Returns:
        A document for ``fsspec.filesystem("reference", fo=...)``, in which the arrays lie at their
        nodes.
    """
    texts: dict[str, str] = {}
    chunks: dict[str, list[Any]] = {}
    for array in arrays:
        texts[array.node] = array_document(array)
        for number in range(array.grid.size if array.constant is None else 0):
            name = array.chunk_name(array.grid.index_at(number))
            chunks[name] = [f"{location.url}/{name}"]
            if array.places is not None:
                pack, first, last = array.places.of(number)
                chunks[name] = [f"{location.url}/{pack}", first, last - first]
    group = root_document(texts.items(), {}).decode()
    documents = {f"{node}/zarr.json": text for node, text in texts.items()}
    return {"version": 1, "refs": {"zarr.json": group, **documents, **chunks}}


def open_references(location: Location, array: ArrayMeta) -> Any:
    """Return an array as ``zarr.Array``, opened for reading through references."""
    import fsspec  # type: ignore[import-untyped]
    import zarr

    protocol = location.url.partition("://")[0] if "://" in location.url else "file"
    found = fsspec.filesystem(
        "reference",
        fo=references(location, [array]),
        remote_protocol=protocol,
        remote_options={**location.options, "asynchronous": True},
        asynchronous=True,
        skip_instance_cache=True,
    )
    store = zarr.storage.FsspecStore(found, read_only=True)
    return zarr.open_array(store, path=array.node, mode="r", zarr_format=3)
