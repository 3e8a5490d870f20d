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
import re
import types
import uuid
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardstore.storage.format import dtypes

if TYPE_CHECKING:
    import torch


_TAG = "$type"
_MAX_DEPTH = 200
_SURROGATE = re.compile("[\ud800-\udfff]")

_PLAIN = "biufcmMSU"
"""Kinds of NumPy's data types whose values are defined by their bytes."""

_FACTORIES: dict[str | None, Callable[[], Any] | None] = {
    None: None,
    **{kind.__name__: kind for kind in (bool, bytes, complex, dict, float, int, list, set)},
    **{kind.__name__: kind for kind in (str, tuple)},
}


class NotPlainError(TypeError):
    """The value has no JSON form."""


def encode(value: Any, depth: int = 0) -> Any:
    """Return the JSON form of a value, for ``json.dumps``.

    Args:
        value: the value.
        depth: number of lists and dicts around it.

    Raises:
        NotPlainError: the value has no JSON form; the text names its type.
    """
    if depth > _MAX_DEPTH:
        raise NotPlainError(f"nested deeper than {_MAX_DEPTH} levels")
    kind = type(value)
    if value is None or kind in (bool, int) or _is_text(value):
        return value
    if kind is float and math.isfinite(value):
        return value
    if kind is list:
        return [encode(item, depth + 1) for item in value]
    if kind is dict and _TAG not in value and all(map(_is_text, value)):
        return {key: encode(item, depth + 1) for key, item in value.items()}
    of_numpy = next((base for base in (np.generic, np.dtype) if isinstance(value, base)), kind)
    form = _FORMS.get(of_numpy) or _FORMS.get(f"{kind.__module__}.{kind.__qualname__}")
    if form is None:
        raise NotPlainError(f"{kind.__module__}.{kind.__qualname__} has no JSON form")
    return {_TAG: form.name, "value": encode(form.parts(value), depth)}


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
    name = document[_TAG]
    make = _MAKERS.get(name) if isinstance(name, str) else None
    if make is None:
        raise ValueError(f"unknown type {name!r} of a stored value")
    try:
        parts = decode(document["value"])
        return make(parts if isinstance(parts, str | dict) else _list(parts))
    except (LookupError, TypeError, AttributeError, RuntimeError, ArithmeticError) as error:
        raise ValueError(f"stored value of type {name!r} is malformed") from error


def _is_text(value: Any) -> bool:
    """Return whether a value is a string without lone surrogates, which JSON files cannot hold."""
    return type(value) is str and (value.isascii() or _SURROGATE.search(value) is None)


def _list(parts: Any) -> list[Any]:
    """Return a list from a document. A range is refused, because a small one in the file can stand
    for more items than memory holds."""
    if type(parts) is not list:
        raise TypeError(f"a {type(parts).__name__} is not a list")
    return parts


def _base64(data: bytes | bytearray | memoryview) -> str:
    return b64encode(data).decode("ascii")


def _pairs(value: Mapping[Any, Any]) -> list[list[Any]]:
    return [[key, item] for key, item in value.items()]


# -- types whose forms take more than a line -------------------------------------------------------


def _defaultdict_parts(value: collections.defaultdict[Any, Any]) -> list[Any]:
    name = getattr(value.default_factory, "__name__", None)
    if _FACTORIES.get(name) is not value.default_factory:
        raise NotPlainError(
            f"collections.defaultdict of {value.default_factory!r:.100} has no JSON form"
        )
    return [name, _pairs(value)]


def _defaultdict(parts: list[Any]) -> collections.defaultdict[Any, Any]:
    return collections.defaultdict(_FACTORIES[parts[0]], parts[1])


def _deque(parts: list[Any]) -> collections.deque[Any]:
    return collections.deque(_list(parts[0]), parts[1])


def _time_parts(value: datetime.datetime | datetime.time) -> list[Any]:
    if type(value.tzinfo) not in (type(None), datetime.timezone):
        kind = type(value).__name__
        raise NotPlainError(f"datetime.{kind} in the time zone {value.tzinfo} has no JSON form")
    text = value.isoformat()
    if type(value).fromisoformat(text).utcoffset() != value.utcoffset():  # of microseconds
        raise NotPlainError(f"an offset of {value.utcoffset()!r} from UTC has no JSON form")
    return [text, value.fold]


def _stream(parts: list[Any]) -> io.BytesIO:
    stream = io.BytesIO(b64decode(parts[0]))
    stream.seek(parts[1])
    return stream


def _numpy_dtype(code: str) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(code)
    _numpy_code(dtype)
    return dtype


def _numpy_code(dtype: np.dtype[Any]) -> str:
    if dtype.kind not in _PLAIN:
        raise NotPlainError(f"NumPy's dtype {dtype} has no JSON form")
    return dtype.str


def _array(parts: list[Any]) -> np.ndarray[Any, Any]:
    code, shape, text = parts
    dtype = _numpy_dtype(code)
    return np.ndarray(_list(shape), dtype, _memory(text, shape, dtype.itemsize))


def _memory(text: str, shape: list[int], itemsize: int) -> bytearray:
    """Return the bytes of an array, in memory that can be written."""
    data, wanted = bytearray(b64decode(text)), math.prod(_list(shape)) * itemsize
    if len(data) != wanted:
        raise ValueError(f"{len(data)} bytes are stored for an array of {wanted}")
    return data


def _scalar_parts(value: np.generic) -> list[str]:
    # tobytes() of empty text returns bytes although its item size is 0.
    parts = [_numpy_code(value.dtype), _base64(value.tobytes()[: value.dtype.itemsize])]
    kind = type(value)
    if kind is not value.dtype.type:
        raise NotPlainError(f"{kind.__module__}.{kind.__qualname__} has no JSON form")
    if _scalar(parts).dtype != value.dtype:
        raise NotPlainError(f"{kind.__name__} that ends with a null character has no JSON form")
    return parts


def _scalar(parts: list[str]) -> np.generic:
    scalar: np.generic = _array([parts[0], [1], parts[1]])[0]
    return scalar


def _tensor_parts(tensor: torch.Tensor) -> list[Any]:
    import torch

    try:
        if not dtypes.is_plain(tensor):
            raise TypeError("its elements are not plain memory")
        plain = tensor.detach().cpu().resolve_conj().resolve_neg()
        # Not reshape, because a single element that keeps a stride cannot be viewed as bytes.
        flat = plain.contiguous().as_strided((plain.numel(),), (1,))
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        shape = list(tensor.shape)
    except (RuntimeError, TypeError) as error:
        what = f"a tensor of dtype {tensor.dtype}, layout {tensor.layout}, on {tensor.device}"
        raise NotPlainError(f"{what}, has no JSON form") from error
    return [_torch_name(tensor.dtype), shape, _base64(data), tensor.requires_grad]


def _torch_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a data type of torch")
    return found


def _tensor(parts: list[Any]) -> torch.Tensor:
    import torch

    name, shape, text, requires_grad = parts
    dtype = _torch_dtype(name)
    data = torch.from_numpy(np.frombuffer(_memory(text, shape, dtype.itemsize), np.uint8))
    return data.view(dtype).reshape(shape).requires_grad_(bool(requires_grad))


def _parameter(parts: list[Any]) -> torch.nn.Parameter:
    from torch.nn import Parameter

    return Parameter(_tensor([*parts[:3], False]), requires_grad=bool(parts[3]))


# -- all forms -------------------------------------------------------------------------------------


class _Form(NamedTuple):
    """The JSON form of a type.

    Attributes:
        name: name of the type.
        parts: returns a list, dict or string from which the value can be made again. Items of the
            list or dict may be of any type with a JSON form.
        made: makes the value.
    """

    name: str
    parts: Callable[[Any], list[Any] | dict[str, Any] | str]
    made: Callable[[Any], Any]


def _of_time(kind: Any) -> _Form:
    made = lambda parts: kind.fromisoformat(parts[0]).replace(fold=parts[1])  # noqa: E731
    return _Form(kind.__name__, _time_parts, made)


def _of_members(kind: Any) -> _Form:
    def made(members: dict[str, Any]) -> Any:
        space = kind()
        vars(space).update(members)
        return space

    return _Form(kind.__name__, vars, made)


def _of_numbers(kind: Any, *names: str) -> _Form:
    def checked(numbers: list[Any]) -> list[Any]:
        if any(isinstance(part, str) for part in numbers):  # Fraction("1e999999999") takes hours
            raise NotPlainError(f"a {kind.__name__} with text, {numbers!r:.100}, has no JSON form")
        return numbers

    return _Form(
        kind.__name__,
        lambda value: checked([getattr(value, name) for name in names]),
        lambda numbers: kind(*checked(numbers)),
    )


_FORMS: dict[type | str, _Form] = {
    **{kind: _Form(kind.__name__, list, kind) for kind in (tuple, set, frozenset)},
    **{kind: _Form(kind.__name__, str, kind) for kind in (decimal.Decimal, uuid.UUID)},
    **{kind: _of_time(kind) for kind in (datetime.datetime, datetime.time)},
    **{kind: _of_members(kind) for kind in (argparse.Namespace, types.SimpleNamespace)},
    float: _Form("float", repr, float),  # not finite
    str: _Form("text", json.dumps, json.loads),  # with lone surrogates
    dict: _Form("dict", _pairs, dict),  # with other keys than text
    bytes: _Form("bytes", _base64, b64decode),
    bytearray: _Form("bytearray", _base64, lambda text: bytearray(b64decode(text))),
    io.BytesIO: _Form("BytesIO", lambda v: [_base64(v.getbuffer()), v.tell()], _stream),
    complex: _of_numbers(complex, "real", "imag"),
    range: _of_numbers(range, "start", "stop", "step"),
    slice: _of_numbers(slice, "start", "stop", "step"),
    fractions.Fraction: _of_numbers(fractions.Fraction, "numerator", "denominator"),
    datetime.timedelta: _of_numbers(datetime.timedelta, "days", "seconds", "microseconds"),
    datetime.date: _Form("date", datetime.date.isoformat, datetime.date.fromisoformat),
    type(pathlib.Path()): _Form("Path", str, pathlib.Path),
    pathlib.PurePosixPath: _Form("PurePosixPath", str, pathlib.PurePosixPath),
    collections.OrderedDict: _Form("OrderedDict", _pairs, collections.OrderedDict),
    collections.Counter: _Form("Counter", _pairs, lambda pairs: collections.Counter(dict(pairs))),
    collections.defaultdict: _Form("defaultdict", _defaultdict_parts, _defaultdict),
    collections.deque: _Form("deque", lambda value: [list(value), value.maxlen], _deque),
    np.ndarray: _Form(
        "ndarray", lambda a: [_numpy_code(a.dtype), list(a.shape), _base64(a.tobytes())], _array
    ),
    np.generic: _Form("numpy", _scalar_parts, _scalar),
    np.dtype: _Form("numpy.dtype", _numpy_code, _numpy_dtype),
    "torch.Size": _Form("Size", list, lambda sizes: import_module("torch").Size(sizes)),
    "torch.device": _Form("device", str, lambda text: import_module("torch").device(text)),
    "torch.dtype": _Form("dtype", _torch_name, _torch_dtype),
    "torch.Tensor": _Form("Tensor", _tensor_parts, _tensor),
    "torch.nn.parameter.Parameter": _Form("Parameter", _tensor_parts, _parameter),
}
"""Forms by the exact type, or by its name if it is a type of torch. :class:`numpy.generic` and
:class:`numpy.dtype` stand for all of NumPy's numbers and data types."""

_MAKERS = {form.name: form.made for form in _FORMS.values()}
