"""The end of a load: read what is planned, and put the tensors in their places."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from shardstore.dict_utils import dict_list_map_outplace
from shardstore.distributed.groups import raise_together
from shardstore.errors import CheckpointingException
from shardstore.loading.context import LoadContext
from shardstore.loading.host import Read, budget_of, read_through_host
from shardstore.loading.plan import ReadPlan
from shardstore.loading.replicas import Exchange
from shardstore.mapping import ShardedStateDict, ShardedTensor, StateDict
from shardstore.storage.movers.chunks import chunk_parts

__all__ = ["assemble", "read_chunks"]


def read_chunks(
    context: LoadContext,
    plan: ReadPlan,
    error: Exception | None = None,
    *,
    read: Read | None = None,
) -> None:
    """Read what is planned, together with the load's group if there is one.

    Args:
        context: the load.
        plan: what this rank wants.
        error: what went wrong on this rank before; it is raised on every rank of the group.
        read: reads regions, and no group shares them; default: reads chunks of the checkpoint.

    Raises:
        RanksError: another rank of the group failed.
        ChunkMissingError, ChunkCorruptError: as :meth:`StoredCheckpoint.read`.
    """
    group = None if read is not None else context.group
    what = f"loading {context.stored.location.url} together"
    if group is not None:
        raise_together(error, group, what)
    elif error is not None:
        raise error
    regions = [region for one in plan.values() for region in one.regions]
    done = None
    if context.meter is not None:
        chunks = 0
        if context.meter.is_watched:
            chunks = sum(1 for region in regions for _ in chunk_parts(region))
        context.meter.expect(sum(region.out.nbytes for region in regions), chunks)
        done = context.meter.add
    with torch.no_grad():
        for one in plan.values():
            if one.is_padded:
                one.target.zero_()
    if group is None:
        read_through_host(read or context.stored.read, regions, budget_of(context), done)
    else:
        Exchange(context.stored, regions, group, context.budget_bytes, done).run(what)


def assemble(
    plan: ReadPlan,
    sharded_state_dict: ShardedStateDict,
    url: str,
    objects: Mapping[int, Any] | None = None,
) -> StateDict:
    """Return the state dict with tensors in the place of sharded tensors.

    Args:
        plan: was read.
        sharded_state_dict: what was asked for.
        url: of the checkpoint, for the error text.
        objects: ``id`` of what else is in it -> its value.

    Raises:
        CheckpointingException: there is something else in it.
    """
    known = objects or {}

    def loaded(value: Any) -> Any:
        if id(value) in known:
            return known[id(value)]
        if not isinstance(value, ShardedTensor):
            raise CheckpointingException(
                f"{type(value).__name__} among the sharded tensors to load from {url}; the "
                "common strategy loads other objects"
            )
        read = plan[id(value)]
        if read.staged is not None:
            with torch.no_grad():
                read.result.copy_(read.staged)
        return read.result

    return cast(StateDict, dict_list_map_outplace(loaded, sharded_state_dict))
