"""What lies at a place that has a checkpoint's marks: a checkpoint, or something that only looks
like one.

An array's folder inside a checkpoint has a ``zarr.json`` too, and so has a group that another
program wrote. Neither may be listed, replaced or deleted as a checkpoint.
"""

from __future__ import annotations

import json
import pickle
from typing import Any

from shardstore.errors import CheckpointingException
from shardstore.storage.format.names import DCP_METADATA_NAME, key_of
from shardstore.storage.stores.location import Location, store_errors

__all__ = ["instead", "is_foreign_node", "is_ours", "node_type", "what_else"]


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


_TORCH = (".pt", ".pth", ".bin", ".ckpt")
_MOST = 50
"""So many folders are looked into, at most."""


def instead(location: Location) -> str | None:
    """What is there instead, and what to do with it; ``None`` where nothing can be said.

    Asked where a call has failed already: a store that does not answer changes nothing.
    """
    try:
        return _file(location) if _is_file(location) else _folder(location)
    except (CheckpointingException, OSError, NotImplementedError):
        return None


def _is_file(location: Location) -> bool:
    return location.is_local and location.path.is_file()


def _file(location: Location) -> str | None:
    if location.name.endswith(".safetensors"):
        return f"it is a safetensors file: {_convert(location)}"
    if location.name.endswith(_TORCH):
        return "it looks like a file of torch.save: load it with torch.load, and save what it holds"
    return None


def _folder(location: Location) -> str | None:
    names = sorted(location.listing())
    if ".metadata" in names:
        return f"it is a checkpoint of PyTorch DCP: {_convert(location)}"
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return f"it holds safetensors: {_convert(location)}"
    if node_type(location) == "array":
        parent, _, node = location.url.rpartition("/")
        key = key_of(node) or node
        return (
            f"it is a single array: give the checkpoint, which may be {parent}, and its key, {key}"
        )
    if "zarr.json" in names and (other := what_else(location)):
        return f"it is {other}: open it with zarr"
    below = [name for name in names[:_MOST] if _is_checkpoint(location, name)]
    if below:
        return f"but {', '.join(below[-3:])} below it: give {location.url}/{below[-1]}"
    return None


def _is_checkpoint(location: Location, name: str) -> bool:
    return (
        not name.startswith(".")
        and location.is_dir(name)
        and location.exists(f"{name}/zarr.json")
        and location.exists(f"{name}/metadata.json")
    )


def _convert(location: Location) -> str:
    return f"convert it first, `shardstore convert {location.url} TARGET`"


def is_ours(location: Location) -> bool:
    """Return whether a checkpoint of ours is at a place, and DCP has not written over it since."""
    if not location.exists("zarr.json"):
        return False
    try:
        # A save of ours removes DCP's metadata; the line of text that it may leave is no pickle.
        return not location.read(DCP_METADATA_NAME).startswith(pickle.PROTO)
    except FileNotFoundError:
        return True
