"""The small document that says which backend wrote a checkpoint.

Answers for `metadata.json`: writing it, reading it, and telling from it whether a directory is a
checkpoint at all. Knows nothing of tensors; importing it does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from shardstore.errors import CheckpointingException, DamagedCheckpointError, NotACheckpointError
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.stores.location import Location

__all__ = [
    "CONFIG_FNAME",
    "CheckpointingConfig",
    "CheckpointingException",
    "check_is_distributed_checkpoint",
    "config_document",
    "maybe_load_config",
    "save_config",
]

CONFIG_FNAME = "metadata.json"


@dataclass
class CheckpointingConfig:
    """Which strategies can read a checkpoint.

    Attributes:
        sharded_backend: name of the backend that wrote the sharded tensors, such as ``"zarr"``.
        sharded_backend_version: version of that backend's format.
        common_backend: name of the backend that wrote the non-sharded part.
        common_backend_version: version of that backend's format.
    """

    sharded_backend: str
    sharded_backend_version: int = 1
    common_backend: str = "torch"
    common_backend_version: int = 1


def check_is_distributed_checkpoint(
    checkpoint_dir: str | Path, *, storage_options: Mapping[str, Any] | None = None
) -> bool:
    """Whether a directory or URL holds a checkpoint, judged by its `metadata.json` (and, in an
    object store, by the document that commits it).

    Any rank may call it; it waits for no other.

    Raises:
        DamagedCheckpointError: there is such a document but it is not JSON.
    """
    try:
        place = Location.given(checkpoint_dir, storage_options).place
        return maybe_load_config(place) is not None
    except NotACheckpointError:
        return False


def maybe_load_config(checkpoint_dir: str | Path) -> CheckpointingConfig | None:
    """Reads which backend wrote a checkpoint.

    Any rank may call it; it waits for no other.

    Args:
        checkpoint_dir: directory of the checkpoint.

    Returns:
        The backend names and versions; ``None`` where there is no `metadata.json`, or where it lies
        in an object store without the root document that commits it.

    Raises:
        DamagedCheckpointError: the document is not JSON.
        NotACheckpointError: the document is JSON but not one that :func:`save_config` writes.
    """
    return stored_config(StoredCheckpoint(Location.of(checkpoint_dir)))


def stored_config(stored: StoredCheckpoint) -> CheckpointingConfig | None:
    """Do what :func:`maybe_load_config` does, for an opened checkpoint.

    A root document that was read before and names the backends spares the request for
    `metadata.json`.
    """
    location = stored.location
    if "zarr.json" in stored.documents and CONFIG_FNAME not in stored.documents:
        config = _config_of_root(stored)
        if config is not None:
            return config
    url = f"{location.url.rstrip('/')}/{CONFIG_FNAME}"
    try:
        document = json.loads(stored.document(CONFIG_FNAME).decode("utf-8"))
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise DamagedCheckpointError(
            f"{url} is not text ({error}); restore it from a copy, or use another checkpoint",
            url=url,
        ) from error
    except json.JSONDecodeError as error:
        raise DamagedCheckpointError(
            f"{url} is not valid JSON ({error}); restore it from a copy, or use another checkpoint",
            url=url,
        ) from error
    config = _parse_config(document, url)
    if not location.is_local and not stored.has_document(commit_document(config)):
        # In an object store a save that is going on, or died, is at its target already.
        return None
    return config


def _config_of_root(stored: StoredCheckpoint) -> CheckpointingConfig | None:
    """Return the backends that the root document names, if there is one and it names them."""
    try:
        document = json.loads(stored.document("zarr.json"))
        found = document["attributes"]["shardstore"]["config"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return _parse_config(found, f"{stored.location.url}/zarr.json")


def _parse_config(document: object, url: str) -> CheckpointingConfig:
    known = {field.name for field in fields(CheckpointingConfig)}
    if not isinstance(document, dict) or "sharded_backend" not in document:
        raise NotACheckpointError(
            f"{url} does not name a sharded_backend, so this is not a distributed "
            "checkpoint; give the directory that save() wrote",
            url=url,
        )
    if unknown := sorted(set(document) - known):
        raise NotACheckpointError(
            f"{url} has the unknown entries {unknown}: written by something else, or by a newer "
            f"version that needs a newer reader; known are {sorted(known)}",
            url=url,
        )
    for name, value in document.items():
        expected = str if name in ("sharded_backend", "common_backend") else int
        if not isinstance(value, expected) or isinstance(value, bool):
            raise NotACheckpointError(
                f"{url} has {name}={value!r} where a value of type {expected.__name__} belongs; "
                "restore the document from a copy, or use another checkpoint",
                url=url,
            )
    return CheckpointingConfig(**document)


def commit_document(config: CheckpointingConfig) -> str:
    """Name of the document that is written last, and without which there is no checkpoint."""
    zarr_root = config.sharded_backend == "zarr" and config.sharded_backend_version >= 2
    return "zarr.json" if zarr_root else CONFIG_FNAME


def config_document(config: CheckpointingConfig) -> bytes:
    """Content of `metadata.json`."""
    return json.dumps(asdict(config)).encode()


def save_config(config: CheckpointingConfig, checkpoint_dir: str | Path) -> None:
    """Writes which backend wrote a checkpoint, replacing what was there.

    One rank calls it.

    Args:
        config: backend names and versions.
        checkpoint_dir: existing directory of the checkpoint.

    Raises:
        FileNotFoundError: there is no such directory.
    """
    location = Location.of(checkpoint_dir)
    if location.is_local:
        Path(location.url, CONFIG_FNAME).write_bytes(config_document(config))
    else:
        location.write(CONFIG_FNAME, config_document(config))
