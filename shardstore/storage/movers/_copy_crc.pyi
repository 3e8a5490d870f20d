from typing import Any

def read_chunk(path: str, size: int, target: Any = None, /) -> tuple[int, int] | None:
    """Read a file of ``size`` bytes and their crc32c, and copy the bytes to ``target``, if given.

    Returns:
        The crc32c of the bytes that were read, and the stored one. ``None``: there is no such file,
        it is large and not in memory, or the target's elements lie neither without gaps nor in
        evenly spaced rows. The target may have been written to.
    """
