"""Queries that any rank may make alone: what a checkpoint holds, and removal of tensors from it.

No function here waits for another rank. Public as :mod:`shardstore.serialization`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardstore.core import CheckpointingException, stored_config
from shardstore.errors import NotACheckpointError
from shardstore.loading.context import LoadContext, context_of, read_documents, using
from shardstore.mapping import StateDict
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.commit.identity import instead
from shardstore.storage.stores.location import Location
from shardstore.validation import (
    CkptShardedMetadata,
    validate_sharded_objects_handling,
    verify_checkpoint_and_load_strategy,
)

if TYPE_CHECKING:
    from shardstore.strategies.base import LoadCommonStrategy, LoadShardedStrategy

__all__ = [
    "CONTENT_METADATA_KEY",
    "ROOT_DOCUMENT",
    "find_strategies",
    "get_default_load_sharded_strategy",
    "load_common_state_dict",
    "load_content_metadata",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "location_of",
    "remove_sharded_tensors",
]

CONTENT_METADATA_KEY = "content_metadata"
ROOT_DOCUMENT = "zarr.json"


def load_common_state_dict(
    checkpoint_dir: str | Path, *, storage_options: Mapping[str, Any] | None = None
) -> StateDict:
    """Load the common part alone. Any rank may call it; it waits for no other."""
    with _opened(checkpoint_dir, storage_options) as context:
        _, common_strategy = find_strategies(context)
        return common_strategy.load_common(context.stored.location.place)


def load_content_metadata(
    checkpoint_dir: str | Path | None = None,
    *,
    preloaded_state_dict: StateDict | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Return what :func:`shardstore.save` was given as ``content_metadata``; ``None`` if nothing.

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
    """Return key -> sharded tensor without data, whole and unsharded.

    It can be handed to :func:`shardstore.load`. Any rank may call it; it waits for no other.
    """
    with _opened(checkpoint_dir, storage_options) as context:
        strategy, _ = find_strategies(context, sharded_strategy)
        return strategy.load_tensors_metadata(context.stored.location.place)


def load_sharded_metadata(
    checkpoint_dir: str | Path,
    sharded_strategy: LoadShardedStrategy | None = None,
    common_strategy: LoadCommonStrategy | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> CkptShardedMetadata:
    """As :func:`load_tensors_metadata`, sharded objects under their unique keys included."""
    with _opened(checkpoint_dir, storage_options) as context:
        place = context.stored.location.place
        sharded, common = find_strategies(context, sharded_strategy, common_strategy)
        metadata = dict(sharded.load_sharded_metadata(place))
        if not sharded.can_handle_sharded_objects:
            validate_sharded_objects_handling(sharded, common)
            metadata.update(common.load_sharded_metadata(place))
        return metadata


def remove_sharded_tensors(
    checkpoint_dir: str | Path,
    key_prefix: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Remove all tensors whose key starts with a prefix. Called by one rank.

    The root document loses them first, so that no reader meets a hole.
    """
    with _opened(checkpoint_dir, storage_options) as context:
        strategy, _ = find_strategies(context)
        strategy.remove_sharded_tensors(context.stored.location.place, key_prefix)


def get_default_load_sharded_strategy(checkpoint_dir: str | Path) -> LoadShardedStrategy:
    """Return the strategy that a checkpoint's own backend needs for loading."""
    with _opened(checkpoint_dir) as context:
        return find_strategies(context)[0]


@contextmanager
def _opened(
    checkpoint_dir: str | Path, storage_options: Mapping[str, Any] | None = None
) -> Iterator[LoadContext]:
    """Open a checkpoint for the strategies that are called within.

    In an object store the root document, which answers most queries, is requested once.
    """
    location = location_of(checkpoint_dir, storage_options)
    context = context_of(location)
    if not location.is_local and not context.stored.documents:
        documents = read_documents(location, [ROOT_DOCUMENT])
        context = replace(context, stored=StoredCheckpoint(location, documents=documents))
    with using(context):
        yield context


def find_strategies(
    context: LoadContext,
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None,
    common_strategy: LoadCommonStrategy | tuple[str, int] | None = None,
) -> tuple[LoadShardedStrategy, LoadCommonStrategy]:
    """Find the strategies that can read a checkpoint.

    Errors as :func:`shardstore.validation.verify_checkpoint_and_load_strategy`.
    """
    return verify_checkpoint_and_load_strategy(
        context.stored.location.place,
        sharded_strategy,
        common_strategy,
        config=stored_config(context.stored),
    )


def location_of(
    checkpoint_dir: str | Path | Location, storage_options: Mapping[str, Any] | None = None
) -> Location:
    """Return the location of a path or URL.

    Raises:
        NotACheckpointError: it is a file.
    """
    location = Location.given(checkpoint_dir, storage_options)
    if location.is_local and location.path.is_file():
        found = instead(location) or "give the folder that save() wrote"
        raise NotACheckpointError(f"{location.url} is a file; {found}", url=location.url)
    return location
