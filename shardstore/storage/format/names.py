"""Pure: array keys to node names and back.

A node name is one path component that every file system, object store and Zarr reader takes: bytes
    outside
``[A-Za-z0-9._-]`` are percent-encoded (UTF-8), as is whatever would make a name special: a leading
dot or a leading ``__`` (reserved by the Zarr v3 core specification, "Node names"), and the name
``zarr.json``. The true key is also kept in the array's attributes, so that nobody has to decode
names.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import unquote

from shardstore.errors import DamagedCheckpointError, KeyNameError

MAX_NAME_BYTES = 200
CONFIG_NAME = "metadata.json"
INTEGRITY_NAME = "integrity.json"
MANIFEST_NAME = "manifest.npz"
COMMON_STATE_NAME = "common.pt"
COMMON_OBJECT = "common_state"
"""Key of the sharded object in which Megatron-Core 0.19 keeps the same."""
DCP_METADATA_NAME = ".metadata"
"""File by which PyTorch DCP's own checkpoints are known; for programs that look for one, ours may
have it too."""
RESERVED = frozenset({"zarr.json", "metadata.json", COMMON_STATE_NAME, MANIFEST_NAME})
"""Names that the checkpoint itself uses, lower case."""

_UNSAFE = re.compile(rb"[^A-Za-z0-9._-]")


def node_name(key: str) -> str:
    """Safe node name of a key; the key itself where it is made of ``[A-Za-z0-9._-]`` alone.

    Raises:
        KeyNameError: the key is empty, holds a lone surrogate, or is no string.
    """
    if not isinstance(key, str):
        raise KeyNameError(f"key {key!r} is a {type(key).__name__}, not a string")
    return _node_name(key)


@lru_cache(maxsize=16384)
def _node_name(key: str) -> str:
    if not key:
        raise KeyNameError("an empty key cannot be stored; give the tensor a name", key=key)
    try:
        raw = key.encode("utf-8")
    except UnicodeEncodeError as error:
        raise KeyNameError(f"key {key!r} is not valid Unicode: {error}", key=key) from None
    name = _UNSAFE.sub(lambda m: b"%%%02X" % m.group()[0], raw).decode("ascii")
    if name[0] == "." or name.startswith("__") or name.lower() in RESERVED:
        name = f"%{ord(name[0]):02X}" + name[1:]
    if len(name) > MAX_NAME_BYTES:
        digest = hashlib.sha256(raw).hexdigest()[:32]
        # A cut name cannot be decoded: the attribute keeps the key, and "%~" occurs in no encoded
        # name.
        name = name[: MAX_NAME_BYTES - 34].rstrip("%") + "%~" + digest
    return name


def key_of(name: str) -> str | None:
    """Return the key behind a node name; ``None`` for a name that was shortened."""
    if "%~" in name:
        return None
    return unquote(name, errors="surrogateescape")


def object_place(name: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Offset and grid shape in the name of a sharded object's file, ``None`` for other names."""
    if not is_object_file(name):
        return None
    parts = name[len("shard_") :].rpartition(".")[0].split("_")
    try:
        offset, shape = (tuple(int(n) for n in part.split(".") if n) for part in parts)
    except ValueError:
        return None
    return offset, shape


def is_object_file(name: str) -> bool:
    """Return whether a file in a folder of an array or object is named as one of a sharded object:
    what ``torch.save`` wrote, or JSON."""
    return name.startswith("shard_") and name.endswith((".pt", ".json"))


def is_inside(name: object) -> bool:
    """Return whether a name leads to something below the folder that it is relative to."""
    if not isinstance(name, str) or "\0" in name:
        return False
    return {"", ".", ".."}.isdisjoint(name.split("/"))


def require_inside(name: object, url: str) -> str:
    """Return a name that a document gives, if it does not leave the checkpoint. Every name that a
    checkpoint gives goes through here before a path is made of it.

    Args:
        name: relative to the checkpoint's folder.
        url: of the document, for the error text.

    Raises:
        DamagedCheckpointError: it leads elsewhere.
    """
    if not isinstance(name, str) or not is_inside(name):
        raise DamagedCheckpointError(
            f"{url} names {name!r}, which is outside of the checkpoint: it is damaged, or was not "
            "written by a checkpointing program; load an earlier checkpoint",
            url=url,
        )
    return name


def check_collisions(keys: Iterable[str]) -> None:
    """Refuse keys whose names differ in case alone: they would be one folder on some file systems.

    Raises:
        KeyNameError: names both keys.
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
