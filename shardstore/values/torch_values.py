"""What ``torch.save`` writes, and reading it without running code of the file's choosing.

Tensors, containers and plain values load; a class loads if it is harmless and known here, or if the
program allowed it (``torch.serialization.add_safe_globals``). Knows no checkpoint.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
import io
import pathlib
import pickle
import re
import types
import uuid
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from shardstore.errors import DamagedCheckpointError, UnsafeObjectError
from shardstore.values.torch_archive import verify_archive

__all__ = ["dump_bytes", "load_bytes"]


@cache
def _safe_classes() -> Sequence[Any]:
    """Classes that only hold values.

    Building them from a file runs no code of the file's choosing.
    """
    scalars = [type(np.dtype(code)) for code in "?bhilqBHILQefdFD"]
    found = [
        argparse.Namespace,
        types.SimpleNamespace,
        collections.OrderedDict,
        collections.Counter,
        datetime.date,
        datetime.datetime,
        datetime.time,
        datetime.timedelta,
        datetime.timezone,
        decimal.Decimal,
        fractions.Fraction,
        uuid.UUID,
        pathlib.Path,
        pathlib.PosixPath,
        pathlib.PurePosixPath,
        io.BytesIO,
        slice,
        range,
        bytearray,
        complex,
        np.ndarray,
        np.dtype,
        *scalars,
    ]
    for module in ("numpy._core.multiarray", "numpy.core.multiarray"):
        try:
            loaded = __import__(module, fromlist=["_reconstruct"])
        except ImportError:
            continue
        found += [loaded._reconstruct, loaded.scalar]
        break
    return found


class _StandIns:
    """Deques and defaultdicts, which ``weights_only`` can make but not fill: it fills lists and
    dicts, which stand for them until all is loaded."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, Callable[[Any], Any]]] = {}

    def safe_globals(self) -> list[Any]:
        """What is called in the classes' place, and what a defaultdict may make."""
        return [
            (self._deque, "collections.deque"),
            (self._defaultdict, "collections.defaultdict"),
            *(bool, bytes, dict, float, int, list, str, tuple),
        ]

    def _deque(self, items: Any = (), maxlen: int | None = None) -> list[Any]:
        made = list(items)
        self._made[id(made)] = made, lambda filled: collections.deque(filled, maxlen)
        return made

    def _defaultdict(self, factory: Any = None, items: Any = ()) -> dict[Any, Any]:
        made = dict(items)
        self._made[id(made)] = made, lambda filled: collections.defaultdict(factory, filled)
        return made

    def replaced(self, value: Any) -> Any:
        """A loaded value with what was stood for, wherever it is in it."""
        return self._replaced(value, {}) if self._made else value

    def _replaced(self, value: Any, seen: dict[int, Any]) -> Any:
        if id(value) in seen:
            return seen[id(value)]
        seen[id(value)] = value
        if isinstance(value, dict):
            for key, item in value.items():
                value[key] = self._replaced(item, seen)
        elif type(value) is list:
            value[:] = [self._replaced(item, seen) for item in value]
        elif type(value) is tuple:
            items = tuple(self._replaced(item, seen) for item in value)
            if any(new is not old for new, old in zip(items, value, strict=True)):
                seen[id(value)] = items
        elif isinstance(value, argparse.Namespace | types.SimpleNamespace):
            self._replaced(vars(value), seen)
        if id(value) in self._made:
            seen[id(value)] = self._made[id(value)][1](value)
        return seen[id(value)]


# What torch.load raises on damaged files.
_BROKEN = (
    RuntimeError,
    EOFError,
    ValueError,
    OSError,
    KeyError,
    TypeError,
    AttributeError,
)


def dump_bytes(value: object) -> bytes:
    """A value as ``torch.save`` writes it, with checksums."""
    out = io.BytesIO()
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)  # a program may have switched them off
    try:
        torch.save(value, out)
    finally:
        torch.serialization.set_crc32_options(before)
    return out.getvalue()


def load_bytes(data: bytes, url: str, key: str | None = None, *, checked: bool = False) -> Any:
    """What ``torch.save`` wrote, loaded without running code from it.

    Args:
        data: all of the file.
        url: of the file, for error texts.
        key: of the object in it, likewise.
        checked: the file is known to be the one that was written; its own checksums are not
            looked at.

    Raises:
        UnsafeObjectError: a class that is not allowed; says how to allow it.
        DamagedCheckpointError: not a file of torch.
    """
    about = f" (object {key!r})" if key is not None else ""
    try:
        if not checked:
            verify_archive(data)
        stand_ins = _StandIns()
        with torch.serialization.safe_globals([*_safe_classes(), *stand_ins.safe_globals()]):
            loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        return stand_ins.replaced(loaded)
    except pickle.UnpicklingError as error:
        text = str(error)
        if unbuilt := re.search(r"Can only .* but got <class '([\w.]+)'>", text):
            raise UnsafeObjectError(
                f"{url}{about} needs a {unbuilt.group(1)}, which torch.load(weights_only=True) can "
                "not build. If you trust this checkpoint, read the file by torch.load(..., "
                "weights_only=False)",
                key=key,
                url=url,
            ) from error
        found = re.search(r"GLOBAL ([\w.]+)", text)
        found = found or re.search(r"`?([\w]+\.[\w.]+)`? was not an allowed", text)
        name = found.group(1) if found else None
        if name is None and "nsupported" not in text:
            raise DamagedCheckpointError(
                f"{url}{about} can not be read ({text.splitlines()[0]}); load an earlier "
                "checkpoint",
                key=key,
                url=url,
            ) from error
        what = f"class {name}" if name else "a class"
        raise UnsafeObjectError(
            f"{url}{about} needs {what}, which was not allowed to be loaded. If you trust this "
            "checkpoint, allow it "
            f"before loading: torch.serialization.add_safe_globals([{name or 'TheClass'}])",
            key=key,
            url=url,
        ) from error
    except _BROKEN as error:
        raise DamagedCheckpointError(
            f"{url}{about} can not be read ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''}); "
            "load an earlier checkpoint",
            key=key,
            url=url,
        ) from error
