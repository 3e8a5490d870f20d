"""Converts array keys to node names and back.

A node name is one path component that every file system, object store and Zarr reader accepts.
Bytes outside of ``[A-Za-z0-9._-]`` are percent-encoded (UTF-8). So is the first character of a name
that begins with a dot or with ``__`` (Zarr v3 core specification, "Node names"), and of a name in
:data:`RESERVED`. The array's attributes also contain the key, so readers need not decode names.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import quote, unquote

from shardstore.errors import KeyNameError, damaged

MAX_NAME_BYTES = 200
CONFIG_NAME = "metadata.json"
INTEGRITY_NAME = "integrity.json"
MANIFEST_NAME = "manifest.npz"
COMMON_STATE_NAME = "common.pt"
COMMON_OBJECT = "common_state"
"""Key of the sharded object in which Megatron-Core 0.19 stores the common state."""
CONTENT_METADATA_KEY = "content_metadata"
"""Name of the content metadata among the common values and the attributes of the root group."""
DCP_METADATA_NAME = ".metadata"
"""File that identifies a checkpoint of PyTorch DCP. A checkpoint of shardstore may have it too, for
programs that look for it."""
COMMITS = ("zarr.json", CONFIG_NAME)
"""Documents that commit a checkpoint."""
MODEL_COMMITS = ("model.safetensors.index.json", "model.safetensors")
"""Files that complete a model in Hugging Face's format: the index, or the only file of weights."""
WEIGHTS = re.compile(r"model(\.safetensors)?(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
"""Usual names of the files with the weights of such a model, and of their index."""
OWN_FILES = (*COMMITS, COMMON_STATE_NAME, MANIFEST_NAME, INTEGRITY_NAME, DCP_METADATA_NAME)
"""Files of a committed checkpoint that do not belong to an array."""
RESERVED = frozenset({"zarr.json", "metadata.json", COMMON_STATE_NAME, MANIFEST_NAME})
"""Names that a checkpoint uses for its own files, in lower case."""

_OBJECT_FILE = re.compile(r"shard_([0-9.]*)_([0-9.]*)\.(?:pt|json)")


def node_name(key: str) -> str:
    """Return the node name of a key; mostly the key itself if it consists of ``[A-Za-z0-9._-]``.

    Raises:
        KeyNameError: the key is empty, contains a lone surrogate, or is not a string.
    """
    if not isinstance(key, str):
        raise KeyNameError(f"key {key!r} is a {type(key).__name__}, not a string")
    return _node_name(key)


@lru_cache(maxsize=16384)
def _node_name(key: str) -> str:
    if not key:
        raise KeyNameError("an empty key cannot be stored; give the tensor a name", key=key)
    try:
        name = quote(key, safe="").replace("~", "%7E")
    except UnicodeEncodeError as error:
        raise KeyNameError(f"key {key!r} is not valid Unicode: {error}", key=key) from None
    if name[0] == "." or name.startswith("__") or name.lower() in RESERVED:
        name = f"%{ord(name[0]):02X}" + name[1:]
    if len(name) > MAX_NAME_BYTES:
        digest = hashlib.sha256(key.encode()).hexdigest()[:32]
        # A shortened name cannot be decoded; the attributes contain the key. "%~" marks it, and
        # occurs in no other name.
        name = name[: MAX_NAME_BYTES - 34].rstrip("%") + "%~" + digest
    return name


def key_of(name: str) -> str | None:
    """Return the key of a node name; ``None`` for a shortened name, and for one that no key has."""
    if "%~" in name or name[:1] in ("", "."):
        return None
    return unquote(name, errors="surrogateescape")


def object_place(name: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return offset and grid shape from the name of a sharded object's file (``shard_0.3_1.8.pt``
    or ``.json``); ``None`` for other names."""
    found = _OBJECT_FILE.fullmatch(name)
    if found is None:
        return None
    offset, shape = (tuple(int(n) for n in part.split(".") if n) for part in found.groups())
    return offset, shape


def is_inside(name: object) -> bool:
    """Return whether a relative path stays below its folder, and a file can have it."""
    if not isinstance(name, str) or "\0" in name:
        return False
    try:
        name.encode(errors="surrogateescape")  # as os.fsencode
    except UnicodeEncodeError:
        return False
    return {"", ".", ".."}.isdisjoint(name.split("/"))


def require_inside(name: object, url: str) -> str:
    """Return ``name`` if it stays inside the checkpoint and a file can have it. Every name from a
    document of a checkpoint passes this check before it becomes part of a path.

    Args:
        name: path relative to the checkpoint's folder.
        url: URL of the document, for the error text.

    Raises:
        DamagedCheckpointError: the name leads out of the checkpoint, or no file can have it.
    """
    if not isinstance(name, str) or not is_inside(name):
        wrong = f"names {name!r}, which is outside of the checkpoint or no file can have: it is"
        raise damaged(url, f"{wrong} damaged, or was not written by a checkpointing program")
    return name


def check_collisions(keys: Iterable[str]) -> None:
    """Check that no two names differ in case only: they would share a folder on some file systems.

    Raises:
        KeyNameError: two names differ in case only. The text names both keys.
    """
    seen: dict[str, str] = {}
    for key in keys:
        folded = node_name(key).casefold()
        other = seen.setdefault(folded, key)
        if other != key:
            raise KeyNameError(
                f"keys {other!r} and {key!r} differ only in case and would share the name "
                f"{folded!r} on a case-insensitive file system; rename one of them",
                key=key,
            )
