"""Sending what one rank of a process group loaded to the others that hold the same shard.

Shares out which rank loads which shard, and moves loaded tensors within the group by one of three
algorithms. Ranks are numbered within the group throughout.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from shardstore.dict_utils import nested_values
from shardstore.distributed.groups import (
    Group,
    exchange_device,
    global_rank,
    group_rank,
    group_size,
    raise_together,
)
from shardstore.errors import CheckpointingException
from shardstore.mapping import ShardedStateDict, ShardedTensor, is_main_replica
from shardstore.utils import _sharded_tensor_shard_id, _ShardId, debug_time

__all__ = [
    "ShardDistribution",
    "data_shape",
    "determine_main_replica_uniform_distribution",
    "distribute_shards_to_ranks",
    "exchange_by_distribution",
    "exchange_loaded_objects_gather_object",
    "exchange_loaded_tensors_broadcast",
    "exchange_loaded_tensors_gather_object",
    "exchange_loaded_tensors_gather_rounds",
    "is_float8tensor",
]

T = TypeVar("T", bound=Hashable)


class ShardDistribution(NamedTuple):
    """Which rank of a group saves or loads which shard.

    Attributes:
        main_rank_for_shard: shard -> the rank (in the group) that saves or loads it.
        shards_in_this_group: shards that this group is responsible for.
        shard_to_metadata: shard -> ShardedTensor without data, for all shards that any rank holds.
        all_ranks_for_shard: shard -> the ranks (in the group) that hold it, ascending.
    """

    main_rank_for_shard: dict[_ShardId, int]
    shards_in_this_group: set[_ShardId]
    shard_to_metadata: dict[_ShardId, ShardedTensor]
    all_ranks_for_shard: dict[_ShardId, list[int]]


def distribute_shards_to_ranks(
    shard_to_ranks: dict[T, list[int]],
    shard_to_size: dict[T, int],
    num_ranks: int,
    cross_parallelization_group_loads: set[T],
) -> dict[T, int]:
    """Give each shard to one of the ranks that hold it, so that the bytes are spread evenly.

    Greedy and deterministic: shards with the fewest candidates first, then the largest, then by
    shard id, each to the candidate with the least so far (the lowest number among equals).

    Args:
        shard_to_ranks: shard -> ranks that hold it, none of them empty.
        shard_to_size: shard -> size in bytes.
        num_ranks: number of ranks.
        cross_parallelization_group_loads: shards that other groups are responsible for; they come
            after all others, so that they even out what is left.

    Returns:
        Shard -> rank, in the order in which the shards were given out.

    Raises:
        CheckpointingException: a shard has no candidate.
    """
    load_bytes = [0] * num_ranks
    assignment: dict[T, int] = {}

    def order(shard: T) -> tuple[bool, int, int, Any]:
        return (
            shard in cross_parallelization_group_loads,
            len(shard_to_ranks[shard]),
            -shard_to_size[shard],
            _orderable(shard),
        )

    for shard in sorted(shard_to_ranks, key=order):
        candidates = shard_to_ranks[shard]
        if not candidates:
            raise CheckpointingException(f"No rank holds shard {shard!r}, so none can be given it")
        rank = min(candidates, key=lambda candidate: (load_bytes[candidate], candidate))
        assignment[shard] = rank
        load_bytes[rank] += shard_to_size[shard]
    return assignment


def _orderable(shard_id: Any) -> Any:
    """A shard id in a form that compares: a whole shard (None) comes before its flat ranges."""
    if shard_id is None:
        return ()
    if isinstance(shard_id, tuple):
        return tuple(_orderable(part) for part in shard_id)
    return shard_id


def _shard_size(sh_ten: ShardedTensor) -> int:
    """Bytes of a shard's data."""
    return math.prod(data_shape(sh_ten)) * sh_ten.dtype.itemsize


def data_shape(sh_ten: ShardedTensor) -> tuple[int, ...]:
    """Shape of a shard's local data: flat for a flattened range."""
    if sh_ten.flattened_range is not None:
        start, stop, _ = sh_ten.flattened_range.indices(math.prod(sh_ten.local_shape))
        return (max(0, stop - start),)
    return tuple(sh_ten.local_shape)


def determine_main_replica_uniform_distribution(
    sharded_state_dict: ShardedStateDict,
    parallelization_group: Group,
    ignore_groups: bool = False,
) -> ShardDistribution | None:
    """Share the shards of a group out among its ranks by size.

    Every rank of the group calls it and waits for the others (one gather of descriptions).

    Args:
        sharded_state_dict: this rank's state dict; leaves other than ShardedTensors are ignored.
        parallelization_group: ranks that share the work; None for all.
        ignore_groups: share out every shard, also those whose main replica is in another group.
            That is what loading needs; for saving only one group may write a shard.

    Returns:
        The distribution, equal on all ranks, or None for a group of one rank.
    """
    if group_size(parallelization_group) <= 1:
        return None
    local = [
        value.without_data()
        for value in nested_values(sharded_state_dict)
        if isinstance(value, ShardedTensor)
    ]
    by_rank: list[list[ShardedTensor]] = [[] for _ in range(group_size(parallelization_group))]
    torch.distributed.all_gather_object(by_rank, local, group=parallelization_group)

    ranks: dict[_ShardId, list[int]] = {}
    metadata: dict[_ShardId, ShardedTensor] = {}
    in_group: set[_ShardId] = set()
    for rank, shards in enumerate(by_rank):
        for sh_ten in shards:
            shard_id = _sharded_tensor_shard_id(sh_ten)
            metadata.setdefault(shard_id, sh_ten)
            holders = ranks.setdefault(shard_id, [])
            if not holders or holders[-1] != rank:
                holders.append(rank)
            if is_main_replica(sh_ten.replica_id):
                in_group.add(shard_id)
    elsewhere = set(ranks) - in_group
    if ignore_groups:
        in_group = set(ranks)
    ranks = {shard_id: holders for shard_id, holders in ranks.items() if shard_id in in_group}
    main_ranks = distribute_shards_to_ranks(
        ranks,
        {shard_id: _shard_size(metadata[shard_id]) for shard_id in ranks},
        len(by_rank),
        elsewhere if ignore_groups else set(),
    )
    return ShardDistribution(main_ranks, in_group, metadata, ranks)


logger = logging.getLogger(__name__)


def is_float8tensor(tensor: object) -> bool:
    """Whether this is a float8 tensor of TransformerEngine (a class that wraps scaled bytes)."""
    return type(tensor).__name__ == "Float8Tensor"


def exchange_by_distribution(
    loaded_tensors: dict[_ShardId, torch.Tensor],
    unloaded_shards: dict[_ShardId, ShardedTensor],
    shard_distribution: ShardDistribution,
    parallelization_group: Group = None,
    exchange_algo: str = "broadcast",
) -> dict[_ShardId, torch.Tensor]:
    """Send the tensors that each rank loaded to the ranks that hold the same shard.

    Every rank of the group calls it with the same distribution and algorithm, and waits for all.

    Args:
        loaded_tensors: what this rank loaded.
        unloaded_shards: what this rank wants from others. Where a shard has ``data``, what is
            received is written into it.
        shard_distribution: who loaded what.
        parallelization_group: ranks among which to exchange; None for all.
        exchange_algo: ``"broadcast"`` (one broadcast a shard; least memory), ``"gather_rounds"``
            (one shard of every rank at a time; ranks work side by side) or ``"gather_object"``
            (all at once, pickled; for comparison and tiny state dicts).

    Returns:
        What this rank loaded or wanted, by shard id.

    Raises:
        NotImplementedError: no such algorithm.
        RanksError: on some rank, what was loaded does not fit the shard's description, or is
            missing; raised on every rank of the group.
    """
    algorithms = {
        "broadcast": exchange_loaded_tensors_broadcast,
        "gather_object": exchange_loaded_tensors_gather_object,
        "gather_rounds": exchange_loaded_tensors_gather_rounds,
    }
    if exchange_algo not in algorithms:
        raise NotImplementedError(
            f"Unknown exchange algorithm {exchange_algo!r}; there are {', '.join(algorithms)}"
        )
    with debug_time(f"exchange_{exchange_algo}", logger):
        return algorithms[exchange_algo](
            loaded_tensors, unloaded_shards, shard_distribution, parallelization_group
        )


def exchange_loaded_tensors_broadcast(
    loaded_tensors: dict[_ShardId, torch.Tensor],
    unloaded_shards: dict[_ShardId, ShardedTensor],
    shard_distribution: ShardDistribution,
    parallelization_group: Group = None,
) -> dict[_ShardId, torch.Tensor]:
    """Exchange with one broadcast for each shard that more than one rank holds.

    See :func:`exchange_by_distribution`. Memory above the results: the largest shard that this rank
    does not hold itself.
    """
    _check_loaded(loaded_tensors, unloaded_shards, shard_distribution, parallelization_group)
    device = exchange_device(parallelization_group)
    results = dict(loaded_tensors)
    for shard_id, main_rank in _shared_shards(shard_distribution):
        tensor, final_device = _get_empty_tensor_for_exchange(
            shard_id, unloaded_shards, shard_distribution.shard_to_metadata, loaded_tensors
        )
        wire = _bytes_on(tensor, device)
        torch.distributed.broadcast(
            wire,
            src=global_rank(parallelization_group, main_rank),
            group=parallelization_group,
        )
        if shard_id in unloaded_shards:
            results[shard_id] = _settle(
                _from_bytes(wire, tensor), unloaded_shards[shard_id], final_device
            )
    return results


def exchange_loaded_tensors_gather_rounds(
    loaded_tensors: dict[_ShardId, torch.Tensor],
    unloaded_shards: dict[_ShardId, ShardedTensor],
    shard_distribution: ShardDistribution | None = None,
    parallelization_group: Group = None,
) -> dict[_ShardId, torch.Tensor]:
    """Exchange in rounds: in each, every rank offers one shard of its own to all.

    See :func:`exchange_by_distribution`. Ranks offer their largest shards first, so that the shards
    of a round, padded to the largest, are of similar size. Memory above the results: one round.
    """
    if shard_distribution is None:
        raise CheckpointingException(
            "Exchange in rounds needs the shard distribution that the loading was based on"
        )
    _check_loaded(loaded_tensors, unloaded_shards, shard_distribution, parallelization_group)
    device = exchange_device(parallelization_group)
    metadata = shard_distribution.shard_to_metadata
    rank = group_rank(parallelization_group)
    offers: list[list[_ShardId]] = [[] for _ in range(group_size(parallelization_group))]
    for shard_id, main_rank in _shared_shards(shard_distribution):
        offers[main_rank].append(shard_id)
    for offered in offers:
        offered.sort(key=lambda shard_id: -_shard_size(metadata[shard_id]))

    results = dict(loaded_tensors)
    for number in range(max(map(len, offers))):
        in_round = [offered[number] if number < len(offered) else None for offered in offers]
        size = max(0 if one is None else _shard_size(metadata[one]) for one in in_round)
        buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in in_round]
        mine = in_round[rank]
        if mine is not None:
            wire = _bytes_on(loaded_tensors[mine], device)
            buffers[rank][: wire.numel()].copy_(wire)
        torch.distributed.all_gather(buffers, buffers[rank].clone(), group=parallelization_group)
        for one, buffer in zip(in_round, buffers, strict=True):
            if one is None or one not in unloaded_shards:
                continue
            tensor, final_device = _get_empty_tensor_for_exchange(
                one, unloaded_shards, metadata, loaded_tensors
            )
            wire = buffer[: _shard_size(metadata[one])]
            results[one] = _settle(_from_bytes(wire, tensor), unloaded_shards[one], final_device)
    return results


def exchange_loaded_tensors_gather_object(
    loaded_tensors: dict[_ShardId, torch.Tensor],
    unloaded_shards: dict[_ShardId, ShardedTensor],
    shard_distribution: ShardDistribution,
    parallelization_group: Group = None,
) -> dict[_ShardId, torch.Tensor]:
    """Exchange by one gather of pickled tensors.

    See :func:`exchange_by_distribution`. Memory above the results: all shared shards, twice.
    """
    _check_loaded(loaded_tensors, unloaded_shards, shard_distribution, parallelization_group)
    shared = {shard_id for shard_id, _ in _shared_shards(shard_distribution)}
    # As bytes: torch cannot unpickle float8 tensors outside of its own archives.
    offered = {
        shard_id: _bytes_on(tensor.detach(), torch.device("cpu"))
        for shard_id, tensor in loaded_tensors.items()
        if shard_id in shared
    }
    by_rank: list[dict[_ShardId, torch.Tensor]]
    by_rank = [{} for _ in range(group_size(parallelization_group))]
    if len(by_rank) > 1:
        torch.distributed.all_gather_object(by_rank, offered, group=parallelization_group)
    results = dict(loaded_tensors)
    for received in by_rank:
        for shard_id, wire in received.items():
            if shard_id not in unloaded_shards:
                continue
            tensor, final_device = _get_empty_tensor_for_exchange(
                shard_id, unloaded_shards, shard_distribution.shard_to_metadata, loaded_tensors
            )
            results[shard_id] = _settle(
                _from_bytes(wire, tensor), unloaded_shards[shard_id], final_device
            )
    return results


def exchange_loaded_objects_gather_object(
    loaded_objects: dict[_ShardId, Any],
) -> dict[_ShardId, Any]:
    """Give every rank of the default process group all objects that any of them loaded.

    Every rank calls it and waits for all.

    Args:
        loaded_objects: what this rank loaded.

    Returns:
        What all ranks loaded.

    Raises:
        CheckpointingException: two ranks loaded the same object; raised on every rank.
    """
    size = group_size(None)
    by_rank: list[dict[_ShardId, Any]] = [loaded_objects] * size
    if size > 1:
        torch.distributed.all_gather_object(by_rank, loaded_objects)
    results: dict[_ShardId, Any] = {}
    loaded_by: dict[_ShardId, int] = {}
    for rank, received in enumerate(by_rank):
        for shard_id, value in received.items():
            if shard_id in results:
                raise CheckpointingException(
                    f"Ranks {loaded_by[shard_id]} and {rank} both loaded {shard_id}: one object "
                    f"has one main replica; give the copies different replica ids",
                    key=str(shard_id[0]),
                )
            results[shard_id] = value
            loaded_by[shard_id] = rank
    return results


def _shared_shards(distribution: ShardDistribution) -> Iterator[tuple[_ShardId, int]]:
    """Shards that more than one rank holds, with their main ranks, in one order for all ranks."""
    for shard_id, main_rank in distribution.main_rank_for_shard.items():
        if len(distribution.all_ranks_for_shard[shard_id]) > 1:
            yield shard_id, main_rank


def _get_empty_tensor_for_exchange(
    shard_id: _ShardId,
    needed_shards: Mapping[_ShardId, ShardedTensor],
    unneeded_shards: Mapping[_ShardId, ShardedTensor],
    loaded_tensors: Mapping[_ShardId, torch.Tensor],
) -> tuple[torch.Tensor, torch.device | None]:
    """A tensor to send from or to receive into, and the device where the result belongs.

    It is the loaded tensor, or the wanted shard's own data where that can be received into
    directly, or a new one. The device is None where nothing has to be moved.
    """
    if shard_id in loaded_tensors:
        return loaded_tensors[shard_id].detach(), None
    wanted = needed_shards.get(shard_id)
    if wanted is None:
        unneeded = unneeded_shards[shard_id]
        return torch.empty(data_shape(unneeded), dtype=unneeded.dtype), None
    data = wanted.data
    if data is None:
        return torch.empty(data_shape(wanted), dtype=wanted.dtype), None
    if data.is_contiguous() and data.dtype == wanted.dtype and data.device.type != "meta":
        return data.detach(), data.device
    return torch.empty(data_shape(wanted), dtype=wanted.dtype), data.device


def _settle(
    received: torch.Tensor, wanted: ShardedTensor, device: torch.device | None
) -> torch.Tensor:
    """Put a received tensor where it was asked for."""
    data = wanted.data
    if data is None or data.device.type == "meta":
        return received if device is None or device.type == "meta" else received.to(device)
    if data.dtype != received.dtype:
        return received.to(data.device)  # never a silent cast
    if data.data_ptr() != received.data_ptr() or data.device != received.device:
        data.detach().copy_(received)
    return data


def _bytes_on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor's bytes, without a copy where possible: not every backend knows every data type."""
    whole = tensor.to(device).contiguous()
    # Not reshape: a single element may keep a stride, and then has no view of its bytes.
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def _from_bytes(wire: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return wire.view(like.dtype).reshape(like.shape)


def _check_loaded(
    loaded_tensors: Mapping[_ShardId, torch.Tensor],
    unloaded_shards: Mapping[_ShardId, ShardedTensor],
    distribution: ShardDistribution,
    group: Group,
) -> None:
    """Raise on every rank if any rank has not what it should, before bytes of it are on the way."""
    rank = group_rank(group)
    problems: list[str] = []
    for shard_id, main_rank in _shared_shards(distribution):
        expected = distribution.shard_to_metadata[shard_id]
        if main_rank == rank:
            tensor = loaded_tensors.get(shard_id)
            if tensor is None:
                problems.append(f"{shard_id} was not loaded")
            elif tensor.dtype != expected.dtype or tuple(tensor.shape) != data_shape(expected):
                problems.append(
                    f"{shard_id} was loaded as {tensor.dtype} {tuple(tensor.shape)}, but described "
                    f"as {expected.dtype} {data_shape(expected)}"
                )
        wanted = unloaded_shards.get(shard_id)
        if wanted is not None and (
            wanted.dtype != expected.dtype or data_shape(wanted) != data_shape(expected)
        ):
            problems.append(
                f"{shard_id} is wanted as {wanted.dtype} {data_shape(wanted)}, but another rank "
                f"describes it as {expected.dtype} {data_shape(expected)}"
            )
    for shard_id in unloaded_shards:
        if shard_id not in distribution.main_rank_for_shard:
            problems.append(f"{shard_id} is wanted, but no rank was given it to load")
    raise_together(
        CheckpointingException("; ".join(problems)) if problems else None,
        group,
        "Exchange of loaded tensors",
    )
