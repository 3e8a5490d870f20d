"""What a verification finds, and what it covered: values for those who print, log or decide.

Knows no files; :mod:`verify` and :mod:`verify_files` look at them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["Finding", "Findings", "Severity", "Verified"]

Severity = Literal["damage", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it was saved.

    Attributes:
        kind: one word or two, such as ``chunk-missing``; does not change between versions.
        severity: ``damage``, or ``note`` for what hinders no reader (a foreign file).
        message: one sentence that names key, chunk, writer and path.
        path: file or object concerned.
        key: key of the tensor or object.
        chunk: chunk index in the array's grid.
        rank: global rank that wrote it, where the manifest knows.
    """

    kind: str
    severity: Severity
    message: str
    path: str
    key: str | None = None
    chunk: tuple[int, ...] | None = None
    rank: int | None = None


@dataclass
class Verified:
    """What a verification covered.

    Attributes:
        arrays, chunks, objects: how many were looked at.
        bytes: read for it, chunks alone.
        unchecked: chunks without any checksum (the Zarr v2 layout), of which only presence and
            size were compared.
        damage, notes: findings of each severity.
        seconds: it took.
    """

    arrays: int = 0
    chunks: int = 0
    objects: int = 0
    bytes: int = 0
    unchecked: int = 0
    damage: int = 0
    notes: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """No damage was found."""
        return self.damage == 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"ok": self.ok, **asdict(self)}


class Findings:
    """Where the threads of one verification report to.

    Args:
        url: the checkpoint.
        found: called for each finding, one call at a time.

    Attributes:
        result: what was covered; changed under :attr:`lock`.
        lock: held for every change, and while ``found`` is called.
    """

    def __init__(self, url: str, found: Callable[[Finding], None]) -> None:
        self.result = Verified()
        self.lock = threading.Lock()
        self._url = url
        self._found = found

    def report(
        self,
        kind: str,
        message: str,
        name: str,
        severity: Severity = "damage",
        *,
        key: str | None = None,
        chunk: tuple[int, ...] | None = None,
        rank: int | None = None,
    ) -> None:
        """Report one; ``name`` is the file's below the checkpoint, the rest as in a Finding."""
        path = f"{self._url}/{name}"
        finding = Finding(kind, severity, message.replace("\n", " "), path, key, chunk, rank)
        with self.lock:
            if severity == "damage":
                self.result.damage += 1
            else:
                self.result.notes += 1
            self._found(finding)
