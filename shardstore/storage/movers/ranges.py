"""Ranges of files: the bytes of a file of another format that a box of an array needs, and the
ranges that one request reads together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from numpy.typing import NDArray

from shardstore.storage.stores.location import Location

GAP_BYTES = 1024 * 1024
"""Ranges with gaps up to this size are read from a store with one request: the gap takes less time
than another request."""
REQUEST_BYTES = 8 * 1024 * 1024
REQUESTS = 8
"""Concurrent requests for ranges. They use at most 8 times :data:`REQUEST_BYTES` of memory."""


R = TypeVar("R", bound=tuple[Any, ...])


def grouped(ranges: Iterable[R], most_bytes: int = REQUEST_BYTES) -> Iterator[list[R]]:
    """Yield the ranges of each request: ranges of a file with small gaps, of ``most_bytes`` in all.
    A longer range is alone. A range begins with the name of the file, the first byte, and one past
    the last byte."""
    group: list[R] = []
    start = end = 0
    for one in sorted(ranges, key=itemgetter(0, 1, 2)):
        name, first, last = one[:3]
        if group and (name != group[0][0] or first - end > GAP_BYTES or last - start > most_bytes):
            yield group
            group, end = [], 0
        group.append(one)
        start, end = group[0][1], max(end, last)
    if group:
        yield group


FilePosition = tuple[str, int]
"""Name of the file that holds an array in C order, and the byte offset of the array in it."""


class Slab(NamedTuple):
    """A slab of a box, see :func:`~.chunk_bytes.slabs`: its bytes in a file, its destination, and
    the shape of the array."""

    name: str
    first: int
    last: int
    out: NDArray[Any]
    shape: tuple[int, ...]


def read_bytes(location: Location, name: str, start: int, stop: int) -> bytes:
    """Return bytes ``start:stop`` of a file, fewer if the file ends before ``stop``.

    Raises:
        FileNotFoundError: there is no such file.
        StorageError: the store failed, or does not read ranges.
    """
    found = location.read_range(name, start, stop) if start < stop else b""
    if found is None:
        raise FileNotFoundError(f"{location.url}/{name}")
    return found
