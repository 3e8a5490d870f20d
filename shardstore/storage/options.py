"""Settings of a save, in one place and checked when they are given."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from shardstore.errors import ArgumentError
from shardstore.storage.format.grid import DEFAULT_TARGET_CHUNK_BYTES

__all__ = ["DEFAULT_BUDGET_BYTES", "SaveOptions", "require_number"]

DEFAULT_BUDGET_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveOptions:
    """How a checkpoint is written.

    Attributes:
        target_chunk_bytes: large shards are cut into chunks of about this many bytes.
        durable: wait until everything is on the disk before the commit.
        overwrite: replace a checkpoint that is at the target.
        validate: refuse the commit unless every chunk was written exactly once.
        threads: threads that write, each rank; ``None``: one a processor, at most 8.
        mover: ``"auto"``, ``"file"`` (plain files) or ``"tensorstore"``.
        budget_bytes: memory, each rank, for chunks on their way to or from an object store.
        allow_unconditional: save to an object store even if it ignores If-None-Match. What is
            written is checked all the same; but of two saves to one target at the same time each
            may believe that it won, and a late writer of a dead save is not fenced off.
        compression: ``"zstd"`` (level 1) for each chunk, or ``None``.
        staging_budget_bytes: host memory for the copy that an asynchronous save makes;
            ``None``: as much as the state.
        overlap_staging: let an asynchronous save copy in the background too.
        verify_base: read each chunk of a base before it is taken over.
        array_documents: give each array a document of its own (``NODE/zarr.json``) beside the
            root's copy; see :func:`shardstore.save`. Zarr v3 only.
    """

    target_chunk_bytes: int = DEFAULT_TARGET_CHUNK_BYTES
    durable: bool = True
    overwrite: bool = False
    validate: bool = True
    threads: int | None = None
    mover: str = "auto"
    budget_bytes: int = DEFAULT_BUDGET_BYTES
    allow_unconditional: bool = False
    compression: str | None = None
    staging_budget_bytes: int | None = None
    overlap_staging: bool = False
    verify_base: bool = False
    array_documents: bool = True

    def __post_init__(self) -> None:
        require_number("target_chunk_bytes", self.target_chunk_bytes)
        require_number("budget_bytes", self.budget_bytes)
        require_number("threads", self.threads, none=True)
        for name in ("verify_base", "array_documents"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ArgumentError(f"{name}={value!r:.100} must be True or False")
        if self.mover not in ("auto", "file", "tensorstore"):
            raise ArgumentError(f"mover={self.mover!r} must be 'auto', 'file' or 'tensorstore'")
        if self.compression not in (None, "zstd"):
            raise ArgumentError(f"compression={self.compression!r} must be 'zstd' or None")
        require_number("staging_budget_bytes", self.staging_budget_bytes, none=True)


def require_number(name: str, value: object, *, none: bool = False) -> None:
    """Raise :class:`ArgumentError` unless an argument is a whole number of at least 1.

    Args:
        name: of the argument.
        value: what was given.
        none: whether it may be None, too.
    """
    if value is None and none:
        return
    # A bool is an Integral, and nobody means 1 by it.
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < 1:
        raise ArgumentError(
            f"{name}={value!r} must be a whole number of at least 1" + (", or None" if none else "")
        )
