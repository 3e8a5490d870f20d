"""Convert values that are not tensors to JSON and back, exactly.

The values are numbers, text, bytes, dates, paths, ``None``, the containers of the standard library
with keys of these types, NumPy's arrays and numbers, and torch's data types, sizes and devices, and
tensors inside other values. A type that JSON lacks becomes ``{"$type": NAME, "value": ...}``;
FORMAT.md lists the names. Values of other types have no JSON form, so a file cannot choose code
that decoding runs. Torch is imported for the first value that needs it.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
import io
import json
import math
import pathlib
import types
import uuid
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


_TAG = "$type"
_MAX_DEPTH = 200

_PLAIN = "biufcmMSU"
"""Kinds of NumPy's data types whose values are defined by their bytes."""

_FACTORIES: dict[str, Callable[[], Any]] = {
    made.__name__: made for made in (bool, bytes, complex, dict, float, int, list, set, str, tuple)
}


class NotPlainError(TypeError):
    """The value has no JSON form."""


def encode(value: Any, depth: int = 0) -> Any:
    """Return the JSON form of a value, for ``json.dumps``.

    Args:
        value: the value.
        depth: number of containers around it.

    Raises:
        NotPlainError: the value has no JSON form; the text names its type.
    """
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
        return [encode(item, depth + 1) for item in value]
    if kind is dict:
        return _encode_dict(value, depth)
    if kind in _FORMS:
        name, form, _ = _FORMS[kind]
        return _tagged(name, form(value, depth + 1))
    if isinstance(value, np.generic) and value.dtype.kind in _PLAIN:
        return _tagged("numpy", _encode_scalar(value))
    if isinstance(value, np.dtype) and value.kind in _PLAIN:
        return _tagged("numpy.dtype", value.str)
    return _encode_of_torch(value, depth)


def _encode_of_torch(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind.__module__.partition(".")[0] != "torch":
        raise NotPlainError(f"{kind.__module__}.{kind.__qualname__} has no JSON form")
    import torch

    if kind is torch.dtype:
        return _tagged("dtype", str(value).removeprefix("torch."))
    if kind is torch.device:
        return _tagged("device", str(value))
    if kind is torch.Size:
        return _tagged("Size", _items(value, depth + 1))
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return _tagged(kind.__name__, _encode_tensor(value))
    raise NotPlainError(f"{kind.__module__}.{kind.__qualname__} has no JSON form")


def _encode_tensor(tensor: torch.Tensor) -> Any:
    import torch

    try:
        # One of these calls fails for sparse, quantized and nested tensors and without memory.
        plain = tensor.detach().cpu().resolve_conj().resolve_neg()
        # Not reshape, because a single element that keeps a stride cannot be viewed as bytes.
        flat = plain.contiguous().as_strided((plain.numel(),), (1,))
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        shape = list(tensor.shape)
    except (RuntimeError, TypeError) as error:
        what = f"a tensor of dtype {tensor.dtype}, layout {tensor.layout}, on {tensor.device}"
        raise NotPlainError(f"{what}, has no JSON form") from error
    return [str(tensor.dtype).removeprefix("torch."), shape, _base64(data), tensor.requires_grad]


def _encode_array(array: np.ndarray[Any, Any], depth: int) -> Any:
    if array.dtype.kind not in _PLAIN:
        raise NotPlainError(f"a NumPy array of dtype {array.dtype} has no JSON form")
    return [array.dtype.str, list(array.shape), _base64(array.tobytes())]


def _encode_scalar(value: np.generic) -> list[str]:
    # tobytes() of empty text returns bytes although its item size is 0.
    form = [value.dtype.str, _base64(value.tobytes()[: value.dtype.itemsize])]
    if (kind := type(value)) is not value.dtype.type:
        raise NotPlainError(f"{kind.__module__}.{kind.__qualname__} has no JSON form")
    if _numpy(form).dtype != value.dtype:
        raise NotPlainError(f"{kind.__name__} that ends with a null character has no JSON form")
    return form


def _encode_slice(value: slice, depth: int) -> Any:
    parts = [value.start, value.stop, value.step]
    if any(isinstance(part, str) for part in parts):
        raise NotPlainError(f"a slice with text, {value!r:.100}, has no JSON form")
    return _items(parts, depth)


def _encode_time(value: datetime.datetime | datetime.time, depth: int) -> Any:
    if type(value.tzinfo) not in (type(None), datetime.timezone):
        kind = type(value).__name__
        raise NotPlainError(f"datetime.{kind} in the time zone {value.tzinfo} has no JSON form")
    text = value.isoformat()
    if type(value).fromisoformat(text).utcoffset() != value.utcoffset():  # of microseconds
        raise NotPlainError(f"an offset of {value.utcoffset()!r} from UTC has no JSON form")
    return [text, value.fold]


def _encode_defaultdict(value: collections.defaultdict[Any, Any], depth: int) -> Any:
    made = value.default_factory
    name = getattr(made, "__name__", "")
    if made is not None and _FACTORIES.get(name) is not made:
        raise NotPlainError(f"collections.defaultdict of {made!r:.100} has no JSON form")
    return [None if made is None else name, _pairs(value, depth)]


def _encode_dict(value: dict[Any, Any], depth: int) -> Any:
    if _TAG not in value and all(type(key) is str and _text(key) == key for key in value):
        return {key: encode(item, depth + 1) for key, item in value.items()}
    return _tagged("dict", _pairs(value, depth + 1))


def _pairs(value: Any, depth: int) -> list[Any]:
    return [[encode(key, depth), encode(item, depth)] for key, item in value.items()]


def _items(value: Iterable[Any], depth: int) -> list[Any]:
    return [encode(item, depth) for item in value]


def _text(value: str) -> Any:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # lone surrogates, which JSON files cannot hold
        return _tagged("text", json.dumps(value))
    return value


def _base64(data: bytes | bytearray | memoryview) -> str:
    return b64encode(data).decode("ascii")


def _tagged(name: str, value: Any) -> dict[str, Any]:
    return {_TAG: name, "value": value}


def decode(document: Any) -> Any:
    """Return the value of a JSON form.

    Raises:
        ValueError: it is not a JSON form that :func:`encode` makes.
    """
    if isinstance(document, list):
        return [decode(item) for item in document]
    if not isinstance(document, dict):
        return document
    if _TAG not in document:
        return {key: decode(item) for key, item in document.items()}
    make = _DECODERS.get(document[_TAG]) if isinstance(document[_TAG], str) else None
    if make is None:
        raise ValueError(f"unknown type {document[_TAG]!r} of a stored value")
    try:
        return make(document["value"])
    except (LookupError, TypeError, AttributeError, RuntimeError, ArithmeticError) as error:
        raise ValueError(f"stored value of type {document[_TAG]!r} is malformed") from error


def _dtype(name: str) -> torch.dtype:
    import torch

    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a data type of torch")
    return found


def _of_torch(name: str, argument: Any) -> Any:
    import torch

    return getattr(torch, name)(argument)


def _tensor(parts: list[Any]) -> torch.Tensor:
    import torch

    dtype, shape, text, requires_grad = parts
    out = torch.empty(tuple(shape), dtype=_dtype(dtype))
    data = b64decode(text)
    _require_bytes(len(data), out.numel() * out.element_size())
    if data:
        out.reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(data, np.uint8)
    return out.requires_grad_(bool(requires_grad))


def _parameter(parts: list[Any]) -> torch.nn.Parameter:
    from torch.nn import Parameter

    return Parameter(_tensor([*parts[:3], False]), requires_grad=bool(parts[3]))


def _array(parts: list[Any]) -> np.ndarray[Any, Any]:
    name, shape, text = parts
    dtype = np.dtype(name)
    if dtype.kind not in _PLAIN:
        raise ValueError(f"{name!r} is not a plain data type")
    data = b64decode(text)
    _require_bytes(len(data), math.prod(shape) * dtype.itemsize)
    # A bytearray makes the array writable.
    return np.ndarray(tuple(shape), dtype, bytearray(data))


def _require_bytes(found: int, wanted: int) -> None:
    if found != wanted:
        raise ValueError(f"{found} bytes are stored for an array of {wanted}")


def _numpy(parts: list[str]) -> np.generic:
    scalar: np.generic = _array([parts[0], [1], parts[1]])[0]
    return scalar


def _stream(parts: list[Any]) -> io.BytesIO:
    stream = io.BytesIO(b64decode(parts[0]))
    stream.seek(parts[1])
    return stream


def _decoded_pairs(pairs: Any) -> Iterable[tuple[Any, Any]]:
    return ((decode(key), decode(item)) for key, item in pairs)


def _defaultdict(parts: Any) -> collections.defaultdict[Any, Any]:
    made = None if parts[0] is None else _FACTORIES[parts[0]]
    return collections.defaultdict(made, _decoded_pairs(parts[1]))


def _counter(pairs: Any) -> collections.Counter[Any]:
    counter: collections.Counter[Any] = collections.Counter()
    for key, count in _decoded_pairs(pairs):
        counter[key] = count
    return counter


_Form = tuple[str, Callable[[Any, int], Any], Callable[[Any], Any]]
"""Name of a type, its encoder (called with the value and its depth), and its decoder."""


def _of_items(kind: Any) -> _Form:
    return kind.__name__, _items, lambda items: kind(decode(items))


def _of_text(kind: Any) -> _Form:
    return kind.__name__, lambda value, _: _text(str(value)), lambda text: kind(decode(text))


def _of_bytes(kind: Any) -> _Form:
    return kind.__name__, lambda value, _: _base64(value), lambda text: kind(b64decode(text))


def _of_time(kind: Any) -> _Form:
    decoder = lambda parts: kind.fromisoformat(parts[0]).replace(fold=parts[1])  # noqa: E731
    return kind.__name__, _encode_time, decoder


def _of_members(kind: Any) -> _Form:
    def made(members: Any) -> Any:
        space = kind()
        vars(space).update(decode(members))
        return space

    return kind.__name__, lambda value, depth: encode(vars(value), depth), made


def _of_parts(kind: Any, *names: str) -> _Form:
    def made(stored: list[Any]) -> Any:
        parts = decode(stored)
        if any(isinstance(part, str) for part in parts):  # a Fraction of "1e999999999" takes hours
            raise ValueError(f"a part of a {kind.__name__} is text")
        return kind(*parts)

    return (
        kind.__name__,
        lambda value, depth: _items((getattr(value, n) for n in names), depth),
        made,
    )


_FORMS: dict[type, _Form] = {
    **{kind: _of_items(kind) for kind in (tuple, set, frozenset)},
    **{kind: _of_bytes(kind) for kind in (bytes, bytearray)},
    **{kind: _of_text(kind) for kind in (decimal.Decimal, uuid.UUID, pathlib.PurePosixPath)},
    **{kind: _of_time(kind) for kind in (datetime.datetime, datetime.time)},
    **{kind: _of_members(kind) for kind in (argparse.Namespace, types.SimpleNamespace)},
    complex: _of_parts(complex, "real", "imag"),
    range: _of_parts(range, "start", "stop", "step"),
    slice: ("slice", _encode_slice, _of_parts(slice)[2]),
    datetime.timedelta: _of_parts(datetime.timedelta, "days", "seconds", "microseconds"),
    fractions.Fraction: _of_parts(fractions.Fraction, "numerator", "denominator"),
    type(pathlib.Path()): ("Path", *_of_text(pathlib.Path)[1:]),
    datetime.date: ("date", lambda value, _: value.isoformat(), datetime.date.fromisoformat),
    io.BytesIO: ("BytesIO", lambda v, _: [_base64(v.getbuffer()), v.tell()], _stream),
    np.ndarray: ("ndarray", _encode_array, _array),
    collections.OrderedDict: (
        "OrderedDict",
        _pairs,
        lambda pairs: collections.OrderedDict(_decoded_pairs(pairs)),
    ),
    collections.Counter: ("Counter", _pairs, _counter),
    collections.defaultdict: ("defaultdict", _encode_defaultdict, _defaultdict),
    collections.deque: (
        "deque",
        lambda value, depth: [_items(value, depth), value.maxlen],
        lambda parts: collections.deque(decode(parts[0]), parts[1]),
    ),
}
"""Forms by the exact type, without subclasses."""

_DECODERS: dict[str, Callable[[Any], Any]] = {
    **{name: made for name, _, made in _FORMS.values()},
    "float": float,
    "text": json.loads,
    "dict": lambda pairs: dict(_decoded_pairs(pairs)),
    "Size": lambda items: _of_torch("Size", decode(items)),
    "device": lambda text: _of_torch("device", text),
    "dtype": _dtype,
    "Tensor": _tensor,
    "Parameter": _parameter,
    "numpy": _numpy,
    "numpy.dtype": np.dtype,
}
