"""Values of a conversion that are no tensors: taken from the source, compared with the target."""

from __future__ import annotations

import io
import logging
import pickle
import sys
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from shardstore.convert.interfaces import Extras
from shardstore.errors import DamagedCheckpointError
from shardstore.values.plain import NotPlainError
from shardstore.values.record import StateRecord, as_json

if TYPE_CHECKING:
    import torch

__all__ = ["UNREADABLE", "compare_values", "record_of", "same_value", "values_of"]

logger = logging.getLogger(__name__)

UNREADABLE = object()
"""Stands for a written value whose class is not allowed to be loaded."""


def values_of(extras: Extras) -> Iterator[tuple[str, tuple[str | int, ...], Any]]:
    """``(key, path, value)`` of what is no tensor."""
    if extras.common is not None:
        for path, value in _leaves(_loaded(extras.common), ()):
            yield ".".join(map(str, path)), path, value
    for key in extras.record.values:
        path = extras.record.paths.get(key, (key,))
        yield key, path, extras.record.value(key, "the source")
    for unique_key, value_of in extras.objects.items():
        key = unique_key if extras.common is not None else unique_key.rpartition("/")[0]
        yield key, extras.record.paths.get(key, (key,)), value_of()


def _loaded(common: bytes) -> dict[Any, Any]:
    from shardstore.values.torch_values import load_bytes

    state = load_bytes(common, "common.pt")
    if not isinstance(state, dict):
        raise pickle.UnpicklingError(f"common.pt holds a {type(state).__name__}, not a dict")
    return {str(name): value for name, value in state.items()}


def _leaves(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    is_nested = isinstance(value, dict) and value and all(isinstance(k, str) for k in value)
    if not is_nested:
        if path:
            yield path, value
        return
    for name, item in value.items():
        yield from _leaves(item, (*path, name))


def plain_json(value: object) -> Any:
    """The JSON form of a value for formats that hold tensors and hardly anything else.

    Raises:
        NotPlainError: it has none, or is a tensor, which nobody would look for there.
    """
    torch = sys.modules.get("torch")  # without it no value is a tensor
    if torch is not None and isinstance(value, torch.Tensor):
        raise NotPlainError("a tensor among the values that are not sharded")
    return as_json(value)


def record_of(extras: Extras) -> StateRecord:
    """The values that have a JSON form, for formats that hold no others."""
    values: dict[str, Any] = {}
    paths: dict[str, Any] = dict(extras.record.paths)
    for key, path, value in values_of(extras):
        try:
            values[key] = plain_json(value)
            paths[key] = path
        except NotPlainError as reason:
            logger.warning("%s is left out: %s", key, reason)
    return StateRecord(paths, values)


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
        DamagedCheckpointError: a value differs, is missing, or is in the target alone; or it
            cannot be read.
    """
    found = {key: value for key, _, value in values_of(written)}
    for key, _, value in values_of(source):
        if plain and not _is_plain(value):
            continue
        if key not in found:
            raise _differs(key, "is missing in", between)
        other = found.pop(key)
        if other is UNREADABLE:
            logger.warning(
                "the value of %r in %s is not compared: its class is not allowed to be loaded",
                key,
                between[1],
            )
        elif not same_value(value, other):
            raise _differs(key, "differs in", between)
    for key in found:
        raise _differs(key, "is not in the source, but in", between)


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
