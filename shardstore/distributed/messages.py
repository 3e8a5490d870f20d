"""Byte messages between the ranks of a gloo group.

A message has a head of fixed size, which holds a short body too: most messages are one piece, and
the receiver, who cannot know how long the next one is, has asked for it before it comes. That
counts: where ranks share processors, each further turn of the two sides' threads may wait for the
time slice of a rank that computes. Errors are gloo's own (``RuntimeError``).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

_HEAD = struct.Struct("<qq?7x")  # status, bytes of the body, whether these come down the tree
_HEAD_BYTES = 512
_INLINE_BYTES = _HEAD_BYTES - _HEAD.size


class Message(NamedTuple):
    """What one rank tells another.

    Attributes:
        status: a number.
        body: bytes.
    """

    status: int
    body: bytes


class _Asked(NamedTuple):
    """A buffer, and what fills it or why nothing will."""

    buffer: torch.Tensor
    work: dist.Work | RuntimeError | None


def attempt(step: Callable[[], T]) -> T | RuntimeError:
    """Return what a step returns, or gloo's error."""
    try:
        return step()
    except RuntimeError as problem:
        return problem


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

    def send_each(
        self, ranks: Sequence[int], message: Message, *, tree: bool = False
    ) -> Iterator[tuple[int, RuntimeError]]:
        """Send to each of some ranks, which take it; yields those that could not be reached.

        Args:
            ranks: which.
            message: for all of them.
            tree: the body comes down a broadcast tree, see :meth:`broadcast`.
        """
        status, body = message
        inline = not tree and len(body) <= _INLINE_BYTES
        head = bytearray(_HEAD.pack(status, len(body), tree) + (body if inline else b""))
        pieces = [head.ljust(_HEAD_BYTES, b"\0")]
        if not tree and not inline:
            pieces.append(bytearray(body))
        tensors = [torch.frombuffer(piece, dtype=torch.uint8) for piece in pieces]

        def begin(rank: int) -> list[dist.Work | None]:
            return [dist.isend(tensor, dst=rank, group=self.group) for tensor in tensors]

        def end(works: list[dist.Work | None] | RuntimeError) -> None:
            if isinstance(works, RuntimeError):
                raise works
            for work in works:
                if work is not None:
                    work.wait()  # as long as the group says: the other side may be late in asking

        begun = [(rank, attempt(partial(begin, rank))) for rank in ranks]
        for rank, works in begun:
            if (problem := attempt(partial(end, works))) is not None:
                yield rank, problem

    def broadcast(self, body: bytes | bytearray) -> None:
        """From rank 0 to all others, each of which was told that it comes."""
        wire = body if isinstance(body, bytearray) else bytearray(body)
        dist.broadcast(torch.frombuffer(wire, dtype=torch.uint8), src=0, group=self.group)

    def ask(self, rank: int, size: int = _HEAD_BYTES) -> _Asked:
        """Ask for the next message of a rank; an error is raised where it is received."""
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu")  # whatever the default device
        return _Asked(buffer, attempt(lambda: dist.irecv(buffer, src=rank, group=self.group)))

    def receive(self, rank: int, asked: _Asked) -> Message:
        """Wait for a message that was asked for."""
        data = self._arrived(asked)
        status, size, tree = _HEAD.unpack_from(data)
        if tree:
            body = bytearray(size)
            self.broadcast(body)
            return Message(status, bytes(body))
        if size <= _INLINE_BYTES:
            return Message(status, data[_HEAD.size : _HEAD.size + size])
        return Message(status, self._arrived(self.ask(rank, size)))

    def receive_each(self, ranks: Sequence[int]) -> Iterator[tuple[int, Message | RuntimeError]]:
        """Wait for a message of each of some ranks; yields them by rank, or why there is none."""
        for rank, asked in [(rank, self.ask(rank)) for rank in ranks]:
            yield rank, attempt(partial(self.receive, rank, asked))

    def wait(self, work: dist.Work | None) -> None:
        """Wait for what was begun."""
        if work is not None:
            work.wait(timedelta(seconds=self.wait_s))

    def _arrived(self, asked: _Asked) -> bytes:
        if isinstance(asked.work, RuntimeError):
            raise asked.work
        self.wait(asked.work)
        return asked.buffer.numpy().tobytes()
