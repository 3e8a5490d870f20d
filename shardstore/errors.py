"""The tree of errors.

Every error is a :class:`CheckpointingException` and, where one fits, a builtin too, so that a
caller
may catch either. Each carries what it is about: ``key``, ``chunk``, ``rank`` and ``url`` (``None``
where it has no meaning), and its text names them together with the remedy::

    CheckpointingException
    ├── ArgumentError              (ValueError, TypeError)  an argument that makes no sense
    │   └── IndexRangeError        (IndexError)         an index beyond the shape of an array
    ├── NotACheckpointError        (FileNotFoundError)  nothing there, or not whole, or not ours
    ├── FormatVersionError         (ValueError)         written by a format this version cannot read
    ├── CheckpointExistsError      (FileExistsError)    saving over something without being asked to
    ├── AccessPatternError         (ValueError)         shards overlap, or leave a part uncovered
    ├── KeyNameError               (ValueError)         a key that cannot be stored, or two that
    collide
    ├── MissingKeyError            (KeyError)           the checkpoint lacks a requested key
    ├── ShapeMismatchError         (ValueError)         stored and requested global shapes differ
    ├── DTypeMismatchError         (TypeError)          stored and requested data types differ, or
    unknown
    ├── DamagedCheckpointError     (OSError)            bytes are not those that were written
    │   ├── ChunkMissingError      (FileNotFoundError)
    │   └── ChunkCorruptError
    ├── StructureError             (ValueError)         nested structures that do not fit together
    ├── StorageError               (OSError)            the store refused: full disk, read-only,
    dead
    ├── UnsafeObjectError          (pickle.UnpicklingError)  a class that was not allowed to load
    ├── RanksError                 (RuntimeError)       another rank failed, or did not answer in
    │   time
    └── SaveInProgressError        (RuntimeError)       an asynchronous save is still running, or
        was aborted
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

__all__ = [
    "AccessPatternError",
    "ArgumentError",
    "CheckpointExistsError",
    "CheckpointingException",
    "ChunkCorruptError",
    "ChunkMissingError",
    "DTypeMismatchError",
    "DamagedCheckpointError",
    "FormatVersionError",
    "IndexRangeError",
    "KeyNameError",
    "MissingKeyError",
    "NotACheckpointError",
    "RanksError",
    "SaveInProgressError",
    "ShapeMismatchError",
    "StorageError",
    "StructureError",
    "UnsafeObjectError",
]


class CheckpointingException(Exception):  # noqa: N818 (the name that callers know)
    """Base of every error raised by shardstore.

    Args:
        message: what happened and what to do about it.
        details: further arguments of an exception, which its text shows beside the message.
        key: key of the tensor or object concerned.
        chunk: chunk index in the array's chunk grid.
        rank: global rank that met the error or wrote the damaged part.
        url: checkpoint, array or chunk concerned.
    """

    def __init__(
        self,
        message: str = "",
        *details: object,
        key: str | None = None,
        chunk: Sequence[int] | None = None,
        rank: int | None = None,
        url: str | None = None,
    ) -> None:
        super().__init__(message, *details)
        self.message = str((message, *details) if details else message)
        self.key = key
        self.chunk = None if chunk is None else tuple(chunk)
        self.rank = rank
        self.url = url

    def __str__(self) -> str:
        # Not the builtin's: KeyError would print the repr, OSError the errno form.
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))


def _rebuild(
    cls: type[CheckpointingException], args: tuple[Any, ...], about: dict[str, object]
) -> CheckpointingException:
    error = cls(*args)
    for name, value in about.items():
        setattr(error, name, value)
    return error


class ArgumentError(CheckpointingException, ValueError, TypeError):
    """An argument is of a wrong type, or has a value that it cannot have."""


class IndexRangeError(ArgumentError, IndexError):
    """An index is out of the range of an axis, or there are more of them than axes."""


class NotACheckpointError(CheckpointingException, FileNotFoundError):
    """There is no committed checkpoint at the given place."""


class FormatVersionError(CheckpointingException, ValueError):
    """The checkpoint was written in a format that this version does not read."""


class CheckpointExistsError(CheckpointingException, FileExistsError):
    """The destination holds something already and overwriting was not asked for."""


class AccessPatternError(CheckpointingException, ValueError):
    """Shards of a tensor overlap, leave a part uncovered, or do not agree with each other."""


class KeyNameError(CheckpointingException, ValueError):
    """A key cannot be stored under a safe name, or collides with another."""


class MissingKeyError(CheckpointingException, KeyError):
    """The checkpoint lacks a key that was asked for."""


class ShapeMismatchError(CheckpointingException, ValueError):
    """The stored global shape differs from the one asked for."""


class DTypeMismatchError(CheckpointingException, TypeError):
    """The stored data type differs from the one asked for, or cannot be stored at all."""


class DamagedCheckpointError(CheckpointingException, OSError):
    """What is stored is not what was written."""


class ChunkMissingError(DamagedCheckpointError, FileNotFoundError):
    """A chunk of a committed checkpoint is gone."""


class ChunkCorruptError(DamagedCheckpointError):
    """A chunk of a committed checkpoint fails its checksum or has another size."""


class StructureError(CheckpointingException, ValueError):
    """Two nested structures that should fit together do not, or one cannot be taken apart."""


class StorageError(CheckpointingException, OSError):
    """The store refused an operation.

    Attributes:
        errno: of the operating system, ``None`` where the store has none.
    """

    def __reduce__(self) -> tuple[object, ...]:
        # The builtin keeps it outside of the instance's own dictionary.
        return _rebuild, (type(self), (self.message,), {**self.__dict__, "errno": self.errno})


class UnsafeObjectError(CheckpointingException, pickle.UnpicklingError):
    """A stored object needs a class that was not allowed to be loaded."""


class RanksError(CheckpointingException, RuntimeError):
    """Another rank failed, or did not answer before the deadline.

    Attributes:
        failures: global rank -> text of what that rank met.
    """

    def __init__(self, message: str = "", *, failures: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.failures = dict(failures or {})


class SaveInProgressError(CheckpointingException, RuntimeError):
    """An asynchronous save stands in the way of another, was aborted before its commit, or is that
    of the process which this one was forked from."""
