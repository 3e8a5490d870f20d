from typing import Any

MOST_BYTES: int
"""Largest chunk that is read: any, if this processor has VPCLMULQDQ."""

def read_chunk_files(requests: list[tuple[str, int, Any]], /) -> list[tuple[int, int] | None]:
    """Read files that hold some bytes and their crc32c, one after the other and without the
    interpreter's lock.

    Args:
        requests: path, number of bytes, and where to copy them; ``None``: nowhere.

    Returns:
        For each file the crc32c computed over the bytes and the crc32c stored in the file. ``None``
        if no regular file of this size exists, if it is larger than :data:`MOST_BYTES`, if it is
        large and not in the page cache, or if the elements of the target are neither contiguous nor
        in evenly spaced rows; the target may then be partly overwritten.
    """
