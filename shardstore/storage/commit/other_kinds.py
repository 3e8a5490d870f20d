"""What lies at a place that is no checkpoint of ours, in words for an error text: a checkpoint of
another kind, a folder of checkpoints, nothing. Looks at names alone and reads next to nothing.
"""

from __future__ import annotations

from shardstore.errors import CheckpointingException
from shardstore.storage.commit.identity import node_type, what_else
from shardstore.storage.stores.location import Location

__all__ = ["instead"]

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
        above = location.url.rpartition("/")[0]
        return f"it is a single array: give the checkpoint, which may be {above}"
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
