"""The checksums of a file of ``torch.save``, compared without torch.

Such a file is a zip archive (since torch 1.6) whose records carry CRC-32s that torch itself ignores
on loading. Knows nothing of what is in the records.
"""

from __future__ import annotations

import io
import zipfile
import zlib

__all__ = ["verify_archive"]

READ_BYTES = 1 << 20


def verify_archive(data: bytes) -> None:
    """Compare the records of a file of torch with their checksums.

    Raises:
        ValueError: a record is damaged, or the archive itself.
    """
    if not data.startswith(b"PK"):
        return  # written by torch before 1.6
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            records = file.infolist()
            damaged = [record.filename for record in records if not _is_whole(file, record)]
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError) as error:
        raise ValueError(str(error)) from error
    # Where no checksum at all is right, they were switched off when another program wrote this.
    if damaged and len(damaged) < len(records):
        raise ValueError(f"record {damaged[0]} fails its checksum")


def _is_whole(file: zipfile.ZipFile, record: zipfile.ZipInfo) -> bool:
    try:
        with file.open(record) as stream:
            while stream.read(READ_BYTES):
                pass
    except (zipfile.BadZipFile, zlib.error):
        return False
    return True
