from typing_extensions import Buffer

KERNELS: list[str]

def copy_crc32c(
    source: Buffer, target: Buffer, crc: int = 0, kernel: str | None = None, /
) -> int: ...
def read_resident(fd: int, target: Buffer, tail: Buffer, /) -> int | None: ...
