"""Connections of a rank to other ranks, made on demand, and byte messages over them.

Each connection is a gloo group of two ranks, with one socket. A silent or dead third rank does not
affect it. Ranks find each other over the store of the default process group, with any backend.

A message begins with a head of fixed size that also holds a short body. So most messages are one
piece, and the receiver can post its buffer before the message arrives, without knowing its length.
This saves a round trip, which is slow if ranks share processors with ranks that compute. Errors are
those of gloo or of the store (``RuntimeError``).
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
from numpy.typing import NDArray
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

T = TypeVar("T")

GRACE_S = 5.0
"""Seconds after a deadline in which the decision of another rank at its deadline must arrive."""
_LEVEL_S = 25.0
"""Seconds after which a rank gives up a rank that dies while both connect."""
_HEAD = struct.Struct("<qq")  # status, bytes of the body
_HEAD_BYTES = 512
_INLINE_BYTES = _HEAD_BYTES - _HEAD.size
_REPORTS, _PIECES = 0, 1
"""Tags of gloo messages. Gloo ends the process if a message does not fit its buffer, so a piece
that no rank waits for must not arrive as a report."""


Begun: TypeAlias = "list[dist.Work] | RuntimeError"
"""Operations in progress with a rank, or the error that prevented them."""
Asked: TypeAlias = "tuple[torch.Tensor, Begun]"
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
        after: the previous channel, which this one replaces because a rank was lost.

    Attributes:
        rank: rank of this process.
        is_broken: whether a rank was lost. The ranks then use a new channel.
    """

    def __init__(self, purpose: str, after: Channel | None = None) -> None:
        self.rank, self.is_broken = dist.get_rank(), False
        self._world_size = dist.get_world_size()
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

    # -- connections ---------------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        """Whether there is any connection."""
        return bool(self._links)

    def gather(self, wait_s: float) -> list[int]:
        """Wait until every rank of the world has called it.

        Returns:
            The ranks that did not call it within ``wait_s`` seconds. Only one rank gets them, and
            calls :meth:`post` for all.

        Raises:
            RuntimeError: the store is gone.
        """
        # In this order: a rank that dies in between does not keep the others waiting here.
        if self._store.add("here", 1) == self._world_size:
            self._store.set("all", "")
        self._store.set(f"here/{self.rank}", "")
        late = attempt(lambda: self._store.wait(["all"], timedelta(seconds=wait_s)))
        if late is None or self._store.check(["all"]):
            return []
        if self._store.add("late", 1) > 1:
            self.posted(GRACE_S)
            return []
        everyone = range(self._world_size)
        return [rank for rank in everyone if not self._store.check([f"here/{rank}"])]

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
        """Put the outcome of the last step on this channel into the store. Return the one that
        stands: the first."""
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

    def begin(self, rank: int, message: Message) -> Begun:
        """Begin to send to a rank."""
        status, body = message
        inline = len(body) <= _INLINE_BYTES
        head = bytearray(_HEAD.pack(status, len(body)) + (body if inline else b""))
        pieces = [head.ljust(_HEAD_BYTES, b"\0")] + ([] if inline else [bytearray(body)])
        return self._move(rank, [torch.frombuffer(p, dtype=torch.uint8) for p in pieces], _REPORTS)

    def begin_piece(self, rank: int, piece: NDArray[np.uint8], *, receive: bool) -> Begun:
        """Begin to send bytes, or to receive them in place. Both sides know their number."""
        data = torch.from_numpy(np.require(piece, requirements="W"))
        return self._move(rank, [data], _PIECES, receive=receive)

    def sent(self, begun: Begun, wait_s: float) -> None:
        """Wait until operations complete. The other rank may post its buffer late.

        Raises:
            RuntimeError: an operation failed or took longer than ``wait_s`` seconds.
        """
        if isinstance(begun, RuntimeError):
            raise begun
        for work in begun:
            work.wait(timedelta(seconds=max(wait_s, 0.001)))  # 0 means the group's timeout

    def ask(self, rank: int, size: int = _HEAD_BYTES) -> Asked:
        """Post a buffer for the next message of a rank. :meth:`receive` raises its error."""
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu")  # not torch's default device
        return buffer, self._move(rank, [buffer], _REPORTS, receive=True)

    def receive(self, rank: int, asked: Asked, wait_s: float) -> Message:
        """Wait for the message of a posted buffer."""
        data = self._arrived(asked, wait_s)
        status, size = _HEAD.unpack_from(data)
        if size <= _INLINE_BYTES:
            return Message(status, data[_HEAD.size : _HEAD.size + size])
        return Message(status, self._arrived(self.ask(rank, size), max(wait_s, GRACE_S)))

    def _arrived(self, asked: Asked, wait_s: float) -> bytes:
        self.sent(asked[1], wait_s)
        return asked[0].numpy().tobytes()

    def _move(
        self, rank: int, pieces: list[torch.Tensor], tag: int, *, receive: bool = False
    ) -> Begun:
        if rank in self._lost:
            return self._lost[rank]
        link = self._links[rank]
        move = link.recv if receive else link.send
        return attempt(lambda: [move([piece], int(rank > self.rank), tag) for piece in pieces])
