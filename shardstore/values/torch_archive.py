"""The records of a file of ``torch.save`` and their checksums, without torch.

Such a file is a zip archive (since torch 1.6) whose records carry CRC-32s that torch itself ignores
on loading.
"""

from __future__ import annotations

import io
import os
import zipfile
import zlib

Stream = io.BytesIO | io.RawIOBase


class Records:
    """The records of an archive by name, without the folder that all of them are in.

    Args:
        file: the archive, which can be sought.

    Raises:
        ValueError: the records take more bytes than the file has.
        zipfile.BadZipFile: the file is no archive.
    """

    def __init__(self, file: Stream) -> None:
        file.seek(0)
        file.read(1)  # zipfile takes a file that cannot be read for one that is damaged
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
        self._file = file
        self._entries = {entry.filename.partition("/")[2]: entry for entry in entries}
        if sum(entry.file_size for entry in entries) > file.seek(0, os.SEEK_END):
            raise ValueError("records that are larger than the file")

    def start(self, name: str) -> int:
        """Where the content of a record begins in the file.

        Raises:
            KeyError: there is no such record.
            ValueError: it is compressed, which torch never does.
        """
        entry = self._entries[name]
        if entry.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"record {name} is compressed")
        # The local header: 30 bytes, the name, and an extra field whose length it alone knows.
        self._file.seek(entry.header_offset + 26)
        header = self._file.read(4)
        lengths = int.from_bytes(header[:2], "little") + int.from_bytes(header[2:], "little")
        return entry.header_offset + 30 + lengths

    def size(self, name: str) -> int:
        """Bytes of a record; errors as :meth:`start`."""
        return self._entries[name].file_size

    def checksums(self) -> list[tuple[str, int]]:
        """Name and CRC-32 of each record."""
        return [(name, entry.CRC) for name, entry in self._entries.items()]

    def read(self, name: str, default: bytes | None = None) -> bytes | bytearray:
        """Return the content of a record; errors as :meth:`start`, and ``ValueError`` if it is cut
        short.

        Args:
            name: of the record.
            default: the answer where there is no such record.
        """
        if default is not None and name not in self._entries:
            return default
        self._file.seek(self.start(name))
        found = bytearray(self.size(name))
        if self._file.readinto(found) != len(found):
            raise ValueError(f"record {name} is truncated")
        return found


def verify_archive(data: bytes) -> None:
    """Compare the records of a file of torch with their checksums.

    Raises:
        ValueError: a record is damaged, or the archive itself.
    """
    if not data.startswith(b"PK"):
        return  # written by torch before 1.6
    try:
        records = Records(io.BytesIO(data))
        sums = records.checksums()
        damaged = [name for name, crc in sums if zlib.crc32(records.read(name)) != crc]
    except (zipfile.BadZipFile, NotImplementedError, KeyError) as error:
        raise ValueError(str(error)) from error
    # Where no checksum at all is right, they were switched off when another program wrote this.
    if damaged and len(damaged) < len(sums):
        raise ValueError(f"record {damaged[0]} fails its checksum")
