"""Settings of a save: one object, checked when it is made and handed on whole."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, Literal, TypedDict

from shardstore.errors import ArgumentError
from shardstore.progress import ProgressCallback
from shardstore.storage.format.grid import DEFAULT_TARGET_CHUNK_BYTES

__all__ = [
    "DEFAULT_BUDGET_BYTES",
    "SaveKeywords",
    "SaveOptions",
    "StepKeywords",
    "WriterKeywords",
    "options_of",
    "require_number",
]

DEFAULT_BUDGET_BYTES = 256 * 1024 * 1024


class StepKeywords(TypedDict, total=False):
    """Keywords of every save of a state dict; :class:`SaveOptions` describes each."""

    overwrite: bool
    durable: bool
    allow_unconditional: bool
    base: str | os.PathLike[str] | None
    verify_base: bool
    compression: str | None
    array_documents: bool
    replica_group: Any
    progress: ProgressCallback | Literal["bar"] | None


class SaveKeywords(StepKeywords, total=False):
    """Keywords of :func:`shardstore.save` and :func:`shardstore.async_save`;
    :class:`SaveOptions` describes each."""

    storage_options: Mapping[str, Any] | None
    staging_budget_bytes: int | None


class WriterKeywords(TypedDict, total=False):
    """Keywords of :class:`shardstore.dcp.StorageWriter` and :func:`shardstore.dcp.install`;
    :class:`SaveOptions` describes each."""

    overwrite: bool
    durable: bool
    target_chunk_bytes: int
    threads: int | None
    array_documents: bool
    storage_options: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveOptions:
    """How a checkpoint is written.

    Attributes:
        overwrite: replace a checkpoint that is at the target. In a folder it stays readable until
            the new one takes its place. In an object store it is deleted first, so that there is
            none for a while, and never a mixed one.
        durable: wait until everything is on the disk before the commit.
        storage_options: of an object store, by fsspec's names (``key``, ``secret``,
            ``endpoint_url``, ``profile`` ...). Environment and profiles give the rest.
        allow_unconditional: save to an object store even if it ignores If-None-Match. What is
            written is checked all the same; but of two saves to one target at the same time each
            may believe that it won, and a late writer of a dead save is not fenced off.
        staging_budget_bytes: host memory, on each rank, for the copy that an asynchronous save
            makes; ``None``: as much as the rank's state. With less, copying waits for writing,
            chunk by chunk.
        base: an earlier checkpoint. Chunks that are the same there, by a 128-bit hash, are linked,
            or copied within the same object store by the store, and not sent again. Each
            checkpoint is whole by itself; any may be deleted. The commit record and the log say
            how much was saved (``reused_bytes``). A chunk that is missing there, has another size,
            or ends in another checksum is sent, with a warning. Linked files are one file: damage
            to one damages all.
        verify_base: read each chunk of the base and verify its checksums before it is taken over;
            a damaged one is sent, with a warning. Reads as many bytes as are taken over, from an
            object store through this host.
        compression: of each chunk: ``"zstd"`` (level 1), ``"blosc"`` (lz4 behind a bit shuffle:
            several times as fast, and smaller for floating-point numbers), or ``None``.
        array_documents: give each array a ``zarr.json`` of its own beside the root's copy. Without
            them an object store takes half as many requests where each array is one chunk.
            ``zarr.open_group`` and xarray, which read the root's consolidated metadata, find all
            arrays all the same; ``zarr.open_array(url/node)`` and TensorStore, by an array's own
            path, find none, and ``zarr.open_group(url, use_consolidated=False)`` shows none. The
            Zarr v2 layout has no root document and refuses ``False``.
        replica_group: a process group (this rank's data-parallel group) whose ranks hold the same
            shards: they share out the chunks by size. Where they hold different shards, main
            replicas write. With a group given, ranks whose ``replica_id`` is not the main one need
            their data too.
        progress: called with a :class:`shardstore.progress.Progress` as this rank's chunks are
            written, from any thread; or ``"bar"``: a bar on standard error, on rank 0 alone.
        validate: refuse the commit unless every chunk was written exactly once.
        overlap_staging: let an asynchronous save copy in the background too.
        target_chunk_bytes: large shards are cut into chunks of about this many bytes.
        threads: threads that write, each rank; ``None``: one a processor, at most 8.
        budget_bytes: memory, each rank, for chunks on their way to or from an object store.
    """

    overwrite: bool = False
    durable: bool = True
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    allow_unconditional: bool = False
    staging_budget_bytes: int | None = None
    base: str | os.PathLike[str] | None = field(default=None, repr=False)
    verify_base: bool = False
    compression: str | None = None
    array_documents: bool = True
    replica_group: Any = None
    progress: ProgressCallback | Literal["bar"] | None = None
    validate: bool = True
    overlap_staging: bool = False
    target_chunk_bytes: int = DEFAULT_TARGET_CHUNK_BYTES
    threads: int | None = None
    budget_bytes: int = DEFAULT_BUDGET_BYTES

    def __post_init__(self) -> None:
        require_number("target_chunk_bytes", self.target_chunk_bytes)
        require_number("budget_bytes", self.budget_bytes)
        require_number("threads", self.threads, none=True)
        for name in ("verify_base", "array_documents"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ArgumentError(f"{name}={value!r:.100} must be True or False")
        if self.compression not in (None, "zstd", "blosc"):
            raise ArgumentError(f"compression={self.compression!r} must be 'zstd', 'blosc' or None")
        require_number("staging_budget_bytes", self.staging_budget_bytes, none=True)

    def of_strategy(self, strategy: SaveOptions) -> SaveOptions:
        """These options with what the strategy decides: chunks, threads, memory."""
        return replace(
            self,
            target_chunk_bytes=strategy.target_chunk_bytes,
            threads=strategy.threads,
            budget_bytes=strategy.budget_bytes,
            array_documents=self.array_documents and strategy.array_documents,
        )


def options_of(
    caller: str,
    given: Mapping[str, Any],
    *,
    keywords: type = SaveKeywords,
    error: BaseException | None = None,
    **further: Any,
) -> tuple[SaveOptions, BaseException | None]:
    """The options of a save, or the error in them, which all ranks raise together.

    Args:
        caller: what was called, for the error text.
        given: the caller's keyword arguments.
        keywords: the typed dict of those that it takes.
        error: an earlier error, which is returned in the place of a new one.
        further: fields of :class:`SaveOptions` that are not keywords.
    """
    known = keywords.__annotations__
    try:
        if unknown := sorted(set(given) - set(known)):
            raise ArgumentError(
                f"{caller} takes no {', '.join(unknown)}; what it takes: {', '.join(sorted(known))}"
            )
        return SaveOptions(**given, **further), error
    except (ValueError, TypeError) as problem:
        return SaveOptions(), error or problem


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
