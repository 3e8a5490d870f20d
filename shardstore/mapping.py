"""How local tensors and objects map onto global ones.

Answers for the descriptions that a sharded state dict is made of: which box (or flattened range) of
which global tensor a rank holds, how a local object is one of a grid of objects, and how factories
turn a tensor into several shards and back. Knows nothing of files, formats or process groups.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from numbers import Integral
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from shardstore.dict_utils import dict_list_map_inplace
from shardstore.errors import (
    AccessPatternError,
    CheckpointingException,
    DTypeMismatchError,
    KeyNameError,
    ShapeMismatchError,
    StructureError,
)

logger = logging.getLogger(__name__)

StateDict: TypeAlias = dict[str, Any]
CommonStateDict: TypeAlias = dict[str, Any]
ShardedStateDict: TypeAlias = dict[str, Any]
ReplicaId: TypeAlias = int | tuple[int, ...]

# What has been remarked upon once in this process, so that it is not remarked upon for every shard.
_logged_deprecations: dict[str, bool] = {}


class ShardedBase(ABC):
    """Anything in a sharded state dict that stands for a part of something global.

    Attributes:
        key: identifies the global entity, the same on every rank.
        data: the local part, or ``None`` where only the description matters.
        replica_id: which copy of the local part this is (see :func:`is_main_replica`).
    """

    key: str
    data: object
    replica_id: ReplicaId

    @abstractmethod
    def validate_metadata_integrity(self) -> None:
        """Raises a :class:`CheckpointingException` where the attributes contradict each other."""

    @abstractmethod
    def without_data(self) -> ShardedBase:
        """A copy of the description alone, with ``data=None``."""


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
        self.local_shape = _ints(self.local_shape)
        self.global_shape = _ints(self.global_shape)
        self.global_offset = _ints(self.global_offset)
        if self.axis_fragmentations is not None:
            self.axis_fragmentations = _ints(self.axis_fragmentations)
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
        ndim = len(self.global_shape)
        if len(self.global_offset) != ndim:
            raise self._wrong(
                f"global_offset has {len(self.global_offset)} axes, global_shape has {ndim}; "
                "give one offset for each global axis"
            )
        if len(self.local_shape) + self.prepend_axis_num != ndim:
            raise self._wrong(
                f"local_shape has {len(self.local_shape)} axes and prepend_axis_num is "
                f"{self.prepend_axis_num}, but global_shape has {ndim} axes; "
                "the first two must add up to the third"
            )
        if any(n < 0 for n in (*self.local_shape, *self.global_shape, *self.global_offset)):
            raise self._wrong("shapes and offsets must not be negative")
        if self.axis_fragmentations is None:
            return
        if len(self.axis_fragmentations) != ndim or any(n < 1 for n in self.axis_fragmentations):
            raise self._wrong(
                f"axis_fragmentations {self.axis_fragmentations} must be one positive number "
                f"for each of the {ndim} global axes, or None for an irregular cut"
            )
        for axis, (offset, size) in enumerate(
            zip(self.global_offset[self.prepend_axis_num :], self.local_shape, strict=True),
            self.prepend_axis_num,
        ):
            if offset % max(1, size):
                raise self._wrong(
                    f"along global axis {axis} the offset {offset} is not a multiple of the local "
                    f"length {size}; for an irregular cut pass axis_fragmentations=None"
                )

    def _validate_range(self) -> None:
        flat = self.flattened_range
        if flat is None:
            return
        if not isinstance(flat, slice):
            raise self._wrong(f"flattened_range must be a slice, not {flat!r}")
        if flat.step is not None:
            raise self._wrong(f"flattened_range {flat} must not have a step")

    def _validate_data(self, data: torch.Tensor) -> None:
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
        local = self._coordinates("global_coordinates")
        prepended = self.prepend_axis_num
        shifted = (
            indices + offset
            for indices, offset in zip(local, self.global_offset[prepended:], strict=True)
        )
        return (*self.global_offset[:prepended], *shifted)

    def local_coordinates(self) -> tuple[npt.NDArray[np.intp], ...]:
        """Index in the unflattened local tensor of each element of a flattened range.

        Returns:
            One array, as long as the range, for each local axis.

        Raises:
            CheckpointingException: there is no flattened range.
        """
        return self._coordinates("local_coordinates")

    def _coordinates(self, name: str) -> tuple[npt.NDArray[np.intp], ...]:
        if self.flattened_range is None:
            raise self._wrong(f"{name} needs a flattened_range; use global_slice for a whole box")
        start, stop = self._flat_bounds()
        if not self.local_shape:
            return ()
        return tuple(np.unravel_index(np.arange(start, stop), self.local_shape))

    def local_chunk_offset_in_global(self) -> tuple[int, ...]:
        """Index of this shard in the grid of shards, one number for each global axis.

        Raises:
            CheckpointingException: the cut is not regular, so that there is no such grid.
        """
        if self.axis_fragmentations is None:
            raise self._wrong("an irregular cut has no grid of chunks to number this one in")
        prepended = self.prepend_axis_num
        index = (
            # A zero-length shard carries no position of its own.
            offset // size if size else 0
            for offset, size in zip(self.global_offset[prepended:], self.local_shape, strict=True)
        )
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
        for axis, (size, parts) in enumerate(
            zip(self.global_shape, self.axis_fragmentations, strict=True)
        ):
            if size % parts and not self.allow_shape_mismatch:
                raise self._wrong(
                    f"global axis {axis} of length {size} cannot be cut into {parts} equal parts; "
                    "pad it (allow_shape_mismatch=True) or pass axis_fragmentations=None"
                )
        return tuple(
            size // parts
            for size, parts in zip(self.global_shape, self.axis_fragmentations, strict=True)
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
        local_shape = tuple(data.shape)
        return cls(
            key,
            data,
            data.dtype,
            local_shape,
            *_grid_position(key, local_shape, rank_offsets, prepend_axis_num),
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
        local_shape = _ints(non_flat_local_shape)
        return cls(
            key,
            data,
            data.dtype,
            local_shape,
            *_grid_position(key, local_shape, args, kwargs.get("prepend_axis_num", 0)),
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
            local_shape=_with(self.local_shape, dim, length),
            global_shape=_with(self.global_shape, axis, parts * length),
            global_offset=_with(self.global_offset, axis, index * length),
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

    def _narrow_bounds(self, dim: int, start: int, length: int) -> tuple[int, int]:
        """``dim`` and ``start`` counted from 0, checked."""
        ndim = len(self.local_shape)
        if not -ndim <= dim < ndim:
            raise self._wrong(f"axis {dim} to narrow is not one of the {ndim} local axes")
        dim %= ndim
        size = self.local_shape[dim]
        first = start + size if start < 0 else start
        if first < 0 or length < 0 or first + length > size:
            raise self._wrong(
                f"cannot narrow axis {dim} of local length {size} to "
                f"{length} elements from {start} on"
            )
        return dim, first


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Whether a replica is the one that is saved: 0, or a tuple of zeros.

    It is the caller's part to hand out replica ids such that each shard has one main replica.
    """
    if isinstance(replica_id, Integral):
        return bool(replica_id == 0)
    assert not isinstance(replica_id, int)
    return all(part == 0 for part in replica_id)


class LocalNonpersistentObject:
    """Keeps an object out of the checkpoint; loading puts the local one back in its place."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def unwrap(self) -> Any:
        """The object itself."""
        return self.obj


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
        self.global_shape = _ints(self.global_shape)
        self.global_offset = _ints(self.global_offset)
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


FactoryBuildFn: TypeAlias = Callable[[str, torch.Tensor, ReplicaId, slice | None], ShardedStateDict]
FactoryMergeFn: TypeAlias = Callable[[StateDict], torch.Tensor]


@dataclass
class ShardedTensorFactory(ShardedBase):
    """Stands for a tensor that is saved in another form than it lives in.

    What ``build_fn`` returns must depend on its arguments alone: an optimizer calls it with other
    keys and its own tensors, to have its state cut as the parameter is.

    Attributes:
        key: passed to ``build_fn``.
        data: the tensor in the form it lives in.
        build_fn: called as ``build_fn(key, data, replica_id, flattened_range)`` before saving and
            loading; returns a sharded state dict.
        merge_fn: takes what was loaded in place of that state dict and returns one tensor.
        replica_id: which copy this is; passed to ``build_fn``.
        flattened_range: range of the flattened tensor that is held; passed to ``build_fn``.
    """

    key: str
    data: torch.Tensor
    build_fn: FactoryBuildFn
    merge_fn: FactoryMergeFn
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None

    def build(self) -> ShardedStateDict:
        """The sharded state dict that takes this factory's place."""
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)

    def validate_metadata_integrity(self) -> None:
        """Nothing can be checked before the factory is built."""

    def without_data(self) -> ShardedTensorFactory:
        """A copy with ``data=None``."""
        return replace(self, data=None)  # type: ignore[arg-type]


def apply_factories(sharded_state_dict: ShardedStateDict) -> None:
    """Replaces every factory in nested dicts and lists by what it builds, in place.

    Factories inside what a factory built are left as they are.
    """

    def built(value: Any) -> Any:
        return value.build() if isinstance(value, ShardedTensorFactory) else value

    dict_list_map_inplace(built, sharded_state_dict)


def apply_factory_merges(
    x1: StateDict, x2: ShardedStateDict, key: tuple[str | int, ...] = ()
) -> StateDict:
    """Turns what was loaded in place of each factory back into one tensor, in place.

    Args:
        x1: what was loaded.
        x2: factories, at the places where they stood; a part of ``x1``'s structure. A dict of
            integers in ``x2`` may stand for some elements of a list in ``x1``.
        key: where ``x1`` and ``x2`` are within the whole; for error texts.

    Returns:
        ``x1``, or what the factory makes of it if ``x2`` itself is one.

    Raises:
        StructureError: (a ``CheckpointingException`` and ``ValueError``) the structures differ.
    """
    merged: StateDict = _merged(x1, x2, key)
    return merged


def _merged(x1: Any, x2: Any, at: tuple[str | int, ...]) -> Any:
    if isinstance(x2, ShardedTensorFactory):
        try:
            return x2.merge_fn(x1)
        except Exception as error:
            error.add_note(f"while merging what was loaded for the factory {x2.key!r} at {at}")
            raise
    places: Iterable[Any]
    if isinstance(x1, dict) and isinstance(x2, dict):
        absent = [k for k in x2 if k not in x1]
        if absent:
            raise StructureError(
                f"factories at {at} stand for {absent}, which were not loaded; there is {list(x1)}"
            )
        places = list(x2)
    elif isinstance(x1, list) and isinstance(x2, list):
        if len(x1) != len(x2):
            raise StructureError(
                f"{len(x1)} elements were loaded at {at} but the factories stand for {len(x2)}"
            )
        places = range(len(x2))
    elif isinstance(x1, list) and isinstance(x2, dict):
        for k in x2:
            if not isinstance(k, int) or not 0 <= k < len(x1):
                raise StructureError(
                    f"factories at {at} name element {k!r} of a list of {len(x1)} elements"
                )
        places = list(x2)
    else:
        raise StructureError(
            f"at {at} a {type(x1).__name__} was loaded, where the factories have a "
            f"{type(x2).__name__}: neither a factory nor a matching dict or list"
        )
    for k in places:
        x1[k] = _merged(x1[k], x2[k], (*at, k))
    return x1


def _ints(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


def _with(values: tuple[int, ...], position: int, value: int) -> tuple[int, ...]:
    return (*values[:position], value, *values[position + 1 :])


def _grid_position(
    key: str,
    local_shape: tuple[int, ...],
    rank_offsets: Sequence[tuple[int, int, int]],
    prepend_axis_num: int,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Global shape, global offset and fragmentations that rank offsets stand for."""
    sizes = (1,) * prepend_axis_num + local_shape
    cuts: dict[int, tuple[int, int]] = {}
    for rank_offset in rank_offsets:
        try:
            axis, index, parts = rank_offset
        except (TypeError, ValueError) as error:
            raise AccessPatternError(
                f"{key}: rank offset {rank_offset!r} is not (axis, index, parts)", key=key
            ) from error
        if not 0 <= axis < len(sizes):
            raise AccessPatternError(
                f"{key}: rank offset {rank_offset} names axis {axis}, the global tensor has "
                f"{len(sizes)} axes ({prepend_axis_num} of them prepended); count them from 0",
                key=key,
            )
        if not 0 <= index < parts:
            raise AccessPatternError(
                f"{key}: rank offset {rank_offset} asks for part {index} of {parts}; "
                "parts are numbered from 0 and there must be at least one",
                key=key,
            )
        if cuts.setdefault(axis, (index, parts)) != (index, parts):
            raise AccessPatternError(
                f"{key}: axis {axis} has two different rank offsets, {(axis, *cuts[axis])} and "
                f"{tuple(rank_offset)}; give one",
                key=key,
            )
    places = [cuts.get(axis, (0, 1)) for axis in range(len(sizes))]
    return (
        tuple(size * parts for size, (_, parts) in zip(sizes, places, strict=True)),
        tuple(size * index for size, (index, _) in zip(sizes, places, strict=True)),
        tuple(parts for _, parts in places),
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
