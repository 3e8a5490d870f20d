"""How local tensors and objects map onto global ones.

:class:`ShardedTensor` says which box (or flattened range) of which global tensor a rank holds. The
other public names come from :mod:`shardstore.sharded.base` and :mod:`shardstore.sharded.objects`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shardstore.errors import (
    AccessPatternError,
    CheckpointingException,
    DTypeMismatchError,
    ShapeMismatchError,
)
from shardstore.sharded.base import (
    CommonStateDict,
    LocalNonpersistentObject,
    ReplicaId,
    ShardedBase,
    ShardedStateDict,
    StateDict,
    is_main_replica,
)
from shardstore.sharded.objects import (
    FactoryBuildFn,
    FactoryMergeFn,
    ShardedObject,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
)
from shardstore.sharded.position import PositionedShard, grid_position, ints, with_item

__all__ = [
    "CheckpointingException",
    "CommonStateDict",
    "FactoryBuildFn",
    "FactoryMergeFn",
    "LocalNonpersistentObject",
    "ReplicaId",
    "ShardedBase",
    "ShardedObject",
    "ShardedStateDict",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StateDict",
    "apply_factories",
    "apply_factory_merges",
    "is_main_replica",
]

logger = logging.getLogger(__name__)

# What has been remarked upon once in this process, so that it is not remarked upon for every shard.
_logged_deprecations: dict[str, bool] = {}


def _require_tensor(key: str, data: object) -> None:
    if not isinstance(data, torch.Tensor):
        raise DTypeMismatchError(
            f"the data of key {key!r} is a {type(data).__name__}, not a tensor; make it one, by "
            "torch.as_tensor or torch.from_numpy, or leave it among the common values",
            key=key,
        )


@dataclass
class ShardedTensor(PositionedShard):
    """A local tensor as a box of a global tensor.

    Every length and offset is in elements. The global tensor has
    ``prepend_axis_num + len(local_shape)`` axes; along each prepended axis a local tensor takes one
    index.

    Attributes:
        key: identifies the global tensor, the same on every rank.
        data: the local tensor; ``None`` where only the description matters.
        dtype: element type of the local and the global tensor.
        local_shape: shape of the local tensor, before any flattening.
        global_shape: shape of the global tensor.
        global_offset: where the local tensor starts in the global one.
        axis_fragmentations: into how many equal parts each global axis is cut; ``None`` where the
            cut is not regular.
        replica_id: which copy this is; exactly one rank holds the main one.
        prepend_axis_num: number of global axes that the local tensor does not have.
        allow_shape_mismatch: on loading, the stored global shape may be another one (padding).
        flattened_range: ``data`` holds only this range of the flattened local tensor.

    Raises:
        CheckpointingException: on construction, where the attributes contradict each other.
    """

    key: str
    data: torch.Tensor | None = field(repr=False)
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None

    def __post_init__(self) -> None:
        self.local_shape = ints(self.local_shape)
        self.global_shape = ints(self.global_shape)
        self.global_offset = ints(self.global_offset)
        if self.axis_fragmentations is not None:
            self.axis_fragmentations = ints(self.axis_fragmentations)
        if self.flattened_range is not None and "flattened_range" not in _logged_deprecations:
            # Upstream trainers are moving away from flattened ranges; here they stay first-class.
            _logged_deprecations["flattened_range"] = True
            logger.info("flattened ranges are deprecated upstream; shardstore keeps handling them")
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Checks the attributes against each other and, where it is given, against the data.

        What the two ``from_rank_offsets`` constructors return always passes; call it again after
        setting attributes by hand. It looks at this shard alone: no rank waits for another.

        Raises:
            DTypeMismatchError: the data has another data type than ``dtype``.
            ShapeMismatchError: the data has another shape than ``local_shape``, or another length
                than ``flattened_range``.
            AccessPatternError: ranks, offsets, fragmentations and range do not fit together.
        """
        self._validate_range()
        if self.data is not None:
            self._validate_data(self.data)
        self._validate_position()

    def _validate_data(self, data: torch.Tensor) -> None:
        _require_tensor(self.key, data)
        if data.dtype != self.dtype:
            raise DTypeMismatchError(
                f"{self}: the data has dtype {data.dtype}, dtype says {self.dtype}; "
                "convert the data or correct dtype",
                key=self.key,
            )
        if self.flattened_range is None:
            if tuple(data.shape) != self.local_shape:
                raise ShapeMismatchError(
                    f"{self}: the data has shape {tuple(data.shape)}, local_shape says "
                    f"{self.local_shape}; pass the data that the shape describes",
                    key=self.key,
                )
            return
        if data.ndim != 1:
            raise ShapeMismatchError(
                f"{self}: with a flattened_range the data must be 1-D, not of shape "
                f"{tuple(data.shape)}; flatten it",
                key=self.key,
            )
        start, stop = self._flat_bounds()
        if data.numel() != stop - start:
            raise ShapeMismatchError(
                f"{self}: the data has {data.numel()} elements, the flattened_range has "
                f"{stop - start} of the {math.prod(self.local_shape)} local ones; they must agree",
                key=self.key,
            )

    def without_data(self) -> ShardedTensor:
        """A copy of the description alone, with ``data=None``."""
        return replace(self, data=None)

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: torch.Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        flattened_range: None = None,
        **init_kwargs: Any,
    ) -> ShardedTensor:
        """Describes a local tensor by its rank along each axis that is cut.

        Args:
            key: identifies the global tensor.
            data: local tensor; its shape and data type are those of the shard.
            rank_offsets: ``(axis, index, parts)`` for each cut axis: the global tensor consists of
                ``parts`` equal parts along global axis ``axis``, and this is number ``index``.
                Axes count from 0 and include prepended ones.
            replica_id: which copy this is.
            prepend_axis_num: number of global axes that ``data`` does not have.
            flattened_range: must be ``None``; see :meth:`from_rank_offsets_flat`.
            init_kwargs: further attributes of :class:`ShardedTensor`.

        Raises:
            AccessPatternError: (a ``ValueError``) an axis, index or number of parts is impossible,
                or a flattened range is given.
        """
        if flattened_range is not None:
            raise AccessPatternError(
                f"{key}: from_rank_offsets makes no flattened ShardedTensor; "
                "use from_rank_offsets_flat",
                key=key,
            )
        _require_tensor(key, data)
        local_shape = tuple(data.shape)
        return cls(
            key,
            data,
            data.dtype,
            local_shape,
            *grid_position(key, local_shape, rank_offsets, prepend_axis_num),
            replica_id=replica_id,
            prepend_axis_num=prepend_axis_num,
            **init_kwargs,
        )

    @classmethod
    def from_rank_offsets_flat(
        cls,
        key: str,
        data: torch.Tensor,
        non_flat_local_shape: tuple[int, ...],
        *args: tuple[int, int, int],
        flattened_range: slice | None = None,
        **kwargs: Any,
    ) -> ShardedTensor:
        """Describes a contiguous range of a flattened local tensor.

        Args:
            key: identifies the global tensor.
            data: 1-D, the elements of the range.
            non_flat_local_shape: shape of the whole local tensor that the range is taken from.
            args: as ``rank_offsets`` of :meth:`from_rank_offsets`.
            flattened_range: which elements of the flattened local tensor ``data`` holds.
            kwargs: ``replica_id``, ``prepend_axis_num``, ``allow_shape_mismatch``.

        Raises:
            CheckpointingException: there is no range, the data is not 1-D or not as long as the
                range, or the rank offsets are impossible.
        """
        if flattened_range is None:
            raise AccessPatternError(
                f"{key}: from_rank_offsets_flat needs a flattened_range; "
                "use from_rank_offsets for a whole local tensor",
                key=key,
            )
        _require_tensor(key, data)
        local_shape = ints(non_flat_local_shape)
        return cls(
            key,
            data,
            data.dtype,
            local_shape,
            *grid_position(key, local_shape, args, kwargs.get("prepend_axis_num", 0)),
            flattened_range=flattened_range,
            **kwargs,
        )

    def init_data(
        self,
        device: str | torch.device,
        init_fn: Callable[..., torch.Tensor] = torch.empty,
    ) -> None:
        """Gives the shard a tensor of its own, unless it has one.

        Args:
            device: where the tensor goes.
            init_fn: called as ``init_fn(local_shape, dtype=..., device=...)``.
        """
        if self.data is not None:
            return
        if self.flattened_range is None:
            self.data = init_fn(self.local_shape, dtype=self.dtype, device=device)
            return
        start, stop = self._flat_bounds()
        if init_fn in (torch.empty, torch.zeros, torch.ones):
            # Every element is alike, so the rest of the local tensor need not exist.
            self.data = init_fn((stop - start,), dtype=self.dtype, device=device)
            return
        whole = init_fn(self.local_shape, dtype=self.dtype, device=device)
        self.data = whole.flatten()[start:stop].clone()

    def narrow(self, dim: int, start: int, length: int) -> list[ShardedTensor]:
        """``torch.narrow`` for shards: every rank keeps the same part of its local tensor.

        The global tensor shrinks accordingly, as if the parts that are kept were joined.

        Args:
            dim: axis of the local tensor; prepended axes do not count.
            start: first element that is kept, along the local tensor's axis.
            length: number of elements that are kept.

        Returns:
            One shard, sharing the data's memory; none where a flattened range and the part that is
            kept have nothing in common.

        Raises:
            CheckpointingException: the part lies outside the local tensor; the cut along ``dim``
                is not regular; or the shard is flattened and ``dim`` is not 0 (the part would
                not be contiguous).
        """
        if self.flattened_range is not None and dim != 0:
            raise self._wrong(
                f"a flattened shard can be narrowed along axis 0 only, not {dim}: "
                "the elements along another axis are not contiguous"
            )
        dim, start = self._narrow_bounds(dim, start, length)
        axis = dim + self.prepend_axis_num
        size, global_size = self.local_shape[dim], self.global_shape[axis]
        offset = self.global_offset[axis]
        if global_size % max(1, size) or offset % max(1, size) or (global_size and not size):
            raise self._wrong(
                f"narrowing axis {dim} needs a regular cut along it, but local length {size} does "
                f"not divide offset {offset} and global length {global_size}"
            )
        parts, index = (global_size // size, offset // size) if size else (0, 0)
        whole = replace(
            self,
            data=None,
            flattened_range=None,
            local_shape=with_item(self.local_shape, dim, length),
            global_shape=with_item(self.global_shape, axis, parts * length),
            global_offset=with_item(self.global_offset, axis, index * length),
        )
        if self.flattened_range is None:
            data = None if self.data is None else self.data.narrow(dim, start, length)
            return [replace(whole, data=data)]

        row = math.prod(self.local_shape[1:])
        first, last = self._flat_bounds()
        kept_first, kept_last = max(first, start * row), min(last, (start + length) * row)
        if kept_first >= kept_last:
            return []
        flat = slice(kept_first - start * row, kept_last - start * row)
        data = None if self.data is None else self.data[kept_first - first : kept_last - first]
        return [replace(whole, data=data, flattened_range=flat)]
