"""Wrappers that let all replicas of a shard take part in saving and loading.

Answers for sharing the shards of a group of ranks out among them (each is saved, or read from
storage, by one rank) and for handing what was read to the others. What is saved and how is the
wrapped strategy's business; who moves bytes between ranks is :mod:`shardstore.exchange_utils`'s.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shardstore.dict_utils import merge, nested_values
from shardstore.distributed.groups import (
    Group,
    exchange_device,
    group_rank,
    group_size,
    raise_together,
)
from shardstore.errors import CheckpointingException
from shardstore.exchange_utils import (
    ShardDistribution,
    determine_main_replica_uniform_distribution,
    exchange_by_distribution,
    exchange_loaded_objects_gather_object,
)
from shardstore.loading.context import context_of, using
from shardstore.loading.deferred import (
    as_lists,
    defer_items,
    fill_in_items,
    numbered,
    renamed,
)
from shardstore.mapping import ShardedObject, ShardedStateDict, ShardedTensor, StateDict
from shardstore.strategies.async_utils import AsyncRequest
from shardstore.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
    SaveShardedStrategy,
)
from shardstore.utils import (
    _sharded_object_id,
    _sharded_tensor_shard_id,
    _ShardId,
    debug_time,
)

__all__ = [
    "FullyParallelLoadStrategyWrapper",
    "FullyParallelSaveStrategyWrapper",
    "distribute_main_replicas_with_precomputed_distribution",
]

logger = logging.getLogger(__name__)


class FullyParallelSaveStrategyWrapper(AsyncSaveShardedStrategy):
    """Spreads saving over the ranks of a group that hold the same shards.

    Args:
        strategy: strategy that writes; it sees a state dict in which each shard of the group has
            exactly one main replica, so that the bytes are spread evenly over the ranks.
        parallelization_group: ranks that share the work, usually the data-parallel group; None for
            all ranks.
        do_cache_distribution: keep the distribution and use it again for the next state dicts of
            the same structure (if the structure of any rank has changed, all compute it anew).
    """

    def __init__(
        self,
        strategy: SaveShardedStrategy,
        parallelization_group: Group = None,
        do_cache_distribution: bool = False,
    ) -> None:
        super().__init__(strategy.backend, strategy.version)
        self.base_strategy = strategy
        self.parallelization_group = parallelization_group
        self.do_cache_distribution = do_cache_distribution
        self.cached_distribution: ShardDistribution | None = None

    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> AsyncRequest:
        """Share out the shards, then let the wrapped strategy stage them.

        Raises:
            CheckpointingException: the wrapped strategy cannot save asynchronously.
        """
        if not isinstance(self.base_strategy, AsyncSaveShardedStrategy):
            raise CheckpointingException(
                f"The wrapped strategy {self.base_strategy} cannot save asynchronously; "
                f"save synchronously, or wrap one that can"
            )
        self.apply_saving_parallelization(sharded_state_dict)
        return self.base_strategy.async_save(sharded_state_dict, checkpoint_dir)

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Share out the shards, then let the wrapped strategy save them."""
        self.apply_saving_parallelization(sharded_state_dict)
        return self.base_strategy.save(sharded_state_dict, checkpoint_dir)

    def apply_saving_parallelization(self, sharded_state_dict: ShardedStateDict) -> None:
        """Make each shard of the group the main replica of exactly one of its ranks.

        Every rank of the group calls it and waits for the others.

        Args:
            sharded_state_dict: state dict whose ShardedTensors get a ``replica_id`` of 0 (this rank
                saves it) or 1, in place.
        """
        _share_out(self, sharded_state_dict, "saving", ignore_groups=False)

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether the wrapped strategy saves ShardedObjects too."""
        return self.base_strategy.can_handle_sharded_objects


class FullyParallelLoadStrategyWrapper(LoadShardedStrategy):
    """Reads each shard of a group from storage once and hands it to the other ranks.

    Args:
        strategy: strategy that reads.
        parallelization_group: ranks that share the work, usually the data-parallel group; None for
            all ranks.
        do_cache_distribution: keep the distribution and use it again, see
            :class:`FullyParallelSaveStrategyWrapper`.
        exchange_algo: see :func:`shardstore.exchange_utils.exchange_by_distribution`; or
            ``"chunks"``: chunks are shared out, not shards, and travel in rounds within a memory
            budget while others are read (strategies of this package's Zarr backends). Replica ids
            stay as they are then.
    """

    def __init__(
        self,
        strategy: LoadShardedStrategy,
        parallelization_group: Group = None,
        do_cache_distribution: bool = False,
        exchange_algo: str = "broadcast",
    ) -> None:
        super().__init__()
        self.base_strategy = strategy
        self.parallelization_group = parallelization_group
        self.do_cache_distribution = do_cache_distribution
        self.exchange_algo = exchange_algo
        self.cached_distribution: ShardDistribution | None = None

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> StateDict:
        """Share out the reading, read, exchange.

        Every rank of the group calls it and waits for the others (every rank of the default group,
        if the wrapped strategy loads sharded objects).

        Args:
            sharded_state_dict: state dict whose leaves are ShardedTensors (and ShardedObjects if
                :attr:`can_handle_sharded_objects`); the ``replica_id`` of the tensors becomes 0
                (this rank reads it) or 1.
            checkpoint_dir: checkpoint to read.

        Returns:
            The same structure with each leaf replaced by what was read.

        Raises:
            RanksError: reading failed on another rank of the group.
        """
        if group_size(self.parallelization_group) <= 1:
            return self.base_strategy.load(sharded_state_dict, checkpoint_dir)
        if self.exchange_algo == "chunks":
            group = self.parallelization_group or torch.distributed.group.WORLD
            with using(replace(context_of(checkpoint_dir), group=group)):
                return self.base_strategy.load(sharded_state_dict, checkpoint_dir)
        distribution = self.apply_loading_parallelization(sharded_state_dict)
        assert distribution is not None  # there is more than one rank

        tensors, rest, to_load, from_others = self._defer_loading_sharded_tensors(
            sharded_state_dict
        )
        objects: ShardedStateDict = {}
        objects_to_load: dict[_ShardId, ShardedObject] = {}
        if self.can_handle_sharded_objects:
            objects, rest, objects_to_load, _ = self._defer_loading_sharded_objects(rest)

        error: Exception | None = None
        loaded: StateDict = {"tensors": {}, "objects": {}}
        try:
            # An empty request goes through too: a strategy may wait for all ranks.
            loaded = self.base_strategy.load(
                {"tensors": numbered(to_load), "objects": numbered(objects_to_load)},
                checkpoint_dir,
            )
        except Exception as caught:
            error = caught
        group = None if self.can_handle_sharded_objects else self.parallelization_group
        raise_together(error, group, f"Loading from {checkpoint_dir}")

        loaded_tensors = renamed(loaded.get("tensors", {}), to_load)
        with debug_time("exchange_loaded_tensors", logger):
            all_tensors = exchange_by_distribution(
                loaded_tensors,
                from_others,
                distribution,
                self.parallelization_group,
                self.exchange_algo,
            )
        self.fill_in_deferred_sharded_tensors(tensors, all_tensors)
        result = tensors
        if self.can_handle_sharded_objects:
            loaded_objects = renamed(loaded.get("objects", {}), objects_to_load)
            all_objects = exchange_loaded_objects_gather_object(loaded_objects)
            self.fill_in_deferred_sharded_objects(objects, all_objects)
            merge(result, objects)
        merge(result, rest)
        return dict(as_lists(result, sharded_state_dict))

    @staticmethod
    def _defer_loading_sharded_objects(
        sharded_state_dict: ShardedStateDict,
    ) -> tuple[
        ShardedStateDict, StateDict, dict[_ShardId, ShardedObject], dict[_ShardId, ShardedObject]
    ]:
        return defer_items(sharded_state_dict, ShardedObject, _sharded_object_id)

    @staticmethod
    def _defer_loading_sharded_tensors(
        sharded_state_dict: ShardedStateDict,
    ) -> tuple[
        ShardedStateDict, StateDict, dict[_ShardId, ShardedTensor], dict[_ShardId, ShardedTensor]
    ]:
        return defer_items(sharded_state_dict, ShardedTensor, _sharded_tensor_shard_id)

    @staticmethod
    def fill_in_deferred_sharded_objects(
        sharded_state_dict: ShardedStateDict, loaded_objects: dict[_ShardId, Any]
    ) -> None:
        """Replace each ShardedObject by the value loaded for it, in place.

        Args:
            sharded_state_dict: state dict to fill in.
            loaded_objects: object id -> value.

        Raises:
            CheckpointingException: nothing was loaded for one of them.
        """
        fill_in_items(sharded_state_dict, loaded_objects, ShardedObject, _sharded_object_id)

    @staticmethod
    def fill_in_deferred_sharded_tensors(
        sharded_state_dict: ShardedStateDict, loaded_tensors: dict[_ShardId, torch.Tensor]
    ) -> None:
        """Replace each ShardedTensor by the tensor loaded for it, in place.

        Args:
            sharded_state_dict: state dict to fill in.
            loaded_tensors: shard id -> tensor.

        Raises:
            CheckpointingException: nothing was loaded for one of them.
        """
        fill_in_items(sharded_state_dict, loaded_tensors, ShardedTensor, _sharded_tensor_shard_id)

    def apply_loading_parallelization(
        self, sharded_state_dict: ShardedStateDict
    ) -> ShardDistribution | None:
        """Give each shard to exactly one rank of the group to read.

        Every rank of the group calls it and waits for the others.

        Args:
            sharded_state_dict: state dict whose ShardedTensors get a ``replica_id`` of 0 (this rank
                reads it) or 1, in place.

        Returns:
            The distribution, or None for a group of one rank, which changes nothing.
        """
        return _share_out(self, sharded_state_dict, "loading", ignore_groups=True)

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether the wrapped strategy loads ShardedObjects too."""
        return self.base_strategy.can_handle_sharded_objects

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """See :meth:`LoadShardedStrategy.load_tensors_metadata`; the wrapped strategy answers."""
        return self.base_strategy.load_tensors_metadata(checkpoint_dir)

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """See :meth:`LoadShardedStrategy.load_sharded_metadata`; the wrapped strategy answers."""
        return self.base_strategy.load_sharded_metadata(checkpoint_dir)

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
    """Set the replica ids of a state dict's tensors as a distribution says.

    Args:
        sharded_state_dict: each of its ShardedTensors gets a ``replica_id`` of 0, if the
            distribution names this rank for it, else 1, in place.
        parallelization_group: group whose ranks the distribution numbers.
        precomputed_distribution: None, for a group of one rank, changes nothing.
    """
    if precomputed_distribution is None or group_size(parallelization_group) <= 1:
        return
    rank = group_rank(parallelization_group)
    seen: set[_ShardId] = set()
    for sh_ten in nested_values(sharded_state_dict):
        if not isinstance(sh_ten, ShardedTensor):
            continue
        shard_id = _sharded_tensor_shard_id(sh_ten)
        # A state dict may name a shard twice; one of them is the main one.
        is_main = (
            shard_id in precomputed_distribution.shards_in_this_group
            and precomputed_distribution.main_rank_for_shard[shard_id] == rank
            and shard_id not in seen
        )
        seen.add(shard_id)
        sh_ten.replica_id = 0 if is_main else 1


def _share_out(
    wrapper: FullyParallelSaveStrategyWrapper | FullyParallelLoadStrategyWrapper,
    sharded_state_dict: ShardedStateDict,
    doing: str,
    *,
    ignore_groups: bool,
) -> ShardDistribution | None:
    """Set the replica ids by the distribution that the wrapper keeps, or by a new one."""
    group = wrapper.parallelization_group
    with debug_time(f"determine_{doing}_distribution", logger):
        distribution = _cached_or_new_distribution(
            sharded_state_dict, group, wrapper.cached_distribution, ignore_groups=ignore_groups
        )
    distribute_main_replicas_with_precomputed_distribution(sharded_state_dict, group, distribution)
    if wrapper.do_cache_distribution:
        wrapper.cached_distribution = distribution
    return distribution


def _cached_or_new_distribution(
    sharded_state_dict: ShardedStateDict,
    group: Group,
    cached: ShardDistribution | None,
    *,
    ignore_groups: bool,
) -> ShardDistribution | None:
    """The cached distribution if it still fits on every rank, else a new one."""
    if cached is not None:
        stale = torch.tensor(
            [int(not _fits(cached, sharded_state_dict, group_rank(group)))],
            device=exchange_device(group),
        )
        torch.distributed.all_reduce(stale, op=torch.distributed.ReduceOp.MAX, group=group)
        if not stale.item():
            return cached
        logger.debug("the structure of the state dict has changed: a new distribution is made")
    return determine_main_replica_uniform_distribution(sharded_state_dict, group, ignore_groups)


def _fits(distribution: ShardDistribution, sharded_state_dict: ShardedStateDict, rank: int) -> bool:
    """Whether this rank's shards are those that the distribution was made for."""
    local: set[_ShardId] = set()
    for sh_ten in nested_values(sharded_state_dict):
        if not isinstance(sh_ten, ShardedTensor):
            continue
        shard_id = _sharded_tensor_shard_id(sh_ten)
        known = distribution.shard_to_metadata.get(shard_id)
        if known is None or (known.dtype, known.local_shape) != (sh_ten.dtype, sh_ten.local_shape):
            return False
        if shard_id in distribution.shards_in_this_group:
            local.add(shard_id)
    return local == {
        shard_id for shard_id, ranks in distribution.all_ranks_for_shard.items() if rank in ranks
    }
