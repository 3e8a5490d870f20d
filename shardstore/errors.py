"""The errors of shardstore.

Every error is a :class:`CheckpointingException` and, where one fits, also a builtin exception, so
that a caller can catch either. The attributes ``key``, ``chunk``, ``rank`` and ``url`` say what the
error is about; they are ``None`` where they do not apply. The text names them and the remedy::

    CheckpointingException
    ├── ArgumentError           (ValueError, TypeError)  an argument has a wrong type or value
    │   └── IndexRangeError     (IndexError)  an index is beyond the shape of an array
    ├── NotACheckpointError     (FileNotFoundError)  no complete checkpoint of a known format
    ├── FormatVersionError      (ValueError)  a format version that this release does not read
    ├── CheckpointExistsError   (FileExistsError)  the target is in use; overwrite was not given
    ├── AccessPatternError      (ValueError)  shards overlap, or leave a part uncovered
    ├── KeyNameError            (ValueError)  a key cannot be stored, or collides with another
    ├── MissingKeyError         (KeyError)  the checkpoint lacks a requested key
    ├── ShapeMismatchError      (ValueError)  stored and requested global shapes differ
    ├── DTypeMismatchError      (TypeError)  data types differ, or one cannot be stored
    ├── DamagedCheckpointError  (OSError)  stored data is missing or damaged
    │   ├── ChunkMissingError   (FileNotFoundError)
    │   └── ChunkCorruptError
    ├── StructureError          (ValueError)  nested structures do not match
    ├── StorageError            (OSError)  the store failed: full, read-only or unreachable
    ├── UnsafeObjectError       (pickle.UnpicklingError)  a pickled class is not allowed
    ├── RanksError              (RuntimeError)  another rank failed, or did not answer in time
    └── SaveInProgressError     (RuntimeError)  an asynchronous save runs, or was aborted
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any


class CheckpointingException(Exception):  # noqa: N818 (Megatron-Core's name)
    """Base of every error raised by shardstore.

    Args:
        message: the problem and the remedy.
        details: further arguments; the text shows them after the message.
        key: key of the tensor or object.
        chunk: index of the chunk in the array's chunk grid.
        rank: global rank that failed, or that wrote the damaged data.
        url: URL of the checkpoint, array or chunk.
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
        # The builtins print other forms: KeyError the repr, OSError the errno.
        return self.message


@cache
def kind_of_dcp(kind: type[CheckpointingException]) -> type[CheckpointingException]:
    """Return a class of errors that is ``kind`` and also PyTorch DCP's ``CheckpointException``.

    Megatron-Core's loads from ``torch_dist`` raise that one. A pickled error is of ``kind`` alone.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    class Both(kind, CheckpointException):  # type: ignore[valid-type, misc]
        @property
        def failures(self) -> dict[int, Any]:
            """Rank -> error, as in DCP; the texts of a :class:`RanksError`."""
            own: dict[int, Any] = vars(self).get("failures") or {self.rank or 0: (self, None)}
            return own

        def __reduce__(self) -> tuple[object, ...]:
            reduced: Any = kind.__reduce__(self)
            return kind, *reduced[1:]

    Both.__module__, Both.__name__, Both.__qualname__ = __name__, kind.__name__, kind.__qualname__
    return Both


class ArgumentError(CheckpointingException, ValueError, TypeError):
    """An argument has a wrong type or value."""


class IndexRangeError(ArgumentError, IndexError):
    """An index is beyond the end of an axis, or there are more indices than axes."""


class NotACheckpointError(CheckpointingException, FileNotFoundError):
    """There is no committed checkpoint at the given place."""


class FormatVersionError(CheckpointingException, ValueError):
    """The checkpoint has a format version that this release does not read."""


class CheckpointExistsError(CheckpointingException, FileExistsError):
    """The target holds a checkpoint or a model, and ``overwrite`` was not given."""


NO_ARRAYS = "tensors that one process saves without shard() are common values"
"""What a checkpoint without arrays may hold, for error texts."""
MAY_LACK = "a rank may lack the key, as that of the state of a parameter without a gradient"
"""Why no rank holds a region, for texts of the next error."""


class AccessPatternError(CheckpointingException, ValueError):
    """Shards of a tensor overlap, leave a part uncovered, or do not agree with each other."""


class KeyNameError(CheckpointingException, ValueError):
    """A key cannot be stored, or its name on disk collides with that of another key."""


class MissingKeyError(CheckpointingException, KeyError):
    """The checkpoint lacks a requested key."""


class ShapeMismatchError(CheckpointingException, ValueError):
    """The stored and the requested global shape differ."""


class DTypeMismatchError(CheckpointingException, TypeError):
    """The stored and the requested data type differ, or a data type cannot be stored."""


class DamagedCheckpointError(CheckpointingException, OSError):
    """Stored data is missing or differs from what was written."""


def damaged(url: str, what: str) -> DamagedCheckpointError:
    """Return the error for a damaged file or document. ``what`` is the predicate of a sentence
    whose subject is ``url``."""
    return DamagedCheckpointError(f"{url} {what}; load an earlier checkpoint", url=url)


class ChunkMissingError(DamagedCheckpointError, FileNotFoundError):
    """A chunk of a committed checkpoint is missing."""


class ChunkCorruptError(DamagedCheckpointError):
    """A chunk of a committed checkpoint fails its checksum or has another size."""


@contextmanager
def as_damage(url: str, what: str = "", key: str | None = None) -> Iterator[None]:
    """Raise an error of a block that decodes stored data as :class:`DamagedCheckpointError`.

    Errors of this package, missing files, and a process without memory or modules (one that lost
    its rights or its environment) stay what they are: an intact file needs no earlier checkpoint.

    Args:
        url: see :class:`CheckpointingException`.
        what: begins the error text; default: that ``url`` cannot be read.
        key: see :class:`CheckpointingException`.
    """
    try:
        yield
    except (CheckpointingException, FileNotFoundError, ImportError, MemoryError):
        raise
    except Exception as error:  # decoders raise many kinds on damaged input
        first_line = str(error).partition("\n")[0]
        raise DamagedCheckpointError(
            f"{what or f'{url} cannot be read'} ({type(error).__name__}: {first_line}); load an "
            "earlier checkpoint",
            key=key,
            url=url,
        ) from error


class StructureError(CheckpointingException, ValueError):
    """Two nested structures do not match, or a structure cannot be flattened or rebuilt."""


class StorageError(CheckpointingException, OSError):
    """The store failed: it is full, read-only or unreachable, or it refused a request.

    Attributes:
        errno: error number of the operating system; ``None`` if there is none.
    """

    def __reduce__(self) -> tuple[object, ...]:
        # OSError keeps errno outside of the instance's __dict__.
        return type(self), (self.message,), {**self.__dict__, "errno": self.errno}


class UnsafeObjectError(CheckpointingException, pickle.UnpicklingError):
    """A pickled object needs a class that the program has not allowed."""


class RanksError(CheckpointingException, RuntimeError):
    """Another rank failed, or did not answer before the deadline.

    Attributes:
        failures: global rank -> text of the error on that rank.
    """

    def __init__(self, message: str = "", *, failures: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.failures = dict(failures or {})


class SaveInProgressError(CheckpointingException, RuntimeError):
    """An asynchronous save is still running, was aborted before its commit, or belongs to the
    parent process of a fork."""
