"""When a run saves: by step, by time, whenever the last save is done, or because it will be ended.

:class:`Schedule` holds the rules. :class:`Notices` receives signals and requests of this process.
:meth:`~shardstore.CheckpointManager.should_save` brings both together for all ranks.
"""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from time import monotonic
from types import FrameType
from typing import Any, Literal, NamedTuple
from weakref import WeakSet

from shardstore.errors import ArgumentError
from shardstore.storage.options import require_number

logger = logging.getLogger("shardstore.manager")

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""The signals of ``save_on_signal=True``: of cluster managers before they end a job."""


class Vote(NamedTuple):
    """What one rank says about a step.

    Attributes:
        step: number of the step.
        is_busy: whether its last asynchronous save still runs.
        notice: why it asks for a save now, if it does.
        age_s: seconds since it received the notice.
    """

    step: int
    is_busy: bool = False
    notice: str | None = None
    age_s: float = 0.0


class Answer(NamedTuple):
    """What all ranks do about a step: whether they save it, and the oldest notice, if any."""

    saves: bool
    notice: str | None = None
    age_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The rules that say when to save. A step is saved if any of them says so.

    Attributes:
        every: save each step that is divisible by this number.
        every_s: save the first step that ends at least so many seconds after the last save began.
        interval: ``"continuous"``: save the first step that ends after the last save was committed.
        grace_s: seconds between a notice and the end of the process.

    Raises:
        ArgumentError: a value is out of range.
    """

    every: int | None = None
    every_s: float | None = None
    interval: Literal["continuous"] | None = None
    grace_s: float | None = None

    def __post_init__(self) -> None:
        require_number("every", self.every, none=True)
        for name, value in (("every_s", self.every_s), ("grace_s", self.grace_s)):
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 < value < math.inf):
                raise ArgumentError(f"{name}={value!r} must be a number above 0, or None")
        if self.interval not in (None, "continuous"):
            raise ArgumentError(f"interval={self.interval!r} must be 'continuous' or None")

    def falls_on(self, step: int) -> bool:
        """Return whether the number of a step alone says that it is saved."""
        return self.every is not None and step % self.every == 0

    def decide(self, votes: Mapping[int, Vote], since_s: float, last: int | None = None) -> Answer:
        """Make the answer of the coordinator.

        Args:
            votes: by rank.
            since_s: seconds since the last save began, or since the manager was made.
            last: the step that was saved or restored last.

        Raises:
            ArgumentError: the ranks asked about different steps.
        """
        (first, one), *others = votes.items()
        for rank, other in others:
            if other.step != one.step:
                raise ArgumentError(
                    f"should_save: rank {first} asks about step {one.step}, rank {rank} about step "
                    f"{other.step}; all ranks call it after the same steps"
                )
        noticed = [vote for vote in votes.values() if vote.notice is not None]
        oldest = max(noticed, key=lambda vote: vote.age_s, default=one)
        by_time = self.every_s is not None and since_s >= self.every_s
        idle = self.interval is not None and not any(vote.is_busy for vote in votes.values())
        saves = bool(noticed) or by_time or idle or self.falls_on(one.step)
        saves = saves and one.step != last
        return Answer(saves, oldest.notice, oldest.age_s)


class Notices:
    """Receives what asks this process for a save now: signals and requests.

    A signal's earlier handler is not called while this is open.

    Args:
        signals: the signals to receive.

    Raises:
        ArgumentError: a signal cannot be received, or this is not the main thread.
    """

    def __init__(self, signals: Iterable[int] = ()) -> None:
        self._when: dict[str, float] = {}  # by notice
        try:
            for number in signals:
                before = signal.getsignal(number)
                _open.setdefault(number, WeakSet()).add(self)  # before the first can arrive
                if before is not _receive:
                    _before[number] = before
                    signal.signal(number, _receive)
                    if callable(before):
                        text = "%s: %r is not called while the manager is open"
                        logger.info(text, _name(number), before)
        except (ValueError, OSError, TypeError) as error:
            self.close()
            raise ArgumentError(
                f"save_on_signal={signals!r:.100} must be True, False or signals that this thread "
                f"can receive, such as [signal.SIGTERM] ({error}). Make the manager in the main "
                "thread, or pass save_on_signal=() and call request_save() before the run is ended"
            ) from error

    def add(self, notice: str) -> None:
        """Receive a notice. The same one again is dropped until :meth:`clear`."""
        self._when.setdefault(notice, monotonic())

    @property
    def pending(self) -> str | None:
        """The oldest notice, if any."""
        return next(iter([*self._when]), None)  # of a copy, because a signal may come meanwhile

    @property
    def age_s(self) -> float:
        """Seconds since the oldest notice was received."""
        now = monotonic()
        return now - min([*self._when.values()], default=now)

    def clear(self, notice: str) -> None:
        """Forget a notice, because a save served it."""
        self._when.pop(notice, None)

    def close(self) -> None:
        """Give the signals back to their earlier handlers, unless another manager waits for them.
        The main thread calls it; elsewhere the next signal does."""
        for number, listening in list(_open.items()):
            listening.discard(self)
            _give_back(number)


_open: dict[int, WeakSet[Notices]] = {}
_before: dict[int, Any] = {}


def _receive(number: int, frame: FrameType | None) -> None:
    listening = list(_open.get(number, ()))
    for one in listening:
        one.add(_name(number))
    if not listening:  # all are gone: as if there had been none
        _give_back(number)
        signal.raise_signal(number)


def _name(number: int) -> str:
    known = {int(one): one.name for one in signal.Signals}  # most real-time signals have no name
    return known.get(number, f"signal {int(number)}")


def _give_back(number: int) -> None:
    if not _open.get(number) and signal.getsignal(number) is _receive:
        with suppress(ValueError):  # not the main thread
            signal.signal(number, _before[number] or signal.SIG_DFL)


def forget_signals() -> None:
    """Let signals act as before in a forked child, for example in a worker of a data loader."""
    _open.clear()
