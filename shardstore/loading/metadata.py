"""What any rank may do with a checkpoint alone: ask what it holds, and remove tensors from it.

Answers for questions that wait for no other rank; the strategies that can read the checkpoint give
the answers. Public as :mod:`shardstore.serialization`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shardstore.core import CheckpointingException
from shardstore.errors import NotACheckpointError
from shardstore.loading.context import ROOT_DOCUMENT, handed_out
from shardstore.mapping import StateDict
from shardstore.storage.commit.identity import instead
from shardstore.storage.handed import is_handed
from shardstore.storage.stores.location import Location
from shardstore.strategies.base import LoadCommonStrategy, LoadShardedStrategy
from shardstore.validation import (
    CkptShardedMetadata,
    validate_sharded_objects_handling,
    verify_checkpoint_and_load_strategy,
)

__all__ = [
    "CONTENT_METADATA_KEY",
    "get_default_load_sharded_strategy",
    "load_common_state_dict",
    "load_content_metadata",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "place_of",
    "remove_sharded_tensors",
]

CONTENT_METADATA_KEY = "content_metadata"


def load_common_state_dict(
    checkpoint_dir: str | Path, *, storage_options: Mapping[str, Any] | None = None
) -> StateDict:
    """Load the common part alone. Any rank may call it; it waits for no other."""
    checkpoint_dir = place_of(checkpoint_dir, storage_options).place
    _, common_strategy = verify_checkpoint_and_load_strategy(checkpoint_dir)
    return common_strategy.load_common(checkpoint_dir)


def load_content_metadata(
    checkpoint_dir: str | Path | None = None,
    *,
    preloaded_state_dict: StateDict | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """What was given to :func:`shardstore.save` as ``content_metadata``; ``None`` if nothing was.

    Args:
        checkpoint_dir: a checkpoint, unless ``preloaded_state_dict`` is given.
        preloaded_state_dict: a loaded state dict or common state dict to take it from.
        storage_options: see :func:`shardstore.save`.

    Raises:
        CheckpointingException: neither was given.
    """
    if preloaded_state_dict is None:
        if checkpoint_dir is None:
            raise CheckpointingException(
                "load_content_metadata needs checkpoint_dir or preloaded_state_dict"
            )
        preloaded_state_dict = load_common_state_dict(
            checkpoint_dir, storage_options=storage_options
        )
    return preloaded_state_dict.get(CONTENT_METADATA_KEY)


def load_tensors_metadata(
    checkpoint_dir: str | Path,
    sharded_strategy: LoadShardedStrategy | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> CkptShardedMetadata:
    """Key -> sharded tensor without data, whole and unsharded.

    It can be handed to :func:`shardstore.load`. Any rank may call it; it waits for no other.
    """
    location = place_of(checkpoint_dir, storage_options)
    with _one_root(location):
        strategy, _ = verify_checkpoint_and_load_strategy(location.place, sharded_strategy)
        return strategy.load_tensors_metadata(location.place)


def load_sharded_metadata(
    checkpoint_dir: str | Path,
    sharded_strategy: LoadShardedStrategy | None = None,
    common_strategy: LoadCommonStrategy | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> CkptShardedMetadata:
    """As :func:`load_tensors_metadata`, sharded objects under their unique keys included."""
    location = place_of(checkpoint_dir, storage_options)
    with _one_root(location):
        sharded, common = verify_checkpoint_and_load_strategy(
            location.place, sharded_strategy, common_strategy
        )
        metadata = dict(sharded.load_sharded_metadata(location.place))
        if not sharded.can_handle_sharded_objects:
            validate_sharded_objects_handling(sharded, common)
            metadata.update(common.load_sharded_metadata(location.place))
    return metadata


@contextmanager
def _one_root(location: Location) -> Iterator[None]:
    """Within, the root document of an object store, which is all that metadata takes, is asked for
    once."""
    if location.is_local or is_handed(location, ROOT_DOCUMENT):
        yield
        return
    root: bytes | None = None
    with suppress(FileNotFoundError):
        root = location.read(ROOT_DOCUMENT)
    with handed_out({(location.url, ROOT_DOCUMENT): root}):
        yield


def remove_sharded_tensors(
    checkpoint_dir: str | Path,
    key_prefix: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Remove all tensors whose key starts with a prefix. Called by one rank.

    The root document loses them first, so that no reader meets a hole.
    """
    checkpoint_dir = place_of(checkpoint_dir, storage_options).place
    strategy, _ = verify_checkpoint_and_load_strategy(checkpoint_dir)
    strategy.remove_sharded_tensors(checkpoint_dir, key_prefix)


def get_default_load_sharded_strategy(checkpoint_dir: str | Path) -> LoadShardedStrategy:
    """The strategy that a checkpoint's own backend needs for loading."""
    return verify_checkpoint_and_load_strategy(place_of(checkpoint_dir).place)[0]


def place_of(
    checkpoint_dir: str | Path | Location, storage_options: Mapping[str, Any] | None = None
) -> Location:
    """The location of a path or URL.

    Raises:
        NotACheckpointError: it is a file.
    """
    location = Location.given(checkpoint_dir, storage_options)
    if location.is_local and location.path.is_file():
        found = instead(location) or "give the folder that save() wrote"
        raise NotACheckpointError(f"{location.url} is a file; {found}", url=location.url)
    return location
