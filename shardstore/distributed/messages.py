"""Connections of a rank to other ranks, made on demand, and byte messages over them.

Each connection is a gloo group of two ranks, with one socket. A silent or dead third rank does not
affect it. Ranks find each other over the store of the default process group, with any backend.

A message begins with a head of fixed size that also holds a short body. So most messages are one
piece, and the receiver can post its buffer before the message arrives, without knowing its length.
This saves a round trip, which is slow if ranks share processors with ranks that compute. Errors are
those of gloo or of the store (``RuntimeError``).

If a rank dies, gloo ends an operation on its connections only if no byte of it has moved. The other
rank would wait for the rest of a piece until the time limit. So a byte follows long pieces, and the
receiver answers with a byte. Both sides wait for these.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from time import monotonic
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from numpy.typing import NDArray
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from shardstore.distributed.groups import Members

T = TypeVar("T")

GRACE_S = 5.0
"""Seconds after a deadline in which the decision of another rank at its deadline must arrive."""
_LEVEL_S = 25.0
"""Seconds after which a rank gives up a rank that dies while both connect."""
_HEAD = struct.Struct("<qq")  # status, bytes of the body
_HEAD_BYTES = 512
_INLINE_BYTES = _HEAD_BYTES - _HEAD.size
_REPORTS, _PIECES, _ENDS, _ACKNOWLEDGEMENTS = range(4)
"""Tags of gloo messages. Gloo ends the process if a message does not fit its buffer, so a piece
that no rank waits for must not arrive as a report."""


Operations: TypeAlias = "list[dist.Work] | RuntimeError"
"""Operations in progress with a rank, which have ended when the last one has, or the error that
prevented them."""
PendingReceive: TypeAlias = "tuple[NDArray[np.uint8], Operations]"
"""A receive buffer, and the operation that fills it."""


class Message(NamedTuple):
    """A message from one rank to another.

    Attributes:
        status: a number whose meaning the caller defines.
        body: the content.
    """

    status: int
    body: bytes


def attempt(step: Callable[[], T]) -> T | RuntimeError:
    """Call a function. Return its result, or its ``RuntimeError``."""
    try:
        return step()
    except RuntimeError as problem:
        return problem


def connect_s(height: int, wait_s: float) -> float:
    """Return the seconds that a rank may need to connect with the ranks that report to it.

    Each level of the tree waits longer than the level below it, and rank 0 at most ``wait_s``.

    Args:
        height: 0 if no rank reports to it, 1 if ranks do, 2 if ranks report to those.
        wait_s: seconds to wait for a rank at the first connection.
    """
    return (height + 1) * min(_LEVEL_S, wait_s / 3)


class Channel:
    """The connections of this rank to other ranks, for one purpose.

    Args:
        purpose: name of the channel, the same on all ranks.
        members: global numbers of the ranks that use it.
        after: the previous channel, which this one replaces because a rank was lost.

    Attributes:
        rank: global rank of this process.
        is_broken: whether a rank was lost. The ranks then use a new channel.
        kept: short sends that nobody waits for. If one is freed before gloo has sent it, its
            connection sends nothing more.
    """

    def __init__(self, purpose: str, members: Members, after: Channel | None = None) -> None:
        self.rank, self.is_broken = dist.get_rank(), False
        self._members = members
        purpose = f"{xxhash.xxh3_64_hexdigest(repr(members).encode())}/{purpose}"
        self._outcome: bytes | None = None
        store = _get_default_store()
        self._number: int = 0 if after is None else after._number + 1
        self._store = PrefixStore(f"shardstore/{purpose}{self._number}", store)
        while after is not None and self.posted() is not None:  # it has lost a rank too
            self._number, self._outcome = self._number + 1, None
            self._store = PrefixStore(f"shardstore/{purpose}{self._number}", store)
        self._gloo: Any = dist.ProcessGroupGloo
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        self._device = (
            self._gloo.create_device(interface=interface)
            if interface
            else self._gloo.create_default_device()
        )
        self._links: dict[int, Any] = {}
        self._lost: dict[int, RuntimeError] = {}
        self.kept: list[dist.Work] = []

    # -- connections ---------------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        """Whether there is any connection."""
        return bool(self._links)

    def gather(self, wait_s: float) -> list[int]:
        """Wait until every member has called it.

        Returns:
            The ranks that did not call it within ``wait_s`` seconds. Only one rank gets them, and
            calls :meth:`post` for all.

        Raises:
            RuntimeError: the store is gone.
        """
        # In this order: a rank that dies in between does not keep the others waiting here.
        if self._store.add("here", 1) == len(self._members):
            self._store.set("all", "")
        self._store.set(f"here/{self.rank}", "")
        late = attempt(lambda: self._store.wait(["all"], timedelta(seconds=wait_s)))
        if late is None or self._store.check(["all"]):
            return []
        if self._store.add("late", 1) > 1:
            self.posted(GRACE_S)
            return []
        return [rank for rank in self._members if not self._store.check([f"here/{rank}"])]

    def connect(self, ranks: Collection[int], wait_s: float) -> None:
        """Connect with other ranks. Each of them calls it with this rank.

        If a rank does not connect, sending to it or receiving from it raises the error.

        Args:
            ranks: the other ranks. Existing connections stay.
            wait_s: seconds to wait for each rank to call it.
        """
        new = sorted(set(ranks) - self._links.keys() - self._lost.keys())
        if not new:
            return
        missing = set(new)
        with suppress(RuntimeError):  # the store is gone
            self._store.set(f"connects/{self.rank}", "")
            here = [f"connects/{rank}" for rank in new]
            late = attempt(lambda: self._store.wait(here, timedelta(seconds=wait_s)))
            missing = {r for r in new if late and not self._store.check([f"connects/{r}"])}
        # A rank may wait for others that did not come.
        until = monotonic() + wait_s + connect_s(1, wait_s)
        for rank in new:  # all ranks connect in one order, so that none blocks another
            self.link(rank, 0 if rank in missing else until, wait_s)

    def link(self, rank: int, until: float, wait_s: float) -> RuntimeError | None:
        """Connect with a rank that calls it with this rank.

        Args:
            rank: the other rank.
            until: when to give up, on the monotonic clock. It gives up earlier if there is an
                outcome in the store (:meth:`posted`).
            wait_s: see :func:`connect_s`.

        Returns:
            ``None``, or the error that sending to the rank or receiving from it raises.
        """
        try:
            if self._outcome is not None:
                raise RuntimeError("another rank was lost")
            self._links[rank] = self._linked(rank, until, connect_s(0, wait_s) / 6)
        except RuntimeError as problem:
            self._lost[rank] = problem
        return self._lost.get(rank)

    def _linked(self, rank: int, until: float, slice_s: float) -> Any:
        low, high = sorted((self.rank, rank))
        pair = PrefixStore(f"{low}-{high}", self._store)
        pair.set(f"{self.rank}", "")
        begun = monotonic()
        there, one_slice = [f"{rank}"], timedelta(seconds=slice_s)
        # If the store is gone, `wait` fails like a timeout, and `check` raises.
        while attempt(lambda: pair.wait(there, one_slice)) is not None and not pair.check(there):
            if self.posted() is not None:
                raise RuntimeError("another rank was lost")
            if monotonic() >= until:
                raise RuntimeError(f"it did not connect within {monotonic() - begun:.0f} s")
        options = self._gloo._Options()
        options._devices, options._threads = [self._device], 0
        options._timeout = one_slice  # gloo gives up after at most five times as long
        return self._gloo(pair, int(self.rank == high), 2, options)

    # -- outcome in the store, for ranks that lost their connections ---------------------------

    def post(self, outcome: bytes) -> bytes:
        """Put the outcome of the last step on this channel into the store, unless another rank has
        put one there. Return the stored outcome."""
        with suppress(RuntimeError):  # the store is gone; other ranks notice it too
            if self._outcome is None:
                # As text, because some stores end a value at a zero byte.
                first = self._store.compare_set("outcome", "", outcome.hex())
                self._outcome = bytes.fromhex(first.decode())
        return self._outcome or outcome

    def posted(self, wait_s: float = 0) -> bytes | None:
        """Return the posted outcome. Wait up to ``wait_s`` seconds for it, then return ``None``."""
        with suppress(RuntimeError):  # the store is gone, perhaps with the coordinator
            if wait_s and self._outcome is None:
                self._store.wait(["outcome"], timedelta(seconds=wait_s))
            if self._outcome is None and self._store.check(["outcome"]):
                self._outcome = bytes.fromhex(self._store.get("outcome").decode())
        return self._outcome

    # -- messages ------------------------------------------------------------------------------

    def begin(self, rank: int, message: Message) -> Operations:
        """Begin to send to a rank. A short message needs no wait."""
        status, body = message
        inline = len(body) <= _INLINE_BYTES
        head = bytearray(_HEAD.pack(status, len(body)) + (body if inline else b""))
        padded = np.frombuffer(head.ljust(_HEAD_BYTES, b"\0"), np.uint8)
        begun = attempt(lambda: self._short(rank, padded, _REPORTS))
        if inline or isinstance(begun, RuntimeError):
            return begun or []
        return self.begin_send(rank, np.frombuffer(bytearray(body), np.uint8), _REPORTS)

    def begin_send(self, rank: int, piece: NDArray[np.uint8], tag: int = _PIECES) -> Operations:
        """Begin to send bytes. Both sides know their number."""
        return attempt(
            lambda: [
                self._move(rank, piece, tag),
                self._move(rank, np.zeros(1, np.uint8), _ENDS),
                self._move(rank, np.zeros(1, np.uint8), _ACKNOWLEDGEMENTS, receive=True),
            ]
        )

    def begin_receive(self, rank: int, piece: NDArray[np.uint8], tag: int = _PIECES) -> Operations:
        """Begin to receive bytes in place. Both sides know their number."""
        return attempt(
            lambda: [
                self._move(rank, piece, tag, receive=True),
                self._move(rank, np.zeros(1, np.uint8), _ENDS, receive=True),
            ]
        )

    def sent(self, begun: Operations, wait_s: float) -> None:
        """Wait until operations complete. The other rank may post its buffer late.

        Raises:
            RuntimeError: an operation failed or took longer than ``wait_s`` seconds.
        """
        if isinstance(begun, RuntimeError):
            raise begun
        for work in reversed(begun):
            work.wait(timedelta(seconds=max(wait_s, 0.001)))  # 0 means the group's timeout

    def received(self, rank: int, begun: Operations, wait_s: float) -> None:
        """Wait until bytes have arrived, and tell the sender; see :meth:`sent`."""
        self.sent(begun, wait_s)
        self._short(rank, np.zeros(1, np.uint8), _ACKNOWLEDGEMENTS)

    def ask(self, rank: int) -> PendingReceive:
        """Post a buffer for the next message of a rank. :meth:`receive` raises its error."""
        buffer = np.empty(_HEAD_BYTES, np.uint8)
        return buffer, attempt(lambda: [self._move(rank, buffer, _REPORTS, receive=True)])

    def receive(self, rank: int, pending: PendingReceive, wait_s: float) -> Message:
        """Wait for the message of a posted buffer."""
        head, begun = pending
        self.sent(begun, wait_s)
        status, size = _HEAD.unpack_from(head.tobytes())
        if size <= _INLINE_BYTES:
            return Message(status, head[_HEAD.size : _HEAD.size + size].tobytes())
        body = np.empty(size, np.uint8)
        begun = self.begin_receive(rank, body, _REPORTS)
        self.received(rank, begun, max(wait_s, GRACE_S))
        return Message(status, body.tobytes())

    def _short(self, rank: int, piece: NDArray[np.uint8], tag: int) -> None:
        """Send a few bytes, for which the other rank has posted a buffer."""
        self.kept.append(self._move(rank, piece, tag))

    def _move(
        self, rank: int, piece: NDArray[np.uint8], tag: int, *, receive: bool = False
    ) -> dist.Work:
        if rank in self._lost:
            raise self._lost[rank]
        link = self._links[rank]
        move = link.recv if receive else link.send
        data = torch.from_numpy(np.require(piece, requirements="W"))
        work: dist.Work = move([data], int(rank > self.rank), tag)
        return work
