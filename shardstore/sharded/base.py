"""What everything in a sharded state dict has in common, and the names of such state dicts.

The base class of parts of global tensors and objects, which copy of a part is saved, and objects
that are kept out of a checkpoint. Public as :mod:`shardstore.mapping`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from numbers import Integral
from typing import Any, TypeAlias

from shardstore.errors import ArgumentError

__all__ = [
    "CommonStateDict",
    "LocalNonpersistentObject",
    "ReplicaId",
    "ShardedBase",
    "ShardedStateDict",
    "StateDict",
    "is_main_replica",
]

StateDict: TypeAlias = dict[str, Any]
CommonStateDict: TypeAlias = dict[str, Any]
ShardedStateDict: TypeAlias = dict[str, Any]
ReplicaId: TypeAlias = int | tuple[int, ...]


class ShardedBase(ABC):
    """Anything in a sharded state dict that stands for a part of something global.

    Attributes:
        key: identifies the global entity, the same on every rank.
        data: the local part, or ``None`` where only the description matters.
        replica_id: which copy of the local part this is (see :func:`is_main_replica`).
    """

    __module__ = "shardstore.mapping"  # the name that programs and their pickles know it by

    key: str
    data: object
    replica_id: ReplicaId

    @abstractmethod
    def validate_metadata_integrity(self) -> None:
        """Raises a :class:`CheckpointingException` where the attributes contradict each other."""

    @abstractmethod
    def without_data(self) -> ShardedBase:
        """A copy of the description alone, with ``data=None``."""


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Whether a replica is the one that is saved: 0, or a tuple of zeros.

    It is the caller's part to hand out replica ids such that each shard has one main replica.
    """
    if type(replica_id) is tuple:  # what nearly all are, and each save asks of each shard
        return replica_id.count(0) == len(replica_id)
    if type(replica_id) is int or isinstance(replica_id, Integral):
        return bool(replica_id == 0)
    if not isinstance(replica_id, Sequence) or isinstance(replica_id, str):
        raise ArgumentError(f"replica_id={replica_id!r} must be a whole number, or a tuple of them")
    return all(part == 0 for part in replica_id)


class LocalNonpersistentObject:
    """Keeps an object out of the checkpoint; loading puts the local one back in its place."""

    __module__ = "shardstore.mapping"  # the name that programs and their pickles know it by

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def unwrap(self) -> Any:
        """The object itself."""
        return self.obj
