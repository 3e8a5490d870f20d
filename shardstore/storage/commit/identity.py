"""What lies at a place that has a checkpoint's marks: a checkpoint, or something that only looks
like one.

An array's folder inside a checkpoint has a ``zarr.json`` too, and so has a group that another
program wrote. Neither may be listed, replaced or deleted as a checkpoint. Knows documents; not
commits.
"""

from __future__ import annotations

import json
from typing import Any

from shardstore.storage.stores.location import Location, store_errors

__all__ = ["is_foreign_node", "node_type", "what_else"]


def _document(location: Location) -> dict[str, Any]:
    """The Zarr v3 document at a place; empty where there is none, or a damaged one.

    Raises:
        StorageError: the store refused to tell.
    """
    url = f"{location.url}/zarr.json"
    with store_errors("reading", url):
        try:
            document = json.loads(location.read("zarr.json"))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
            return {}
    return document if isinstance(document, dict) else {}


def node_type(location: Location) -> str | None:
    """``"array"`` or ``"group"`` of a place's own Zarr v3 document, ``None`` where there is none
    that can be read."""
    kind = _document(location).get("node_type")
    return kind if isinstance(kind, str) else None


def what_else(location: Location) -> str | None:
    """What is at a place with a ``zarr.json`` and no ``metadata.json``, if it is no checkpoint of
    ours; ``None`` for one, a damaged one included, so that it can be removed.

    Returns:
        Words for an error text.
    """
    document = _document(location)
    if document.get("node_type") == "array":
        return "a single array (a part of a checkpoint, or another program's)"
    attributes = document.get("attributes")
    ours = isinstance(attributes, dict) and "shardstore" in attributes
    if document.get("node_type") == "group" and not ours:
        return "a Zarr group of another program"
    return None


def is_foreign_node(text: bytes) -> bool:
    """Whether the Zarr v3 document of a folder in a checkpoint says that it is none of its arrays:
    an array without our attributes, or a group (another program's, or a checkpoint of its own). A
    damaged document may be ours."""
    try:
        document = json.loads(text)
    except ValueError:
        return False
    kind = document.get("node_type") if isinstance(document, dict) else None
    if kind != "array":
        return bool(kind == "group")
    attributes = document.get("attributes")
    return not (isinstance(attributes, dict) and "shardstore" in attributes)
