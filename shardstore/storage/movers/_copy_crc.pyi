from typing import Any

from numpy.typing import NDArray
from typing_extensions import Buffer

KERNELS: list[str]

def copy_crc32c(
    source: Buffer, target: Buffer, crc: int = 0, kernel: str | None = None, /
) -> int: ...
def sum_blocks(
    source: Buffer, target: Buffer | None, block: int, crc: int, position: int, /
) -> tuple[int, list[int]]: ...
def read_chunks(
    paths: list[str], targets: list[NDArray[Any]], checksums: list[int | None], /
) -> list[int]: ...
def checksum_file(path: str, size: int, tail: bytearray, /) -> int | None: ...
