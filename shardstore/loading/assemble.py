"""The last steps of a load: read the planned regions, and put the tensors into the state dict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch

from shardstore.dict_utils import dict_list_map_outplace
from shardstore.errors import ArgumentError, CheckpointingException
from shardstore.loading.context import LoadContext
from shardstore.loading.host import Read, read_through_host
from shardstore.loading.plan import ReadPlan
from shardstore.loading.replicas import by_chunk, exchange
from shardstore.mapping import ShardedStateDict, ShardedTensor, StateDict
from shardstore.storage.movers.chunks import chunk_parts
from shardstore.storage.movers.parallel import default_threads

BYTES_A_THREAD = 32 * 1024 * 1024
"""Size of the buffers for files. Larger buffers are not faster, because new memory is slow."""


def read_chunks(context: LoadContext, plan: ReadPlan, *, read: Read | None = None) -> None:
    """Read the planned regions. If the load has a group, its ranks share the reading and wait for
    each other.

    Args:
        context: the context of the load.
        plan: the plan of this rank.
        read: reads regions, without sharing; default: reads chunks of the checkpoint.

    Raises:
        RanksError: another rank of the group failed.
        ChunkMissingError, ChunkCorruptError: as :meth:`StoredCheckpoint.read`.
    """
    if read is not None:
        context = replace(context, group=None)
    stored, meter = context.stored, context.meter
    done = meter.count if meter is not None and meter.is_watched else None
    with context.together(), torch.no_grad():
        regions = [region for one in plan.values() for region in one.regions]
        if meter is not None:
            watched = regions if meter.is_watched else ()
            chunks = sum(1 for region in watched for _ in chunk_parts(region))
            meter.expect(sum(region.out.nbytes for region in regions), chunks)
        for one in plan.values():
            if one.is_padded:
                one.target.zero_()
        parts = {} if context.group is None else by_chunk(regions)
    if context.group is not None:
        exchange(context, parts, done)
        return
    budget_bytes = context.budget_bytes
    if stored.location.is_local:
        budget_bytes = min(budget_bytes, BYTES_A_THREAD * default_threads())
    read_through_host(read or stored.read, regions, budget_bytes, done)


def assemble(
    plan: ReadPlan,
    sharded_state_dict: ShardedStateDict,
    url: str,
    objects: Mapping[int, Any] | None = None,
) -> StateDict:
    """Return the state dict with tensors instead of sharded tensors.

    Args:
        plan: the plan, after :func:`read_chunks`.
        sharded_state_dict: the state dict of the load.
        url: URL of the checkpoint, for error texts.
        objects: ``id`` of other entries -> their values.

    Raises:
        CheckpointingException: the state dict has an entry of another type.
        ArgumentError: two keys with different stored values are loaded into the same memory.
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
        if read.tied:
            if not torch.equal(_bits(read.target), _bits(read.result)):
                raise ArgumentError(
                    f"keys {read.tied!r} and {value.key!r} are loaded into the same memory, and "
                    f"their stored values in {url} differ; give each a tensor of its own (clone() "
                    "makes a copy)",
                    key=value.key,
                    url=url,
                )
        elif read.staged is not None:
            with torch.no_grad():
                read.result.copy_(read.staged)
        return read.result

    return cast(StateDict, dict_list_map_outplace(loaded, sharded_state_dict))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
