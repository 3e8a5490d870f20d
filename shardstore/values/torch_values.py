"""Read files of ``torch.save`` without running code that the file chooses.

The pickle in such a file names functions and classes. This module maps each known name to a
function that checks the arguments and builds a new value. So a damaged or hostile file makes the
load use no more memory than its size, and reaches no other memory. Other classes load only if the
program allows them (``torch.serialization.add_safe_globals``).
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import fractions
import io
import math
import pathlib
import pickle
import sys
import types
import uuid
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, cast
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import _weights_only_unpickler

from shardstore import errors
from shardstore.values.torch_archive import Records, Stream, verify_archive

_BLOCKED = ("sys", "os", "posix", "nt")
"""Modules whose functions and classes a program cannot allow, as in torch."""
_FILLED = {list, dict, set, collections.deque, collections.defaultdict, collections.Counter}
_FILLED |= {collections.OrderedDict}
NUMPY_CODES = "?bhilqBHILQefdFD"
"""Codes of NumPy's data types whose values are loaded."""
_ATTRIBUTED = {argparse.Namespace, types.SimpleNamespace, collections.OrderedDict}


_UNUSED = pickle.BYTEARRAY8 + pickle.NEXT_BUFFER + pickle.READONLY_BUFFER
_UNUSED += pickle.INST + pickle.OBJ + pickle.NEWOBJ_EX + pickle.EXT1 + pickle.EXT2 + pickle.EXT4
"""Operations that take any size, or call classes in ways that ``torch.save`` does not use."""


class BoundedUnpickler(pickle._Unpickler):
    """The Python unpickler of the standard library. The C unpickler allocates any size that a
    number in the pickle claims."""

    stack: list[Any]
    metastack: list[list[Any]]
    dispatch: ClassVar[dict[int, Any]] = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if code not in _UNUSED
    }


class RefusedError(Exception):
    """An undamaged pickle needs something that this program does not load.

    Its arguments are a description of it, and the remedy.
    """


class _Unfilled:
    """Placeholder for a value that a pickle creates empty and fills later."""

    def __init__(self, fill: Callable[[Any], Any]) -> None:
        self.fill = fill
        self.number: int | None = None


class _PickledName:
    """A name in a pickle that is no value.

    Args:
        meaning: the function to call, or the data type of a storage.
    """

    def __init__(self, meaning: Any) -> None:
        self.meaning = meaning


class _Memo(dict[int, Any]):
    def __setitem__(self, number: int, value: Any) -> None:
        if type(value) is _Unfilled:
            value.number = number
        super().__setitem__(number, value)


# -- what the names in a pickle stand for ----------------------------------------------------------


def _require(fits: bool, what: str) -> None:
    if not fits:
        raise pickle.UnpicklingError(f"not as a program writes it: {what}")


def _full_name(module: str, name: str) -> str:
    return f"{module}.{name}".replace("pathlib._local.", "pathlib.")  # Python 3.13


def _of(kind: type, *allowed: type) -> Callable[..., Any]:
    """Return a function that makes a value of a type from arguments of the allowed types."""

    def make(*args: Any) -> Any:
        _require(all(type(arg) in allowed for arg in args), f"arguments of {kind.__name__}")
        return kind(*args)

    return make


def _encode(text: str, encoding: str) -> bytes:
    _require(encoding in ("latin1", "latin-1"), f"bytes encoded as {encoding!r}")
    return text.encode("latin1")


def _defaultdict(kind: Any = None) -> collections.defaultdict[Any, Any]:
    _require(kind is None or kind in _MAKERS, "what a defaultdict makes")
    return collections.defaultdict(kind)


def _bytes_io(content: bytes, position: int, _: object) -> io.BytesIO:
    _require(type(content) is bytes, "content of BytesIO")
    made = io.BytesIO(content)
    made.seek(position)
    return made


def _numpy_dtype(code: str, align: bool, copy: bool) -> _Unfilled:
    dtype = np.dtype(code) if type(code) is str else None
    if dtype is None or dtype.char not in NUMPY_CODES:
        remedy = "read the file by torch.load(..., weights_only=False)"
        raise RefusedError(f"NumPy's data type {code!r}, which is not loaded", remedy)
    return _Unfilled(lambda state: np.dtype(dtype.newbyteorder(state[1]).str))


def _numpy_array(shape: tuple[int, ...], dtype: np.dtype[Any], fortran: bool, data: bytes) -> Any:
    sizes = all(type(n) is int and n >= 0 for n in shape)
    _require(sizes and isinstance(dtype, np.dtype) and type(data) is bytes, "a NumPy array")
    _require(math.prod(shape) * dtype.itemsize == len(data), "the size of a NumPy array")
    order: Any = "F" if fortran else "C"
    return np.ndarray(shape, dtype, data, order=order).copy(order)


def _numpy_empty(kind: type, shape: object, code: object) -> _Unfilled:
    _require(kind is np.ndarray, "a class of NumPy arrays")
    return _Unfilled(lambda state: _numpy_array(*state[1:]))


def _numpy_scalar(dtype: np.dtype[Any], data: bytes) -> Any:
    return _numpy_array((), dtype, False, data)[()]


def _sparse(layout: torch.layout, data: Sequence[Any]) -> torch.Tensor:
    device = data[0].device
    if layout == torch.sparse_coo:
        return torch.sparse_coo_tensor(*data[:3], device=device, check_invariants=True)
    return torch.sparse_compressed_tensor(
        *data, layout=layout, device=device, check_invariants=True
    )


def _subclassed(rebuild: _PickledName, kind: Any, args: Any, state: Any) -> Any:
    _require(type(rebuild) is _PickledName and rebuild.meaning in _REBUILD, "a tensor")
    return torch._tensor._rebuild_from_type_v2(rebuild.meaning, kind, args, state)  # type: ignore[no-untyped-call]


def _member(kind: Any, name: str) -> enum.Enum:
    """Return a member of an allowed enumeration, which Python 3.11.0 to 3.11.3 store as a call of
    ``getattr``."""
    if isinstance(kind, enum.EnumMeta) and type(name) is str and name in kind.__members__:
        return cast(enum.Enum, kind[name])
    raise RefusedError(
        f"a call of getattr for {name!r:.100}",
        "if you trust the file, allow it before loading: "
        "torch.serialization.add_safe_globals([getattr])",
    )


_REBUILD: list[Any] = [
    torch._utils._rebuild_tensor,
    torch._utils._rebuild_tensor_v2,
    torch._utils._rebuild_tensor_v3,
    torch._utils._rebuild_parameter,
    torch._utils._rebuild_parameter_with_state,
    torch._utils._rebuild_wrapper_subclass,
    torch._utils._rebuild_meta_tensor_no_storage,
]
_MAKERS: dict[type, Callable[..., Any]] = {
    **{kind: _of(kind) for kind in (bool, bytes, dict, float, int, list, str, tuple)},
    **{kind: _of(kind) for kind in (argparse.Namespace, types.SimpleNamespace)},
    **{kind: _of(kind, list) for kind in (set, frozenset, collections.OrderedDict)},
    **{kind: _of(kind, int) for kind in (range, datetime.timedelta, fractions.Fraction)},
    **{kind: _of(kind, str) for kind in (decimal.Decimal, pathlib.Path, pathlib.PosixPath)},
    pathlib.PurePosixPath: _of(pathlib.PurePosixPath, str),
    bytearray: _of(bytearray, bytes),
    complex: _of(complex, float, int),
    slice: lambda *bounds: slice(*bounds),
    collections.Counter: _of(collections.Counter, dict),
    collections.deque: _of(collections.deque, tuple, list, int),
    collections.defaultdict: _defaultdict,
    datetime.date: _of(datetime.date, bytes, int),
    datetime.datetime: _of(datetime.datetime, bytes, int, datetime.timezone),
    datetime.time: _of(datetime.time, bytes, int, datetime.timezone),
    datetime.timezone: _of(datetime.timezone, datetime.timedelta, str),
    uuid.UUID: lambda: _Unfilled(lambda state: uuid.UUID(int=state["int"])),
    io.BytesIO: lambda: _Unfilled(lambda state: _bytes_io(*state)),
    np.dtype: _numpy_dtype,
    torch.Size: _of(torch.Size, tuple),
    torch.device: _of(torch.device, str, int),
}
"""Class -> function that is called instead of it. The class itself may be a value of a file."""
_KNOWN: dict[str, Any] = {
    **{f"torch._utils.{function.__name__}": function for function in _REBUILD},
    **{_full_name(kind.__module__, kind.__name__): kind for kind in _MAKERS},
    "torch._tensor._rebuild_from_type_v2": _subclassed,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch.serialization._get_layout": torch.serialization._get_layout,
    "torch.Tensor": torch.Tensor,
    "torch.nn.parameter.Parameter": torch.nn.Parameter,
    "numpy.ndarray": np.ndarray,
    **{f"numpy.{core}.multiarray._reconstruct": _numpy_empty for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _numpy_scalar for core in ("core", "_core")},
    "_codecs.encode": _encode,
}


_FILLING = {pickle.APPEND: 2, pickle.SETITEM: 3}
_FILLING |= dict.fromkeys((pickle.APPENDS, pickle.SETITEMS, pickle.ADDITEMS), 0)
"""Operations that add items -> position of the container on the stack from the end; 0: it is the
last value before the mark."""


def _filling(code: int, position: int) -> Callable[[_ValuesUnpickler], None]:
    """Return an operation that adds items to a container, and refuses unknown containers."""

    def fill(self: _ValuesUnpickler) -> None:
        kind = type(self.stack[-position] if position else self.metastack[-1][-1])
        _require(kind in _FILLED or id(kind) in self._allowed_ids, "items")
        BoundedUnpickler.dispatch[code](self)

    return fill


class _ValuesUnpickler(BoundedUnpickler):
    """Unpickler for files of ``torch.save``.

    Args:
        file: the pickle.
        storage: returns a storage by its name and size in bytes.
    """

    def __init__(
        self, file: io.BytesIO, storage: Callable[[str, int], torch.UntypedStorage]
    ) -> None:
        super().__init__(file)
        self.memo: dict[int, Any] = _Memo()
        self._storage = storage
        self._storages: dict[str, Any] = {}
        self._allowed = cast(Any, _weights_only_unpickler)._get_user_allowed_globals()
        self._allowed_ids = {id(value) for value in self._allowed.values()}
        self._unfilled = 0
        self._names: WeakValueDictionary[str, _PickledName] = WeakValueDictionary()

    def find_class(self, module: str, name: str) -> Any:
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        full = _full_name(module, name)
        if (known := _KNOWN.get(full)) is not None:
            return known if isinstance(known, type) else self._named(full, known)
        if full in self._allowed and module not in _BLOCKED:
            return self._allowed[full]
        for kind in self._allowed.values():  # members that Python 3.11.0 to 3.11.3 store by name
            if isinstance(kind, enum.EnumMeta) and kind.__module__ == module:
                member = vars(sys.modules[module]).get(name)
                if type(member) is kind:
                    return member
        if full == "builtins.getattr":
            return self._named(full, _member)
        if full == "torch.storage.UntypedStorage":
            return self._named(full, torch.uint8)
        if module in ("torch", "torch.cuda") and name.endswith("Storage"):
            return self._named(full, cast(Any, torch.serialization).StorageType(name).dtype)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        loaded = sys.modules.get(module)
        kind = vars(loaded).get(name) if loaded is not None else None
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
            return kind  # a value of the groups of Megatron-Core's offloaded optimizer; not called
        remedy = f"allow it before loading: torch.serialization.add_safe_globals([{full}])"
        raise RefusedError(f"class {full}, which was not allowed to be loaded", remedy)

    def _named(self, full: str, meaning: Any) -> _PickledName:
        return self._names.setdefault(full, _PickledName(meaning))

    def persistent_load(self, pid: Any) -> Any:
        kind, of, name, _, count = pid
        dtype: Any = of.meaning if type(of) is _PickledName else None
        fits = isinstance(dtype, torch.dtype) and type(count) is int and count >= 0
        _require(kind == "storage" and fits, "a storage")
        if name not in self._storages:
            untyped = self._storage(name, count * dtype.itemsize)
            self._storages[name] = cast(Any, torch.storage).TypedStorage(
                wrap_storage=untyped, dtype=dtype, _internal=True
            )
        return self._storages[name]

    def load(self) -> Any:
        value = super().load()
        self.memo.clear()
        for held in self._names:  # whatever is not in the value has gone
            remedy = "read the file by torch.load(..., weights_only=False)"
            raise RefusedError(f"{held} as a value, which is not loaded", remedy)
        _require(self._unfilled == 0, "a value that is never filled")
        return value

    def _make(self, *, new: bool) -> None:
        args, kind = self.stack.pop(), self.stack[-1]
        if id(kind) in self._allowed_ids:
            made = kind.__new__(kind, *args) if new else kind(*args)
        else:
            maker: Any = kind.meaning if type(kind) is _PickledName else _MAKERS.get(kind)
            _require(isinstance(maker, types.FunctionType), "a call")
            made = maker(*args)
            self._unfilled += type(made) is _Unfilled
        self.stack[-1] = made

    def _build(self) -> None:
        target, state = self.stack[-2:]
        if type(target) is _Unfilled:
            self.stack.pop()
            self.stack[-1] = target.fill(state)
            self._unfilled -= 1
            if target.number is not None:
                self.memo[target.number] = self.stack[-1]
        elif type(target) in _ATTRIBUTED:
            vars(target).update(self.stack.pop())
        else:
            is_member = isinstance(target, enum.Enum)  # one for the whole process
            _require(id(type(target)) in self._allowed_ids and not is_member, "a state")
            BoundedUnpickler.dispatch[pickle.BUILD[0]](self)

    dispatch: ClassVar[dict[int, Any]] = {
        **BoundedUnpickler.dispatch,
        **{code[0]: _filling(code[0], depth) for code, depth in _FILLING.items()},
        pickle.REDUCE[0]: partial(_make, new=False),
        pickle.NEWOBJ[0]: partial(_make, new=True),
        pickle.BUILD[0]: _build,
    }


def load_bytes(
    data: bytes | Stream, url: str, key: str | None = None, *, meta: bool = False
) -> Any:
    """Load a file of ``torch.save`` without running code from it.

    Args:
        data: the content of the file; or the open file, whose checksums are not verified.
        url: URL of the file, for error texts.
        key: key of the object in the file, for error texts.
        meta: whether tensors are on the device ``meta``, without memory.

    Raises:
        UnsafeObjectError: the file needs a class that is not allowed; the text names the remedy.
        DamagedCheckpointError: the file is damaged, or not a file of ``torch.save``.
    """
    about = f" (object {key!r})" if key is not None else ""
    with errors.as_damage(url, f"{url}{about} cannot be read", key):
        records = verify_archive(data) if isinstance(data, bytes) else Records(data)
        try:
            return unpickled(records, meta=meta)
        except RefusedError as error:
            what, remedy = error.args
            raise errors.UnsafeObjectError(
                f"{url}{about} needs {what}. If you trust this checkpoint, {remedy}",
                key=key,
                url=url,
            ) from None


def unpickled(records: Records, *, meta: bool = False) -> Any:
    """Return the value in an archive; for ``meta``, see :func:`load_bytes`.

    Raises:
        RefusedError: this program does not load it.
        Exception: the archive is damaged, or was not written by ``torch.save``.
    """
    is_little = "byteorder" not in records.entries or records.read("byteorder") == b"little"
    _require(is_little, "its byte order")

    def storage(name: str, nbytes: int) -> torch.UntypedStorage:
        if meta:
            return torch.UntypedStorage(nbytes, device="meta")  # type: ignore[no-untyped-call]
        found = records.read(f"data/{name}")
        _require(len(found) == nbytes, "the size of a tensor")
        return torch.frombuffer(found or bytearray(1), dtype=torch.uint8).untyped_storage()

    return _ValuesUnpickler(io.BytesIO(records.read("data.pkl")), storage).load()
