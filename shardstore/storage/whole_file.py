"""Whole chunk files from memory, checked on the way: what most of a load or a check is.

The compiled part (:mod:`shardstore.storage._copy_crc`: Linux on x86-64, a C compiler at the
installation) opens, copies and checksums files in one call, in one pass over memory, which is as
fast as read(2) alone. It says no to whatever is out of the ordinary, and the caller goes the
long way, which knows every error. Whether a file is in memory shows when it is read without waiting
(preadv2(2), cachestat(2), Linux man-pages). It maps only files that are there altogether, in large
pieces, and on this machine's own file systems: an error of the disk, or a file that another machine
deletes, would be the death of who reads through a mapping.
Destinations at odd addresses profit most: the kernel copies to an address that is no multiple of 32
at a fraction of its usual rate (3 to 8 times slower on an AMD EPYC), and views into a flat
parameter buffer begin anywhere. It knows files and destinations.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

try:
    from shardstore.storage import _copy_crc
except ImportError:  # no compiler at the installation, or another processor
    COMPILED = False
else:
    COMPILED = True

_BYTE = np.dtype("u1")

__all__ = ["COMPILED", "checksum_whole_file", "read_whole_files"]


def read_whole_files(
    paths: list[str], outs: list[NDArray[Any]], expected: list[int | None]
) -> list[int]:
    """Fill each array from a file of just its bytes and their crc32c (four bytes, little-endian).

    Args:
        paths: of chunk files.
        outs: any data types and shapes.
        expected: the checksum that a file has to have, where one is known.

    Returns:
        Positions of those that have to be read in another way, where what is wrong with them shows:
        the file is not there, has another size, is not in memory, its checksum is wrong, or the
        array's elements do not lie one behind the other along its last axis. Such an array may have
        been written to.
    """
    if not COMPILED:
        return list(range(len(paths)))
    views: list[NDArray[Any]] = []
    gaps = []
    for i, out in enumerate(outs):
        strides = out.strides
        if strides and strides[-1] == out.itemsize:
            views.append(out.view(_BYTE))
        elif out.flags.c_contiguous:  # also of one element, whatever its strides
            views.append(out.reshape(-1).view(_BYTE))
        else:
            gaps.append(i)
    if not gaps:
        return _copy_crc.read_chunks(paths, views, expected)
    others = sorted(set(range(len(paths))).difference(gaps))
    left = _copy_crc.read_chunks([paths[i] for i in others], views, [expected[i] for i in others])
    return sorted([*gaps, *(others[i] for i in left)])


def checksum_whole_file(path: str, size: int, tail: bytearray) -> int | None:
    """The crc32c of the first ``size`` bytes of a file that has just so many and the tail's.

    Args:
        path: of a chunk file.
        size: bytes before the tail.
        tail: takes what follows.

    Returns:
        ``None`` as for :func:`read_whole_files`.
    """
    return _copy_crc.checksum_file(path, size, tail) if COMPILED else None
