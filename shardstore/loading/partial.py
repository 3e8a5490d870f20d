"""What is asked for beyond a state dict's own tensors: parts of stored ones, and other devices.

Pure descriptions: nothing here reads.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from shardstore.dict_utils import dict_list_map_outplace
from shardstore.errors import ArgumentError, MissingKeyError
from shardstore.mapping import ShardedStateDict, ShardedTensor
from shardstore.sharded.layouts import flat_bounds

__all__ = ["part_of", "with_destinations"]


def with_destinations(wanted: ShardedStateDict, device: torch.device) -> ShardedStateDict:
    """The same state dict, with tensors on a device where sharded tensors have no data."""

    def given(value: Any) -> Any:
        if not isinstance(value, ShardedTensor) or value.data is not None:
            return value
        shape: tuple[int, ...] = tuple(value.local_shape)
        if value.flattened_range is not None:
            start, stop = flat_bounds(value)
            shape = (stop - start,)
        return replace(value, data=torch.empty(shape, dtype=value.dtype, device=device))

    return cast(ShardedStateDict, dict_list_map_outplace(given, wanted))


def part_of(
    tensors: Mapping[str, Any],
    key: str,
    region: Sequence[slice] | Mapping[str, Sequence[slice]] | None,
    url: str,
) -> ShardedTensor:
    """A stored tensor, or a region of it, as a sharded tensor without data.

    Args:
        tensors: key -> whole tensor without data.
        key: which.
        region: slices of leading axes, for all keys or by key.
        url: where, for the error text.

    Raises:
        MissingKeyError: no such key.
        ArgumentError: a step other than 1, a bound that is no number, or more slices than axes.
    """
    if key not in tensors:
        close = difflib.get_close_matches(key, tensors, n=3)
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise MissingKeyError(
            f"key {key!r} is not in the checkpoint {url} ({len(tensors)} arrays){hint}",
            key=key,
            url=url,
        )
    whole: ShardedTensor = tensors[key]
    slices = region.get(key, ()) if isinstance(region, Mapping) else region or ()
    shape = whole.global_shape
    if not isinstance(slices, Sequence) or not all(isinstance(s, slice) for s in slices):
        raise ArgumentError(
            f"region {slices!r} of key {key!r} is to be a list of slices, one an axis, such as "
            "[slice(0, 2)]"
        )
    if len(slices) > len(shape) or any(s.step not in (None, 1) for s in slices):
        raise ArgumentError(
            f"region {tuple(slices)} does not fit key {key!r} of shape {shape}: give at most one "
            "slice an axis, without steps"
        )
    try:
        bounds = [s.indices(n)[:2] for s, n in zip(slices, shape, strict=False)]
    except TypeError as error:
        raise ArgumentError(
            f"region {slices!r} of key {key!r} has bounds that are no whole numbers: give slices "
            "such as slice(0, 2)"
        ) from error
    bounds += [(0, n) for n in shape[len(slices) :]]
    local = tuple(max(0, stop - start) for start, stop in bounds)
    offset = tuple(start if n else 0 for (start, _), n in zip(bounds, local, strict=True))
    if local == shape:
        return whole
    return ShardedTensor(key, None, whole.dtype, local, shape, offset, None)
