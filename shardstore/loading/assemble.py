"""From a stored shard to the tensor that is asked for: padded, and cut to its flattened range.

Answers for arrays and tensors that are in memory already. Knows nothing of files; the strategies
read straight into place (:mod:`.read_plan`). Public as :mod:`shardstore.strategies.zarr`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardstore.errors import ShapeMismatchError
from shardstore.mapping import ShardedTensor
from shardstore.storage.format import dtypes

__all__ = ["flatten_range", "pad_to_expected_shape", "postprocess_numpy_array"]


def postprocess_numpy_array(
    loaded_array: NDArray[Any], sharded_tensor: ShardedTensor, apply_flattened_range: bool = True
) -> torch.Tensor:
    """Turn a NumPy array of a whole shard into the torch tensor that is asked for.

    Args:
        loaded_array: the shard as it was stored, of the local shape unless
            ``allow_shape_mismatch``.
        sharded_tensor: what is asked for.
        apply_flattened_range: cut out the flattened range, if there is one.

    Raises:
        ShapeMismatchError: another shape, without ``allow_shape_mismatch``.
    """
    x = dtypes.as_tensor(np.ascontiguousarray(loaded_array).reshape(loaded_array.shape))
    if tuple(x.shape) != sharded_tensor.local_shape:
        if not sharded_tensor.allow_shape_mismatch:
            raise ShapeMismatchError(
                f"Local shape mismatch for key {sharded_tensor.key!r}: loaded {tuple(x.shape)}, "
                "expected "
                f"{sharded_tensor.local_shape}; set allow_shape_mismatch=True to zero-pad",
                key=sharded_tensor.key,
            )
        x = pad_to_expected_shape(x, sharded_tensor)
    if apply_flattened_range and sharded_tensor.flattened_range is not None:
        x = flatten_range(sharded_tensor, x)
    return x


def flatten_range(sharded_tensor: ShardedTensor, x: torch.Tensor) -> torch.Tensor:
    """The flattened range of a whole local tensor, one-dimensional.

    The tensor itself where there is no range.
    """
    if sharded_tensor.flattened_range is None:
        return x
    return x.reshape(-1)[sharded_tensor.flattened_range]


def pad_to_expected_shape(x: torch.Tensor, expected_sharded_ten: ShardedTensor) -> torch.Tensor:
    """A tensor in the expected local shape, zero beyond the tensor's own extent.

    Raises:
        ShapeMismatchError: another number of axes, or the tensor is longer than expected along one.
    """
    expected = expected_sharded_ten.local_shape
    if x.ndim != len(expected):
        raise ShapeMismatchError(
            f"key {expected_sharded_ten.key!r}: loaded {x.ndim} axes {tuple(x.shape)}, expected "
            f"{len(expected)} {expected}; "
            "padding changes lengths, not the number of axes",
            key=expected_sharded_ten.key,
        )
    if tuple(x.shape) == expected:
        return x
    if any(a > b for a, b in zip(x.shape, expected, strict=True)):
        raise ShapeMismatchError(
            f"key {expected_sharded_ten.key!r}: loaded {tuple(x.shape)} is larger than expected "
            f"{expected}; padding "
            "never drops data",
            key=expected_sharded_ten.key,
        )
    out = x.new_zeros(expected)
    out[tuple(slice(n) for n in x.shape)] = x
    return out
