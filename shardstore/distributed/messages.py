"""Connections of a rank to other ranks, made on demand, and byte messages over them.

Each connection is a gloo group of two ranks: one socket, which neither the silence nor the death of
a third rank touches. Ranks find each other over the store of the default process group, whatever
its backend is.

A message has a head of fixed size, which holds a short body too: most messages are one piece, and
the receiver, who cannot know how long the next one is, has asked for it before it comes. That
counts: where ranks share processors, each further turn of the two sides' threads may wait for the
time slice of a rank that computes. Errors are gloo's own or the store's (``RuntimeError``).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

T = TypeVar("T")

GRACE_S = 5.0
"""Seconds, beyond a deadline, in which what another rank decided at its deadline must arrive."""
_CONNECT_S = 4.0
"""Seconds to connect with a rank that is about to do so too. If it dies at that moment, gloo gives
up after five times as long at the most."""
_HEAD = struct.Struct("<qq")  # status, bytes of the body
_HEAD_BYTES = 512
_INLINE_BYTES = _HEAD_BYTES - _HEAD.size
_REPORTS, _PIECES = 0, 1
"""Tags: a piece that nobody waits for any more must not be taken for a report, of another size,
which ends the process from within gloo."""


Begun: TypeAlias = "list[dist.Work] | RuntimeError"
"""What is under way to or from a rank, or why it is not."""


class Message(NamedTuple):
    """What one rank tells another.

    Attributes:
        status: a number.
        body: bytes.
    """

    status: int
    body: bytes


class Asked(NamedTuple):
    """A buffer, and what fills it or why nothing will."""

    buffer: torch.Tensor
    work: dist.Work | RuntimeError


def attempt(step: Callable[[], T]) -> T | RuntimeError:
    """Return what a step returns, or gloo's error."""
    try:
        return step()
    except RuntimeError as problem:
        return problem


class Channel:
    """The connections of one rank, to whom it speaks alone.

    Args:
        purpose: the same on all ranks.
        after: the channel that this one takes the place of, because a rank was lost.

    Attributes:
        rank: of this process.
        world: the default process group, which the channel belongs to.
        is_broken: whether a rank was lost: the ranks meet next over another channel.
    """

    def __init__(self, purpose: str, after: Channel | None = None) -> None:
        self.rank, self.world, self.is_broken = dist.get_rank(), dist.group.WORLD, False
        store = _get_default_store()
        self._number: int = 0 if after is None else after._number + 1
        self._store = PrefixStore(f"shardstore/{purpose}{self._number}", store)
        while after is not None and self.posted() is not None:  # others have lost this one too
            self._number += 1
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

    def connect(self, ranks: Collection[int], stage: str, wait_s: float) -> None:
        """Connect with ranks, each of which calls it with this one, in a stage of the same name.

        Those that do not come are errors where something is sent to them or asked of them.

        Args:
            ranks: which; what is connected stays so.
            stage: what brings them here.
            wait_s: seconds to wait for them to come. One with a lower number may wait as long for
                others before it connects.
        """
        ranks = sorted(set(ranks) - self._links.keys() - self._lost.keys())
        if not ranks:
            return
        with suppress(RuntimeError):  # of each rank below
            self._store.set(f"{stage}/{self.rank}", "")
            self._store.wait([f"{stage}/{rank}" for rank in ranks], timedelta(seconds=wait_s))
        for rank in ranks:  # in the same order everywhere, by the lower number and then the higher
            try:
                if not self._store.check([f"{stage}/{rank}"]):
                    raise RuntimeError(f"it did not come within {wait_s:g} s")
                self._links[rank] = self._link(rank, wait_s)
            except RuntimeError as problem:
                self._lost[rank] = problem

    def _link(self, rank: int, wait_s: float) -> Any:
        low, high = sorted((self.rank, rank))
        pair = PrefixStore(f"{low}-{high}", self._store)
        if self.rank == low:
            pair.set("ready", "")
        else:
            others_s = wait_s + GRACE_S + 5 * _CONNECT_S
            pair.wait(["ready"], timedelta(seconds=wait_s + others_s))
        options = self._gloo._Options()
        options._devices, options._threads = [self._device], 0
        options._timeout = timedelta(seconds=_CONNECT_S)
        return self._gloo(pair, int(self.rank == high), 2, options)

    # -- what is told where connections are lost -----------------------------------------------

    def post(self, outcome: bytes) -> None:
        """Tell over the store how the ranks' last meeting here ended."""
        with suppress(RuntimeError):  # the store is gone; they find out that a rank is lost
            # As text: some stores end a value at a zero byte.
            self._store.set("outcome", outcome.hex())

    def posted(self, wait_s: float = 0) -> bytes | None:
        """Return what was posted, if anything was or is within some seconds."""
        with suppress(RuntimeError):  # the store is gone, with the coordinator perhaps
            if wait_s:
                self._store.wait(["outcome"], timedelta(seconds=wait_s))
            if self._store.check(["outcome"]):
                return bytes.fromhex(self._store.get("outcome").decode())
        return None

    # -- messages ------------------------------------------------------------------------------

    def begin(self, rank: int, message: Message) -> Begun:
        """Begin to send to a rank."""
        status, body = message
        inline = len(body) <= _INLINE_BYTES
        head = bytearray(_HEAD.pack(status, len(body)) + (body if inline else b""))
        pieces = [head.ljust(_HEAD_BYTES, b"\0")] + ([] if inline else [bytearray(body)])
        tensors = [torch.frombuffer(piece, dtype=torch.uint8) for piece in pieces]
        return attempt(lambda: [self._send(rank, tensor, _REPORTS) for tensor in tensors])

    def begin_piece(self, rank: int, piece: torch.Tensor, *, receive: bool) -> Begun:
        """Begin to send bytes of a known number, or to receive them in place."""
        move = self._receive if receive else self._send
        return attempt(lambda: [move(rank, piece, _PIECES)])

    def sent(self, begun: Begun, wait_s: float) -> None:
        """Wait until what was begun is done: the other side may be late in asking."""
        if isinstance(begun, RuntimeError):
            raise begun
        for work in begun:
            work.wait(timedelta(seconds=wait_s))

    def ask(self, rank: int, size: int = _HEAD_BYTES) -> Asked:
        """Ask for the next message of a rank; an error is raised where it is received."""
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu")  # whatever the default device
        return Asked(buffer, attempt(lambda: self._receive(rank, buffer, _REPORTS)))

    def receive(self, rank: int, asked: Asked, wait_s: float) -> Message:
        """Wait for a message that was asked for."""
        data = _arrived(asked, wait_s)
        status, size = _HEAD.unpack_from(data)
        if size <= _INLINE_BYTES:
            return Message(status, data[_HEAD.size : _HEAD.size + size])
        return Message(status, _arrived(self.ask(rank, size), max(wait_s, GRACE_S)))

    def _send(self, rank: int, data: torch.Tensor, tag: int) -> dist.Work:
        work: dist.Work = self._to(rank).send([data], int(rank > self.rank), tag)
        return work

    def _receive(self, rank: int, buffer: torch.Tensor, tag: int) -> dist.Work:
        work: dist.Work = self._to(rank).recv([buffer], int(rank > self.rank), tag)
        return work

    def _to(self, rank: int) -> Any:
        if rank in self._lost:
            raise self._lost[rank]
        return self._links[rank]


def _arrived(asked: Asked, wait_s: float) -> bytes:
    if isinstance(asked.work, RuntimeError):
        raise asked.work
    asked.work.wait(timedelta(seconds=max(wait_s, 0.001)))  # 0: as long as the group says
    return asked.buffer.numpy().tobytes()
