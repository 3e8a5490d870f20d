"""Read and verify the records of a file of ``torch.save``, without torch.

Such a file is a zip archive (since torch 1.6). Its records have CRC-32 checksums, which torch
ignores on loading.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib

Stream = io.BytesIO | io.RawIOBase
HEADER_BYTES = 30
"""Size of a record's header in front of its content (APPNOTE.TXT of zip, "Local file header")."""


class Records:
    """The records of an archive by name, without their common folder.

    Args:
        file: the archive, a seekable file.

    Attributes:
        entries: name of a record -> its entry in the directory of the archive.

    Raises:
        ValueError: the records take more bytes than the file has, or lie outside of it.
        zipfile.BadZipFile: the file is not an archive.
    """

    def __init__(self, file: Stream) -> None:
        file.seek(0)
        file.read(1)  # raises the read error, which zipfile would report as damage
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
        self._file = file
        self.entries = {entry.filename.partition("/")[2]: entry for entry in entries}
        size = file.seek(0, os.SEEK_END)
        if sum(entry.file_size for entry in entries) > size:
            raise ValueError("records that are larger than the file")
        if any(entry.header_offset + HEADER_BYTES > size for entry in entries):
            raise ValueError("records that begin after the end of the file")

    def start(self, name: str) -> int:
        """Return the offset of a record's content in the file, in bytes.

        Raises:
            KeyError: there is no such record.
            ValueError: the record is compressed, which torch never does.
        """
        entry = self.entries[name]
        if entry.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"record {name} is compressed")
        # A name and an extra field follow the header. Only it holds their lengths.
        self._file.seek(entry.header_offset + 26)
        lengths: tuple[int, int] = struct.unpack("<HH", self._file.read(4))
        return entry.header_offset + HEADER_BYTES + sum(lengths)

    def read(self, name: str) -> bytearray:
        """Return the content of a record.

        Raises:
            KeyError: there is no such record.
            ValueError: the record is compressed or truncated.
        """
        self._file.seek(self.start(name))
        found = bytearray(self.entries[name].file_size)
        if self._file.readinto(found) != len(found):
            raise ValueError(f"record {name} is truncated")
        return found


def verify_archive(data: bytes) -> Records:
    """Return the records of a file of ``torch.save``, after a comparison with their checksums.

    Raises:
        ValueError: a record or the archive itself is damaged.
    """
    try:
        records = Records(io.BytesIO(data))
        sums = {name: entry.CRC for name, entry in records.entries.items()}
        damaged = [name for name, crc in sums.items() if zlib.crc32(records.read(name)) != crc]
    except (zipfile.BadZipFile, NotImplementedError, KeyError) as error:
        raise ValueError(str(error)) from error
    # If no checksum matches, the program that wrote the file had switched checksums off.
    if damaged and len(damaged) < len(sums):
        raise ValueError(f"record {damaged[0]} fails its checksum")
    return records
