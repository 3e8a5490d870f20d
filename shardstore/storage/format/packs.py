"""Packs: zip files that hold the small chunks of many arrays.

The members of a pack are stored, not compressed, and form a Zarr hierarchy: first the chunks, then
the documents of the arrays of which the pack holds every chunk, and of a root group. So each reader
of zip files finds them, while a checkpoint's root document says where each chunk lies.

The layout is that of PKWARE's APPNOTE 6.3.10 (4.3.7 local header, 4.3.12 central directory, 4.3.14
to 4.3.16 its end, with the forms of zip64 where there are 65,535 members or more).
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

PACKS = ".packs"
"""Folder of the packs. No node's name begins with a dot."""
SMALL_BYTES = 1024 * 1024
"""An array is packed if its chunks have at most this size."""
MOST_BYTES = 32 * 1024 * 1024
"""A pack is closed when it has this size, so that it has at most one small chunk more."""
_NAME = re.compile(rf"{re.escape(PACKS)}/\d+\.\d+\.zip")

_ROW = struct.Struct("<IQI")
_LOCAL = struct.Struct("<4s5H3I2H")
_MEMBER = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR_64 = struct.Struct("<4sIQI")
_VERSION, _VERSION_64, _UNIX = 20, 45, 3 << 8
_DATE = 1 << 5 | 1  # 1 January 1980, the first day that a zip file can name
_MODE = 0o100644 << 16
_GROUP = json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}).encode()


def is_pack(name: str) -> bool:
    """Return whether a name below a checkpoint is that of a pack."""
    return _NAME.fullmatch(name) is not None


class PackedRange(NamedTuple):
    """Where a packed chunk lies: the name of the pack below the root, the first byte, and one past
    the last byte."""

    name: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Places:
    """Where the chunks of a packed array lie.

    Attributes:
        files: names of the packs of the checkpoint.
        rows: for each chunk in C order over the grid: number of its pack in ``files`` (uint32),
            first byte (uint64) and size in bytes (uint32), little-endian. Empty before the commit.
    """

    files: tuple[str, ...] = ()
    rows: bytes = b""

    def of(self, number: int) -> PackedRange:
        """Return the place of a chunk. ``number`` is its position in C order over the grid."""
        file, first, size = _ROW.unpack_from(self.rows, _ROW.size * number)
        return PackedRange(self.files[file], first, first + size)

    def names(self) -> set[str]:
        """Return the names of the packs in which a chunk lies."""
        return {self.files[file] for file, _, _ in _ROW.iter_unpack(self.rows)}

    def fit(self, chunks: int) -> bool:
        """Return whether each of so many chunks has a place in one of the files."""
        if len(self.rows) != _ROW.size * chunks:
            return False
        found = _ROW.iter_unpack(self.rows)
        return all(file < len(self.files) and first < 2**62 for file, first, _ in found)


@dataclass
class Pack:
    """A pack in the making.

    Attributes:
        body: the members so far, each a local header and its content.
        members: name, CRC-32, size and the offset of the local header of each of them.
    """

    body: bytearray = field(default_factory=bytearray)
    members: list[tuple[bytes, int, int, int]] = field(default_factory=list)

    def add(self, name: str, content: Iterable[bytes | memoryview]) -> tuple[int, int]:
        """Add a member. Return its first byte, and its size in bytes."""
        encoded, offset, crc = name.encode(), len(self.body), 0
        first = offset + _LOCAL.size + len(encoded)
        self.body += bytes(_LOCAL.size) + encoded
        for part in content:
            crc = zlib.crc32(part, crc)
            self.body += part
        size = len(self.body) - first
        about = (_VERSION, 0, 0, 0, _DATE, crc, size, size, len(encoded), 0)
        _LOCAL.pack_into(self.body, offset, b"PK\3\4", *about)
        self.members.append((encoded, crc, size, offset))
        return first, size

    def extend(self, other: Pack) -> int:
        """Add the members of another pack. Return by how many bytes they moved."""
        moved = len(self.body)
        self.body += other.body
        self.members += [(*member[:3], member[3] + moved) for member in other.members]
        return moved

    def close(self, documents: Sequence[tuple[str, str]]) -> bytes:
        """Add the documents of arrays (node, text) and of the root group. Return the file."""
        for node, text in documents:
            self.add(f"{node}/zarr.json", [text.encode()])
        self.add("zarr.json", [_GROUP])
        start, count = len(self.body), len(self.members)
        for name, crc, size, offset in self.members:
            about = (_UNIX | _VERSION, _VERSION, 0, 0, 0, _DATE, crc, size, size, len(name))
            self.body += _MEMBER.pack(b"PK\1\2", *about, 0, 0, 0, 0, _MODE, offset) + name
        end = len(self.body)
        if count >= 0xFFFF:
            rest = (_UNIX | _VERSION_64, _VERSION_64, 0, 0, count, count, end - start, start)
            self.body += _END_64.pack(b"PK\6\6", _END_64.size - 12, *rest)
            self.body += _LOCATOR_64.pack(b"PK\6\7", 0, end, 1)
        shown = min(count, 0xFFFF)
        self.body += _END.pack(b"PK\5\6", 0, 0, shown, shown, end - start, start, 0)
        return bytes(self.body)
