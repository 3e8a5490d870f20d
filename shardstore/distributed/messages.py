"""Byte messages between the ranks of a gloo group.

A message has a head of fixed size, which holds a short body too: most messages are one piece, and
the receiver, who cannot know how long the next one is, has asked for it before it comes. That
counts: where ranks share processors, each further turn of the two sides' threads may wait for the
time slice of a rank that computes. Errors are gloo's own (``RuntimeError``).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

__all__ = ["Message", "Messages"]

_HEAD = struct.Struct("<qq?7x")  # status, bytes of the body, whether these come down the tree
_HEAD_BYTES = 512
_INLINE_BYTES = _HEAD_BYTES - _HEAD.size
_AT_ONCE = 256
"""Ranks that are heard or told at once: nobody is to hold messages of ten thousand."""


class Message(NamedTuple):
    """What one rank tells another.

    Attributes:
        status: a number.
        body: bytes.
    """

    status: int
    body: bytes


class _Incoming(NamedTuple):
    """A buffer, and what fills it or why nothing will."""

    buffer: torch.Tensor
    work: dist.Work | RuntimeError | None


@dataclass(frozen=True)
class Messages:
    """Messages over one group.

    Attributes:
        group: of gloo.
        wait_s: seconds to wait for each piece that is received; what is sent, and what comes down
            the tree, is waited for as long as the group says.
    """

    group: Any
    wait_s: float

    def send(self, rank: int, message: Message) -> None:
        """Send to one rank; returns when that has taken it."""
        self._sent(self._begin_send(rank, _pieces(message)))

    def send_each(
        self, ranks: Sequence[int], message: Message, *, tree: bool = False
    ) -> Iterator[tuple[int, RuntimeError]]:
        """Send to each of some ranks; yields those that could not be reached.

        Args:
            ranks: which.
            message: for all of them.
            tree: the body comes down a broadcast tree, see :meth:`broadcast`.
        """
        pieces = _pieces(message, tree=tree)
        for window in _windows(ranks):
            sent: list[tuple[int, list[dist.Work | None] | RuntimeError]] = []
            for rank in window:
                try:
                    sent.append((rank, self._begin_send(rank, pieces)))
                except RuntimeError as problem:
                    sent.append((rank, problem))
            for rank, works in sent:
                try:
                    self._sent(works)
                except RuntimeError as problem:
                    yield rank, problem

    def broadcast(self, body: bytes) -> None:
        """From rank 0 to all others, each of which was told that it comes."""
        self._broadcast(bytearray(body))

    def expect(self, rank: int) -> _Incoming:
        """Ask for the next message of a rank; see :meth:`receive`."""
        return self._begin_receive(rank, _buffer(_HEAD_BYTES))

    def receive(self, rank: int, expected: _Incoming) -> Message:
        """Wait for a message that was asked for."""
        status, size, tree, inline = _parsed(self._arrived(expected))
        if inline is not None:
            return Message(status, inline)
        if tree:
            body = bytearray(size)
            self._broadcast(body)
            return Message(status, bytes(body))
        return Message(status, self._body(self._begin_receive(rank, _buffer(size))))

    def receive_each(self, ranks: Sequence[int]) -> Iterator[tuple[int, Message | RuntimeError]]:
        """Wait for a message of each of some ranks; yields them by rank, or why there is none."""
        for window in _windows(ranks):
            expected = [self.expect(rank) for rank in window]
            found: list[tuple[int, bytes | _Incoming] | RuntimeError] = []
            for rank, incoming in zip(window, expected, strict=True):
                try:
                    status, size, _, inline = _parsed(self._arrived(incoming))
                except RuntimeError as problem:
                    found.append(problem)
                    continue
                rest = self._begin_receive(rank, _buffer(size)) if inline is None else inline
                found.append((status, rest))
            for rank, one in zip(window, found, strict=True):
                if isinstance(one, RuntimeError):
                    yield rank, one
                    continue
                status, rest = one
                try:
                    body = rest if isinstance(rest, bytes) else self._body(rest)
                except RuntimeError as problem:
                    yield rank, problem
                else:
                    yield rank, Message(status, body)

    def wait(self, work: dist.Work | None) -> None:
        """Wait for what was begun."""
        if work is not None:
            work.wait(timedelta(seconds=self.wait_s))

    def _begin_send(self, rank: int, pieces: Sequence[torch.Tensor]) -> list[dist.Work | None]:
        return [dist.isend(piece, dst=rank, group=self.group) for piece in pieces]

    def _sent(self, works: Sequence[dist.Work | None] | RuntimeError) -> None:
        if isinstance(works, RuntimeError):
            raise works
        for work in works:
            if work is not None:
                work.wait()  # as long as the group says: the other side may be late in asking

    def _begin_receive(self, rank: int, buffer: torch.Tensor) -> _Incoming:
        try:
            return _Incoming(buffer, dist.irecv(buffer, src=rank, group=self.group))
        except RuntimeError as problem:
            return _Incoming(buffer, problem)

    def _arrived(self, incoming: _Incoming) -> torch.Tensor:
        if isinstance(incoming.work, RuntimeError):
            raise incoming.work
        self.wait(incoming.work)
        return incoming.buffer

    def _body(self, incoming: _Incoming) -> bytes:
        return self._arrived(incoming).numpy().tobytes()

    def _broadcast(self, body: bytearray) -> None:
        dist.broadcast(torch.frombuffer(body, dtype=torch.uint8), src=0, group=self.group)


def _windows(ranks: Sequence[int]) -> Iterator[Sequence[int]]:
    for first in range(0, len(ranks), _AT_ONCE):
        yield ranks[first : first + _AT_ONCE]


def _buffer(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu")  # whatever the default device is


def _pieces(message: Message, *, tree: bool = False) -> list[torch.Tensor]:
    status, body = message
    head = bytearray(_HEAD_BYTES)
    _HEAD.pack_into(head, 0, status, len(body), tree)
    pieces = [torch.frombuffer(head, dtype=torch.uint8)]
    if tree:
        return pieces
    if len(body) <= _INLINE_BYTES:
        head[_HEAD.size : _HEAD.size + len(body)] = body
    else:
        pieces.append(torch.frombuffer(bytearray(body), dtype=torch.uint8))
    return pieces


def _parsed(head: torch.Tensor) -> tuple[int, int, bool, bytes | None]:
    """Status, bytes of the body, whether these come down the tree; and a short body itself."""
    data = head.numpy().tobytes()
    status, size, tree = _HEAD.unpack_from(data)
    inline = not tree and size <= _INLINE_BYTES
    return status, size, tree, data[_HEAD.size : _HEAD.size + size] if inline else None
