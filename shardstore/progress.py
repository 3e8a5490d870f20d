"""Progress events of operations, a progress bar, and log records of operations.

A callback or a bar receives the events, one call at a time. If a callback fails, the operation
continues without it. The package rich is imported only for a bar.

Log records go to children of the logger ``shardstore``. A record of an operation has the attribute
``event``, one of :data:`EVENTS`, and the fields of the event as further attributes, so that a
handler can chart them without parsing text. The level is INFO; it is WARNING for ``damaged``,
``later_steps``, ``same_content``, and for a ``delete`` by ``restore(discard_later=)``. Only the
coordinator logs them; every rank logs ``damaged``. An operation that fails raises an error and logs
no event for its end.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from shardstore.errors import ArgumentError

if TYPE_CHECKING:
    from rich.console import Console

EVENTS = (
    "commit", "load", "verify_begin", "verify", "convert_begin", "convert", "step", "delete",
    "damaged", "later_steps", "same_content",
)  # fmt: skip
"""Names of events. docs/reference/events.md says when each is logged, and lists its fields."""


def log_event(
    logger: logging.Logger, event: str, text: str, level: int = logging.INFO, /, **fields: Any
) -> None:
    """Log an event. If it has ``bytes`` and ``seconds``, add the field ``bytes_per_second``. An
    error of a handler is printed.

    Args:
        logger: logger of the calling module.
        event: one of :data:`EVENTS`.
        text: message of the record.
        level: level of the record.
        fields: fields of the event.
    """
    if "bytes" in fields and "seconds" in fields:
        seconds = fields["seconds"]
        rate = round(fields["bytes"] / max(seconds, 1e-9))
        fields = {**fields, "seconds": round(seconds, 3), "bytes_per_second": rate}
    try:
        logger.log(level, "%s", text, extra={"event": event, **fields}, stacklevel=2)
    except Exception:  # of a handler; this rank alone has it, and what it logs has happened
        traceback.print_exc()


logger = logging.getLogger(__name__)

Operation: TypeAlias = Literal["save", "load", "verify", "convert", "read", "compare"]
Phase: TypeAlias = Literal["begin", "move", "commit", "done", "failed"]


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of an operation on this rank.

    The totals are 0 until the operation is planned.

    Attributes:
        operation: ``"save"``, ``"load"``, ``"verify"``, ``"convert"``, ``"read"`` (statistics) or
            ``"compare"``.
        phase: ``"begin"``; ``"move"`` while chunks move; ``"commit"`` while a save waits for all
            ranks and commits; ``"done"`` or ``"failed"`` in the last event.
        url: URL of the checkpoint.
        bytes_done: bytes of tensors that this rank has written, or read and verified.
        bytes_total: bytes that this rank will write or read.
        chunks_done: chunks that this rank has written, or read and verified.
        chunks_total: chunks that this rank will write or read.
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
        """Whether this is the last event of the operation."""
        return self.phase in ("done", "failed")


ProgressCallback: TypeAlias = Callable[[Progress], None]
"""Called from any thread, one call at a time. If it raises an error, the error is logged, and the
operation continues without it."""
ProgressArgument: TypeAlias = ProgressCallback | Literal["bar"] | None
"""The argument ``progress`` of operations: a callback, or ``"bar"``: a bar on standard error."""


class Meter:
    """Counts the progress of one operation on this rank and passes it to a callback.

    Args:
        operation: see :class:`Progress`.
        url: see :class:`Progress`.
        callback: called with each event.

    Attributes:
        now: the current event.
        is_watched: whether there is a callback.
    """

    def __init__(
        self, operation: Operation, url: str, callback: ProgressCallback | None = None
    ) -> None:
        self.now = Progress(operation, "begin", url)
        self._callback, self.is_watched = callback, callback is not None
        self._lock = threading.Lock()
        if self.is_watched:
            self.tell()

    def count(self, size: int, chunks: int = 1) -> None:
        """Add bytes and chunks to those that are done; without a callback, do nothing."""
        if self.is_watched:
            self.tell(bytes_done=size, chunks_done=chunks)

    def tell(self, phase: Phase | None = None, **more: int) -> None:
        """Change the current event, and pass it to the callback.

        Args:
            phase: the phase that begins; ``None``: the current one goes on.
            **more: amounts that are added to fields of the event.
        """
        with self._lock:
            now = self.now
            sums = {name: getattr(now, name) + n for name, n in more.items()}
            self.now = replace(now, phase=phase or now.phase, **sums)
            try:
                if self._callback is not None:
                    self._callback(self.now)
            except Exception as error:
                self._callback, self.is_watched = None, False
                logger.warning(
                    f"{now.operation} of {now.url} continues without its progress callback, which "
                    f"raised {type(error).__name__}: {error}"
                )


@contextmanager
def metered(operation: Operation, url: str, progress: ProgressArgument) -> Iterator[Meter]:
    """Yield the meter of one operation. Its last event is ``"done"``, or ``"failed"`` on an error.

    Args:
        operation: see :class:`Progress`.
        url: see :class:`Progress`.
        progress: a callback, ``"bar"``, or ``None``.

    Raises:
        ArgumentError: ``progress`` is another value.
    """
    meter = Meter(operation, url, None if progress is None else callback_of(progress))
    phase: Phase = "failed"
    try:
        yield meter
        phase = "done"
    finally:
        if meter.now.phase != "failed":
            meter.tell(phase)


def callback_of(progress: ProgressArgument, *, shows: bool = True) -> ProgressCallback | None:
    """Return the callback for a ``progress`` argument.

    Args:
        progress: a callback, ``"bar"`` or ``None``.
        shows: whether this rank shows the bar.

    Raises:
        ArgumentError: ``progress`` is another value.
    """
    if progress is None or callable(progress):
        return progress
    if progress == "bar":
        return bar() if shows else None
    raise ArgumentError(f"progress={progress!r} must be a callable, 'bar' or None")


def bar(console: Console | None = None) -> ProgressCallback:
    """Return a callback that draws a bar on standard error: bytes, rate, time left.

    It can show several operations, in sequence or at the same time. If standard error is not a
    terminal, it prints one line at the end of each operation.

    Args:
        console: draw on this console instead.
    """
    from rich import console as consoles
    from rich import progress as parts

    shown: dict[tuple[str, str], parts.Progress] = {}
    phases = {"begin": "planning", "commit": "committing", "done": "done", "failed": "failed"}

    def draw(event: Progress) -> None:
        about = (event.operation, event.url)
        if about not in shown:
            shown[about] = parts.Progress(
                parts.TextColumn("{task.description}", markup=False),
                parts.BarColumn(),
                parts.DownloadColumn(binary_units=True),
                parts.TransferSpeedColumn(),
                parts.TimeRemainingColumn(),
                console=console or consoles.Console(stderr=True),
                redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
            )
            shown[about].add_task("", total=None)
        name = event.url.rpartition("/")[2]
        name = name if name.isprintable() else ascii(name)  # no control sequences
        shown[about].update(
            shown[about].task_ids[0],
            description=f"{event.operation} {name} {phases.get(event.phase, '')}".rstrip(),
            completed=event.bytes_done,
            total=event.bytes_total if event.bytes_total or event.finished else None,
        )
        shown[about].start()  # does nothing if the bar is shown already
        if event.finished:
            shown.pop(about).stop()

    return draw
