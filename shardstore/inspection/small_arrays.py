"""Small arrays of a local checkpoint, proved to be as they were saved with little more than the
system calls that reading their files takes.

Answers yes, or does not answer: what is wrong with an array that is not proved here is for the
slower look of :mod:`verify` to find out. Arrays of a few KiB cost a verification nothing but
overhead, so nothing is done here that a sound array does not need.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import xxhash

from shardstore.errors import DTypeMismatchError
from shardstore.storage.format import dtypes
from shardstore.storage.format.manifest import Manifest
from shardstore.storage.movers.checksums import crc32c

try:
    from shardstore.storage.movers import _small_files
except ImportError:  # no compiler at the installation, or another processor
    COMPILED = False
else:
    COMPILED = True

__all__ = ["COMPILED", "SMALL_CHUNK_BYTES", "SmallArray", "SmallArrays", "document_texts"]

SMALL_CHUNK_BYTES = 128 * 1024
"""Larger chunks are read in pieces, where the system calls do not count."""

_BEGIN = b'":{"zarr_format":'
"""Before the text of a document, behind its name."""
_KEYS = {"name": "default", "configuration": {"separator": "."}}
_CODECS = ["bytes", "crc32c"]
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


class SmallArray(NamedTuple):
    """What an array's document and the manifest say of its files.

    Attributes:
        node: its node name.
        folder: path of its folder.
        document_name: name of its document.
        text: of that; empty where the array has none.
        chunk_names: names of its chunks in C order.
        stored: bytes of each, the crc32c at its end included.
        crcs: crc32c of each chunk, little-endian.
        first_row: of the first one, in the manifest.
    """

    node: str
    folder: str
    document_name: str
    text: bytes
    chunk_names: tuple[str, ...]
    stored: int
    crcs: bytes
    first_row: int


class SmallArrays:
    """Proves arrays of one checkpoint; safe to use from several threads.

    Args:
        root: the local folder.
        documents: node -> the array's document, parsed.
        texts: node -> its text.
        manifest: what the chunks were when they were written.
        hashes: compare the 128-bit hashes too.
        array_documents: whether each array has a document of its own.
    """

    def __init__(
        self,
        root: str,
        documents: Mapping[str, Mapping[str, Any]],
        texts: Mapping[str, bytes],
        manifest: Manifest,
        *,
        hashes: bool = False,
        array_documents: bool = True,
    ) -> None:
        self._root = root
        self._documents = documents
        self._texts = texts
        self._manifest = manifest
        self._crcs = manifest.crc.astype("<u4").tobytes()
        self._hashes = hashes
        self._array_documents = array_documents

    def known(self, nodes: Iterable[str]) -> list[SmallArray]:
        """The arrays among some that are for this look."""
        return [small for node in nodes if (small := self._known(node)) is not None]

    def prove(self, arrays: Sequence[SmallArray]) -> dict[str, int]:
        """Read all files of some arrays.

        Returns:
            Node -> bytes of its chunks, of each array whose document, chunks and names in the
            folder are all as they should be; the others are left out.
        """
        if COMPILED and not self._hashes:
            sound = _small_files.sound_arrays(tuple([small[1:7] for small in arrays]))
        else:
            sound = bytes(self._is_sound(small) for small in arrays)
        return {
            small.node: len(small.chunk_names) * small.stored
            for small, is_sound in zip(arrays, sound, strict=True)
            if is_sound
        }

    def _known(self, node: str) -> SmallArray | None:
        """An array as its document and the manifest have it; ``None``: not for this look."""
        text, place = self._texts.get(node), self._manifest.place(node)
        if text is None or place is None or "/" in node:
            return None
        first, count, size = place
        try:
            document = self._documents[node]
            if size > SMALL_CHUNK_BYTES or document["chunk_key_encoding"] != _KEYS:
                return None
            if [codec["name"] for codec in document["codecs"]] != _CODECS:
                return None
            dtypes.check(document["data_type"])
            shape = document["shape"]
            chunk_shape = document["chunk_grid"]["configuration"]["chunk_shape"]
            counts = [-(-n // c) for n, c in zip(shape, chunk_shape, strict=True)]
        except (KeyError, TypeError, ValueError, ZeroDivisionError, DTypeMismatchError):
            return None
        if prod(counts) != count:
            return None
        if count == 1:
            names = ["c" + ".0" * len(counts)]
        else:
            names = [".".join(["c", *map(str, i)]) for i in product(*map(range, counts))]
        return SmallArray(
            node,
            f"{self._root}/{node}",
            "zarr.json",
            text if self._array_documents else b"",
            tuple(names),
            size + _CRC_BYTES,
            self._crcs[_CRC_BYTES * first : _CRC_BYTES * (first + count)],
            first,
        )

    def _is_sound(self, small: SmallArray) -> bool:
        """What the compiled part finds out, without it."""
        try:
            # Each of the files is opened below: with no other name beside them, all are theirs.
            if len(os.listdir(small.folder)) != bool(small.text) + len(small.chunk_names):
                return False
            text = small.text
            if text and _read(f"{small.folder}/{small.document_name}", len(text)) != text:
                return False
            for number, name in enumerate(small.chunk_names):
                data = _read(f"{small.folder}/{name}", small.stored)
                if not self._is_saved(data, small, number):
                    return False
        except (OSError, ValueError):
            return False
        return True

    def _is_saved(self, data: bytes, small: SmallArray, number: int) -> bool:
        if len(data) != small.stored or crc32c(data, 0) != _RESIDUE:
            return False
        if data[-_CRC_BYTES:] != small.crcs[_CRC_BYTES * number : _CRC_BYTES * (number + 1)]:
            return False
        if not self._hashes:
            return True
        digest = xxhash.xxh3_128_digest(memoryview(data)[:-_CRC_BYTES])
        return bool(digest == self._manifest.digest[small.first_row + number].tobytes())


def _read(path: str, size: int) -> bytes:
    """A file's content, or its beginning if it is larger than expected: one byte tells."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, size + 1)
    finally:
        os.close(fd)
