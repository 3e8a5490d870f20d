"""What the ranks do together: reports to one coordinator and its verdict to all, and pieces of
chunks.

The shape is a star, not a ring or a tree: every rank reports to rank 0, rank 0 answers every rank.
A rank that died is met by the coordinator alone, at once and by name, and everybody else still gets
an answer; in a ring the neighbours of the dead rank would fail and the others wait for a timeout.
Only large answers go down a broadcast tree, once all ranks are known to be there. A rank that is
silent past the deadline is named to all over the store of the process group: by then gloo has
closed the coordinator's connections.

All traffic is on CPU tensors over a gloo group of our own, so that the trainer's NCCL streams are
never touched and its own collectives cannot be confused with ours. Without a process group there
is one rank.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from shardstore.distributed.groups import (
    gathered,
    group_rank,
    group_size,
    has_ranks,
    raise_together,
)
from shardstore.distributed.messages import Message, Messages, attempt
from shardstore.errors import CheckpointingException, RanksError

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEADLINE_VARIABLE = "SHARDSTORE_DEADLINE_S"
"""Environment variable: seconds a rank waits for another one before it gives up."""

DEFAULT_DEADLINE_S = 1800.0
GRACE_S = 5.0
"""Seconds, beyond the deadline, in which the coordinator's verdict must arrive."""
TREE_FROM_BYTES = 64 * 1024
_PIECES = 1
"""Tag of pieces of chunks: one that nobody waits for any more must not be taken for a report, of
another size, which ends the process from within gloo."""
_OK, _ERROR, _BROKEN = 0, 1, 2  # broken: an error, and the group is of no more use


def deadline_from_environment() -> float:
    """Seconds to wait for other ranks: ``SHARDSTORE_DEADLINE_S``, else 1800."""
    text = os.environ.get(DEADLINE_VARIABLE)
    if not text:
        return DEFAULT_DEADLINE_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e8:
        raise CheckpointingException(
            f"{DEADLINE_VARIABLE}={text!r} is not a positive number of seconds; unset it or give "
            "one"
        )
    return seconds


@dataclass
class _Control:
    """A gloo group of ours that belongs to one default process group."""

    world: object
    group: Any
    name: str
    number: int
    calls: int = 0
    broken: bool = False


_controls: dict[str, _Control] = {}
# Groups that outlive the interpreter's end may abort the process when their threads are torn down.
atexit.register(_controls.clear)


def _is_lacking(purpose: str) -> bool:
    control = _controls.get(purpose)
    return control is None or control.broken or control.world is not dist.group.WORLD


def _control_group(deadline_s: float, purpose: str, *, anew: bool) -> _Control:
    control = _controls.get(purpose)
    if control is None or anew:
        # The coordinator gives up on a rank after the deadline. The others wait for its verdict,
        # which it may begin to collect up to a deadline later than they do.
        wait = timedelta(seconds=2 * deadline_s + GRACE_S)
        number = 0 if control is None else control.number + 1
        try:
            group = dist.new_group(backend="gloo", timeout=wait)
        except RuntimeError as problem:
            raise RanksError(
                f"rank {dist.get_rank()} could not connect to all other ranks "
                f"({_first_line(problem)}): one of them died or is late, its log says more; "
                f"{DEADLINE_VARIABLE} sets the wait"
            ) from problem
        world = dist.group.WORLD
        control = _Control(world=world, group=group, name=f"{purpose}{number}", number=number)
        _controls[purpose] = control
    return control


@dataclass
class Ranks:
    """The ranks that save or load one checkpoint, seen from one of them.

    Attributes:
        rank: this process's global rank, 0 without a process group.
        world_size: number of ranks, 1 without a process group.
        deadline_s: seconds to wait for any other rank.
    """

    rank: int = 0
    world_size: int = 1
    deadline_s: float = DEFAULT_DEADLINE_S
    _group: _Control | None = field(default=None, repr=False)

    @classmethod
    def current(cls, purpose: str = "") -> Ranks:
        """Return the ranks of the default process group, or a world of one.

        Called by every rank; the first call of a process group creates a gloo group of ours, which
        all ranks wait for.

        Args:
            purpose: each purpose has a group of its own, so that a thread in the background can
                talk to its like while the caller's thread uses another.

        Raises:
            RanksError: a rank did not come within the deadline.
        """
        deadline_s = deadline_from_environment()
        if not has_ranks() or dist.get_world_size() == 1:
            return cls(deadline_s=deadline_s)
        group = _control_group(deadline_s, purpose, anew=_is_lacking(purpose))
        return cls(dist.get_rank(), dist.get_world_size(), deadline_s, group)

    def lacks(self, purpose: str) -> bool:
        """Return whether this rank needs a group for a purpose and has none that works. It asks
        nobody: of other ranks this may not be true, or not yet.
        """
        return self.world_size > 1 and _is_lacking(purpose)

    def over(self, purpose: str, *, anew: bool) -> Ranks:
        """Return the same ranks, over the group of another purpose.

        Called by every rank; with ``anew`` a group is created, which all ranks wait for.

        Args:
            purpose: see :meth:`current`.
            anew: whether any rank lacks one, as all of them have agreed.

        Raises:
            RanksError: a rank did not come within the deadline.
        """
        if self.world_size == 1:
            return self
        return replace(self, _group=_control_group(self.deadline_s, purpose, anew=anew))

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank collects the reports and decides."""
        return self.rank == 0

    @property
    def is_broken(self) -> bool:
        """Whether a rank was lost, so that there is nothing these can do together any more."""
        return self._group is not None and self._group.broken

    def together(
        self,
        report: bytes = b"",
        *,
        what: str,
        error: BaseException | None = None,
        decide: Callable[[list[bytes]], bytes] | None = None,
    ) -> bytes:
        """Every rank reports, the coordinator decides, everyone gets the same answer.

        Called by every rank, which waits until all have called it and the coordinator has decided.

        Args:
            report: this rank's report, handed to ``decide`` on the coordinator.
            what: what the ranks are doing, for the error text ("committing s3://...").
            error: what went wrong on this rank, if anything. It is raised again here, and reaches
                the others as a :class:`RanksError` that names this rank.
            decide: called on the coordinator alone, with the reports by rank, if no rank had an
                error; what it raises is raised on every rank.

        Returns:
            What ``decide`` returned.

        Raises:
            RanksError: another rank failed, died, or did not answer within the deadline.
        """
        if self.world_size == 1:
            if error is not None:
                raise error
            return decide([report]) if decide is not None else b""
        assert self._group is not None
        self._group.calls += 1
        if self.is_coordinator:
            answer = self._coordinate(report, what, error, decide)
        else:
            answer = self._report(report, what, error)
        status, body = answer
        if error is not None:
            raise error
        if status != _OK:
            raise pickle.loads(body)
        return body

    def step(
        self,
        what: str,
        work: Callable[[], T],
        report: Callable[[T], bytes] = lambda _: b"",
        decide: Callable[[list[bytes]], bytes] | None = None,
    ) -> tuple[T, bytes]:
        """Do something on this rank, and raise on every rank if it failed on any.

        Args:
            what: see :meth:`together`.
            work: what to do.
            report: makes this rank's report of its result.
            decide: makes the coordinator's answer of all reports.

        Returns:
            What ``work`` returned on this rank, and the coordinator's answer.
        """
        error: BaseException | None = None
        done: list[T] = []
        said = b""
        try:
            done.append(work())
            said = report(done[0])
        except Exception as problem:
            error = problem
        answer = self.together(said, what=what, error=error, decide=decide)
        return done[0], answer

    # -- the two sides of the star -------------------------------------------------------------

    def _coordinate(
        self,
        report: bytes,
        what: str,
        error: BaseException | None,
        decide: Callable[[list[bytes]], bytes] | None,
    ) -> tuple[int, bytes]:
        reports = [report]
        failures = {} if error is None else {0: _describe(error)}
        causes = [] if error is None else [error]
        lost: list[int] = []
        others = range(1, self.world_size)
        messages = self._messages(self.deadline_s)
        for rank, answer in messages.receive_each(others):
            if isinstance(answer, RuntimeError):
                # After a timeout gloo closes every pair: only the first silence is evidence.
                if not lost or "timed out" not in failures[lost[0]].lower():
                    failures[rank] = f"no answer ({_first_line(answer)})"
                    lost.append(rank)
            elif answer.status == _ERROR:
                failures[rank], cause = pickle.loads(answer.body)
                causes += [cause] if cause is not None else []
            else:
                reports.append(answer.body)
        status, body = _OK, b""
        if failures:
            status = _BROKEN if lost else _ERROR
            body = pickle.dumps(_failure(what, failures, causes))
        elif decide is not None:
            try:
                body = decide(reports)
            except Exception as problem:
                shown = _portable(problem) or CheckpointingException(_describe(problem))
                status, body = _ERROR, pickle.dumps(shown)
        if lost:
            self._post(body)
        tree = status == _OK and len(body) >= TREE_FROM_BYTES
        for rank, reason in messages.send_each(others, Message(status, body), tree=tree):
            logger.warning("rank %d could not be told the outcome of %s: %s", rank, what, reason)
        if tree:
            messages.broadcast(body)
        if lost:
            self._break()
        return status, body

    def _report(self, report: bytes, what: str, error: BaseException | None) -> tuple[int, bytes]:
        messages = self._messages(2 * self.deadline_s + GRACE_S)
        try:
            said = Message(_OK, report)
            if error is not None:
                said = Message(_ERROR, pickle.dumps((_describe(error), _portable(error))))
            answer = messages.ask(0)
            for _, problem in messages.send_each([0], said):
                raise problem
            status, body = messages.receive(0, answer)
            if status == _BROKEN:
                # All that are left make a new group next time, or none does.
                self._break()
            return status, body
        except RuntimeError as problem:
            self._break()
            posted = self._posted()
            if posted is not None:
                return _BROKEN, posted
            failure = RanksError(
                f"{what}: rank {self.rank} has no answer from the coordinator, rank 0, which "
                "died or "
                f"waited longer than {self.deadline_s:g} s for another rank "
                f"({_first_line(problem)}). "
                f"Its log says more; {DEADLINE_VARIABLE} sets the wait",
                failures={0: "no answer"},
            )
            if error is None:
                raise failure from problem
            raise error from failure

    # A rank that waited in vain has closed its connections to all others, as gloo does: what it
    # finds out can reach them only over the store of the process group.

    def _verdict_key(self) -> str:
        assert self._group is not None
        return f"shardstore/{self._group.name}/{self._group.calls}"

    def _post(self, body: bytes) -> None:
        try:
            # As text: some stores end a value at a zero byte.
            _get_default_store().set(self._verdict_key(), body.hex())
        except Exception as problem:
            logger.warning("the ranks cannot be told over the store: %s", problem)

    def _posted(self) -> bytes | None:
        key = self._verdict_key()
        try:
            store = _get_default_store()
            store.wait([key], timedelta(seconds=GRACE_S))
            return bytes.fromhex(store.get(key).decode())
        except Exception:  # the store is gone, with the coordinator perhaps
            return None

    # -- messages ------------------------------------------------------------------------------

    def _messages(self, wait_s: float) -> Messages:
        assert self._group is not None
        return Messages(self._group.group, wait_s)

    def _break(self) -> None:
        """Forget the group: after a timeout or a death gloo's connections are of no more use."""
        if self._group is not None:
            self._group.broken = True

    def exchange(
        self,
        sends: Sequence[tuple[int, NDArray[np.uint8]]],
        receives: Sequence[tuple[int, NDArray[np.uint8]]],
    ) -> None:
        """Send and receive byte pieces between ranks.

        Called by every rank that has something to send or receive; waits for those alone. Between
        two ranks the order of ``sends`` on one is the order of ``receives`` on the other.

        Args:
            sends: ``(rank, bytes)``, one-dimensional contiguous uint8.
            receives: ``(rank, buffer)``, one-dimensional contiguous uint8, written in place.
        """
        messages = self._messages(self.deadline_s)
        way: Any = {"group": messages.group, "tag": _PIECES}
        # Also where a rank is gone: the others wait for our pieces, and only then for a verdict.
        begun = [
            (rank, attempt(partial(dist.irecv, torch.from_numpy(buffer), rank, **way)))
            for rank, buffer in receives
        ]
        begun += [
            (rank, attempt(partial(dist.isend, _as_tensor(piece), rank, **way)))
            for rank, piece in sends
        ]
        lost: dict[int, RuntimeError] = {}
        for rank, work in begun:
            ended = (
                work if isinstance(work, RuntimeError) else attempt(partial(messages.wait, work))
            )
            if isinstance(ended, RuntimeError):
                lost.setdefault(rank, ended)
        for rank, problem in lost.items():  # the first: after a timeout gloo closes every pair
            self._break()
            raise RanksError(
                f"rank {self.rank} lost rank {rank} while pieces of chunks were exchanged "
                f"({_first_line(problem)})",
                failures={rank: "no answer"},
            ) from problem


@dataclass
class GroupRanks(Ranks):
    """The ranks of a process group of the caller's, over its own collectives.

    They have no deadline but the group's.
    """

    group: Any = None

    @classmethod
    def of(cls, group: Any) -> Ranks:
        """The ranks of a group; ``None``: those of the default process group."""
        if group is None:
            return Ranks.current()
        return cls(group_rank(group), group_size(group), group=group)

    def together(
        self,
        report: bytes = b"",
        *,
        what: str,
        error: BaseException | None = None,
        decide: Callable[[list[bytes]], bytes] | None = None,
    ) -> bytes:
        """See :meth:`Ranks.together`."""
        with raise_together(self.group, what):
            if error is not None:
                raise error
        reports, answer = gathered(report, self.group), b""
        with raise_together(self.group, what):
            if decide is not None and self.is_coordinator:
                answer = decide(reports)
        return gathered(answer, self.group)[0]


def _as_tensor(piece: NDArray[np.uint8]) -> torch.Tensor:
    if not piece.flags.writeable:
        piece = piece.copy()
    return torch.from_numpy(piece)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines() or [type(error).__name__]
    return text[0][:200]


def _describe(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text if isinstance(error, CheckpointingException) else f"{type(error).__name__}: {text}"


def _portable(error: BaseException) -> CheckpointingException | None:
    """Return the error itself where other ranks can rebuild it."""
    if not isinstance(error, CheckpointingException):
        return None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever it takes along may refuse, each with an error of its own
        return None
    return error


def _failure(
    what: str, failures: dict[int, str], causes: Sequence[BaseException]
) -> CheckpointingException:
    """One error for all: the ranks' own where all failed alike, else one that lists them."""
    texts = set(failures.values())
    if len(texts) == 1 and len(causes) == len(failures) and len(failures) > 1:
        return _portable(causes[0]) or CheckpointingException(_describe(causes[0]))
    lines = [f"rank {rank}: {text}" for rank, text in sorted(failures.items())]
    shown = "; ".join(lines[:8]) + (f"; and {len(lines) - 8} more" if len(lines) > 8 else "")
    return RanksError(f"{what} failed on {len(failures)} rank(s): {shown}", failures=failures)
