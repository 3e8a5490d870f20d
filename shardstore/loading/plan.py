"""From sharded tensors to regions: what of which array goes where in memory.

A destination is the tensor that was given, where its memory can be written directly. One on a
device is filled through a little host memory, one of an unusual kind by a copy at the end; where
none was given or one without memory (on the meta device), a new one is returned. One that can not
be filled is refused. Flattened ranges are read as boxes, never as the whole shard. Nothing is cast
unless the load was asked to, and nothing is padded unless ``allow_shape_mismatch`` says so.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from shardstore.errors import (
    AccessPatternError,
    ArgumentError,
    DTypeMismatchError,
    MissingKeyError,
    ShapeMismatchError,
)
from shardstore.loading.casting import CastRead, can_cast, goes_through_host
from shardstore.mapping import ShardedTensor
from shardstore.sharded.layouts import flat_bounds, local_box
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box, flat_range_boxes
from shardstore.storage.movers.chunks import RegionRead

__all__ = ["TensorRead", "plan_read", "require_writable"]


@dataclass
class TensorRead:
    """How one sharded tensor is loaded.

    Attributes:
        result: the tensor that the caller gets.
        regions: what is read.
        staged: host memory that is copied into ``result`` at the end, where it can not be read
            into.
    """

    result: torch.Tensor
    regions: list[RegionRead] = field(default_factory=list)
    staged: torch.Tensor | None = None

    def finish(self) -> torch.Tensor:
        """Bring staged data to its place, and return the loaded tensor."""
        if self.staged is not None:
            with torch.no_grad():
                self.result.copy_(self.staged)
        return self.result


def find_array(
    arrays: Mapping[str, ArrayMeta], tensor: ShardedTensor, url: str, *, cast: bool = False
) -> ArrayMeta:
    """The stored array of a tensor.

    Args:
        arrays: what is stored, by key.
        tensor: what is asked for.
        url: of the checkpoint, for error texts.
        cast: whether a stored array of another data type will do.

    Raises:
        MissingKeyError: there is none of that key.
        DTypeMismatchError: of another data type, in a load that does not cast, or not to this one.
        ShapeMismatchError: of another global shape, without ``allow_shape_mismatch``.
    """
    meta = arrays.get(tensor.key)
    if meta is None:
        close = difflib.get_close_matches(tensor.key, arrays, n=3)
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else "."
        raise MissingKeyError(
            f"key {tensor.key!r} is not in the checkpoint {url} ({len(arrays)} arrays){hint} "
            "A `strict` mode other than assume_ok_unexpected leaves such keys out",
            key=tensor.key,
            url=url,
        )
    expected = dtypes.zarr_name(tensor.dtype)
    if meta.dtype != expected:
        _require_cast(tensor, meta, url, cast)
    same = meta.shape == tensor.global_shape
    if not same and not (
        tensor.allow_shape_mismatch and len(meta.shape) == len(tensor.global_shape)
    ):
        raise ShapeMismatchError(
            f"Global shape mismatch for key {tensor.key!r}: stored {meta.shape}, expected "
            f"{tensor.global_shape} "
            f"({url}); build the model with the stored shape, or set allow_shape_mismatch=True "
            "to cut or zero-pad",
            key=tensor.key,
            url=url,
        )
    return meta


def _require_cast(tensor: ShardedTensor, meta: ArrayMeta, url: str, cast: bool) -> None:
    """Raise unless a tensor may be filled with values of another data type."""
    remedy = "which loses more than precision and is never done for you:"
    if can_cast(meta.dtype, tensor.dtype):
        if cast:
            return
        remedy = "nothing is cast silently: load with cast=True, or"
    raise DTypeMismatchError(
        f"key {tensor.key!r} is stored as {meta.dtype} in {url} but asked for as "
        f"{dtypes.zarr_name(tensor.dtype)}; {remedy} load it as "
        f"{dtypes.torch_dtype(meta.dtype)} and convert",
        key=tensor.key,
        url=url,
    )


def plan_read(tensor: ShardedTensor, meta: ArrayMeta) -> TensorRead:
    """Plan how a sharded tensor is loaded from its array.

    Raises:
        ShapeMismatchError, DTypeMismatchError: the tensor given has not the described shape or
            data type.
        AccessPatternError: the shard lies outside the global shape.
        ArgumentError: the tensor given can not be filled in place.
    """
    tensor.validate_metadata_integrity()
    box = local_box(tensor)
    flat = flat_bounds(tensor) if tensor.flattened_range is not None else None
    shape = tensor.local_shape if flat is None else (flat[1] - flat[0],)
    if not (_inside(box, tensor.global_shape) or box.size == 0):
        raise AccessPatternError(
            f"key {tensor.key!r}: the shard at offset {box.offset} of shape {box.shape} reaches "
            f"beyond the global shape {tensor.global_shape}; correct global_offset",
            key=tensor.key,
        )
    name = dtypes.zarr_name(tensor.dtype)
    converts = name != meta.dtype
    read, through = _destination(tensor, shape, converts)
    host = read.staged if read.staged is not None else read.result
    out: Any = host.detach() if through else dtypes.memory_of(host, name)
    whole = meta.shape == tensor.global_shape or _inside(box, meta.shape)
    if not whole:
        with torch.no_grad():
            host.zero_()
    if flat is None:
        if tensor.prepend_axis_num:
            out = out[(*(None,) * tensor.prepend_axis_num, ...)]
        _add(read, meta, box, out, whole)
        return read
    start, stop = flat
    position = 0
    for part in flat_range_boxes(box.shape, start, stop):
        region = Box(tuple(a + b for a, b in zip(box.offset, part.offset, strict=True)), part.shape)
        piece = out[position : position + part.size].reshape(part.shape)
        _add(read, meta, region, piece, whole)
        position += part.size
    return read


def _inside(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether a box of as many axes lies within a shape."""
    for o, s, n in zip(box.offset, box.shape, shape, strict=True):  # noqa: SIM110 - twice as fast
        if o + s > n:
            return False
    return True


def _add(read: TensorRead, meta: ArrayMeta, region: Box, out: Any, whole: bool) -> None:
    """Read the part of a region that is stored; into a tensor, not an array: through the host."""
    kind = CastRead if isinstance(out, torch.Tensor) else RegionRead
    if whole:
        if region.size:
            read.regions.append(kind(meta, region, out))
        return
    common = Box((0,) * len(meta.shape), meta.shape).intersect(region)
    if common is None:
        return
    where: tuple[Any, ...] = (..., *common.relative_to(region.offset).slices)
    read.regions.append(kind(meta, common, out[where]))


def _destination(
    tensor: ShardedTensor, shape: tuple[int, ...], converts: bool
) -> tuple[TensorRead, bool]:
    """Where to, and whether a buffer is between that and the store."""
    data = tensor.data
    if data is None or data.is_meta:
        fresh = torch.empty(shape, dtype=tensor.dtype)
        return TensorRead(fresh), converts or goes_through_host(fresh)
    require_writable(data, tensor.key)
    if type(data) not in (torch.Tensor, torch.nn.Parameter):
        staged = torch.empty(shape, dtype=tensor.dtype, pin_memory=data.device.type == "cuda")
        return TensorRead(data, staged=staged), converts or goes_through_host(staged)
    if converts or goes_through_host(data):
        return TensorRead(data.detach()), True
    lazy = data.is_conj() or data.is_neg()  # the memory holds other values than the tensor
    if lazy or (tensor.flattened_range is not None and not data.is_contiguous()):
        return TensorRead(data, staged=torch.empty(shape, dtype=tensor.dtype)), False
    return TensorRead(data.detach()), False


def require_writable(tensor: torch.Tensor, key: str) -> None:
    """Raise :class:`ArgumentError` unless every element of a tensor has memory of its own.

    Args:
        tensor: is to be filled by a load; on any device.
        key: of it, for the text.
    """
    if tensor.layout is not torch.strided:
        what = f"of layout {tensor.layout}, which has no plain memory to be filled"
    elif _overlaps_itself(tensor):
        what = (
            f"with strides {tuple(tensor.stride())}, several elements of which share memory, as in "
            "an expanded tensor"
        )
    else:
        try:
            dtypes.require_memory(tensor)
        except ArgumentError as error:
            raise ArgumentError(f"key {key!r} is to be loaded: {error}", key=key) from None
        return
    raise ArgumentError(
        f"key {key!r} is to be loaded into a tensor of shape {tuple(tensor.shape)} {what}; nothing "
        "was loaded. Give a dense tensor (clone() makes one), or, to be given a new one, none "
        "(data=None) or one on the meta device",
        key=key,
    )


def _overlaps_itself(data: torch.Tensor) -> bool:
    if data.is_contiguous():
        return False
    extent = 1
    axes = [(s, n) for s, n in sorted(zip(data.stride(), data.shape, strict=True)) if n != 1]
    if not math.prod(data.shape):
        return False
    for stride, size in axes:
        if not stride:
            return True
        if stride < extent:
            # Axes that reach into each other, as only as_strided makes them: counted.
            places = np.zeros(1, np.int64)
            for s, n in axes:
                places = (places[:, None] + s * np.arange(n)).reshape(-1)
            return len(np.unique(places)) < len(places)
        extent = stride * (size - 1) + extent
    return False
