"""Write values as ``torch.save`` does, with the memory that their tensors use.

``torch.save`` writes whole storages: for a view of 400 bytes, all of the 200 MB that it is a view
of. Here a storage is written whole, and shared by its tensors, if the value's distinct views of it
take as many bytes together. Otherwise each of them is written as a storage of its own.
"""

from __future__ import annotations

import io
import math
import pickle
import sys
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import IO, Any, NamedTuple, cast

import torch


class _View(NamedTuple):
    """Offset, shape and strides of a tensor in its storage, in elements of a data type."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def extent(self) -> int:
        """Number of elements from the first to the last one; fewer than all if it is expanded."""
        steps = (s * (n - 1) for s, n in zip(self.strides, self.shape, strict=True))
        return 1 + sum(steps) if self.size else 0

    @property
    def nbytes(self) -> int:
        """Bytes that the view takes alone."""
        return min(self.size, self.extent) * self.dtype.itemsize

    def copied(self, storage: torch.UntypedStorage) -> tuple[torch.UntypedStorage, _View]:
        """Return a copy of the view's memory, without gaps, and the view of it."""
        size = self.dtype.itemsize
        start = self.offset * size
        memory = torch.empty(0, dtype=torch.uint8, device=storage.device)
        if self.extent <= self.size:
            memory.set_(storage, start, (self.extent * size,), (1,))
            return memory.clone().untyped_storage(), self._replace(offset=0)
        strides = [stride * size for stride in self.strides]
        memory.set_(storage, start, (*self.shape, size), (*strides, 1))
        dense = [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        made = memory.contiguous().untyped_storage()
        return made, self._replace(offset=0, strides=tuple(dense))


_Form = Callable[[Any, _View], tuple[Any, ...]]


def _parts(tensor: torch.Tensor) -> tuple[torch.UntypedStorage, _View, _Form] | None:
    """Return the storage of a tensor, its view, and a function that makes the pickled form of the
    tensor with a storage and a view of it; ``None`` if it is not pickled as a view."""
    function, args, *more = cast(Any, tensor).__reduce_ex__(2)
    is_subclass = function is torch._tensor._rebuild_from_type_v2
    first, *inner = args[2] if is_subclass else args
    storage = getattr(first, "_untyped_storage", first)
    if not isinstance(storage, torch.UntypedStorage) or storage.device.type == "meta":
        return None

    def form(memory: torch.UntypedStorage | None, view: _View) -> tuple[Any, ...]:
        typed: Any = memory
        if memory is not None and storage is not first:
            kind = cast(Any, torch.storage).TypedStorage
            typed = kind(wrap_storage=memory, dtype=first.dtype, _internal=True)
        made = (typed, *view[:3], *inner[3:])
        return function, (*args[:2], made, *args[3:]) if is_subclass else made, *more

    return storage, _View(inner[0], inner[1], inner[2], tensor.dtype), form


class _Finder(pickle.Pickler):
    """Finds the views in a value, and writes nothing."""

    def __init__(self) -> None:
        nowhere = SimpleNamespace(write=len)
        super().__init__(cast(Any, nowhere), 5, buffer_callback=lambda _: None)
        self.views: defaultdict[int, set[_View]] = defaultdict(set)

    def reducer_override(self, value: Any) -> Any:
        """Note a tensor's view, and leave its storage out."""
        parts = _parts(value) if isinstance(value, torch.Tensor) else None
        if parts is None:
            return NotImplemented
        storage, view, form = parts
        self.views[storage._cdata].add(view)
        return form(None, view)


def _pickler_for(value: object) -> type[pickle.Pickler]:
    """Return a class of picklers for one value."""
    finder = _Finder()
    finder.dump(value)
    used = {storage: sum(view.nbytes for view in views) for storage, views in finder.views.items()}
    copies: dict[tuple[int, _View], tuple[torch.UntypedStorage, _View]] = {}

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            parts = _parts(value) if isinstance(value, torch.Tensor) else None
            if parts is None:
                return NotImplemented
            storage, view, form = parts
            # Storages that an object makes whenever it is pickled are not in ``used``.
            if used.get(storage._cdata, sys.maxsize) >= storage.nbytes():
                return NotImplemented
            name = storage._cdata, view
            if name not in copies:
                copies[name] = view.copied(storage)
            return form(*copies[name])

    return Pickler


def dump(value: object, file: IO[bytes]) -> None:
    """Write a value to the end of a file in the format of ``torch.save``."""
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
