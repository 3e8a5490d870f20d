"""Collective steps of the ranks: reports to one coordinator, its answer to all, and the exchange of
pieces of chunks.

The ranks are all ranks, or those of a process group. Reports, errors and connections name a rank by
its global number.

The ranks form a tree of two levels. Each block of about the square root of the number of ranks
reports to its leader: its first rank, but the second rank in the first block. The leaders report to
the first rank, the coordinator, which decides. So no rank receives more than about the square root
of the number of ranks. The answer goes down the same way. Each rank is connected only to its
neighbours in the tree. A rank that waits for a dead rank notices the death at once, and all other
ranks still get an answer that names the dead rank. A rank that loses its connection towards the
coordinator, or does not answer before the deadline, reads the outcome from the store of the default
process group.

All messages are CPU tensors over separate gloo connections (:mod:`.messages`). They do not touch
the trainer's NCCL streams or collectives. Without a process group there is one rank.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import pickle
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, ref

import msgspec
import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from shardstore.distributed.groups import (
    Group,
    Members,
    described,
    global_ranks,
    listed,
    require_group,
)
from shardstore.distributed.messages import (
    GRACE_S,
    Channel,
    Message,
    PendingReceive,
    attempt,
    connect_s,
)
from shardstore.errors import ArgumentError, CheckpointingException, RanksError

logger = logging.getLogger(__name__)

Merge: TypeAlias = Callable[[list[Any]], Any]
"""Merges the reports of consecutive ranks into one."""
Decide: TypeAlias = Callable[[list[Any]], Any]
"""Makes the coordinator's answer from the reports."""

DEADLINE_VARIABLE = "SHARDSTORE_DEADLINE_S"
"""Environment variable: seconds that a rank waits for another rank before it gives up."""

DEFAULT_DEADLINE_S = 1800.0
LEAST_BLOCK = 8
"""Smallest number of ranks in a block: those of one node."""
_OK, _ERROR, _BROKEN = 0, 1, 2  # broken: an error after which the connections cannot be used


def deadline_from_environment() -> float:
    """Return the seconds to wait for other ranks: ``SHARDSTORE_DEADLINE_S``, by default 1800.

    Raises:
        CheckpointingException: the variable is not a positive number.
    """
    text = os.environ.get(DEADLINE_VARIABLE) or DEFAULT_DEADLINE_S
    with suppress(ValueError):
        if 0 < (seconds := float(text)) < 1e8:
            return seconds
    raise CheckpointingException(
        f"{DEADLINE_VARIABLE}={text!r} is not a positive number of seconds; unset it or give one"
    )


def block_size(world_size: int) -> int:
    """Return the largest number of ranks that report to one rank, it included."""
    return max(LEAST_BLOCK, math.isqrt(world_size - 1) + 1)


def neighbours(rank: int, world_size: int) -> tuple[int | None, list[int]]:
    """Return the rank that a rank reports to (``None`` for rank 0), and the ranks that report to
    it, all numbered from 0 in the tree."""
    block = block_size(world_size)
    if world_size <= block:
        return (None, list(range(1, world_size))) if rank == 0 else (0, [])
    first = rank - rank % block
    leader = max(first, 1)  # rank 0 receives from the leaders only
    if rank == 0:
        return None, [1, *range(block, world_size, block)]
    if rank != leader:
        return leader, []
    return 0, list(range(leader + 1, min(first + block, world_size)))


def _height(rank: int, world_size: int) -> int:
    """Return the number of levels of ranks that report to a rank."""
    below = neighbours(rank, world_size)[1]
    return 1 + _height(below[0], world_size) if below else 0


class _Message(msgspec.Struct, array_like=True):
    """What a rank sends of its reports and of those sent to it.

    Attributes:
        reports: the distinct reports, pickled.
        sent: of each rank the number of its report.
        failures, broken, steps: see :class:`_Gathered`.
    """

    reports: list[bytes]
    sent: list[int]
    failures: dict[int, str]
    broken: bool
    steps: dict[str, str]


_decode = msgspec.msgpack.Decoder(_Message).decode


@dataclass
class _Gathered:
    """The reports and failures of a rank and of the ranks that report to it.

    Attributes:
        reports: the reports, pickled.
        failures: rank -> failure.
        broken: whether a rank was lost.
        steps: kind of a step -> which rank is in which one; more than one if the program calls
            different functions on its ranks.
    """

    reports: list[bytes] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)
    broken: bool = False
    steps: dict[str, str] = field(default_factory=dict)

    def add(self, other: _Gathered) -> None:
        self.reports += other.reports
        self.failures |= other.failures
        self.broken |= other.broken
        self.steps = other.steps | self.steps

    def to_bytes(self, merge: Merge | None) -> bytes:
        """Return the message for the next rank: each distinct report once, and which of them each
        rank sent. After a failure it has no reports."""
        reports = [] if self.failures else self.reports
        if merge is not None and len(reports) > 1:
            with suppress(Exception):  # the coordinator gets the same error and raises it
                reports = [pickle.dumps(merge([*map(pickle.loads, reports)]))]
        numbers: dict[bytes, int] = {}
        sent = [numbers.setdefault(report, len(numbers)) for report in reports]
        message = _Message(list(numbers), sent, self.failures, self.broken, self.steps)
        return msgspec.msgpack.encode(message)

    @classmethod
    def from_bytes(cls, message: bytes) -> _Gathered:
        """Return what :meth:`to_bytes` sent."""
        found = _decode(message)
        reports = [found.reports[number] for number in found.sent]
        return cls(reports, found.failures, found.broken, found.steps)


@dataclass
class Meeting:
    """One step of all ranks, see :meth:`Ranks.meet`.

    Attributes:
        report: this rank's report to the coordinator, set within the step.
        answer: the coordinator's answer, after the step.
    """

    report: Any = None
    answer: Any = None


_channels: WeakKeyDictionary[Any, dict[tuple[str, Members], Channel]] = WeakKeyDictionary()
"""Channels by default process group, purpose and members. They end with that group: a channel that
stays keeps the group's store alive, and a group that is made anew would read its old keys."""
# Connections that are still open when the interpreter ends may abort the process.
atexit.register(_channels.clear)


def _channel(purpose: str, members: Members) -> Channel:
    channels = _channels.setdefault(dist.group.WORLD, {})
    channel = channels.get((purpose, members))
    if channel is None or channel.is_broken:
        channel = channels[purpose, members] = Channel(purpose, members, after=channel)
    return channel


def _weakly(channel: Channel | None) -> Callable[[], Channel | None]:
    """Return what finds a channel as long as its process group exists. An error that a program
    keeps refers to the ranks of a step, and a channel to the store of the group."""
    return (lambda: None) if channel is None else ref(channel)


def _first_wait_s(deadline_s: float) -> float:
    """Return the seconds to wait for a rank at the first connection: until the deadline, or the
    shortest timeout of the default process group's backends."""
    world: Any = dist.group.WORLD
    found = [deadline_s]
    for device in world._device_types:
        with suppress(RuntimeError, AttributeError):  # a third-party backend without options
            found.append(world._get_backend(device).options._timeout.total_seconds())
    return min(found)


@dataclass
class Ranks:
    """The ranks that save or load one checkpoint, seen from one of them.

    Attributes:
        rank: this process's global rank, 0 without a process group.
        members: the global numbers of the ranks; the first is the coordinator. All lists of
            reports are in this order.
        deadline_s: seconds to wait for any other rank.
        failed: whether a step of several ranks failed, which every rank knows.
        problem: the error of a wrong deadline on this rank; every rank raises it in its next step.
        world_size: number of ranks, 1 without a process group.
        is_coordinator: whether this rank is the coordinator.
    """

    rank: int = 0
    members: Members = range(1)
    deadline_s: float = DEFAULT_DEADLINE_S
    failed: bool = False
    problem: CheckpointingException | None = None
    _held: Callable[[], Channel | None] = field(default=lambda: None, repr=False)
    world_size: int = field(init=False)
    is_coordinator: bool = field(init=False)

    def __post_init__(self) -> None:
        self.world_size = len(self.members)
        self.is_coordinator = self.rank == self.members[0]

    @classmethod
    def current(cls, purpose: str = "") -> Ranks:
        """Return the ranks of the default process group, or one rank. It waits for no other rank.

        Args:
            purpose: name of a set of connections. A background thread uses its own purpose, so that
                its messages do not mix with those of the caller's thread.
        """
        return cls.of(None, purpose)

    @classmethod
    def of(cls, group: Group, purpose: str = "") -> Ranks:
        """Return the ranks of a process group; ``None``: see :meth:`current`.

        Raises:
            ArgumentError: it is no process group, or this rank is not a member.
        """
        if group is None and not dist.is_initialized():
            return cls()  # one rank, which waits for no other
        require_group("process_group", group)
        if not dist.is_initialized():
            return cls()
        rank, members = dist.get_rank(), global_ranks(group)
        if not members:
            raise ArgumentError(f"rank {rank} is not in process_group; only its ranks call this")
        channel = _channel(purpose, members) if len(members) > 1 else None
        ranks = cls(rank, members, _held=_weakly(channel))
        try:
            ranks.deadline_s = deadline_from_environment()
        except CheckpointingException as error:
            ranks.problem = error
        return ranks

    def over(self, purpose: str) -> Ranks:
        """Return the same ranks over the connections of another purpose.

        Every rank calls it. If the connections do not exist yet, it waits for all ranks.

        Args:
            purpose: see :meth:`current`.

        Raises:
            RanksError: a rank did not connect; every rank raises it.
        """
        if self.world_size == 1:
            return self
        channel = _channel(purpose, self.members)
        if channel.is_connected and channel.posted() is not None:  # another rank lost a connection
            channel.is_broken = True
            channel = _channel(purpose, self.members)
        ranks = replace(self, _held=lambda: channel)  # a thread may outlive the process group
        if not channel.is_connected:
            ranks.together(what=f"connecting the ranks for the {purpose}")
        return ranks

    @property
    def is_broken(self) -> bool:
        """Whether a rank was lost, so that no further collective step is possible."""
        channel = self._channel
        return self.world_size > 1 and (channel is None or channel.is_broken)

    @property
    def _channel(self) -> Channel | None:
        return self._held()

    def together(
        self,
        report: Any = None,
        *,
        what: str,
        error: BaseException | None = None,
        merge: Merge | None = None,
        decide: Decide = lambda _: None,
    ) -> Any:
        """Send every rank's report to the coordinator, and its answer to every rank. Both may be
        any values that can be pickled.

        Every rank calls it, and waits until all have called it and the coordinator has decided.

        Args:
            report: this rank's report, an argument of ``decide`` on the coordinator.
            what: the step, for the error text ("committing s3://...").
            error: the error of this rank, if any. This rank raises it again, and the other ranks
                raise a :class:`RanksError` that names this rank.
            merge: merges the reports of consecutive ranks into one, on the way to the coordinator.
            decide: makes the answer. Only the coordinator calls it, and only if no rank has an
                error. Its argument is the list of reports in the order of :attr:`members`, of which
                some may be merged. Every rank raises its error.

        Returns:
            The result of ``decide``.

        Raises:
            RanksError: another rank failed, died, or did not answer within the deadline. For the
                first step over new connections, the timeout of the default process group applies if
                it is shorter.
        """
        error = error or self.problem
        if self.world_size == 1:
            if error is not None:
                raise error
            return decide([report])
        gathered = _Gathered(steps={what.partition(" ")[0]: f"rank {self.rank} is {what}"})
        try:
            gathered.reports.append(pickle.dumps(report))
        except Exception as problem:  # raised at the end, because the other ranks wait
            error = error or problem
        if error is not None:
            gathered.failures[self.rank] = described(error)
        status, body = self._pass_on(gathered, what, merge, decide)
        if error is None:
            answer = pickle.loads(body)
            if status == _OK:
                return answer
            error = answer
        self.failed, self._held = True, _weakly(self._channel)
        raise error

    @contextmanager
    def meet(
        self,
        what: str,
        decide: Decide = lambda _: None,
        merge: Merge | None = None,
        *,
        error: BaseException | None = None,
    ) -> Iterator[Meeting]:
        """If the block fails on any rank, every rank raises.

        Every rank enters it, and waits at its end as in :meth:`together`, whose arguments these
        are. A rank that has an ``error`` already raises it without the block.

        Yields:
            The meeting, for this rank's report and the answer.
        """
        if error is not None:
            self.together(what=what, error=error)  # raises it
        meeting = Meeting()
        try:
            yield meeting
        except Exception as problem:
            error = problem
        meeting.answer = self.together(
            meeting.report, what=what, error=error, merge=merge, decide=decide
        )

    # -- up and down the tree ------------------------------------------------------------------

    def _pass_on(
        self, gathered: _Gathered, what: str, merge: Merge | None, decide: Decide
    ) -> Message:
        channel = self._channel
        assert channel is not None
        if not channel.is_connected:
            if late := channel.posted():
                channel.is_broken = True
                return Message(_BROKEN, late)
            self._connect_tree(channel, what)
        above, below = self._neighbours(self.rank)
        answer, kept = None if above is None else channel.ask(above), len(channel.kept)
        until = monotonic() + self.deadline_s
        for rank, pending in [(rank, channel.ask(rank)) for rank in below]:
            # A rank that receives reports may itself wait until the deadline.
            more_s = GRACE_S if self._neighbours(rank)[1] else 0
            left_s = until + more_s - monotonic()
            message = attempt(partial(channel.receive, rank, pending, left_s))
            if isinstance(message, RuntimeError):
                gathered.add(_Gathered(failures=_no_answer([rank], message), broken=True))
            else:
                gathered.add(_Gathered.from_bytes(message.body))
        gathered.broken |= channel.is_broken
        if above is None or answer is None:
            verdict = _verdict(gathered, what, decide)
            if verdict.status == _BROKEN:
                verdict = Message(_BROKEN, channel.post(verdict.body))
        else:
            verdict = self._ask(channel, above, answer, gathered.to_bytes(merge), what)
        begun = [(rank, channel.begin(rank, verdict)) for rank in below]
        sent = {r: attempt(partial(channel.sent, works, self._patience_s)) for r, works in begun}
        if lost := [f"{rank} ({_first_line(error)})" for rank, error in sent.items() if error]:
            named = ", ".join(lost[:3]) + (", ..." if len(lost) > 3 else "")
            logger.warning(
                "%d rank(s) did not receive the outcome of %s: %s", len(lost), what, named
            )
        if verdict.status != _BROKEN:  # every rank has received what was sent before this step
            del channel.kept[:kept]
        # Either all remaining ranks make new connections for the next step, or none does.
        channel.is_broken |= verdict.status == _BROKEN
        return verdict

    def _neighbours(self, rank: int) -> tuple[int | None, list[int]]:
        above, below = neighbours(self.members.index(rank), self.world_size)
        return None if above is None else self.members[above], [self.members[n] for n in below]

    def _ask(
        self, channel: Channel, above: int, answer: PendingReceive, gathered: bytes, what: str
    ) -> Message:
        """Report to the rank above, and wait for the coordinator's answer."""
        try:
            channel.sent(channel.begin(above, Message(_OK, gathered)), self._patience_s)
            return channel.receive(above, answer, self._patience_s)
        except RuntimeError as problem:
            posted = channel.posted(GRACE_S)
            if posted is None:
                failure = RanksError(
                    f"{what}: rank {self.rank} has no answer from rank {above}, which died or "
                    f"waited too long for another rank ({_first_line(problem)}). See its log. "
                    f"{DEADLINE_VARIABLE} ({self.deadline_s:g} s) and the timeout of the process "
                    "group set the wait",
                    failures={above: "no answer"},
                )
                posted = channel.post(pickle.dumps(failure))
            return Message(_BROKEN, posted)

    @property
    def _patience_s(self) -> float:
        """Seconds to wait for the coordinator's answer. The coordinator waits for each rank until
        the deadline, and may start to wait up to one deadline later than this rank."""
        return 2 * (self.deadline_s + GRACE_S)

    # -- connections ---------------------------------------------------------------------------

    def _connect_tree(self, channel: Channel, what: str) -> None:
        """Connect with the neighbours in the tree. The first rank that loses another posts the
        outcome for all."""
        above, below = self._neighbours(self.rank)
        wait_s = _first_wait_s(self.deadline_s)
        missing = attempt(partial(channel.gather, wait_s))
        if missing and not isinstance(missing, RuntimeError):
            problem = RuntimeError(f"it did not come within {wait_s:g} s")
            channel.post(pickle.dumps(_failure(what, _no_answer(missing, problem))))
        begun = monotonic()
        # Those below first: all leaders connect with their blocks at the same time.
        for rank in [*below, *([] if above is None else [above])]:
            height = _height(self.members.index(rank), self.world_size)
            until = begun + connect_s(height, wait_s)
            if lost := channel.link(rank, until, wait_s):
                channel.post(pickle.dumps(_failure(what, _no_answer([rank], lost))))

    def connect(self, ranks: Collection[int]) -> None:
        """Connect with other ranks for :meth:`exchange`. They call it too, after a
        :meth:`together`.

        It waits for them until the deadline, or for the timeout of the default process group if
        that is shorter. If a rank does not connect, :meth:`exchange` raises the error.
        """
        if (channel := self._channel) is not None:
            channel.connect(ranks, _first_wait_s(self.deadline_s))

    # -- pieces of chunks ----------------------------------------------------------------------

    def exchange(
        self,
        sends: Sequence[tuple[int, NDArray[np.uint8]]],
        receives: Sequence[tuple[int, NDArray[np.uint8]]],
    ) -> None:
        """Send and receive byte pieces between connected ranks (:meth:`connect`).

        Every rank that sends or receives calls it, and waits only for its partners. For each pair
        of ranks, ``sends`` on one has the same order as ``receives`` on the other.

        Args:
            sends: ``(rank, bytes)``, one-dimensional contiguous uint8.
            receives: ``(rank, buffer)``, one-dimensional contiguous uint8, written in place.

        Raises:
            RanksError: a rank died, or did not send or receive within the deadline.
        """
        channel = self._channel
        assert channel is not None
        begun_receives = [(rank, channel.begin_receive(rank, data)) for rank, data in receives]
        begun_sends = [(rank, channel.begin_send(rank, data)) for rank, data in sends]
        lost: dict[int, RuntimeError] = {}
        # Continue after a rank is lost, because the other ranks wait for pieces of this one.
        for rank, begun in begun_receives:
            if problem := attempt(partial(channel.received, rank, begun, self.deadline_s)):
                lost.setdefault(rank, problem)
        for rank, begun in begun_sends:  # a rank that receives may itself wait until the deadline
            if problem := attempt(partial(channel.sent, begun, self.deadline_s + GRACE_S)):
                lost.setdefault(rank, problem)
        for rank, problem in lost.items():
            channel.is_broken = True
            raise RanksError(
                f"rank {self.rank} lost rank {rank} while pieces of chunks were exchanged "
                f"({_first_line(problem)})",
                failures=dict.fromkeys(lost, "no answer"),
            ) from problem


def _verdict(gathered: _Gathered, what: str, decide: Decide) -> Message:
    """Return the coordinator's answer to the reports and failures of all ranks."""
    if gathered.failures:
        failure = pickle.dumps(_failure(what, gathered.failures))
        return Message(_BROKEN if gathered.broken else _ERROR, failure)
    if len(gathered.steps) > 1:
        text = f"the ranks call different functions: {', '.join(sorted(gathered.steps.values()))}"
        return Message(_BROKEN, pickle.dumps(RanksError(f"{text}; every rank calls the same")))
    try:
        return Message(_OK, pickle.dumps(decide([*map(pickle.loads, gathered.reports)])))
    except Exception as problem:
        with suppress(Exception):  # pickling an attribute of the error may raise any exception
            body = pickle.dumps(problem)
            if isinstance(pickle.loads(body), CheckpointingException):
                return Message(_ERROR, body)
        return Message(_ERROR, pickle.dumps(CheckpointingException(described(problem))))


def _no_answer(ranks: Sequence[int], problem: RuntimeError) -> dict[int, str]:
    return dict.fromkeys(ranks, f"no answer ({_first_line(problem)})")


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines() or [type(error).__name__]
    return text[0][:200]


def _failure(what: str, failures: dict[int, str]) -> RanksError:
    return RanksError(
        f"{what} failed on {len(failures)} rank(s): {listed(failures)}", failures=failures
    )
