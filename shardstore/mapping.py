"""The mapping of local tensors and objects to global ones.

A :class:`ShardedTensor` names the box (or flattened range) of a global tensor that a rank holds.
The other public names come from :mod:`shardstore.sharded.base` and
:mod:`shardstore.sharded.objects`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
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

# Notices already logged in this process. Each is logged once, not for every shard.
_logged_deprecations: dict[str, bool] = {}


def _require_tensor(key: str, data: object) -> None:
    if not isinstance(data, torch.Tensor):
        raise DTypeMismatchError(
            f"the data of key {key!r} is a {type(data).__name__}, not a tensor; convert it with "
            "torch.as_tensor or torch.from_numpy, or save it as a common value",
            key=key,
        )


@dataclass
class ShardedTensor(ShardedBase):
    """A local tensor as a box of a global tensor.

    All lengths and offsets are in elements. The global tensor has
    ``prepend_axis_num + len(local_shape)`` axes. The box of a local tensor has length 1 along each
    prepended axis.

    Attributes:
        key: identifies the global tensor; the same on every rank.
        data: the local tensor; ``None`` if only its description is needed.
        dtype: data type of the local and the global tensor.
        local_shape: shape of the local tensor, before any flattening.
        global_shape: shape of the global tensor.
        global_offset: offset of the local tensor in the global tensor, one number per global axis.
        axis_fragmentations: number of equal parts that each global axis is cut into; ``None`` if
            the cut is irregular.
        replica_id: number of this copy; exactly one rank holds the main replica.
        prepend_axis_num: number of leading global axes that the local tensor does not have.
        allow_shape_mismatch: a load accepts another stored global shape (padding).
        flattened_range: ``data`` holds only this range of the flattened local tensor.

    Raises:
        CheckpointingException: on construction, if the attributes contradict each other.
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
            # Megatron-Core deprecates flattened ranges; shardstore supports them.
            _logged_deprecations["flattened_range"] = True
            logger.info("Megatron-Core deprecates flattened ranges; shardstore supports them")
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Check that the attributes are consistent with each other and with the data, if any.

        The result of ``from_rank_offsets`` and ``from_rank_offsets_flat`` always passes. Call this
        after setting attributes by hand. Any rank may call it; it waits for no other.

        Raises:
            DTypeMismatchError: the data type of the data is not ``dtype``.
            ShapeMismatchError: the shape of the data is not ``local_shape``, or its length is not
                that of ``flattened_range``.
            AccessPatternError: shapes, offsets, fragmentations and range do not fit together.
        """
        if (flat := self.flattened_range) is not None:
            size = math.prod(self.local_shape)
            if not isinstance(flat, slice) or flat.step is not None:
                raise self._wrong(f"flattened_range={flat!r} must be a slice without a step")
            start = 0 if flat.start is None else flat.start
            stop = size if flat.stop is None else flat.stop
            if not 0 <= start <= stop <= size:
                raise ShapeMismatchError(
                    f"{self}: flattened_range {flat} is not within the {size} elements of the "
                    f"local tensor; give 0 <= start <= stop <= {size}",
                    key=self.key,
                )
        if self.data is not None:
            self._validate_data(self.data)
        parts = self.axis_fragmentations
        problem = misfit(  # a caller may have set lists, which are not hashable
            tuple(self.local_shape),
            tuple(self.global_shape),
            tuple(self.global_offset),
            None if parts is None else tuple(parts),
            self.prepend_axis_num,
        )
        if problem is not None:
            raise self._wrong(problem)

    def _validate_data(self, data: torch.Tensor) -> None:
        _require_tensor(self.key, data)
        if data.dtype != self.dtype:
            raise DTypeMismatchError(
                f"{self}: the data has dtype {data.dtype}, but dtype is {self.dtype}; "
                "convert the data or correct dtype",
                key=self.key,
            )
        flat = self.flattened_range
        expected = self.local_shape
        if flat is not None:
            start, stop = self._flat_bounds()
            expected = (stop - start,)
        if data.shape != expected:
            described = f"local_shape is {expected}"
            if flat is not None:
                described = f"with flattened_range {flat} it must be 1-D, {expected[0]} elements"
            raise ShapeMismatchError(
                f"{self}: the data has shape {tuple(data.shape)}, {data.numel()} elements, but "
                f"{described}; pass data of this shape or correct the description",
                key=self.key,
            )

    def without_data(self) -> ShardedTensor:
        """Return a copy of the description, with ``data=None``."""
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
        """Describe a local tensor by its part number along each cut axis.

        Any rank may call it; it waits for no other.

        Args:
            key: identifies the global tensor.
            data: the local tensor; the shard has its shape and data type.
            rank_offsets: ``(axis, index, parts)`` for each cut axis: the global tensor consists of
                ``parts`` equal parts along global axis ``axis``, and this is part ``index``. Axes
                and parts count from 0. Prepended axes count too.
            replica_id: number of this copy.
            prepend_axis_num: number of leading global axes that ``data`` does not have.
            flattened_range: must be ``None``; see :meth:`from_rank_offsets_flat`.
            init_kwargs: further attributes of :class:`ShardedTensor`.

        Raises:
            AccessPatternError: an axis, index or number of parts is out of range, or a flattened
                range is given. It is a ``ValueError``.
        """
        if flattened_range is not None:
            raise AccessPatternError(
                f"{key}: from_rank_offsets takes no flattened_range; use from_rank_offsets_flat",
                key=key,
            )
        _require_tensor(key, data)
        shape = tuple(data.shape)
        return cls(
            key,
            data,
            data.dtype,
            shape,
            *grid_position(key, shape, rank_offsets, prepend_axis_num),
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
        """Describe a contiguous range of a flattened local tensor.

        Any rank may call it; it waits for no other.

        Args:
            key: identifies the global tensor.
            data: the elements of the range, 1-D.
            non_flat_local_shape: shape of the whole local tensor.
            args: ``rank_offsets`` of the whole local tensor, see :meth:`from_rank_offsets`.
            flattened_range: the elements of the flattened local tensor that ``data`` holds.
            kwargs: ``replica_id``, ``prepend_axis_num``, ``allow_shape_mismatch``.

        Raises:
            CheckpointingException: no range is given, the data is not 1-D, the lengths of data and
                range differ, or a rank offset is out of range.
        """
        if flattened_range is None:
            raise AccessPatternError(
                f"{key}: from_rank_offsets_flat needs a flattened_range; "
                "use from_rank_offsets for a whole local tensor",
                key=key,
            )
        _require_tensor(key, data)
        shape = ints(non_flat_local_shape)
        position = grid_position(key, shape, args, kwargs.get("prepend_axis_num", 0))
        return cls(
            key, data, data.dtype, shape, *position, flattened_range=flattened_range, **kwargs
        )

    def _flat_bounds(self) -> tuple[int, int]:
        """Return start and stop of the flattened range."""
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
        """Return the index of this shard's box in the global tensor.

        Prepended axes give integers, so that ``global_tensor[index]`` has the local shape. The
        flattened range is ignored: the box is that of the whole local tensor.
        """
        prepended = self.prepend_axis_num
        box = (
            slice(offset, offset + size)
            for offset, size in zip(self.global_offset[prepended:], self.local_shape, strict=True)
        )
        return (*self.global_offset[:prepended], *box)

    def global_coordinates(self) -> tuple[int | npt.NDArray[np.intp], ...]:
        """Return the global index of each element of the flattened range.

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
        """Return the index in the unflattened local tensor of each element of the flattened range.

        Returns:
            One array, as long as the range, for each local axis.

        Raises:
            CheckpointingException: there is no flattened range.
        """
        if self.flattened_range is None:
            raise self._wrong(
                "global_coordinates and local_coordinates need a flattened_range; without one use "
                "global_slice"
            )
        elements = np.arange(*self._flat_bounds())
        return tuple(np.unravel_index(elements, self.local_shape)) if self.local_shape else ()

    def local_chunk_offset_in_global(self) -> tuple[int, ...]:
        """Return the index of this shard in the grid of shards, one number per global axis.

        Raises:
            CheckpointingException: the cut is irregular, and the offset of this shard is not a
                multiple of its shape.
        """
        prepended = self.prepend_axis_num
        index = []
        for offset, size in zip(self.global_offset[prepended:], self.local_shape, strict=True):
            if self.axis_fragmentations is None and offset % max(1, size):
                raise self._wrong("an irregular cut has no regular grid of chunks")
            # An empty shard has no position along this axis.
            index.append(offset // size if size else 0)
        return (*self.global_offset[:prepended], *index)

    def max_allowed_chunks(self) -> tuple[int, ...]:
        """Return the largest chunk shape for which every shard of a regular cut is whole chunks.

        Returns:
            Length in elements for each global axis.

        Raises:
            CheckpointingException: the cut is irregular, or an axis is not divisible by its number
                of parts and ``allow_shape_mismatch`` is not set.
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
        self, device: str | torch.device, init_fn: Callable[..., torch.Tensor] = torch.empty
    ) -> None:
        """Allocate ``data``, unless the shard has data.

        Args:
            device: device of the tensor.
            init_fn: called as ``init_fn(local_shape, dtype=..., device=...)``.
        """
        if self.data is not None:
            return
        if self.flattened_range is None:
            self.data = init_fn(self.local_shape, dtype=self.dtype, device=device)
            return
        start, stop = self._flat_bounds()
        if init_fn in (torch.empty, torch.zeros, torch.ones):
            # All elements are equal, so allocate only the range.
            self.data = init_fn((stop - start,), dtype=self.dtype, device=device)
            return
        whole = init_fn(self.local_shape, dtype=self.dtype, device=device)
        self.data = whole.flatten()[start:stop].clone()

    def narrow(self, dim: int, start: int, length: int) -> list[ShardedTensor]:
        """Narrow the local tensor as ``torch.narrow`` does; all ranks keep the same part.

        The new global tensor consists of the kept parts of all shards, joined.

        Args:
            dim: axis of the local tensor; prepended axes do not count.
            start: first kept element along this axis of the local tensor.
            length: number of kept elements.

        Returns:
            One shard that shares the data's memory, or none if a flattened range does not overlap
            the kept part.

        Raises:
            CheckpointingException: the part is outside of the local tensor; the cut along ``dim``
                is irregular; or the shard is flattened and ``dim`` is not 0 (the part would
                not be contiguous).
        """
        if self.flattened_range is not None and dim != 0:
            raise self._wrong(
                f"a flattened shard can be narrowed along axis 0, not {dim}: "
                "the elements along other axes are not contiguous"
            )
        ndim = len(self.local_shape)
        if not -ndim <= dim < ndim:
            raise self._wrong(f"cannot narrow axis {dim}: the local tensor has {ndim} axes")
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
        data, flat = self.data, self.flattened_range
        if flat is None:
            data = None if data is None else data.narrow(dim, start, length)
        else:
            row = math.prod(self.local_shape[1:])
            first, last = self._flat_bounds()
            kept_first, kept_last = max(first, start * row), min(last, (start + length) * row)
            if kept_first >= kept_last:
                return []
            flat = slice(kept_first - start * row, kept_last - start * row)
            data = None if data is None else data[kept_first - first : kept_last - first]
        narrowed = replace(
            self,
            data=data,
            flattened_range=flat,
            local_shape=tuple(local_shape),
            global_shape=tuple(global_shape),
            global_offset=tuple(global_offset),
        )
        return [narrowed]
