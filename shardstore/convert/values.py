"""Comparison of the values that a conversion wrote beside the arrays with those of the source."""

from __future__ import annotations

import io
import logging
import pickle
import sys
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from shardstore.convert.interfaces import UNREADABLE, Extras, plain_json, values_of
from shardstore.errors import DamagedCheckpointError
from shardstore.values.plain import NotPlainError

if TYPE_CHECKING:
    import torch

__all__ = ["compare_values", "same_value"]

logger = logging.getLogger(__name__)


def compare_values(
    source: Extras, written: Extras, *, plain: bool, between: tuple[str, str]
) -> None:
    """Compare what is no tensor.

    Args:
        source: of the source, opened for this.
        written: read back from what was written.
        plain: the target's format keeps only what has a JSON form; other values are left out.
        between: both places, for the error.

    Raises:
        DamagedCheckpointError: a value differs, is missing, or is in the target alone; or it can
            not be read.
    """
    found = {key: value for key, _, value in values_of(written)}
    held = set()
    for key, _, value in values_of(source):
        if plain and not _is_plain(value):
            continue
        held.add(key)
        if key not in found:
            raise _differs(key, "is missing in", between)
        if found[key] is UNREADABLE:
            logger.warning(
                "the value of %r in %s is not compared: its class is not allowed to be loaded",
                key,
                between[1],
            )
        elif not same_value(value, found[key]):
            raise _differs(key, "differs in", between)
    more = sorted(set(found) - held)
    if more:
        raise _differs(more[0], "is not in the source, but in", between)


def _differs(key: str, how: str, between: tuple[str, str]) -> DamagedCheckpointError:
    source, target = between
    return DamagedCheckpointError(
        f"the value of {key!r}, converted from {source}, {how} what was written for {target}; "
        "nothing was put there. Convert again with resume=False, and check the disk",
        key=key,
        url=target,
    )


def _is_plain(value: object) -> bool:
    try:
        plain_json(value)
    except NotPlainError:
        return False
    return True


def same_value(a: Any, b: Any) -> bool:
    """Whether two values are of one type and equal in every bit: a NaN equals itself, and zeros of
    different signs differ."""
    try:
        return _same(a, b)
    except RecursionError:  # it has itself among its parts
        return pickle.dumps(a) == pickle.dumps(b)


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    torch = sys.modules.get("torch")  # without it no value is a tensor
    if torch is not None and isinstance(a, torch.Tensor):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and _elements(a) == _elements(b)
    if isinstance(a, np.ndarray) and a.dtype != object:
        return (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        # In the order in which they are: a dict of optimizer states may be walked through.
        return list(a) == list(b) and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float | complex):
        return repr(a) == repr(b)
    if isinstance(a, io.BytesIO):
        return bool(a.getvalue() == b.getvalue())
    if getattr(a, "__dict__", None):
        return _same(vars(a), vars(b))
    try:
        if bool(a == b):
            return True
    except Exception:  # it has a mind of its own of what is equal
        pass
    return pickle.dumps(a) == pickle.dumps(b)


def _elements(tensor: torch.Tensor) -> bytes:
    import torch

    whole = tensor.detach().cpu().to_dense().contiguous()
    # Not reshape: a single element may keep a stride, and then has no view of its bytes.
    flat = whole.as_strided((whole.numel(),), (1,))
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
