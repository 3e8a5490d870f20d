"""Small arrays of a local checkpoint, proved to be as they were saved with little more than the
system calls that reading their files takes.

Answers yes, or does not answer: what is wrong with an array that is not proved here is for the
slower look of :mod:`verify` to find out. Arrays of a few KiB cost a verification nothing but
overhead, so nothing is done here that a sound array does not need.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import xxhash

from shardstore.storage.checksums import crc32c
from shardstore.storage.documents import CRC32C, ArrayMeta
from shardstore.storage.manifest import Manifest

try:
    from shardstore.storage import _small_files
except ImportError:  # no compiler at the installation, or another processor
    COMPILED = False
else:
    COMPILED = True

__all__ = ["COMPILED", "SMALL_CHUNK_BYTES", "SmallArrays", "document_texts"]

SMALL_CHUNK_BYTES = 128 * 1024
"""Larger chunks are read in pieces, where the system calls do not count."""

_BEGIN = b'":{"zarr_format":'
"""Before the text of a document, behind its name."""
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
    parts = root.split(_BEGIN)
    names = [part.rpartition(b'"')[2] for part in parts[:-1]]
    texts: dict[str, bytes] = {}
    # The root's own document may begin in the same way: behind what comes before its first array.
    at = 0
    for node in nodes:
        name = node.encode()
        while at < len(names) and names[at] != name and not texts:
            at += 1
        if at + 1 >= len(names) or names[at] != name:
            break
        # Behind a text come a comma, and the next name in quotation marks of which one is _BEGIN's.
        texts[node] = _BEGIN[2:] + parts[at + 1][: -len(names[at + 1]) - 2]
        at += 1
    return texts


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

    def proves(self, arrays: Sequence[ArrayMeta]) -> list[int | None]:
        """Read all files of some arrays.

        Returns:
            For each the bytes of its chunks if its document, its chunks and the names in its folder
            are all as they should be; ``None`` if anything is not, or is not for this look.
        """
        sizes: list[int | None] = [None] * len(arrays)
        known = [
            (number, first, array)
            for number, array in enumerate(arrays)
            if (first := self._first_row(array)) is not None
        ]
        if COMPILED and not self._hashes:
            sound = _small_files.sound_arrays(
                tuple(self._described(array, first) for _, first, array in known)
            )
        else:
            sound = bytes(self._is_sound(array, first) for _, first, array in known)
        for (number, _, array), is_sound in zip(known, sound, strict=True):
            if is_sound:
                sizes[number] = array.grid.size * (array.chunk_bytes + _CRC_BYTES)
        return sizes

    def _first_row(self, array: ArrayMeta) -> int | None:
        """Row in the manifest of an array's first chunk; ``None``: not for this look."""
        if array.codecs != (CRC32C,) or array.node not in self._documents:
            return None
        if array.chunk_bytes > SMALL_CHUNK_BYTES:
            return None
        return self._manifest.first_row(array)

    def _described(
        self, array: ArrayMeta, first: int
    ) -> tuple[str, str, bytes, tuple[str, ...], int, bytes]:
        """An array for the compiled part."""
        count = array.grid.size
        return (
            f"{self._root}/{array.node}",
            array.document_name,
            self._documents[array.node],
            tuple(array.chunk_key(array.grid.index(linear)) for linear in range(count)),
            array.chunk_bytes + _CRC_BYTES,
            self._crcs[_CRC_BYTES * first : _CRC_BYTES * (first + count)],
        )

    def _is_sound(self, array: ArrayMeta, first: int) -> bool:
        """The same for one array without it."""
        count, text = array.grid.size, self._documents[array.node]
        folder = f"{self._root}/{array.node}"
        stored = array.chunk_bytes + _CRC_BYTES
        try:
            # Each of the files is opened below: with no other name beside them, all are theirs.
            if len(os.listdir(folder)) != 1 + count:
                return False
            if _read(f"{folder}/{array.document_name}", len(text)) != text:
                return False
            for linear in range(count):
                data = _read(f"{folder}/{array.chunk_key(array.grid.index(linear))}", stored)
                if not self._is_saved(data, stored, first + linear):
                    return False
        except (OSError, ValueError):
            return False
        return True

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
