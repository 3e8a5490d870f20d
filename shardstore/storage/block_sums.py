"""Running checksums of a chunk at the ends of its blocks, taken while its rows are gathered.

The compiled part (:mod:`shardstore.storage._copy_crc`) does both in one pass and one call; without
it the blocks are summed one by one. It knows bytes, not chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardstore.storage.checksums import crc32c

try:
    from shardstore.storage import _copy_crc
except ImportError:  # no compiler at the installation, or another processor
    COMPILED = False
else:
    COMPILED = True

__all__ = ["COMPILED", "Sums", "sum_blocks"]


@dataclass(slots=True)
class Sums:
    """What is known of a chunk's bytes up to some position.

    Attributes:
        block: bytes of the blocks whose ends are noted.
        crc: crc32c of all bytes so far.
        position: how many they are.
        running: values of ``crc`` at the ends of blocks.
    """

    block: int
    crc: int = 0
    position: int = 0
    running: list[int] = field(default_factory=list)

    def add(self, source: memoryview | NDArray[np.uint8], to: memoryview | None = None) -> None:
        """Take further bytes in; they are copied to ``to`` on the way, which they may have to be
        where ``source`` has gaps between its rows."""
        self.crc, found = sum_blocks(source, to, self.block, self.crc, self.position)
        self.position += source.nbytes
        self.running += found


def sum_blocks(
    source: memoryview | bytes | NDArray[np.uint8],
    target: memoryview | None,
    block: int,
    crc: int,
    position: int,
) -> tuple[int, list[int]]:
    """Carry a crc32c over bytes, and note it wherever a block ends.

    Args:
        source: bytes; with a target, an array of them whose last axis has no gaps.
        target: as many bytes, which those of ``source`` are copied to, in C order; ``None``:
            ``source`` has no gaps and stays where it is.
        block: bytes of a block.
        crc: of what came before.
        position: of the first byte, in what is cut into blocks.

    Returns:
        The checksum at the end, and its values at the ends of blocks, one at the very end included.
    """
    data: Any = source
    if COMPILED:
        return _copy_crc.sum_blocks(data, target, block, crc, position)
    if target is not None:
        np.frombuffer(target, np.uint8).reshape(data.shape)[...] = data
        data = target
    view = memoryview(data)
    running = []
    start, size = 0, view.nbytes
    while start < size:
        step = min(block - (position + start) % block, size - start)
        crc = crc32c(view[start : start + step], crc)
        start += step
        if (position + start) % block == 0:
            running.append(crc)
    return crc, running
