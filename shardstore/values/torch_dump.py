"""Write values as ``torch.save`` does, with the memory that their tensors use.

``torch.save`` writes whole storages: for a view of 400 bytes, all of the 200 MB that it is a view
of. Here a tensor that uses its whole storage is written with it, and equal tensors share it. A view
of a part is written as a storage of its own, without the gaps between its elements.
"""

from __future__ import annotations

import io
import math
import pickle
from types import SimpleNamespace
from typing import IO, Any, cast

import torch

_View = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]
"""Offset, shape and strides of a tensor in its storage, in elements of a data type."""


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


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any, protocol: int | None = None) -> None:
        super().__init__(file, protocol)
        # With the storages themselves, so that no other one gets the address.
        self._copies: dict[tuple[int, _View], tuple[Any, ...]] = {}

    def reducer_override(self, value: Any) -> Any:
        """Return the pickled form of a view of a part, with a copy of the part."""
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        function, args, *more = cast(Any, value).__reduce_ex__(2)
        is_subclass = function is torch._tensor._rebuild_from_type_v2
        first, *rest = args[2] if is_subclass else args
        storage = getattr(first, "_untyped_storage", first)
        if not isinstance(storage, torch.UntypedStorage) or storage.device.type == "meta":
            return NotImplemented
        view = (*rest[:3], value.dtype)
        if _size(view) >= storage.nbytes():
            return NotImplemented
        name = storage._cdata, view
        if name not in self._copies:
            self._copies[name] = storage, *_copied(storage, view)
        _, memory, (*place, _) = self._copies[name]
        if storage is not first:
            kind = cast(Any, torch.storage).TypedStorage
            memory = kind(wrap_storage=memory, dtype=first.dtype, _internal=True)
        made = (memory, *place, *rest[3:])
        return function, (*args[:2], made, *args[3:]) if is_subclass else made, *more


def dump(value: object, file: IO[bytes]) -> None:
    """Write a value to the end of a file in the format of ``torch.save``."""
    torch.save(value, file, pickle_module=SimpleNamespace(__name__="pickle", Pickler=_Pickler))


def dump_bytes(value: object) -> bytes:
    """Return a value in the format of ``torch.save``."""
    out = io.BytesIO()
    dump(value, out)
    return out.getvalue()


def pickled(value: object) -> bytes:
    """Return a value as :func:`pickle.dumps` writes it, with the memory that its tensors use."""
    out = io.BytesIO()
    _Pickler(out).dump(value)
    return out.getvalue()
