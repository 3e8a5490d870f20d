"""Distinguish checkpoints from places that only look like one.

The folder of an array in a checkpoint also has a ``zarr.json``, and so does a Zarr group of another
program. Neither may be listed, replaced or deleted as a checkpoint.
"""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Collection, Iterable
from contextlib import suppress

from shardstore.errors import (
    ArgumentError,
    CheckpointingException,
    DamagedCheckpointError,
    StorageError,
)
from shardstore.storage.format.names import CONFIG_NAME, DCP_METADATA_NAME, key_of
from shardstore.storage.runtime.parallel import run_together
from shardstore.storage.stores.location import Location

logger = logging.getLogger(__name__)

ATTEMPTS = ".attempts"
"""Folder of the claims and marks, below a target in an object store."""

TORCH_NAMES = (".pt", ".pth", ".bin", ".ckpt")
_MOST = 50
"""Largest number of subfolders that are searched for a checkpoint."""


def _parsed(text: bytes) -> tuple[str | None, bool]:
    """Return the node type in a Zarr v3 document (``None`` if it has none), and whether the
    document has shardstore's attributes."""
    try:
        document = json.loads(text)
        kind, attributes = document.get("node_type"), dict(document.get("attributes") or {})
    except (AttributeError, RecursionError, TypeError, ValueError):
        return None, False
    return kind if isinstance(kind, str) else None, "shardstore" in attributes


def _document(location: Location) -> tuple[str | None, bool]:
    """Return the result of :func:`_parsed` for the document of a place.

    Raises:
        StorageError: the store failed.
    """
    try:
        return _parsed(location.read("zarr.json"))
    except (FileNotFoundError, DamagedCheckpointError):
        return None, False


def node_type(location: Location) -> str | None:
    """Return the node type in the Zarr v3 document of a place, ``"array"`` or ``"group"``; ``None``
    if no document can be read."""
    return _document(location)[0]


def what_else(location: Location) -> str | None:
    """Describe a place with a ``zarr.json`` and no ``metadata.json``, for an error text.

    Returns:
        The description, or ``None`` for a checkpoint of shardstore. A damaged checkpoint counts as
        one, so that it can be removed.
    """
    kind, ours = _document(location)
    if kind == "array":
        return "a single array (a part of a checkpoint, or another program's)"
    return "a Zarr group of another program" if kind == "group" and not ours else None


def is_foreign_node(text: bytes) -> bool:
    """Return whether the Zarr v3 document of a folder in a checkpoint shows that the folder is not
    one of the checkpoint's arrays. It is then an array without shardstore's attributes, or a group
    (of another program, or the root of another checkpoint). For a damaged document the result is
    false."""
    kind, ours = _parsed(text)
    return kind == "group" or (kind == "array" and not ours)


def is_ours(location: Location) -> bool:
    """Return whether a place holds a shardstore checkpoint that DCP has not overwritten."""
    # A shardstore save removes DCP's metadata.
    return location.exists("zarr.json") and not has_dcp_metadata(location)


def has_dcp_metadata(location: Location) -> bool:
    """Return whether a place has the metadata of PyTorch DCP, a pickle. The line of text that
    shardstore writes under its name does not count."""
    return location.read_range(DCP_METADATA_NAME, 0, 1) == pickle.PROTO


def warn_of_dcp(location: Location) -> None:
    """Log a warning if PyTorch DCP wrote over a checkpoint in a folder, from which the older values
    are read. In an object store, the look would be a request."""
    both = (DCP_METADATA_NAME, "zarr.json")
    with suppress(CheckpointingException):  # what lies beside it does not make the load fail
        if location.is_local and all(map(location.exists, both)) and has_dcp_metadata(location):
            remedy = (
                "For the newer ones, load with dcp.load, or run `shardstore convert %s TARGET`; "
                "to keep the older ones, remove .metadata and *.distcp"
            )
            text = "%s: read from shardstore's files, over which PyTorch DCP saved newer values. "
            logger.warning(text + remedy, *[location.url] * 2)


def instead(location: Location) -> str | None:
    """Describe a place that is not a checkpoint, with the remedy. Return ``None`` if its content is
    unknown.

    Callers already handle another error, so errors of the store are ignored.
    """
    try:
        if not location.is_file():
            return _folder(location)
        above = location.parent()
        if above and b'"sharded_backend"' in (above.read_if_there(CONFIG_NAME) or b""):
            return f"it is a file of a checkpoint: give its folder, {above.url}"
    except (CheckpointingException, OSError, NotImplementedError):
        return None
    if location.name.endswith(".safetensors"):
        return f"it is a safetensors file: {_convert(location)}"
    if location.name == DCP_METADATA_NAME or location.name.endswith(".distcp"):
        return f"it is a file of PyTorch DCP: give its folder, {location.url.rpartition('/')[0]}"
    if location.name.endswith(TORCH_NAMES):
        return "it looks like a file of torch.save: load it with torch.load, and save what it holds"
    return None


def _folder(location: Location) -> str | None:
    names = sorted(location.listing())
    if not names and location.is_dir():
        return "it is an empty folder"
    if DCP_METADATA_NAME in names:
        return f"it is a checkpoint of PyTorch DCP: {_convert(location)}"
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return f"it holds safetensors: {_convert(location)}"
    if location.name.startswith("models--") and "snapshots" in names:
        found = [f"{location.url}/snapshots/{name}" for name in location.listing("snapshots")]
        return f"it is a model in the cache of the Hub: give its snapshot, {' or '.join(found[:3])}"
    if ".zarray" in names or node_type(location) == "array":
        parent, _, node = location.url.rpartition("/")
        key = key_of(node) or node
        return (
            f"it is a single array: give the checkpoint, which may be {parent}, and its key, {key}"
        )
    if ".zgroup" in names or ("zarr.json" in names and what_else(location)):
        what = "it is a Zarr group of another program: shardstore.open reads it; to load it, "
        return what + _convert(location)
    below: dict[str, list[str]] = {"checkpoints": [], "models": []}
    for name in (name for name in names[:_MOST] if not name.startswith(".")):
        if all(location.exists(f"{name}/{document}") for document in ("zarr.json", CONFIG_NAME)):
            below["checkpoints"].append(name)
        elif any(one.endswith(".safetensors") for one in location.listing(name)):
            below["models"].append(name)
    for what, found in below.items():
        if found:
            found.sort(key=len)  # step-9 before step-10
            return f"{what} are below it ({', '.join(found[-3:])}): give {location.url}/{found[-1]}"
    return None


def _convert(location: Location) -> str:
    return f"convert it first, `shardstore convert {location.url} TARGET`"


def is_checkpoint(location: Location) -> bool:
    """Return whether a place holds a committed checkpoint: of shardstore, or of another backend
    with a ``metadata.json``.

    The folder of an array inside a checkpoint does not count, and neither does a Zarr group of
    another program.
    """
    if location.is_local:
        names = [name for name in (CONFIG_NAME, "zarr.json") if location.exists(name)]
        committed = bool(names)
    else:
        names = location.listing()
        committed = is_committed(location, names)
    return committed and (CONFIG_NAME in names or what_else(location) is None)


def require_root(root: Location, names: Collection[str], steps: Iterable[str]) -> None:
    """Raise an error if checkpoints were sought below a place that cannot be their root, and log a
    warning about a step of PyTorch DCP. Taken for an empty root, a run would begin anew.

    Args:
        root: a place without checkpoints below it.
        names: the names directly below it.
        steps: those that are named like steps, the newest first.

    Raises:
        StorageError: it is a file, or the store failed.
        ArgumentError: it is a checkpoint itself.
    """
    root.require_no_file()
    if not {CONFIG_NAME, "zarr.json"}.isdisjoint(names) and is_checkpoint(root):
        raise root.error(
            " is a checkpoint itself, and has no checkpoints below it: give "
            f"{root.url.rpartition('/')[0]}, the folder that holds it",
            ArgumentError,
        )
    for place in map(root.child, steps):
        if has_dcp_metadata(place):
            text = "a checkpoint of PyTorch DCP is no step of this package, and is not restored"
            logger.warning(f"{place.url}: {text}. To go on from it, {_convert(place)}")
            return


def is_committed(location: Location, names: Collection[str] | None = None) -> bool:
    """Return whether a place in an object store holds a committed checkpoint: of shardstore, or of
    another backend with a ``metadata.json``.

    Args:
        location: the target.
        names: the names below it, if the caller has listed them.

    Raises:
        StorageError: the store failed.
    """

    def config_text() -> bytes | StorageError | None:
        try:
            return location.read_range(CONFIG_NAME)
        except StorageError as error:
            return error

    if names is None:
        # One byte shows that the document exists, without reading a large one.
        start, text = run_together(lambda: location.read_range("zarr.json", 0, 1), config_text)
        has_root = start is not None
    else:
        has_root = "zarr.json" in names
        text = config_text() if CONFIG_NAME in names and not has_root else None
    if has_root or text is None:
        return has_root
    if isinstance(text, StorageError):
        raise text
    try:
        config = json.loads(text)
        # With layout 2, the root document is the commit, and it is missing.
        version = config.get("sharded_backend_version", 1)
        return bool(config.get("sharded_backend") != "zarr" or version == 1)
    except (AttributeError, RecursionError, ValueError):
        return False
