"""Plan a load: the regions of arrays to read, and their destinations in memory. Put the tensors
into the state dict after the read.

A region is read directly into the given tensor if its memory can be written, else through host
memory. If no tensor is given, or one on the meta device, a new tensor is made. Flattened ranges are
read as boxes, without the rest of the shard. Planning reads no bytes.
"""

from __future__ import annotations

import difflib
import logging
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray

from shardstore import errors
from shardstore.dict_utils import dict_list_map_outplace
from shardstore.mapping import (
    ShardedStateDict,
    ShardedTensor,
    StateDict,
    data_shape,
    flat_bounds,
    is_within,
    local_box,
)
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta, array_of_one_chunk
from shardstore.storage.format.grid import Box, flat_range_boxes
from shardstore.storage.movers.chunks import RegionRead

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class HostRead(RegionRead):
    """A region that is read into host memory and then copied to its destination.

    Attributes:
        out: a tensor of the region's shape, on any device and of any data type.
    """

    out: Any

    def __post_init__(self) -> None:
        """Accept any data type and device."""


@dataclass(slots=True)
class TensorRead:
    """The plan for one sharded tensor.

    Attributes:
        result: the tensor that the caller gets.
        target: the tensor that the regions are parts of: ``result``, or host memory if parts of
            ``result`` cannot be written. It is copied to ``result`` at the end.
        regions: the regions to read.
        is_padded: whether a part of the tensor is not stored. That part becomes zero.
        tied: key of another tensor that is loaded into ``result``. Its values are compared with
            ``target``.
    """

    result: torch.Tensor
    target: torch.Tensor
    regions: list[RegionRead] = field(default_factory=list)
    is_padded: bool = False
    tied: str = ""


ReadPlan: TypeAlias = dict[int, TensorRead]
"""``id`` of a sharded tensor -> its plan."""


def plan_reads(
    tensors: Iterable[ShardedTensor],
    arrays: Mapping[str, ArrayMeta],
    url: str,
    *,
    cast: bool | Literal["warn"] = False,
) -> ReadPlan:
    """Plan the load of sharded tensors. A pure function; it waits for no rank.

    Args:
        tensors: the wanted tensors.
        arrays: key -> stored array.
        url: URL of the checkpoint, for error texts.
        cast: whether stored values may be cast to the data type of a tensor; ``"warn"`` also allows
            casts between all kinds of data types, with a warning.

    Raises:
        MissingKeyError: the checkpoint has no array with the key of a tensor.
        DTypeMismatchError: the array has another data type, and ``cast`` does not allow the cast;
            or the data type of the given tensor differs from its description.
        ShapeMismatchError: the array has another global shape, without ``allow_shape_mismatch``; or
            the shape of the given tensor differs from its description.
        AccessPatternError: the shard is outside the global shape.
        ArgumentError: the given tensor cannot be filled in place, or shares a part of its memory
            with another one.
    """
    plan: ReadPlan = {}
    differing: list[str] = []
    tensors = list({id(tensor): tensor for tensor in tensors}.values())
    tied = _tied(tensors)
    for tensor in tensors:
        meta = _find_array(arrays, tensor, url, cast)
        plan[id(tensor)] = _plan_read(tensor, meta, tied=tied.get(id(tensor), ""))
        if cast == "warn" and meta.dtype != (requested := dtypes.zarr_name(tensor.dtype)):
            differing.append(f"{tensor.key!r} ({meta.dtype} as {requested})")
    if differing:
        warn_of_casts(differing, url)
    return plan


def warn_of_casts(differing: Sequence[str], url: str) -> None:
    """Log a warning of tensors that are cast: their keys, each with both data types."""
    text = "%d tensors of %s are stored in another data type and are cast, such as %s"
    logger.warning(text, len(differing), url, differing[0])


class _Span(NamedTuple):
    """Addresses ``start:stop`` of the memory of a tensor."""

    start: int
    stop: int
    tensor: ShardedTensor
    memory: torch.Tensor


def _tied(tensors: Sequence[ShardedTensor]) -> dict[int, str]:
    """Find tensors that share all of their memory with another tensor of the load, as tied weights
    do.

    Returns:
        ``id`` of the sharded tensor -> key of the other.

    Raises:
        ArgumentError: two tensors share a part of their memory, so that one would overwrite the
            other.
    """
    spans: list[_Span] = []
    for tensor in tensors:
        data: Any = tensor.data
        is_known = type(data) in (torch.Tensor, torch.nn.Parameter) and data.layout is torch.strided
        if is_known or (data is not None and dtypes.is_plain(data)):
            start, size = data.data_ptr(), dtypes.extent_bytes(data)
            if start and size:  # 0: a tensor without memory
                spans.append(_Span(start, start + size, tensor, data))
    tied: dict[int, str] = {}
    before: list[_Span] = []
    for span in sorted(spans, key=operator.attrgetter("start")):
        _, _, tensor, data = span
        before = [other for other in before if other.stop > span.start]
        for _, _, other, memory in before:
            if elements_of(data) == elements_of(memory):
                if _region(tensor) != _region(other):
                    tied.setdefault(id(tensor), other.key)
            elif np.shares_memory(_addresses(data), _addresses(memory)):
                raise errors.ArgumentError(
                    f"keys {other.key!r} and {tensor.key!r} are to be loaded into tensors of shape "
                    f"{tuple(memory.shape)} and {tuple(data.shape)} that share a part of their "
                    "memory, so that one would overwrite the other; nothing was loaded. Give each "
                    "memory of its own (clone() makes a copy)",
                    key=tensor.key,
                )
        before.append(span)
    return tied


def elements_of(data: torch.Tensor) -> tuple[Any, ...]:
    """Return the identity of a tensor's memory and of the elements in it."""
    return data.data_ptr(), data.shape, data.stride(), data.dtype


def _region(tensor: ShardedTensor) -> tuple[Any, ...]:
    flat = tensor.flattened_range
    return tensor.key, local_box(tensor), None if flat is None else flat_bounds(tensor)


def _addresses(data: torch.Tensor) -> NDArray[Any]:
    """Return a tensor of any device as an array for :func:`numpy.shares_memory`, which does not
    read the elements."""
    size = data.element_size()
    about = {
        "version": 3,
        "typestr": f"|V{size}",
        "shape": tuple(data.shape),
        "strides": tuple(stride * size for stride in data.stride()),
        "data": (data.data_ptr(), True),
    }
    return np.asarray(SimpleNamespace(__array_interface__=about))


LEAVES_OUT = " strict='log_unexpected' leaves such keys out and logs them"
"""Remedy for a missing key, for :func:`missing_key`."""


def _find_array(
    arrays: Mapping[str, ArrayMeta], tensor: ShardedTensor, url: str, cast: bool | Literal["warn"]
) -> ArrayMeta:
    """Return the stored array of a tensor; raise an error if it does not match."""
    meta = arrays.get(tensor.key)
    if meta is None:
        raise missing_key(tensor.key, arrays, url, LEAVES_OUT)
    if meta.dtype != dtypes.zarr_name(tensor.dtype):
        require_cast(tensor.key, dtypes.torch_dtype(meta.dtype), tensor.dtype, url, cast)
    stored = meta.grid.shape
    if stored != tensor.global_shape and not (
        tensor.allow_shape_mismatch and len(stored) == len(tensor.global_shape)
    ):
        raise errors.ShapeMismatchError(
            f"Global shape mismatch for key {tensor.key!r}: stored {stored}, expected "
            f"{tensor.global_shape} ({url}); build the model with the stored shape, or give a "
            "ShardedTensor with allow_shape_mismatch=True, which is cut or zero-padded",
            key=tensor.key,
            url=url,
        )
    return meta


def require_fitting(
    shards: Iterable[ShardedTensor], stored: torch.Tensor, url: str, cast: bool | Literal["warn"]
) -> None:
    """Raise an error unless the shards of a tensor, with data, can be filled from all of it. For
    the errors see :func:`plan_reads`."""
    for shard in shards:
        shape, name = tuple(stored.shape), dtypes.zarr_name(stored.dtype)
        _find_array({shard.key: array_of_one_chunk(shard.key, shape, name)}, shard, url, cast)
        assert shard.data is not None
        require_writable(shard.data, shard.key)


def missing_key(
    key: str, arrays: Mapping[str, Any], url: str, more: str = ""
) -> errors.MissingKeyError:
    """Return the error for a missing key. Its text names similar keys, then says ``more``."""
    close = difflib.get_close_matches(key, arrays, n=3)
    hint = "" if arrays else f": {errors.NO_ARRAYS}"
    hint += f"; did you mean {' or '.join(map(repr, close))}?" if close else "." if more else ""
    return errors.MissingKeyError(
        f"key {key!r} is not in the checkpoint {url} ({len(arrays)} arrays){hint}{more}",
        key=key,
        url=url,
    )


def require_cast(
    key: str, stored: torch.dtype, requested: torch.dtype, url: str, cast: object
) -> None:
    """Raise an error unless a tensor may be filled with values of another data type.

    Floating-point values out of range are converted as by ``copy_``. Integers would wrap around.
    """
    names = [str(dtype).removeprefix("torch.") for dtype in (stored, requested)]
    remedy = "cast=True does not allow this cast, because it loses more than precision:"
    exists = dtypes.PACKED.isdisjoint(names)
    if cast == "warn" and exists:
        return
    has_range = requested.is_floating_point or requested.is_complex
    is_kind = exists and torch.can_cast(stored, requested)
    if is_kind and (has_range or np.can_cast(names[0], names[1])):
        if cast:
            return
        remedy = "nothing is cast silently: load with cast=True, or"
    raise errors.DTypeMismatchError(
        f"key {key!r} is stored as {names[0]} in {url} but asked for as {names[1]}; "
        f"{remedy} load it as {stored} and convert",
        key=key,
        url=url,
    )


def _plan_read(tensor: ShardedTensor, meta: ArrayMeta, *, tied: str = "") -> TensorRead:
    """Plan the load of one sharded tensor from its array. ``tied`` is the key of another tensor
    that is loaded into the same memory."""
    tensor.validate_metadata_integrity()
    box = local_box(tensor)
    is_whole = box.shape == tensor.global_shape and not any(box.offset)
    if not is_whole and box.size and not is_within(box, tensor.global_shape):
        raise errors.AccessPatternError(
            f"key {tensor.key!r}: the shard at offset {box.offset} of shape {box.shape} reaches "
            f"beyond the global shape {tensor.global_shape}; correct global_offset",
            key=tensor.key,
        )
    read = _destination(tensor)
    if tied:
        read.target, read.tied = _on_host(tensor), tied
    stored_shape = meta.grid.shape
    read.is_padded = stored_shape != tensor.global_shape and not is_within(box, stored_shape)
    name = dtypes.zarr_name(tensor.dtype)
    target = read.target
    through_host = name != meta.dtype or goes_through_host(target)
    out: Any = target.detach() if through_host else dtypes.memory_of(target, name)
    kind = HostRead if through_host else RegionRead
    for region, where in held_regions(tensor, box, out):
        if not read.is_padded:
            if 0 not in region.shape:
                read.regions.append(kind(meta, region, where))
        elif (stored := stored_part(stored_shape, region, where)) is not None:
            read.regions.append(kind(meta, *stored))
    return read


def stored_part(shape: tuple[int, ...], region: Box, memory: Any) -> tuple[Box, Any] | None:
    """Return the part of a region that lies in an array of another shape, with its memory; ``None``
    if there is none. The rest of the region is padding."""
    stored = Box((0,) * len(shape), shape).intersect(region)
    if stored is None:
        return None
    inside: tuple[Any, ...] = (..., *stored.relative_to(region.offset).slices)
    return stored, memory[inside]


def held_regions(tensor: ShardedTensor, box: Box, memory: Any) -> Iterator[tuple[Box, Any]]:
    """Yield the boxes of the global tensor that a rank holds, each with its part of the memory.

    Args:
        tensor: the shard.
        box: result of :func:`local_box`.
        memory: an array or tensor with the shape of the shard's data.
    """
    if tensor.flattened_range is None:
        prepended = (None,) * tensor.prepend_axis_num
        yield box, memory[(*prepended, ...)] if prepended else memory
        return
    position = 0
    for part in held_boxes(tensor):
        yield part, memory[position : position + part.size].reshape(part.shape)
        position += part.size


def held_boxes(tensor: ShardedTensor) -> list[Box]:
    """Return the boxes of the global tensor that a shard consists of, in the order of its data."""
    box = local_box(tensor)
    if tensor.flattened_range is None:
        return [box]
    parts = flat_range_boxes(box.shape, *flat_bounds(tensor))
    return [moved(part, box.offset) for part in parts]


def moved(part: Box, origin: tuple[int, ...]) -> Box:
    """Return a box relative to ``origin`` as a box of the whole array."""
    return Box(tuple(a + b for a, b in zip(part.offset, origin, strict=True)), part.shape)


def _destination(tensor: ShardedTensor) -> TensorRead:
    """Return the given tensor, if it has memory, or a new one."""
    data = tensor.data
    if data is None or data.is_meta:
        try:
            made = _on_host(tensor)
            return TensorRead(made, made)
        except RuntimeError as error:
            raise errors.CheckpointingException(
                f"key {tensor.key!r} of shape {data_shape(tensor)} and type {tensor.dtype} takes "
                "more memory than is available: load parts of it, or on more ranks",
                key=tensor.key,
            ) from error
    require_writable(data, tensor.key)
    if type(data) in (torch.Tensor, torch.nn.Parameter):
        given = data.detach()
        return TensorRead(given, given)
    # A subclass may refuse to be written in parts.
    return TensorRead(data, _on_host(tensor))


def _on_host(tensor: ShardedTensor) -> torch.Tensor:
    """Return host memory for the data of a shard, whatever the program's default device is."""
    return torch.empty(data_shape(tensor), dtype=tensor.dtype, device="cpu")


def goes_through_host(tensor: torch.Tensor) -> bool:
    """Return whether stored bytes cannot be read directly into a tensor's memory, because it is on
    a device or is a conjugated or negated view."""
    return not tensor.is_cpu or tensor.is_conj() or tensor.is_neg()


def require_writable(tensor: torch.Tensor, key: str) -> None:
    """Raise :class:`ArgumentError` unless every element of a tensor has memory of its own.

    Args:
        tensor: a tensor that a load fills, on any device.
        key: key of the tensor, for the error text.
    """
    if tensor.layout is not torch.strided:
        what = f"of layout {tensor.layout}, which has no plain memory to be filled"
    elif not tensor.is_contiguous() and _overlaps_itself(tensor):
        what = (
            f"with strides {tuple(tensor.stride())}, several elements of which share memory, as in "
            "an expanded tensor"
        )
    else:
        try:
            dtypes.require_memory(tensor)
        except errors.ArgumentError as error:
            raise errors.ArgumentError(f"key {key!r} is to be loaded: {error}", key=key) from None
        return
    raise errors.ArgumentError(
        f"key {key!r} is to be loaded into a tensor of shape {tuple(tensor.shape)} {what}; nothing "
        "was loaded. Give a dense tensor (clone() makes one); with data=None or a tensor on the "
        "meta device, the load creates a new one",
        key=key,
    )


def _overlaps_itself(data: torch.Tensor) -> bool:
    extent = 1
    for stride, size in sorted(zip(data.stride(), data.shape, strict=True)):
        if stride < extent and size != 1:  # axes overlap
            return True
        extent += stride * (size - 1)
    return False


def assemble(
    plan: ReadPlan,
    sharded_state_dict: ShardedStateDict,
    url: str,
    objects: Mapping[int, Any] = {},
) -> StateDict:
    """Return the state dict with tensors instead of sharded tensors.

    Args:
        plan: the plan, after :func:`.read_chunks`.
        sharded_state_dict: the state dict of the load.
        url: URL of the checkpoint, for error texts.
        objects: ``id`` of other entries -> their values.

    Raises:
        CheckpointingException: the state dict has an entry of another type.
        ArgumentError: two keys with different stored values are loaded into the same memory.
    """

    def loaded(value: Any) -> Any:
        if id(value) in objects:
            return objects[id(value)]
        if not isinstance(value, ShardedTensor):
            raise errors.CheckpointingException(
                f"{type(value).__name__} among the sharded tensors to load from {url}; the "
                "common strategy loads other objects"
            )
        read = plan[id(value)]
        if read.tied:
            if not torch.equal(_bits(read.target), _bits(read.result)):
                raise errors.ArgumentError(
                    f"keys {read.tied!r} and {value.key!r} are loaded into the same memory, and "
                    f"their stored values in {url} differ; give each a tensor of its own (clone() "
                    "makes a copy)",
                    key=value.key,
                    url=url,
                )
        elif read.target is not read.result:
            with torch.no_grad():
                read.result.copy_(read.target)
        return read.result

    return cast(StateDict, dict_list_map_outplace(loaded, sharded_state_dict))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)


def whole_tensor(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> ShardedTensor:
    """Return an unsharded ShardedTensor without data for a stored tensor."""
    zeros, ones = (0,) * len(shape), (1,) * len(shape)
    return ShardedTensor(key, None, dtype, shape, shape, zeros, ones)


def whole_tensors(arrays: Mapping[str, ArrayMeta]) -> ShardedStateDict:
    """Return key -> unsharded ShardedTensor without data, for each stored tensor."""
    return {
        key: whole_tensor(key, meta.shape, dtypes.torch_dtype(meta.dtype))
        for key, meta in arrays.items()
    }


def with_destinations(wanted: ShardedStateDict, device: torch.device) -> ShardedStateDict:
    """Return the state dict with new tensors on a device for sharded tensors without data, or with
    data on the meta device."""

    def given(value: Any) -> Any:
        if not isinstance(value, ShardedTensor) or not (value.data is None or value.data.is_meta):
            return value
        return replace(value, data=torch.empty(data_shape(value), dtype=value.dtype, device=device))

    return cast(ShardedStateDict, dict_list_map_outplace(given, wanted))


def part_of(
    tensors: Mapping[str, Any],
    key: str,
    region: Sequence[slice] | Mapping[str, Sequence[slice]] | None,
    url: str,
) -> ShardedTensor:
    """Return a stored tensor, or a region of it, as a sharded tensor without data.

    Args:
        tensors: key -> unsharded tensor without data.
        key: key of the tensor.
        region: slices of leading axes, for all keys or by key.
        url: URL of the checkpoint, for the error text.

    Raises:
        MissingKeyError: there is no such key.
        ArgumentError: a step is not 1, a bound is not a number, or there are more slices than axes.
    """
    if key not in tensors:
        raise missing_key(key, tensors, url)
    whole: ShardedTensor = tensors[key]
    given = region.get(key, ()) if isinstance(region, Mapping) else region or ()
    shape = whole.global_shape
    try:
        slices = [*given, *[slice(None)] * (len(shape) - len(given))]
        if any(s.step not in (None, 1) for s in slices):
            raise TypeError("steps")
        bounds = [s.indices(n)[:2] for s, n in zip(slices, shape, strict=True)]
    except (TypeError, ValueError, AttributeError) as error:
        raise errors.ArgumentError(
            f"region {given!r} does not fit key {key!r} of shape {shape}: give a list of slices "
            "of whole numbers, without steps, at most one an axis, such as [slice(0, 2)]"
        ) from error
    local = tuple(max(0, stop - start) for start, stop in bounds)
    offset = tuple(start if n else 0 for (start, _), n in zip(bounds, local, strict=True))
    return ShardedTensor(key, None, whole.dtype, local, shape, offset, None)
