"""Which tensors a load can fill in place.

What it can not fill is refused: a new tensor in its place would leave the one that was given, a
model's parameter perhaps, as it was, without a word. Knows tensors alone.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from shardstore.errors import ArgumentError
from shardstore.storage import dtypes

__all__ = ["require_writable"]


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
