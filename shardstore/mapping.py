"""The mapping of local tensors and objects to global ones.

The entries of a sharded state dict are a :class:`ShardedTensor`, which names the box (or flattened
range) of a global tensor that a rank holds; a :class:`ShardedObject`, one cell of a grid of
objects; and a :class:`ShardedTensorFactory`, a tensor that is saved in another form than it has in
memory. A factory builds shards before a save or load, and merges them into one tensor after a load.
"""

from __future__ import annotations

import copy
import logging
import math
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, Self, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.parameter import is_lazy

from shardstore import errors
from shardstore.errors import CheckpointingException as CheckpointingException
from shardstore.storage.format.grid import Box

logger = logging.getLogger(__name__)

# Notices already logged in this process. Each is logged once, not for every shard.
_logged_deprecations: dict[str, bool] = {}

StateDict: TypeAlias = dict[str, Any]
CommonStateDict: TypeAlias = dict[str, Any]
ShardedStateDict: TypeAlias = dict[str, Any]
ReplicaId: TypeAlias = int | tuple[int, ...]


class ShardedBase(ABC):
    """An entry of a sharded state dict: a part of a global tensor or object.

    Attributes:
        key: identifies the global tensor or object; the same on every rank.
        data: the local part; ``None`` if only its description is needed.
        replica_id: number of this copy of the part, see :func:`is_main_replica`.
    """

    key: str
    data: object
    replica_id: ReplicaId

    @abstractmethod
    def validate_metadata_integrity(self) -> None:
        """Check the attributes.

        Raises:
            CheckpointingException: they contradict each other.
        """

    def without_data(self) -> Self:
        """Return a copy of the description alone, with ``data=None``."""
        described = copy.copy(self)
        described.data = None
        return described

    def _wrong(
        self, what: str, kind: type[CheckpointingException] = errors.AccessPatternError
    ) -> CheckpointingException:
        return kind(f"{self}: {what}", key=self.key)


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Return whether a replica is the main one, which is saved: 0, or a tuple of zeros.

    The caller must give exactly one rank the main replica of each shard.
    """
    if type(replica_id) is tuple:  # the most frequent case first, for speed
        return replica_id.count(0) == len(replica_id)
    if type(replica_id) is int or isinstance(replica_id, Integral):
        return bool(replica_id == 0)
    if not isinstance(replica_id, Sequence) or isinstance(replica_id, str):
        raise errors.ArgumentError(
            f"replica_id={replica_id!r} must be a whole number or a tuple of them"
        )
    return all(part == 0 for part in replica_id)


class LocalNonpersistentObject:
    """An object that is not saved. ``load`` returns the local object in its place."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def unwrap(self) -> Any:
        """Return the object."""
        return self.obj


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
            is_range = isinstance(flat, slice) and flat.step is None
            bounds = (flat.start, flat.stop) if is_range else ("",)
            if not all(one is None or hasattr(one, "__index__") for one in bounds):
                text = f"flattened_range={flat!r} must be a slice of whole numbers without a step"
                raise self._wrong(text)
            if not 0 <= (flat.start or 0) <= (size if flat.stop is None else flat.stop) <= size:
                raise self._wrong(
                    f"flattened_range {flat} is not within the {size} elements of the local "
                    f"tensor; give 0 <= start <= stop <= {size}",
                    errors.ShapeMismatchError,
                )
        if (data := self.data) is not None:
            if not isinstance(data, torch.Tensor) or data.is_nested or is_lazy(data):
                raise _not_dense(self.key, data)
            if data.dtype != self.dtype:
                raise self._wrong(
                    f"the data has dtype {data.dtype}, but dtype is {self.dtype}; convert the data "
                    "or correct dtype",
                    errors.DTypeMismatchError,
                )
            if data.shape != (expected := self.local_shape if flat is None else data_shape(self)):
                what = "local_shape" if flat is None else "the 1-D flattened shape"
                raise self._wrong(
                    f"the data has shape {tuple(data.shape)}, {data.numel()} elements, but {what} "
                    f"is {expected}; pass data of this shape or correct the description",
                    errors.ShapeMismatchError,
                )
        local, offset, parts = self.local_shape, self.global_offset, self.axis_fragmentations
        prepended, ndim = self.prepend_axis_num, len(self.global_shape)
        if not ndim == len(offset) == len(local) + prepended:
            raise self._wrong(
                f"global_shape has {ndim} axes, but global_offset has {len(offset)}, and "
                f"local_shape {len(local)} beside prepend_axis_num={prepended}; give one offset "
                "for each global axis, and as many local and prepended axes together"
            )
        if min((*local, *self.global_shape, *offset, 0)) < 0:
            raise self._wrong("shapes and offsets must not be negative")
        if parts is None:
            return
        if len(parts) != ndim or min((*parts, 1)) < 1:
            raise self._wrong(
                f"axis_fragmentations {parts} must be one positive number for each of the {ndim} "
                "global axes, or None for an irregular cut"
            )
        for axis, size in enumerate(local, prepended):
            if offset[axis] % (size or 1):
                raise self._wrong(
                    f"along global axis {axis} the offset {offset[axis]} is not a multiple of the "
                    f"local length {size}; for an irregular cut pass axis_fragmentations=None"
                )

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
            raise errors.AccessPatternError(
                f"{key}: from_rank_offsets takes no flattened_range; use from_rank_offsets_flat",
                key=key,
            )
        init_kwargs |= {"replica_id": replica_id, "prepend_axis_num": prepend_axis_num}
        return cls._at(key, data, None, rank_offsets, **init_kwargs)

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
            raise errors.AccessPatternError(
                f"{key}: from_rank_offsets_flat needs a flattened_range; "
                "use from_rank_offsets for a whole local tensor",
                key=key,
            )
        kwargs["flattened_range"] = flattened_range
        return cls._at(key, data, non_flat_local_shape, args, **kwargs)

    @classmethod
    def _at(
        cls,
        key: str,
        data: torch.Tensor,
        local_shape: tuple[int, ...] | None,
        rank_offsets: Sequence[tuple[int, int, int]],
        *,
        prepend_axis_num: int = 0,
        **more: Any,
    ) -> ShardedTensor:
        """Return a shard at rank offsets. ``None``: the local shape is that of the data."""
        if not isinstance(data, torch.Tensor) or data.is_nested or is_lazy(data):
            raise _not_dense(key, data)
        shape = ints(data.shape if local_shape is None else local_shape)
        sizes = (1,) * prepend_axis_num + shape
        cuts: dict[int, tuple[int, int]] = {}
        for rank_offset in rank_offsets:
            try:
                axis, index, parts = map(operator.index, rank_offset)
                fits = 0 <= axis < len(sizes) and 0 <= index < parts
                fits = fits and cuts.setdefault(axis, (index, parts)) == (index, parts)
            except (TypeError, ValueError):
                fits = False
            if not fits:
                raise errors.AccessPatternError(
                    f"{key}: rank offset {rank_offset!r} of {rank_offsets} is not (axis, index, "
                    "parts), three whole numbers from 0: an axis below "
                    f"{len(sizes)} ({prepend_axis_num} of them prepended) without a different rank "
                    "offset, and an index below parts",
                    key=key,
                )
        places = [cuts.get(axis, (0, 1)) for axis in range(len(sizes))]
        return cls(
            key,
            data,
            data.dtype,
            shape,
            tuple(size * parts for size, (_, parts) in zip(sizes, places, strict=True)),
            tuple(size * index for size, (index, _) in zip(sizes, places, strict=True)),
            tuple(parts for _, parts in places),
            prepend_axis_num=prepend_axis_num,
            **more,
        )

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
        return (*self.global_offset[:prepended], *local_box(self).slices[prepended:])

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
        elements = np.arange(*flat_bounds(self))
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
            if offset % max(1, size):
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
        if self.data is None:
            whole = init_fn(self.local_shape, dtype=self.dtype, device=device)
            flat = self.flattened_range
            self.data = whole if flat is None else whole.flatten()[flat].clone()

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
        ndim, flat = len(self.local_shape), self.flattened_range
        if flat is not None and dim != 0:
            raise self._wrong(
                f"a flattened shard can be narrowed along axis 0, not {dim}: "
                "the elements along other axes are not contiguous"
            )
        size = self.local_shape[dim] if -ndim <= dim < ndim else -1  # -1 is less than any start
        start += size if start < 0 else 0
        if not 0 <= start <= start + length <= size:
            raise self._wrong(
                f"cannot narrow axis {dim} to {length} elements from {start} on; give an axis and "
                "elements of local_shape"
            )
        dim %= ndim
        axis = dim + self.prepend_axis_num
        global_size, offset, unit = self.global_shape[axis], self.global_offset[axis], max(1, size)
        if global_size % unit or offset % unit or (global_size and not size):
            raise self._wrong(
                f"narrowing axis {dim} needs a regular cut along it, but local length {size} does "
                f"not divide offset {offset} and global length {global_size}"
            )
        part = dim, start, length
        if flat is not None:
            row = math.prod(self.local_shape[1:])
            held_from, held_to = flat_bounds(self)
            first, last = max(held_from, start * row), min(held_to, (start + length) * row)
            if first >= last:
                return []
            part = 0, first - held_from, last - first
            flat = slice(first - start * row, last - start * row)
        narrowed = replace(
            self,
            data=None if self.data is None else self.data.narrow(*part),
            flattened_range=flat,
            local_shape=_with(self.local_shape, dim, length),
            global_shape=_with(self.global_shape, axis, global_size // unit * length),
            global_offset=_with(self.global_offset, axis, offset // unit * length),
        )
        return [narrowed]


def _with(values: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
    """Return the tuple with another value at one axis."""
    return (*values[:axis], value, *values[axis + 1 :])


def local_box(tensor: ShardedTensor) -> Box:
    """Return the box of the whole, unflattened local tensor in the global tensor."""
    return Box(tensor.global_offset, (1,) * tensor.prepend_axis_num + tensor.local_shape)


def is_within(box: Box, shape: tuple[int, ...]) -> bool:
    """Return whether a box is inside of a shape with the same number of axes."""
    return all(map(operator.le, box.end, shape))


def flat_bounds(tensor: ShardedTensor) -> tuple[int, int]:
    """Return start and stop of the flattened range in the flattened local tensor."""
    assert tensor.flattened_range is not None
    start, stop, _ = tensor.flattened_range.indices(math.prod(tensor.local_shape))
    return start, stop


def data_shape(tensor: ShardedTensor) -> tuple[int, ...]:
    """Return the shape of a shard's local data; 1-D for a flattened range."""
    if tensor.flattened_range is None:
        return tensor.local_shape
    start, stop = flat_bounds(tensor)
    return (stop - start,)


def is_empty_range(tensor: ShardedTensor) -> bool:
    """Return whether a tensor is a flattened range without elements. Such a range is neither saved
    nor loaded."""
    return tensor.flattened_range is not None and data_shape(tensor) == (0,)


def ints(values: Sequence[int]) -> tuple[int, ...]:
    """Convert any kind of integers to a tuple of ``int``.

    Raises:
        ArgumentError: ``values`` is no sequence of numbers.
    """
    try:
        return tuple(map(int, values))
    except (TypeError, ValueError):
        raise errors.ArgumentError(
            f"{values!r:.100} must be a tuple of whole numbers, such as (4, 2)"
        ) from None


def _not_dense(key: str, data: object) -> CheckpointingException:
    is_nested = isinstance(data, torch.Tensor) and data.is_nested
    kind = "nested tensor" if is_nested else type(data).__name__
    return errors.DTypeMismatchError(
        f"the data of key {key!r} is a {kind}, not a dense tensor; convert it (torch.from_numpy; "
        "unbind() of a nested tensor; a forward pass for a lazy module), or leave it out",
        key=key,
    )


_NUMBERS = r"((?:-?\d+(?:\.-?\d+)*)?)"
_UNIQUE_KEY = re.compile(f"(.*)/shard_{_NUMBERS}_{_NUMBERS}", re.DOTALL)


@dataclass
class ShardedObject(ShardedBase):
    """A local object as one cell of a global grid of objects.

    It loads only into the same grid that it was saved in.

    Attributes:
        key: identifies the global object; the same on every rank.
        data: the local object; ``None`` if only its description is needed.
        global_shape: shape of the grid, in objects.
        global_offset: cell of this object in the grid.
        replica_id: number of this copy.

    Raises:
        CheckpointingException: on construction, if shape and offset differ in their number of axes.
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
        """Check that shape and offset have the same number of axes.

        Raises:
            AccessPatternError: the numbers of axes differ.
        """
        if len(self.global_shape) != len(self.global_offset):
            raise self._wrong(
                f"global_offset {self.global_offset} and global_shape {self.global_shape} must "
                "have the same number of axes"
            )

    @property
    def unique_key(self) -> str:
        """The name of this cell: ``<key>/shard_<offset>_<shape>``, numbers joined by dots."""
        offset = ".".join(map(str, self.global_offset))
        shape = ".".join(map(str, self.global_shape))
        return f"{self.key}/shard_{offset}_{shape}"

    def __str__(self) -> str:
        return f"{type(self).__name__}(key={self.key!r})"

    @classmethod
    def empty_from_unique_key(cls, unique_key: str, replica_id: ReplicaId = 0) -> ShardedObject:
        """Return the description for a :attr:`unique_key`, without data.

        Args:
            unique_key: ``<key>/shard_<offset>_<shape>``; the key itself may contain slashes.
            replica_id: number of the copy.

        Raises:
            KeyNameError: (a ``ValueError``) the text does not have this form.
        """
        if found := _UNIQUE_KEY.fullmatch(unique_key):
            key, *cell = found.groups()
            offset, shape = ([int(n) for n in text.split(".") if n] for text in cell)
        if not found or len(shape) > len(offset):
            raise errors.KeyNameError(
                f"{unique_key!r} is not the unique key of a sharded object; expected "
                "<key>/shard_<offset>_<shape>, numbers joined by dots",
                key=unique_key,
            )
        # Old names have only the first length of the grid; the others are unknown.
        lengths = (*shape, *[-1] * (len(offset) - len(shape)))
        return cls(key, None, lengths, tuple(offset), replica_id)


FactoryBuildFn: TypeAlias = Callable[[str, torch.Tensor, ReplicaId, slice | None], ShardedStateDict]
FactoryMergeFn: TypeAlias = Callable[[StateDict], torch.Tensor]


@dataclass
class ShardedTensorFactory(ShardedBase):
    """A tensor that is saved in another form than it has in memory.

    The result of ``build_fn`` must depend only on its arguments. An optimizer calls it with other
    keys and its own tensors, so that its state is cut like the parameter.

    Attributes:
        key: passed to ``build_fn``.
        data: the tensor in its form in memory.
        build_fn: called as ``build_fn(key, data, replica_id, flattened_range)`` before saving and
            loading; returns a sharded state dict.
        merge_fn: takes the loaded form of that state dict and returns one tensor.
        replica_id: number of this copy; passed to ``build_fn``.
        flattened_range: the held range of the flattened tensor; passed to ``build_fn``.
    """

    key: str
    data: torch.Tensor
    build_fn: FactoryBuildFn
    merge_fn: FactoryMergeFn
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None

    def build(self) -> ShardedStateDict:
        """Return the sharded state dict that replaces this factory."""
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)

    def validate_metadata_integrity(self) -> None:
        """Do nothing: a factory cannot be checked before it is built."""


def apply_factories(sharded_state_dict: ShardedStateDict) -> None:
    """Replace every factory in nested dicts and lists by the state dict that it builds, in place.

    Factories inside such a state dict are not replaced.
    """
    state: Any = sharded_state_dict
    entries = enumerate(state) if isinstance(state, list) else ()
    for key, value in list(state.items() if isinstance(state, dict) else entries):
        if isinstance(value, ShardedTensorFactory):
            state[key] = value.build()
        else:
            apply_factories(value)


def apply_factory_merges(
    x1: StateDict, x2: ShardedStateDict, key: tuple[str | int, ...] = ()
) -> StateDict:
    """Merge the loaded state dict of each factory into one tensor, in place.

    Args:
        x1: the loaded state dict.
        x2: the factories at their places in the structure of ``x1``. In ``x2``, a dict with integer
            keys may name some elements of a list in ``x1``.
        key: path to ``x1`` and ``x2`` in the whole state dict, for error texts.

    Returns:
        ``x1``; if ``x2`` is a factory, the merged tensor.

    Raises:
        StructureError: (a ``CheckpointingException`` and ``ValueError``) the structures differ.
    """
    if isinstance(x2, ShardedTensorFactory):
        try:
            return cast(StateDict, x2.merge_fn(x1))
        except Exception as error:
            error.add_note(f"while merging the loaded parts of the factory {x2.key!r} at {key}")
            raise
    if not isinstance(x1, dict | list) or not isinstance(x2, dict | type(x1)):
        raise errors.StructureError(
            f"at {key} a {type(x1).__name__} was loaded, where the factories have a "
            f"{type(x2).__name__}: neither a factory nor a matching dict or list"
        )
    if isinstance(x2, list) and len(x1) != len(x2):
        raise errors.StructureError(
            f"{len(x1)} elements were loaded at {key}, but the factories need {len(x2)}"
        )
    loaded = x1 if isinstance(x1, dict) else range(len(x1))
    for k in x2 if isinstance(x2, dict) else loaded:
        if k not in loaded:
            raise errors.StructureError(
                f"factories at {key} need element {k!r} of a {type(x1).__name__} of {len(x1)} "
                f"elements, which was not loaded; loaded are {list(loaded)}"
            )
        x1[k] = apply_factory_merges(x1[k], x2[k], (*key, k))
    return x1
