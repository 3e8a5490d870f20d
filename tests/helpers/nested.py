"""Nested states, compared value by value."""

from __future__ import annotations

import io
import pickle
from collections import deque
from typing import Any

import numpy as np
import torch

__all__ = ["exactly_same", "same"]


def same(a: Any, b: Any) -> bool:
    """Whether two states have the same structure, types and values."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, io.BytesIO):
        return a.getvalue() == bytes(b.getvalue())
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def exactly_same(a: Any, b: Any) -> bool:
    """Whether two values are of one type and equal in every bit: a NaN equals itself, and zeros of
    different signs differ."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and _elements(a) == _elements(b)
    if isinstance(a, np.ndarray) and a.dtype != object:
        return (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(exactly_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(exactly_same, a, b))
    if isinstance(a, float | complex):
        return repr(a) == repr(b)
    if isinstance(a, io.BytesIO):
        return a.getvalue() == b.getvalue()
    if getattr(a, "__dict__", None):
        return exactly_same(vars(a), vars(b))
    return pickle.dumps(a) == pickle.dumps(b) or bool(a == b)


def _elements(tensor: torch.Tensor) -> bytes:
    whole = tensor.detach().cpu().to_dense().resolve_conj().resolve_neg().contiguous()
    # Not reshape: a single element may keep a stride, and then has no view of its bytes.
    flat = whole.as_strided((whole.numel(),), (1,))
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
