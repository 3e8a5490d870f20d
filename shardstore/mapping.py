"""How local tensors and objects map onto global ones.

:class:`ShardedTensor` says which box (or flattened range) of which global tensor a rank holds. The
other public names come from :mod:`shardstore.sharded.base` and :mod:`shardstore.sharded.objects`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
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
    grid_position,
    ints,
    is_main_replica,
    misfit,
)
from shardstore.sharded.objects import (
    FactoryBuildFn,
    FactoryMergeFn,
    ShardedObject,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
)

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
class ShardedTensor(ShardedBase):
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
        flat, size = self.flattened_range, math.prod(self.local_shape)
        if flat is not None:
            if not isinstance(flat, slice) or flat.step is not None:
                raise self._wrong(f"flattened_range must be a slice without a step, not {flat!r}")
            start = 0 if flat.start is None else flat.start
            stop = size if flat.stop is None else flat.stop
            if not 0 <= start <= stop <= size:
                raise ShapeMismatchError(
                    f"{self}: flattened_range {flat} is not within the {size} elements of the "
                    "local tensor; count from 0 and end at its last element",
                    key=self.key,
                )
        if self.data is not None:
            self._validate_data(self.data)
        about = (
            self.local_shape,
            self.global_shape,
            self.global_offset,
            self.axis_fragmentations,
            self.prepend_axis_num,
        )
        try:
            problem = misfit(*about)
        except TypeError:  # lists, set by hand, cannot be looked up
            problem = misfit.__wrapped__(*about)
        if problem is not None:
            raise self._wrong(problem)

    def _validate_data(self, data: torch.Tensor) -> None:
        _require_tensor(self.key, data)
        if data.dtype != self.dtype:
            raise DTypeMismatchError(
                f"{self}: the data has dtype {data.dtype}, dtype says {self.dtype}; "
                "convert the data or correct dtype",
                key=self.key,
            )
        flat = self.flattened_range
        expected = self.local_shape
        if flat is not None:
            start, stop = self._flat_bounds()
            expected = (stop - start,)
        if tuple(data.shape) != expected:
            described = f"local_shape says {expected}"
            if flat is not None:
                described = f"with flattened_range {flat} it must be 1-D, {expected[0]} elements"
            raise ShapeMismatchError(
                f"{self}: the data has shape {tuple(data.shape)}, {data.numel()} elements, but "
                f"{described}; pass the data that the description fits",
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
        return cls._placed(
            key,
            data,
            tuple(data.shape),
            rank_offsets,
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
        shape = ints(non_flat_local_shape)
        return cls._placed(key, data, shape, args, flattened_range=flattened_range, **kwargs)

    @classmethod
    def _placed(
        cls,
        key: str,
        data: torch.Tensor,
        local_shape: tuple[int, ...],
        rank_offsets: Sequence[tuple[int, int, int]],
        **kwargs: Any,
    ) -> ShardedTensor:
        position = grid_position(key, local_shape, rank_offsets, kwargs.get("prepend_axis_num", 0))
        return cls(key, data, data.dtype, local_shape, *position, **kwargs)

    def _flat_bounds(self) -> tuple[int, int]:
        """First and last-plus-one flat element of the local tensor that the range names."""
        assert self.flattened_range is not None
        start, stop, _ = self.flattened_range.indices(math.prod(self.local_shape))
        return start, max(start, stop)

    def _wrong(self, what: str) -> AccessPatternError:
        return AccessPatternError(f"{self}: {what}", key=self.key)

    @property
    def has_regular_grid(self) -> bool:
        """Whether the global tensor is cut into equal parts along each axis."""
        return self.axis_fragmentations is not None

    def global_slice(self) -> tuple[int | slice, ...]:
        """The box of the global tensor, ready to index it with.

        Prepended axes give integers, so that the indexed result has the local shape. A
        flattened range plays no part: the box is the whole local tensor's.
        """
        prepended = self.prepend_axis_num
        box = (
            slice(offset, offset + size)
            for offset, size in zip(self.global_offset[prepended:], self.local_shape, strict=True)
        )
        return (*self.global_offset[:prepended], *box)

    def global_coordinates(self) -> tuple[int | npt.NDArray[np.intp], ...]:
        """Global index of each element of a flattened range.

        Returns:
            One entry for each global axis: an integer for a prepended axis, otherwise an array as
            long as the range.

        Raises:
            CheckpointingException: there is no flattened range.
        """
        prepended = self.prepend_axis_num
        local = zip(self.local_coordinates(), self.global_offset[prepended:], strict=True)
        shifted = (indices + offset for indices, offset in local)
        return (*self.global_offset[:prepended], *shifted)

    def local_coordinates(self) -> tuple[npt.NDArray[np.intp], ...]:
        """Index in the unflattened local tensor of each element of a flattened range.

        Returns:
            One array, as long as the range, for each local axis.

        Raises:
            CheckpointingException: there is no flattened range.
        """
        if self.flattened_range is None:
            raise self._wrong(
                "global_coordinates and local_coordinates need a flattened_range; use global_slice "
                "for a whole box"
            )
        elements = np.arange(*self._flat_bounds())
        return tuple(np.unravel_index(elements, self.local_shape)) if self.local_shape else ()

    def local_chunk_offset_in_global(self) -> tuple[int, ...]:
        """Index of this shard in the grid of shards, one number for each global axis.

        Raises:
            CheckpointingException: the cut is not regular and this shard does not lie at a multiple
                of its own lengths, so that there is no such grid.
        """
        prepended = self.prepend_axis_num
        index = []
        for offset, size in zip(self.global_offset[prepended:], self.local_shape, strict=True):
            if self.axis_fragmentations is None and offset % max(1, size):
                raise self._wrong("an irregular cut has no grid of chunks to number this one in")
            # A zero-length shard carries no position of its own.
            index.append(offset // size if size else 0)
        return (*self.global_offset[:prepended], *index)

    def max_allowed_chunks(self) -> tuple[int, ...]:
        """Largest chunk shape under which every shard of a regular cut is whole chunks.

        Returns:
            One length in elements for each global axis.

        Raises:
            CheckpointingException: the cut is not regular, or an axis does not divide evenly and
                ``allow_shape_mismatch`` is not set.
        """
        if self.axis_fragmentations is None:
            raise self._wrong("an irregular cut has no common chunk shape")
        cuts = list(zip(self.global_shape, self.axis_fragmentations, strict=True))
        for axis, (size, parts) in enumerate(cuts):
            if size % parts and not self.allow_shape_mismatch:
                raise self._wrong(
                    f"global axis {axis} of length {size} cannot be cut into {parts} equal parts; "
                    "pad it (allow_shape_mismatch=True) or pass axis_fragmentations=None"
                )
        return tuple(size // parts for size, parts in cuts)

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
        ndim = len(self.local_shape)
        if not -ndim <= dim < ndim:
            raise self._wrong(f"axis {dim} to narrow is not one of the {ndim} local axes")
        dim %= ndim
        axis, size = dim + self.prepend_axis_num, self.local_shape[dim]
        start += size if start < 0 else 0
        if start < 0 or length < 0 or start + length > size:
            raise self._wrong(
                f"cannot narrow axis {dim} of local length {size} to "
                f"{length} elements from {start} on"
            )
        global_size, offset = self.global_shape[axis], self.global_offset[axis]
        if global_size % max(1, size) or offset % max(1, size) or (global_size and not size):
            raise self._wrong(
                f"narrowing axis {dim} needs a regular cut along it, but local length {size} does "
                f"not divide offset {offset} and global length {global_size}"
            )
        local_shape, global_shape = list(self.local_shape), list(self.global_shape)
        global_offset = list(self.global_offset)
        local_shape[dim] = length
        global_shape[axis] = global_size // max(1, size) * length
        global_offset[axis] = offset // max(1, size) * length
        whole = replace(
            self,
            data=None,
            flattened_range=None,
            local_shape=tuple(local_shape),
            global_shape=tuple(global_shape),
            global_offset=tuple(global_offset),
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
