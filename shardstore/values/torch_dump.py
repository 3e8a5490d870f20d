"""Write values as ``torch.save`` does, with the memory that their tensors use.

``torch.save`` writes whole storages: for a view of 400 bytes, all of the 200 MB that it is a view
of. Here a storage is written whole, and shared by its tensors, if the value's distinct views of it
take as many bytes together. Otherwise each of them is written as a storage of its own, without the
gaps between its elements.

:func:`require_loadable` checks before a save that :mod:`.torch_values` can load the values again.
"""

from __future__ import annotations

import collections
import io
import math
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import IO, Any, cast

import numpy as np
import torch

from shardstore import errors
from shardstore.storage.format import dtypes
from shardstore.values.torch_archive import Records
from shardstore.values.torch_values import NUMPY_CODES, RefusedError, unpickled

_View = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]
"""Offset, shape and strides of a tensor in its storage, in elements of a data type."""
_PLAIN = (str, int, float, bool, type(None), bytes, complex, torch.dtype, torch.device, torch.Size)
_SURE = {type(None), bool, int, float, complex, str, bytes, io.BytesIO}
"""Types whose values can always be loaded, so that a save need not test them."""
_ALLOW = (
    ", or allow its class in the programs that save and load (torch.serialization.add_safe_globals)"
)
_Place = Callable[[torch.UntypedStorage, _View], tuple[Any, _View]]
"""Takes storage and view of a tensor, and returns those that are pickled."""


def _size(view: _View) -> int:
    """Return the bytes that a view takes alone; an expanded axis has one element in memory."""
    _, shape, strides, dtype = view
    held = (n if step else min(n, 1) for n, step in zip(shape, strides, strict=True))
    return math.prod(held) * dtype.itemsize


def _copied(storage: torch.UntypedStorage, view: _View) -> tuple[torch.UntypedStorage, _View]:
    offset, shape, strides, dtype = view
    size = dtype.itemsize
    held = [n if step else min(n, 1) for n, step in zip(shape, strides, strict=True)]
    memory = torch.empty(0, dtype=torch.uint8, device=storage.device)
    memory.set_(storage, offset * size, (*held, size), (*[step * size for step in strides], 1))
    copy = memory.clone(memory_format=torch.contiguous_format)
    steps = [new // size if old else 0 for new, old in zip(copy.stride(), strides, strict=False)]
    return copy.untyped_storage(), (0, shape, tuple(steps), dtype)


def _pickler(place: _Place) -> type[pickle.Pickler]:
    """Return a class of picklers that use ``place`` for tensors that are views of a storage."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return NotImplemented
            _require_own(value)
            function, args, *more = cast(Any, value).__reduce_ex__(2)
            is_subclass = function is torch._tensor._rebuild_from_type_v2
            first, *rest = args[2] if is_subclass else args
            storage = getattr(first, "_untyped_storage", first)
            if not isinstance(storage, torch.UntypedStorage) or storage.device.type == "meta":
                return NotImplemented
            memory, view = place(storage, (*rest[:3], value.dtype))
            if memory is not None and storage is not first:
                kind = cast(Any, torch.storage).TypedStorage
                memory = kind(wrap_storage=memory, dtype=first.dtype, _internal=True)
            made = (memory, *view[:3], *rest[3:])
            return function, (*args[:2], made, *args[3:]) if is_subclass else made, *more

    return Pickler


def _require_own(value: Any) -> None:
    """Refuse a DTensor that ranks share: loaded, it would have the part and the place in the mesh
    of the rank that saved it, on every rank."""
    if hasattr(value, "placements") and value.device_mesh.size() > 1:
        raise errors.AccessPatternError(
            f"it holds a DTensor of shape {tuple(value.shape)} and placements {value.placements}; "
            "keep it in a dict or list, which are searched for DTensors, or give its full_tensor()"
        )


def _pickler_for(value: object) -> type[pickle.Pickler]:
    """Return a class of picklers for one value."""
    views: collections.defaultdict[int, set[_View]] = collections.defaultdict(set)
    copies: dict[Any, tuple[torch.UntypedStorage, _View]] = {}

    def found(storage: torch.UntypedStorage, view: _View) -> tuple[None, _View]:
        views[storage._cdata].add(view)
        return None, view

    nowhere = cast(Any, SimpleNamespace(write=len))
    _pickler(found)(nowhere, 5, buffer_callback=lambda _: None).dump(value)
    used = {storage: sum(map(_size, of_storage)) for storage, of_storage in views.items()}

    def place(storage: torch.UntypedStorage, view: _View) -> tuple[torch.UntypedStorage, _View]:
        name = storage._cdata, view
        # Storages that an object makes whenever it is pickled are not in ``used``.
        if used.get(storage._cdata, sys.maxsize) >= storage.nbytes():
            return storage, view
        if name not in copies:
            copies[name] = _copied(storage, view)
        return copies[name]

    return _pickler(place)


def _uses_whole_storages(value: Any) -> bool:
    """Return whether a value consists of plain containers, plain values, and tensors that each use
    all of their storage. ``torch.save`` alone writes it without further bytes, and pickling it
    twice would take longer than all other work of a save with thousands of tensors."""
    kind = type(value)
    if kind is dict:
        return all(map(_uses_whole_storages, value)) and all(
            map(_uses_whole_storages, value.values())
        )
    if kind in (list, tuple):
        return all(map(_uses_whole_storages, value))
    if kind is not torch.Tensor:
        return kind in _PLAIN
    is_strided = value.layout is torch.strided and value.device.type != "meta"
    return is_strided and value.nbytes == value.untyped_storage().nbytes()


def dump(value: object, file: IO[bytes]) -> None:
    """Write a value to the end of a file in the format of ``torch.save``."""
    if _uses_whole_storages(value):
        torch.save(value, file)
        return
    module = SimpleNamespace(__name__="pickle", Pickler=_pickler_for(value))
    torch.save(value, file, pickle_module=module)


def dump_bytes(value: object) -> bytes:
    """Return a value in the format of ``torch.save``."""
    out = io.BytesIO()
    dump(value, out)
    return out.getvalue()


def pickled(value: object) -> bytes:
    """Return a value as :func:`pickle.dumps` writes it, with the memory that its tensors use."""
    out = io.BytesIO()
    _pickler_for(value)(out).dump(value)
    return out.getvalue()


# -- check before a save that values can be loaded -------------------------------------------------


def require_loadable(
    value: object, what: str, *, refuse_classes: bool = True, refuse_meta: bool = True
) -> None:
    """Check that :func:`.load_bytes` can load a value again.

    Values of types that may fail are written and read again, in memory.

    Args:
        value: nested dicts, lists and tuples.
        what: name of the value in the error text.
        refuse_classes: refuse a class that ``load_bytes`` loads only if the program allows it.
        refuse_meta: refuse tensors on the meta device, which have no values to save.

    Raises:
        CheckpointingException: a value cannot be loaded; the text names its path and type. It is a
            :class:`DTypeMismatchError` for a tensor.
    """
    doubtful = list(_doubtful(value, ()))
    if not doubtful or _problem([found for _, found in doubtful], refuse_meta) is None:
        return
    for path, found in doubtful:
        if (error := _problem([found], refuse_meta)) is not None:
            kind, place = type(found), ".".join(map(str, path))
            is_refused = isinstance(error, RefusedError)
            if is_refused and not refuse_classes:
                continue
            why = f"it needs {error.args[0]}" if is_refused else str(error)
            is_tensor = isinstance(found, torch.Tensor)
            is_numpy = isinstance(found, np.ndarray | np.generic)  # of a type that has no class
            how = " (its tolist())" * is_numpy
            how += " (its get_state())" * isinstance(found, torch.Generator)
            raise (errors.DTypeMismatchError if is_tensor else errors.CheckpointingException)(
                f"{what}{place and f' at {place!r}'} is a {kind.__module__}.{kind.__qualname__} "
                f"that could not be loaded again: {why}. Store plain values in its place{how}, "
                f"or keep it out with LocalNonpersistentObject{_ALLOW * (is_refused > is_numpy)}",
                key=place,
            ) from error


def _doubtful(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the values whose types do not guarantee that they can be loaded, with their paths."""
    if type(value) in (dict, collections.OrderedDict):
        for key in value:
            if type(key) not in _SURE:
                yield (*path, key), key
    elif type(value) not in (list, tuple, set, frozenset):
        if type(value) not in _SURE and not _is_plain_array(value):
            yield path, value
        return
    for name, item in value.items() if isinstance(value, dict) else enumerate(value):
        if type(item) not in _SURE:
            yield from _doubtful(item, (*path, name))


def _is_plain_array(value: Any) -> bool:
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        is_known = str(value.dtype).removeprefix("torch.") in dtypes.names()
        if is_known and dtypes.is_plain(value) and not vars(value):
            with suppress(errors.ArgumentError):
                dtypes.require_memory(value)
                return True
        return False
    is_numpy = type(value) is np.ndarray or isinstance(value, np.generic)
    return is_numpy and type(value).__module__ == "numpy" and value.dtype.char in NUMPY_CODES


def _problem(values: Sequence[Any], refuse_meta: bool) -> Exception | None:
    """Return the error of writing values and reading them again; ``None`` if they are loaded with
    the same types."""
    try:
        for value in values:
            if isinstance(value, torch.Tensor) and value.is_meta:
                if refuse_meta:
                    raise TypeError("it is on the meta device, where tensors have no values")
            elif isinstance(value, torch.Tensor) and (
                value.layout is torch.strided or value.is_nested
            ):
                if not dtypes.is_plain(value):
                    how = dtypes.how_to_save(value)
                    raise TypeError(f"its elements are not plain memory ({how})")
                dtypes.require_memory(value)
        found = unpickled(Records(io.BytesIO(dump_bytes(values))))
        for one, other in zip(values, found, strict=True):
            if type(one) is not type(other):
                raise TypeError(f"it would be loaded as a {type(other).__name__}")
    except Exception as error:  # methods of a class may raise any exception
        return error
    return None
