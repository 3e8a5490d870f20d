"""Computes crc32c, and running crc32c values at the ends of a chunk's blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import xxhash
from crc32c import crc32c as _crc32c

crc32c: Callable[[memoryview | bytes | bytearray, int], int] = _crc32c
"""``crc32c(data, crc)`` continues the checksum ``crc`` (0 at the start) over ``data``."""


@dataclass(slots=True)
class Sums:
    """Running crc32c over a chunk's bytes.

    Attributes:
        block: block size in bytes.
        crc: crc32c of all bytes so far.
        position: byte offset of the next byte in the chunk.
        running: values of ``crc`` at the ends of blocks.
        hasher: hash of the same bytes, if it is wanted.
    """

    block: int
    crc: int = 0
    position: int = 0
    running: list[int] = field(default_factory=list)
    hasher: xxhash.xxh3_128 | None = None

    def add(self, data: memoryview) -> None:
        """Continue over further bytes."""
        start, size = 0, data.nbytes
        while start < size:
            step = min(self.block - self.position % self.block, size - start)
            part = data[start : start + step]
            self.crc = crc32c(part, self.crc)
            if self.hasher is not None:  # while the part is in the processor's cache
                self.hasher.update(part)
            start += step
            self.position += step
            if self.position % self.block == 0:
                self.running.append(self.crc)

    def ends(self) -> list[int]:
        """Return the values of ``crc`` at the end of each block. The last block may be shorter."""
        return self.running if self.position % self.block == 0 else [*self.running, self.crc]
