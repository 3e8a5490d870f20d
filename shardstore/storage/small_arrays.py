"""Small arrays of a local checkpoint, proved to be as they were saved with little more than the
system calls that reading their files takes.

Answers yes, or does not answer: what is wrong with an array that is not proved here is for the
slower look of :mod:`verify` to find out. Arrays of a few KiB cost a verification nothing but
overhead, so nothing is done here that a sound array does not need.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import xxhash

from shardstore.storage.checksums import crc32c
from shardstore.storage.documents import CRC32C, ArrayMeta
from shardstore.storage.manifest import Manifest

__all__ = ["SMALL_CHUNK_BYTES", "SmallArrays", "document_texts"]

SMALL_CHUNK_BYTES = 128 * 1024
"""Larger chunks are read in pieces, where the system calls do not count."""

_CRC_BYTES = 4
_RESIDUE = 0x48674BC7
"""crc32c of anything with its own crc32c, little-endian, behind it."""


def document_texts(root: bytes, nodes: Iterable[str]) -> dict[str, bytes]:
    """What each array's own document has to be, byte for byte, cut out of the root's.

    A save puts the very text of each array's document into the root's. That of another program, or
    the last one, may be left out: such an array is for the slower look.

    Args:
        root: text of the root document.
        nodes: names of all nodes in it, in its order.
    """
    starts: list[tuple[str, int, int]] = []
    end = 0
    for node in nodes:
        mark = f'"{node}":{{'.encode()
        at = root.find(mark, end)
        if at < 0:
            break
        end = at + len(mark)
        starts.append((node, at, end - 1))
    following = (at for _, at, _ in starts[1:])
    return {
        node: root[start : at - 1] for (node, _, start), at in zip(starts, following, strict=False)
    }


class SmallArrays:
    """Proves arrays of one checkpoint; safe to use from several threads.

    Args:
        root: the local folder.
        documents: node -> text of the array's document.
        manifest: what the chunks were when they were written.
        hashes: compare the 128-bit hashes too.
    """

    def __init__(
        self,
        root: str,
        documents: dict[str, bytes],
        manifest: Manifest,
        *,
        hashes: bool = False,
    ) -> None:
        self._root = root
        self._documents = documents
        self._manifest = manifest
        self._crcs = manifest.crc.astype("<u4").tobytes()
        self._hashes = hashes

    def proves(self, array: ArrayMeta) -> int | None:
        """Read all files of an array.

        Returns:
            Bytes of its chunks if its document, its chunks and the names in its folder are all as
            they should be; ``None`` if anything is not, or is not for this look.
        """
        total = array.chunk_bytes
        if total > SMALL_CHUNK_BYTES or array.codecs != (CRC32C,):
            return None
        grid = array.grid
        count = grid.size
        row = self._manifest.row(array, (0,) * len(grid.shape))
        text = self._documents.get(array.node)
        if row is None or text is None:
            return None
        folder = f"{self._root}/{array.node}"
        try:
            # Each of the files is opened below: with no other name beside them, all are theirs.
            if len(os.listdir(folder)) != 1 + count:
                return None
            if _read(f"{folder}/{array.document_name}", len(text)) != text:
                return None
            stored = total + _CRC_BYTES
            for linear in range(count):
                data = _read(f"{folder}/{array.chunk_key(grid.index(linear))}", stored)
                if not self._is_saved(data, stored, row + linear):
                    return None
        except (OSError, ValueError):
            return None
        return count * stored

    def _is_saved(self, data: bytes, stored: int, row: int) -> bool:
        if len(data) != stored or crc32c(data, 0) != _RESIDUE:
            return False
        if data[-_CRC_BYTES:] != self._crcs[_CRC_BYTES * row : _CRC_BYTES * (row + 1)]:
            return False
        if not self._hashes:
            return True
        digest = xxhash.xxh3_128_digest(memoryview(data)[:-_CRC_BYTES])
        return bool(digest == self._manifest.digest[row].tobytes())


def _read(path: str, size: int) -> bytes:
    """A file's content, or its beginning if it is larger than expected: one byte tells."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, size + 1)
    finally:
        os.close(fd)
