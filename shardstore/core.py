"""Reads and writes ``metadata.json``, the document that names the backends of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from shardstore.errors import CheckpointingException as CheckpointingException
from shardstore.errors import FormatVersionError, NotACheckpointError, as_damage
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.stores.location import Location

CONFIG_FNAME = "metadata.json"
DCP_BACKEND = "torch_dist"
"""Name of the backend that uses DCP's own files."""


@dataclass
class CheckpointingConfig:
    """Names and versions of the backends that wrote a checkpoint.

    Attributes:
        sharded_backend: name of the backend that wrote the sharded tensors, such as ``"zarr"``.
        sharded_backend_version: version of that backend's format.
        common_backend: name of the backend that wrote the common values.
        common_backend_version: version of that backend's format.
    """

    sharded_backend: str
    sharded_backend_version: int = 1
    common_backend: str = "torch"
    common_backend_version: int = 1


def check_is_distributed_checkpoint(
    checkpoint_dir: str | Path, *, storage_options: Mapping[str, Any] | None = None
) -> bool:
    """Return whether a folder or URL holds a checkpoint.

    It checks for `metadata.json` and, in an object store, for the document that commits it. Any
    rank may call it; it waits for no other.

    Raises:
        DamagedCheckpointError: the document exists but is not JSON.
    """
    try:
        place = Location.of(checkpoint_dir, storage_options).place
        return maybe_load_config(place) is not None
    except NotACheckpointError:
        return False


def maybe_load_config(checkpoint_dir: str | Path) -> CheckpointingConfig | None:
    """Read the names and versions of the backends that wrote a checkpoint.

    Any rank may call it; it waits for no other.

    Args:
        checkpoint_dir: folder or URL of the checkpoint.

    Returns:
        The backends; ``None`` if there is no `metadata.json`, or, in an object store, no root
        document that commits it.

    Raises:
        DamagedCheckpointError: the document is not JSON.
        NotACheckpointError: the document is JSON, but does not describe backends.
    """
    return stored_config(StoredCheckpoint(Location.of(checkpoint_dir)))


def stored_config(stored: StoredCheckpoint) -> CheckpointingConfig | None:
    """Do what :func:`maybe_load_config` does, for an opened checkpoint.

    If the root document has been read and names the backends, `metadata.json` is not requested.
    """
    location, found = stored.location, None
    if stored.documents.get("zarr.json") is not None and CONFIG_FNAME not in stored.documents:
        with suppress(NotACheckpointError, FormatVersionError):
            found = None if stored.root is None else stored.root.about.get("config")
    if found is not None:
        return parse_config(found, f"{location.url}/zarr.json")
    if (text := stored.document(CONFIG_FNAME)) is None:
        return None
    url = f"{location.url.rstrip('/')}/{CONFIG_FNAME}"
    with as_damage(url, f"{url} is not valid JSON"):
        document = json.loads(text)
    config = parse_config(document, url)
    has_root = config.sharded_backend == "zarr" and config.sharded_backend_version >= 2
    is_read = stored.documents.get("zarr.json") is not None
    if has_root and not (is_read or location.is_local or stored.has_file("zarr.json")):
        # In an object store, a save that is running or dead may have written this document.
        return None
    return config


def parse_config(document: object, url: str) -> CheckpointingConfig:
    """Return the backends that the content of ``metadata.json`` names.

    Raises:
        NotACheckpointError: it does not describe backends.
    """
    if isinstance(document, dict) and document.get("sharded_backend") == DCP_BACKEND:
        # Megatron-Core 0.19 stores the common part as an object of torch_dist.
        document = {"common_backend": DCP_BACKEND, **document}
    try:
        config = msgspec.convert(document, CheckpointingConfig)
        if unknown := sorted(set(cast(dict[str, object], document)) - set(asdict(config))):
            raise msgspec.ValidationError(f"unknown entries {unknown}")
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise NotACheckpointError(
            f"{url} ({document!r:.200}) does not name the sharded_backend of a distributed "
            f"checkpoint of a known version ({error}); give the folder that save() wrote, restore "
            "it from a copy, or upgrade shardstore if a newer version wrote it",
            url=url,
        ) from error
    return config


def save_config(config: CheckpointingConfig, checkpoint_dir: str | Path) -> None:
    """Write the names and versions of a checkpoint's backends; replace an existing document.

    One rank calls it.

    Args:
        config: names and versions of the backends.
        checkpoint_dir: existing folder of the checkpoint.

    Raises:
        FileNotFoundError: the folder does not exist.
    """
    location, data = Location.of(checkpoint_dir), json.dumps(asdict(config)).encode()
    if location.is_local and not location.is_dir():
        raise FileNotFoundError(f"the folder {location.url} does not exist")
    location.write(CONFIG_FNAME, data)
