"""crc32c, from the fastest library that is there.

awscrt's uses carry-less multiplication over wide vectors where the processor has them, and reached
35 GiB/s a core where the crc32c package reached 15 (1 MiB pieces, one core of an AVX-512 server):
on warm loads that is the difference between checking every byte and being seen to. Both release the
GIL for large pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    from awscrt.checksums import crc32c as _crc32c  # type: ignore[import-untyped]
except ImportError:  # no build of awscrt for this platform
    from crc32c import crc32c as _crc32c

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["crc32c"]

crc32c: Callable[[memoryview | bytes | bytearray, int], int] = _crc32c
"""``crc32c(data, crc)``: carries the checksum ``crc`` (0 at the start) over ``data``."""
