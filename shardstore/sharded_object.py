"""A local object as one cell of a global grid of objects.

Answers for where an object belongs and for the name that tells its cell from all others. Knows
nothing of tensors, files or process groups; public as :mod:`shardstore.mapping`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import zip_longest

from shardstore.errors import AccessPatternError, KeyNameError
from shardstore.shard_position import ints
from shardstore.sharded_base import ReplicaId, ShardedBase

__all__ = ["ShardedObject"]


@dataclass
class ShardedObject(ShardedBase):
    """A local object as one cell of a global grid of objects.

    Unlike a tensor's, the cut of a global object cannot change between saving and loading.

    Attributes:
        key: identifies the global object, the same on every rank.
        data: the local object; ``None`` where only the description matters.
        global_shape: shape of the grid, in objects.
        global_offset: cell of this object in the grid.
        replica_id: which copy this is.

    Raises:
        CheckpointingException: on construction, where shape and offset do not have as many axes.
    """

    key: str
    data: object
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: ReplicaId = 0

    def __post_init__(self) -> None:
        self.global_shape = ints(self.global_shape)
        self.global_offset = ints(self.global_offset)
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Checks that shape and offset have as many axes.

        Raises:
            AccessPatternError: they do not.
        """
        if len(self.global_shape) != len(self.global_offset):
            raise AccessPatternError(
                f"{self}: global_offset {self.global_offset} and global_shape "
                f"{self.global_shape} must have as many axes",
                key=self.key,
            )

    def without_data(self) -> ShardedObject:
        """A copy of the description alone, with ``data=None``."""
        return replace(self, data=None)

    @property
    def unique_key(self) -> str:
        """Names this very cell: ``<key>/shard_<offset>_<shape>``, numbers joined by dots."""
        offset = ".".join(map(str, self.global_offset))
        shape = ".".join(map(str, self.global_shape))
        return f"{self.key}/shard_{offset}_{shape}"

    def __str__(self) -> str:
        return f"{type(self).__name__}(key={self.key!r})"

    @classmethod
    def empty_from_unique_key(cls, unique_key: str, replica_id: ReplicaId = 0) -> ShardedObject:
        """The description that a :attr:`unique_key` was made from, without data.

        Args:
            unique_key: ``<key>/shard_<offset>_<shape>``; the key itself may contain slashes.
            replica_id: which copy the result stands for.

        Raises:
            KeyNameError: (a ``ValueError``) the text is not of that form.
        """
        key, separator, cell = unique_key.rpartition("/shard_")
        try:
            if not separator:
                raise ValueError("no /shard_")
            offset_text, shape_text = cell.split("_")
            offset = [int(n) for n in offset_text.split(".") if offset_text]
            shape = [int(n) for n in shape_text.split(".") if shape_text]
            if len(shape) > len(offset):
                raise ValueError("more lengths than offsets")
        except ValueError as error:
            raise KeyNameError(
                f"{unique_key!r} names no sharded object; expected <key>/shard_<offset>_<shape>, "
                "numbers joined by dots",
                key=unique_key,
            ) from error
        # Names written when only the first length was recorded leave the others unknown.
        lengths = tuple(-1 if n is None else n for _, n in zip_longest(offset, shape))
        return cls(key, None, lengths, tuple(offset), replica_id)


ShardedObject.__module__ = "shardstore.mapping"  # what programs and their pickles know it by
