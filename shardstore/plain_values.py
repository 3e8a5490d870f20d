"""Pure: values that are no tensors, as JSON and back, exactly.

Numbers, text, bytes, ``None``, lists, tuples, sets, dicts of any such keys, and torch's data types,
sizes and devices. JSON has fewer types than Python, so what it lacks goes as ``{"$type": ...}``. A
value of any other kind is not encoded at all: nothing here can run code, in either direction.
Torch is imported with the first value that is torch's.
"""

from __future__ import annotations

import base64
import collections
import json
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

__all__ = ["NotPlainError", "decode", "encode"]

_TAG = "$type"
_MAX_DEPTH = 200


class NotPlainError(TypeError):
    """The value has no JSON form."""


def encode(value: object) -> Any:
    """The JSON form of a value: what ``json.dumps`` takes as it is.

    Raises:
        NotPlainError: names the type that has no JSON form.
    """
    return _encode(value, 0)


def _encode(value: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise NotPlainError(f"nested deeper than {_MAX_DEPTH} levels")
    kind = type(value)
    if value is None or kind in (bool, int):
        return value
    if kind is str:
        return _text(value)
    if kind is float:
        return value if math.isfinite(value) else _tagged("float", repr(value))
    if kind is list:
        return [_encode(item, depth + 1) for item in value]
    if kind in (dict, collections.OrderedDict):
        return _encode_dict(value, depth)
    if kind in _SEQUENCES:
        items = [_encode(item, depth + 1) for item in value]
        return _tagged(_SEQUENCES[kind], items)
    if kind is complex:
        return _tagged("complex", [_encode(value.real, depth), _encode(value.imag, depth)])
    if kind in (bytes, bytearray):
        return _tagged(kind.__name__, base64.b64encode(value).decode("ascii"))
    if kind.__module__ == "torch" and (found := _encode_of_torch(value, depth)) is not None:
        return found
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return _tagged("numpy", [value.dtype.str, base64.b64encode(value.tobytes()).decode()])
    raise NotPlainError(f"{kind.__module__}.{kind.__qualname__} has no JSON form")


def _encode_of_torch(value: Any, depth: int) -> Any:
    import torch

    kind = type(value)
    if kind is torch.dtype:
        return _tagged("dtype", str(value).removeprefix("torch."))
    if kind is torch.device:
        return _tagged("device", str(value))
    if kind is torch.Size:
        return _tagged("Size", [_encode(item, depth + 1) for item in value])
    return None


def _text(value: str) -> Any:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # lone surrogates, which JSON files can not hold
        return _tagged("text", json.dumps(value))
    return value


def _encode_dict(value: dict[Any, Any], depth: int) -> Any:
    ordinary = type(value) is dict and _TAG not in value
    if ordinary and all(type(key) is str and _text(key) == key for key in value):
        return {key: _encode(item, depth + 1) for key, item in value.items()}
    pairs = [[_encode(key, depth + 1), _encode(item, depth + 1)] for key, item in value.items()]
    return _tagged("dict" if type(value) is dict else "OrderedDict", pairs)


def _tagged(name: str, value: Any) -> dict[str, Any]:
    return {_TAG: name, "value": value}


_SEQUENCES: dict[type, str] = {
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
}


def decode(document: Any) -> Any:
    """The value behind a JSON form.

    Raises:
        ValueError: not one that :func:`encode` makes.
    """
    if isinstance(document, list):
        return [decode(item) for item in document]
    if not isinstance(document, dict):
        return document
    if _TAG not in document:
        return {key: decode(item) for key, item in document.items()}
    make = _DECODERS.get(document[_TAG])
    if make is None:
        raise ValueError(f"unknown type {document[_TAG]!r} of a stored value")
    try:
        return make(document["value"])
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"stored value of type {document[_TAG]!r} is malformed") from error


def _dtype(name: str) -> torch.dtype:
    import torch

    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no data type of torch")
    return found


def _device(text: str) -> torch.device:
    import torch

    return torch.device(text)


def _size(items: Any) -> torch.Size:
    import torch

    return torch.Size(decode(items))


def _numpy(parts: list[str]) -> np.generic:
    dtype = np.dtype(parts[0])
    if dtype.kind not in "biuf":
        raise ValueError(f"{parts[0]!r} is no plain data type")
    scalar: np.generic = np.frombuffer(base64.b64decode(parts[1]), dtype)[0]
    return scalar


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "text": json.loads,
    "tuple": lambda items: tuple(decode(items)),
    "set": lambda items: set(decode(items)),
    "frozenset": lambda items: frozenset(decode(items)),
    "Size": _size,
    "complex": lambda parts: complex(decode(parts[0]), decode(parts[1])),
    "bytes": lambda text: base64.b64decode(text),
    "bytearray": lambda text: bytearray(base64.b64decode(text)),
    "dtype": _dtype,
    "device": _device,
    "numpy": _numpy,
    "dict": lambda pairs: {decode(key): decode(item) for key, item in pairs},
    "OrderedDict": lambda pairs: collections.OrderedDict(
        (decode(key), decode(item)) for key, item in pairs
    ),
}
