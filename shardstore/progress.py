"""How far a save, a load or a verification is, as events; and a bar that shows them.

Progress goes to a callback or a bar: one call at a time, and a callback that fails does not end the
operation. rich is imported when a bar is asked for.

Log records go to :mod:`logging` below ``shardstore``. A record about an operation has the attribute
``event``, one of :data:`EVENTS`, and the fields of the event as further attributes, so that a
handler can count and chart without parsing texts. Their level is INFO; it is WARNING for
``damaged``, ``later_steps``, ``same_content``, and for a ``delete`` by ``restore(discard_later=)``.
Of several ranks that save or load together the coordinator alone logs them. An operation that
fails raises, and has no event of its end.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from shardstore.errors import ArgumentError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "EVENTS",
    "Meter",
    "Progress",
    "ProgressCallback",
    "bar",
    "callback_of",
    "log_event",
    "metered",
]

EVENTS = {
    "commit": "a save is committed: url, bytes, chunks, seconds, bytes_per_second, world_size",
    "load": "a load is done: url, bytes (on rank 0), seconds, bytes_per_second, world_size",
    "verify_begin": "a verification begins: url",
    "verify": "it is done: url, bytes, seconds, bytes_per_second, arrays, chunks, objects, damage, "
    "notes (numbers of findings)",
    "convert_begin": "a conversion begins: url (of the target), source, source_format, "
    "target_format",
    "convert": "it is done: the same, and tensors, bytes, resumed_bytes, seconds, "
    "bytes_per_second, verified",
    "step": "a manager has saved a step: step, url, bytes, seconds, bytes_per_second, metrics",
    "delete": "a manager has deleted a step: step, url",
    "damaged": "a manager passes over a damaged step: step, url",
    "later_steps": "a run goes on from a step, of which there are later ones that it did not come "
    "from: step, later (their numbers), url where they are looked for",
    "same_content": "a step has the same tensors as an earlier one: step, earlier",
}
"""Name -> when it is logged, and its fields: sizes in bytes, times in seconds."""


def log_event(
    logger: logging.Logger, event: str, text: str, level: int = logging.INFO, /, **fields: Any
) -> None:
    """Log an event; one with ``bytes`` and ``seconds`` has their rate too.

    Args:
        logger: of the module that tells it.
        event: one of :data:`EVENTS`.
        text: for people.
        level: of the record.
        fields: of the event.
    """
    if "bytes" in fields and "seconds" in fields:
        seconds = fields["seconds"]
        rate = round(fields["bytes"] / max(seconds, 1e-9))
        fields = {**fields, "seconds": round(seconds, 3), "bytes_per_second": rate}
    logger.log(level, "%s", text, extra={"event": event, **fields})


logger = logging.getLogger(__name__)

Operation: TypeAlias = Literal["save", "load", "verify", "convert", "read", "compare"]
Phase: TypeAlias = Literal["begin", "move", "commit", "done", "failed"]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far this rank is.

    The totals are known once it is planned what moves; until then they are 0.

    Attributes:
        operation: ``"save"``, ``"load"``, ``"verify"``, ``"convert"``, ``"read"`` (statistics) or
            ``"compare"``.
        phase: ``"begin"``; ``"move"`` while chunks move; ``"commit"`` while a save waits for all
            ranks and commits; ``"done"`` or ``"failed"``, which is the last event.
        url: the checkpoint.
        bytes_done: bytes of tensors that are written, or read and verified, on this rank.
        bytes_total: of how many.
        chunks_done: chunks, the same.
        chunks_total: of how many.
    """

    operation: Operation
    phase: Phase
    url: str
    bytes_done: int = 0
    bytes_total: int = 0
    chunks_done: int = 0
    chunks_total: int = 0

    @property
    def finished(self) -> bool:
        """Whether no event of this operation comes after this one."""
        return self.phase in ("done", "failed")


ProgressCallback: TypeAlias = Callable[[Progress], None]
"""Called from any thread, one call at a time. What it raises is logged, and it is not called again:
a checkpoint is worth more than a picture of it."""


class Meter:
    """Counts one operation of this rank, and tells a callback.

    Args:
        operation: see :class:`Progress`.
        url: see :class:`Progress`.
        callback: who is told; ``None``: nobody, and then nothing is counted chunk by chunk.
    """

    def __init__(
        self, operation: Operation, url: str, callback: ProgressCallback | None = None
    ) -> None:
        self.bytes_total = 0
        self._operation: Operation = operation
        self._url = url
        self._callback = callback
        self._lock = threading.Lock()
        self.phase: Phase = "begin"
        self._bytes = self._chunks = self._chunks_total = 0
        self._tell()

    @property
    def add(self) -> Callable[[int, int], None] | None:
        """To be called with bytes and chunks that are done; ``None`` where nobody wants to know."""
        return None if self._callback is None else self.count

    @property
    def is_watched(self) -> bool:
        """Whether somebody is told."""
        return self._callback is not None

    def expect(self, size: int, chunks: int = 0) -> None:
        """So many more bytes and chunks are to come."""
        with self._lock:
            self.bytes_total += size
            self._chunks_total += chunks
            self.phase = "move"
            self._tell()

    def enter(self, phase: Phase) -> None:
        """Another phase begins."""
        with self._lock:
            self.phase = phase
            self._tell()

    def count(self, size: int, chunks: int = 1) -> None:
        """So many more bytes and chunks are done."""
        with self._lock:
            self._bytes += size
            self._chunks += chunks
            self._tell()

    def _tell(self) -> None:
        if self._callback is None:
            return
        event = Progress(
            self._operation,
            self.phase,
            self._url,
            self._bytes,
            self.bytes_total,
            self._chunks,
            self._chunks_total,
        )
        try:
            self._callback(event)
        except Exception as error:
            self._callback = None
            logger.warning(
                "%s of %s goes on without its progress callback, which raised %s: %s",
                self._operation,
                self._url,
                type(error).__name__,
                error,
            )


@contextmanager
def metered(
    operation: Operation, url: str, progress: ProgressCallback | Literal["bar"] | None
) -> Iterator[Meter]:
    """The meter of one operation; its last event is ``"done"``, or ``"failed"`` on an error.

    Args:
        operation: see :class:`Progress`.
        url: see :class:`Progress`.
        progress: a callback, ``"bar"``, or ``None``.

    Raises:
        ArgumentError: ``progress`` is something else.
    """
    meter = Meter(operation, url, callback_of(progress))
    phase: Phase = "failed"
    try:
        yield meter
        phase = "done"
    finally:
        if meter.phase != "failed":
            meter.enter(phase)


def callback_of(
    progress: ProgressCallback | Literal["bar"] | None, *, shows: bool = True
) -> ProgressCallback | None:
    """The callback that a ``progress`` argument stands for.

    Args:
        progress: a callback, ``"bar"``, or nothing.
        shows: whether this rank is the one that shows the bar.

    Raises:
        ArgumentError: something else.
    """
    if progress is None or callable(progress):
        return progress
    if progress == "bar":
        return bar() if shows else None
    raise ArgumentError(f"progress={progress!r} must be a callable, 'bar' or None")


def bar(console: Console | None = None) -> ProgressCallback:
    """A callback that draws a bar on standard error: bytes, rate, time left.

    It may serve any number of operations, one after the other or at a time. Where standard error is
    no terminal, each operation leaves one line at its end.

    Args:
        console: where to draw instead.
    """
    return _Bar(console)


class _Bar:
    _PHASES = {"begin": "planning", "commit": "committing", "done": "done", "failed": "failed"}  # noqa: RUF012

    def __init__(self, console: Console | None) -> None:
        self._console = console
        self._shown: dict[tuple[str, str], tuple[Any, Any]] = {}

    def __call__(self, event: Progress) -> None:
        about = (event.operation, event.url)
        if about not in self._shown:
            self._shown[about] = self._made()
        shown, task = self._shown[about]
        phase = self._PHASES.get(event.phase, "")
        name = event.url.rpartition("/")[2]
        name = name if name.isprintable() else ascii(name)  # nothing that a terminal obeys
        shown.update(
            task,
            description=f"{event.operation} {name} {phase}".rstrip(),
            completed=event.bytes_done,
            total=event.bytes_total if event.bytes_total or event.finished else None,
        )
        shown.start()  # does nothing where it is shown already
        if event.finished:
            del self._shown[about]
            shown.stop()

    def _made(self) -> tuple[Any, Any]:
        from rich import progress as parts
        from rich.console import Console

        shown = parts.Progress(
            parts.TextColumn("{task.description}", markup=False),
            parts.BarColumn(),
            parts.DownloadColumn(binary_units=True),
            parts.TransferSpeedColumn(),
            parts.TimeRemainingColumn(),
            console=self._console or Console(stderr=True),
            redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
        )
        return shown, shown.add_task("", total=None)
