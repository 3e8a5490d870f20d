"""Wrappers that divide the saving and loading of replicated shards among the ranks of a group.

One rank saves each shard, or reads it and sends it to the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardstore.dict_utils import dict_list_map_inplace, dict_list_map_outplace, nested_values
from shardstore.distributed.groups import Group, group_rank, group_size, largest, raise_together
from shardstore.errors import CheckpointingException
from shardstore.exchange_utils import (
    ShardDistribution,
    determine_main_replica_uniform_distribution,
    exchange_by_distribution,
    exchange_loaded_objects_gather_object,
    require_known,
)
from shardstore.loading.read import context_of
from shardstore.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
    is_main_replica,
)
from shardstore.strategies import base
from shardstore.strategies.async_utils import AsyncRequest
from shardstore.utils import (
    _sharded_object_id,
    _sharded_tensor_shard_id,
    _ShardId,
    sharded_tensors_of,
)


class _Wrapper:
    """A strategy that shares the work of another one among the ranks of a group."""

    base_strategy: Any

    def _wrap(self, strategy: Any, group: Group, do_cache_distribution: bool) -> None:
        self.base_strategy = strategy
        self.can_handle_sharded_objects = bool(strategy.can_handle_sharded_objects)
        self.parallelization_group = group
        self.do_cache_distribution = do_cache_distribution
        self.cached_distribution: ShardDistribution | None = None

    def _share_out(
        self, state_dict: ShardedStateDict, *, ignore_groups: bool
    ) -> ShardDistribution | None:
        """Set the replica ids by the cached distribution, or by a new one."""
        group, distribution = self.parallelization_group, self.cached_distribution
        if distribution is None or not _fits(distribution, state_dict, group):
            distribution = determine_main_replica_uniform_distribution(
                state_dict, group, ignore_groups
            )
        distribute_main_replicas_with_precomputed_distribution(state_dict, group, distribution)
        if self.do_cache_distribution:
            self.cached_distribution = distribution
        return distribution


class FullyParallelSaveStrategyWrapper(_Wrapper, base.AsyncSaveShardedStrategy):
    """Divides a save among the ranks of a group that hold the same shards.

    Args:
        strategy: strategy that writes. It gets a state dict in which each shard of the group has
            exactly one main replica, with about equal bytes on each rank.
        parallelization_group: ranks that share the work, usually the data-parallel group; None for
            all ranks.
        do_cache_distribution: reuse the distribution for the next state dicts with the same
            structure. If the structure of any rank has changed, all ranks compute it again.
        pg_cache_path, pg_cache_create: arguments of Megatron-Core, without effect.
    """

    base_strategy: base.SaveShardedStrategy

    def __init__(
        self,
        strategy: base.SaveShardedStrategy,
        parallelization_group: Group = None,
        do_cache_distribution: bool = False,
        pg_cache_path: object = None,
        pg_cache_create: object = None,
    ) -> None:
        super().__init__(strategy.backend, strategy.version)
        self.meets_to_plan = getattr(strategy, "meets_to_plan", "never")
        self._wrap(strategy, parallelization_group, do_cache_distribution)

    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> AsyncRequest:
        """Distribute the shards, then call ``async_save`` of the wrapped strategy.

        Raises:
            CheckpointingException: the wrapped strategy cannot save asynchronously.
        """
        if not isinstance(self.base_strategy, base.AsyncSaveShardedStrategy):
            raise CheckpointingException(
                f"The wrapped strategy {self.base_strategy} cannot save asynchronously; "
                f"save synchronously, or wrap one that can"
            )
        self.apply_saving_parallelization(sharded_state_dict)
        return base.called(self.base_strategy.async_save, sharded_state_dict, checkpoint_dir)

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Distribute the shards, then call ``save`` of the wrapped strategy."""
        self.apply_saving_parallelization(sharded_state_dict)
        base.called(self.base_strategy.save, sharded_state_dict, checkpoint_dir)

    def apply_saving_parallelization(self, sharded_state_dict: ShardedStateDict) -> None:
        """Make exactly one rank of the group the main replica of each shard.

        Every rank of the group calls it and waits for the others.

        Args:
            sharded_state_dict: state dict whose ShardedTensors get a ``replica_id`` of 0 (this rank
                saves it) or 1, in place.
        """
        self._share_out(sharded_state_dict, ignore_groups=False)


class FullyParallelLoadStrategyWrapper(_Wrapper, base.LoadShardedStrategy):
    """Reads each shard once in a group and sends it to the other ranks.

    Args:
        strategy: strategy that reads.
        parallelization_group: ranks that share the work, usually the data-parallel group; None for
            all ranks.
        do_cache_distribution: see :class:`FullyParallelSaveStrategyWrapper`.
        exchange_algo: see :func:`shardstore.exchange_utils.exchange_by_distribution`; or
            ``"chunks"``: the ranks divide the chunks instead of the shards, and send them in rounds
            within a memory budget while they read further chunks. Only this package's Zarr
            strategies support it. Replica ids do not change then.
        pg_cache_path, pg_cache_create: arguments of Megatron-Core, without effect.

    Raises:
        NotImplementedError: the algorithm is unknown.
    """

    base_strategy: base.LoadShardedStrategy

    def __init__(
        self,
        strategy: base.LoadShardedStrategy,
        parallelization_group: Group = None,
        do_cache_distribution: bool = False,
        exchange_algo: str = "broadcast",
        pg_cache_path: object = None,
        pg_cache_create: object = None,
    ) -> None:
        if exchange_algo != "chunks":
            require_known(exchange_algo)
        self._wrap(strategy, parallelization_group, do_cache_distribution)
        self.exchange_algo = exchange_algo

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> StateDict:
        """Distribute the shards, read them, and exchange them.

        Every rank of the group calls it and waits for the others (every rank of the default group,
        if the wrapped strategy loads sharded objects).

        Args:
            sharded_state_dict: state dict whose leaves are ShardedTensors (and ShardedObjects if
                :attr:`can_handle_sharded_objects`); the ``replica_id`` of the tensors becomes 0
                (this rank reads it) or 1.
            checkpoint_dir: checkpoint to read.

        Returns:
            The same structure with each leaf replaced by the loaded tensor or object.

        Raises:
            RanksError: reading failed on another rank of the group.
        """
        loads = partial(base.called, self.base_strategy.load)
        if group_size(self.parallelization_group) <= 1:
            return loads(sharded_state_dict, checkpoint_dir)
        context = context_of(checkpoint_dir)
        if self.exchange_algo == "chunks":
            group = self.parallelization_group or torch.distributed.group.WORLD
            return loads(sharded_state_dict, replace(context, group=group))
        distribution = self.apply_loading_parallelization(sharded_state_dict)
        assert distribution is not None  # there is more than one rank
        kinds = (ShardedTensor, ShardedObject) if self.can_handle_sharded_objects else ShardedTensor
        items = [item for item in nested_values(sharded_state_dict) if isinstance(item, kinds)]
        mine = {_id_of(item): item for item in items if is_main_replica(item.replica_id)}
        # Also for an empty request, because a strategy may wait for all ranks.
        wanted = {str(n): item for n, item in enumerate(mine.values())}
        group = None if self.can_handle_sharded_objects else self.parallelization_group
        with raise_together(group, f"Loading from {context.stored.location}"):
            loaded = loads(wanted, checkpoint_dir)
            values = {shard_id: loaded[str(n)] for n, shard_id in enumerate(mine)}
        tensors = {key: values.pop(key) for key in mine if isinstance(mine[key], ShardedTensor)}
        all_tensors = {_id_of(item): item for item in items if isinstance(item, ShardedTensor)}
        others = {key: item for key, item in all_tensors.items() if key not in tensors}
        shared = exchange_by_distribution(tensors, others, distribution, self.parallelization_group)
        state: StateDict = dict(dict_list_map_outplace(lambda value: value, sharded_state_dict))
        if self.can_handle_sharded_objects:
            found = exchange_loaded_objects_gather_object(values)
            self.fill_in_deferred_sharded_objects(state, found)
        self.fill_in_deferred_sharded_tensors(state, shared)
        return state

    @staticmethod
    def fill_in_deferred_sharded_objects(
        sharded_state_dict: ShardedStateDict, loaded_objects: dict[_ShardId, Any]
    ) -> None:
        """Replace each ShardedObject by the value loaded for it, in place.

        Args:
            sharded_state_dict: state dict to fill in.
            loaded_objects: object id -> value.

        Raises:
            CheckpointingException: no value was loaded for an object.
        """
        _fill_in(sharded_state_dict, ShardedObject, loaded_objects)

    @staticmethod
    def fill_in_deferred_sharded_tensors(
        sharded_state_dict: ShardedStateDict, loaded_tensors: dict[_ShardId, torch.Tensor]
    ) -> None:
        """Replace each ShardedTensor by the tensor loaded for it, in place.

        Args:
            sharded_state_dict: state dict to fill in. A loaded tensor is copied into the ``data``
                of its shard if data type and shape are the same.
            loaded_tensors: shard id -> tensor.

        Raises:
            CheckpointingException: no tensor was loaded for a shard.
        """
        _fill_in(sharded_state_dict, ShardedTensor, loaded_tensors)

    def apply_loading_parallelization(
        self, sharded_state_dict: ShardedStateDict
    ) -> ShardDistribution | None:
        """Choose the rank of the group that reads each shard.

        Every rank of the group calls it and waits for the others.

        Args:
            sharded_state_dict: state dict whose ShardedTensors get a ``replica_id`` of 0 (this rank
                reads it) or 1, in place.

        Returns:
            The distribution, or None for a group of one rank, which changes nothing.
        """
        return self._share_out(sharded_state_dict, ignore_groups=True)

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """See :meth:`LoadShardedStrategy.load_tensors_metadata`; the wrapped strategy answers."""
        return base.called(self.base_strategy.load_tensors_metadata, checkpoint_dir)

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """See :meth:`LoadShardedStrategy.load_sharded_metadata`; the wrapped strategy answers."""
        return base.called(self.base_strategy.load_sharded_metadata, checkpoint_dir)

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """See :meth:`LoadShardedStrategy.remove_sharded_tensors`; the wrapped strategy does it."""
        self.base_strategy.remove_sharded_tensors(checkpoint_dir, key_prefix)

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise if the wrapped strategy cannot read ``loaded_backend``."""
        self.base_strategy.check_backend_compatibility(loaded_backend)

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise if the wrapped strategy cannot read ``loaded_version``."""
        self.base_strategy.check_version_compatibility(loaded_version)


def distribute_main_replicas_with_precomputed_distribution(
    sharded_state_dict: ShardedStateDict,
    parallelization_group: Group,
    precomputed_distribution: ShardDistribution | None,
) -> None:
    """Set the replica ids of a state dict's tensors by a distribution.

    Args:
        sharded_state_dict: each of its ShardedTensors gets a ``replica_id`` of 0 if the
            distribution names this rank for it, else 1, in place.
        parallelization_group: the group of the distribution.
        precomputed_distribution: the distribution; None changes nothing.
    """
    if precomputed_distribution is None or group_size(parallelization_group) <= 1:
        return
    rank = group_rank(parallelization_group)
    main_ranks = precomputed_distribution.main_rank_for_shard
    mine = {shard_id for shard_id, main_rank in main_ranks.items() if main_rank == rank}
    for sh_ten in sharded_tensors_of(sharded_state_dict):
        shard_id = _sharded_tensor_shard_id(sh_ten)
        sh_ten.replica_id = 0 if shard_id in mine else 1
        mine.discard(shard_id)  # if a state dict holds a shard twice, only one is the main replica


def _fits(distribution: ShardDistribution, state_dict: ShardedStateDict, group: Group) -> bool:
    """Return whether a distribution was made for the shards of every rank.

    Every rank of the group calls it and waits for the others.
    """
    rank, known = group_rank(group), distribution.shard_to_metadata
    local = {_id_of(tensor): tensor for tensor in sharded_tensors_of(state_dict)}
    is_known = all(
        key in known and (known[key].dtype, known[key].local_shape) == (one.dtype, one.local_shape)
        for key, one in local.items()
    )
    expected = {key for key, ranks in distribution.all_ranks_for_shard.items() if rank in ranks}
    own = local.keys() & distribution.shards_in_this_group
    return not largest([int(not is_known or own != expected)], group)[0]


def _id_of(item: ShardedTensor | ShardedObject) -> _ShardId:
    """Return the identity of a shard, the same for its replicas on all ranks."""
    if isinstance(item, ShardedObject):
        return _sharded_object_id(item)
    return _sharded_tensor_shard_id(item)


def _fill_in(
    state_dict: ShardedStateDict,
    kind: type[ShardedTensor | ShardedObject],
    loaded: Mapping[_ShardId, Any],
) -> None:
    """Replace each item of a type by the value loaded for it, in place."""

    def filled(value: Any) -> Any:
        if not isinstance(value, kind):
            return value
        shard_id = _id_of(value)
        if shard_id not in loaded:
            raise CheckpointingException(
                f"{kind.__name__} {shard_id} was not loaded, because no rank has its main "
                f"replica: {value.without_data()}",
                key=value.key,
            )
        found = loaded[shard_id]
        return _in_place(value, found) if isinstance(value, ShardedTensor) else found

    dict_list_map_inplace(filled, state_dict)


def _in_place(wanted: ShardedTensor, loaded: torch.Tensor) -> torch.Tensor:
    """Copy a loaded tensor into the given tensor and return that one; return the loaded tensor if
    data type or shape differ."""
    given = wanted.data
    if given is None or given.is_meta or (given.dtype, given.shape) != (loaded.dtype, loaded.shape):
        return loaded
    if (given.device, given.data_ptr()) != (loaded.device, loaded.data_ptr()):
        given.detach().copy_(loaded)
    return given
