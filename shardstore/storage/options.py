"""The options of a save, as one object that is checked when it is made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from numbers import Integral
from typing import Any, Literal, TypedDict

from shardstore.errors import ArgumentError
from shardstore.progress import ProgressCallback, callback_of
from shardstore.storage.format.grid import DEFAULT_TARGET_CHUNK_BYTES

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
    constants: bool
    pack: bool
    replica_group: Any
    replicas: Literal["lowest", "equal"]
    progress: ProgressCallback | Literal["bar"] | None


class SaveKeywords(StepKeywords, total=False):
    """Keywords of :func:`shardstore.save` and :func:`shardstore.async_save`;
    :class:`SaveOptions` describes each."""

    storage_options: Mapping[str, Any] | None
    staging_budget_bytes: int | None


class ChunkKeywords(TypedDict, total=False):
    """Keywords of the writers of chunks; :class:`SaveOptions` describes each."""

    target_chunk_bytes: int
    threads: int | None
    array_documents: bool
    constants: bool
    pack: bool


class StrategyKeywords(ChunkKeywords, total=False):
    """Keywords of the strategy that saves the Zarr formats."""

    budget_bytes: int


class WriterKeywords(ChunkKeywords, total=False):
    """Keywords of :class:`shardstore.dcp.StorageWriter` and :func:`shardstore.dcp.install`;
    :class:`SaveOptions` describes each."""

    overwrite: bool
    durable: bool
    storage_options: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveOptions:
    """How a checkpoint is written: ``shardstore.save(state, place, options=SaveOptions(...))``. The
    functions that save take most of them as keywords too.

    Attributes:
        overwrite: replace the checkpoint at the target. In a folder, the old checkpoint stays
            readable until the new one takes its place. In an object store it is deleted first:
            until the new commit there is no checkpoint, and never a mixed one.
        durable: wait until everything is on the disk before the commit.
        storage_options: options of the object store, with fsspec's names (``key``, ``secret``,
            ``endpoint_url``, ``profile`` ...). Others come from the environment and profiles.
        allow_unconditional: save to an object store that ignores If-None-Match. Commits are still
            checked, but if two saves write to one target at the same time, each may report success,
            and a late writer of a dead save is not kept out.
        staging_budget_bytes: host memory on each rank for the copy of an asynchronous save;
            ``None``: the size of the rank's state. With less, copying and writing take turns.
        base: an earlier checkpoint. Chunks that are equal there, by a 128-bit hash, are not written
            again: they become hard links, or copies that the object store makes. Each checkpoint is
            complete by itself, and any may be deleted. The commit record and the log give the bytes
            that were reused (``reused_bytes``). If a chunk of the base is missing, has another
            size or ends in another checksum, the save writes the chunk and logs a warning. Linked
            files are one file on the disk: damage to it affects all checkpoints that share it.
        verify_base: read each chunk of the base and verify its checksums before it is reused. The
            save writes a damaged chunk again and logs a warning. It reads as many bytes as are
            reused, from an object store through this host.
        compression: codec of each chunk: ``"zstd"`` (level 1), ``"blosc"`` (a bit shuffle, then
            lz4; several times as fast, and smaller for floating-point numbers), or ``None``.
        array_documents: write a ``zarr.json`` for each array in addition to the root's copy.
            Without them, a save to an object store needs half as many requests if each array is one
            chunk. ``zarr.open_group`` and xarray read the root's consolidated metadata and still
            find all arrays. ``zarr.open_array(url/node)`` and TensorStore, which open an array by
            its own path, find none, and ``zarr.open_group(url, use_consolidated=False)`` shows
            none. The Zarr v2 layout has no root document and refuses ``False``.
        constants: store no chunk of an array whose elements all have the same bits (a step count,
            zero moments), if one rank writes it whole: its document has the value, so that other
            Zarr readers see it too. Versions before 0.2 refuse such a checkpoint. Not for the Zarr
            v2 layout.
        pack: put chunks of up to 1 MiB into few files. These are zip files that Zarr readers open;
            the checkpoint's own ``zarr.json`` does not list the arrays in them. It implies
            ``constants``. Versions before 0.2 refuse such a checkpoint. Not for the Zarr v2 layout.
        replica_group: a process group (this rank's data-parallel group) whose ranks hold the same
            shards: they divide the chunks by size. If they hold different shards, the main replicas
            write. With a group, ranks that are not the main replica need their data too.
        replicas: what to do if ranks hold different values at one path of the state dict:
            ``"lowest"`` saves the value of the lowest rank and logs a warning, ``"equal"`` raises
            an error. ``validate_access_integrity=False`` compares no values.
        progress: called with a :class:`shardstore.progress.Progress` as this rank's chunks are
            written, from any thread; or ``"bar"``: a bar on standard error, on rank 0 only.
        validate_access_integrity: refuse the commit unless every chunk was written exactly once.
        overlap_staging: let an asynchronous save return before it has copied the state.
        target_chunk_bytes: size of chunks in bytes; larger shards are cut.
        threads: number of threads that write on each rank; ``None``: the rank's share of the
            processors (``LOCAL_WORLD_SIZE``), at most 8.
        budget_bytes: memory on each rank for chunks in transfer to or from an object store.
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
    constants: bool = False
    pack: bool = False
    replica_group: Any = None
    replicas: Literal["lowest", "equal"] = "lowest"
    progress: ProgressCallback | Literal["bar"] | None = None
    validate_access_integrity: bool = True
    overlap_staging: bool = False
    target_chunk_bytes: int = DEFAULT_TARGET_CHUNK_BYTES
    threads: int | None = None
    budget_bytes: int = DEFAULT_BUDGET_BYTES

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if option.type == "bool":
                require_bool(option.name, value)
            elif option.type in ("int", "int | None"):
                require_number(option.name, value, none=option.type != "int")
        if self.compression not in (None, "zstd", "blosc"):
            raise ArgumentError(f"compression={self.compression!r} must be 'zstd', 'blosc' or None")
        if self.replicas not in ("lowest", "equal"):
            raise ArgumentError(f"replicas={self.replicas!r:.100} must be 'lowest' or 'equal'")
        if self.progress is not None:
            callback_of(self.progress, shows=False)

    def of_strategy(self, given: StrategyKeywords) -> SaveOptions:
        """Return these options with those that were given to the strategy."""
        documents = self.array_documents and given.get("array_documents", True)
        more: dict[str, Any] = {**given, "array_documents": documents}
        return replace(self, **more)


def options_of(
    caller: str,
    given: Mapping[str, Any],
    *,
    keywords: type = SaveKeywords,
    options: SaveOptions | None = None,
    **further: Any,
) -> SaveOptions:
    """Return the options of a save.

    Args:
        caller: name of the called function, for the error text.
        given: the caller's keyword arguments, which replace those of ``options``.
        keywords: typed dict of the keywords that the function takes.
        options: the other options.
        further: fields of :class:`SaveOptions` that are not keywords.

    Raises:
        ArgumentError: there is no such keyword, an option has a wrong type or value, or ``options``
            is something else.
    """
    if not isinstance(options, SaveOptions | None):
        raise ArgumentError(
            f"options={options!r:.100} must be a shardstore.SaveOptions, such as "
            "SaveOptions(durable=False), or None"
        )
    known = keywords.__annotations__
    if unknown := sorted(set(given) - set(known)):
        raise ArgumentError(
            f"{caller} has no keyword {', '.join(unknown)}; it takes its named arguments "
            f"and {', '.join(sorted(known))}"
        )
    given = {**given, **further}
    return SaveOptions(**given) if options is None else replace(options, **given)


def require_bool(name: str, value: object) -> None:
    """Raise :class:`ArgumentError` unless an argument is ``True`` or ``False``."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{name}={value!r:.100} must be True or False")


def require_number(name: str, value: object, *, none: bool = False, at_least: int = 1) -> None:
    """Raise :class:`ArgumentError` unless an argument is a whole number of at least ``at_least``.

    Args:
        name: name of the argument.
        value: its value.
        none: whether ``None`` is allowed.
        at_least: the smallest number.
    """
    if value is None and none:
        return
    # A bool is an Integral too, but never a meant number.
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < at_least:
        raise ArgumentError(
            f"{name}={value!r} must be a whole number of at least {at_least}"
            + (", or None" if none else "")
        )


def require_duration(name: str, value: object) -> None:
    """Raise :class:`ArgumentError` unless an argument is a :class:`~datetime.timedelta`."""
    if not isinstance(value, timedelta):
        text = f"{name}={value!r:.100} must be a timedelta, such as datetime.timedelta(hours=24)"
        raise ArgumentError(text)


DEFAULTS = SaveOptions()
"""The options of a save that were not given."""
