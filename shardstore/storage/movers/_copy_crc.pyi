from typing import Any

def read_chunk(path: str, size: int, target: Any = None, /) -> tuple[int, int] | None:
    """Read a file that holds ``size`` bytes and their crc32c. Copy the bytes to ``target``, if one
    is given.

    Returns:
        The crc32c computed over the bytes and the crc32c stored in the file. ``None`` if no regular
        file of this size exists, if the file is large and not in the page cache, or if the elements
        of the target are neither contiguous nor in evenly spaced rows; the target may then be
        partly overwritten.
    """
