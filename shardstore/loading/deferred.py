"""A load cut in two: items that this rank reads itself, and items that come from other ranks.

Answers for taking a state dict of sharded items apart by who reads them, and for putting what was
loaded in their places. It moves nothing between ranks, and does not know who decided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from shardstore.dict_utils import (
    dict_list_map_outplace,
    extract_matching_values,
    nested_values,
)
from shardstore.errors import CheckpointingException
from shardstore.mapping import (
    ShardedBase,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
    is_main_replica,
)
from shardstore.utils import _ShardId

__all__ = ["as_lists", "defer_items", "fill_in_items", "numbered", "renamed"]

T = TypeVar("T", bound=ShardedBase)


def defer_items(
    sharded_state_dict: ShardedStateDict,
    item_type: type[T],
    shard_id_func: Callable[[T], _ShardId],
) -> tuple[ShardedStateDict, StateDict, dict[_ShardId, T], dict[_ShardId, T]]:
    """Split a state dict by type, and the items of the type by who loads them.

    Returns:
        The items in their structure, everything else, the main replicas by id, and by id the others
        that this rank has no main replica of. Lists become dicts by position, which keeps the two
        structures mergeable.
    """
    items, rest = extract_matching_values(
        sharded_state_dict, lambda value: isinstance(value, item_type), return_lists_as_dicts=True
    )
    to_load: dict[_ShardId, T] = {}
    deferred: dict[_ShardId, T] = {}
    for item in nested_values(items):
        chosen = to_load if is_main_replica(item.replica_id) else deferred
        chosen.setdefault(shard_id_func(item), item)
    for shard_id in to_load:
        deferred.pop(shard_id, None)
    return items, rest, to_load, deferred


def fill_in_items(
    sharded_state_dict: ShardedStateDict,
    loaded_items: Mapping[_ShardId, Any],
    item_type: type[T],
    shard_id_func: Callable[[T], _ShardId],
) -> None:
    """Replace each item of the type by what was loaded for its id, in place.

    Raises:
        CheckpointingException: nothing was loaded for one of them.
    """

    def filled(value: Any) -> Any:
        if not isinstance(value, item_type):
            return value
        shard_id = shard_id_func(value)
        if shard_id not in loaded_items:
            raise CheckpointingException(
                f"{item_type.__name__} {shard_id} was loaded by no rank: no rank has its main "
                f"replica. Wanted as {value.without_data()}",
                key=value.key,
            )
        loaded = loaded_items[shard_id]
        given = value.data
        if (
            isinstance(value, ShardedTensor)
            and isinstance(given, torch.Tensor)
            and given.device.type != "meta"
            and given is not loaded
            and (given.dtype, given.shape) == (loaded.dtype, loaded.shape)
        ):
            # The caller's memory is where the values were asked for.
            given.detach().copy_(loaded)
            return given
        return loaded

    for key, value in sharded_state_dict.items():
        sharded_state_dict[key] = dict_list_map_outplace(filled, value)


def numbered(items: Mapping[_ShardId, T]) -> dict[str, T]:
    """Items under plain keys, as strategies expect a state dict to have."""
    return {str(number): item for number, item in enumerate(items.values())}


def renamed(loaded: Mapping[str, Any], items: Mapping[_ShardId, T]) -> dict[_ShardId, Any]:
    """What was loaded for :func:`numbered` items, by shard id."""
    return {shard_id: loaded[str(number)] for number, shard_id in enumerate(items)}


def as_lists(result: Any, template: Any) -> Any:
    """Turn dicts by position back into the lists that they stand for."""
    if isinstance(template, list):
        if isinstance(result, list):
            return result
        return [as_lists(result[i], part) for i, part in enumerate(template)]
    if isinstance(template, dict):
        return {key: as_lists(result[key], part) for key, part in template.items()}
    return result
