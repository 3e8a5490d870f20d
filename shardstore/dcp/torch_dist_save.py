"""One save in DCP's own files, as one rank takes part in it: planned, staged, written, published.

Ranks meet twice: over their plans, and over what they wrote. A save in the background writes from a
copy. Errors of DCP's writing threads, which DCP drops, are raised. Planner and files are DCP's.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from shardstore.distributed.coordinator import Ranks
from shardstore.errors import ArgumentError, CheckpointingException, StorageError
from shardstore.saving.sources import DevicePart
from shardstore.saving.staging import Staging
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Grid
from shardstore.storage.movers.chunks import ChunkWrite
from shardstore.storage.movers.device import stream_of

__all__ = ["FilesSave"]


class FilesSave:
    """One rank's part of a save in DCP's files.

    Args:
        folder: where to, a local folder.
        url: what errors call it.
        threads: files that this rank writes at a time.
        separation_hint: tensors and objects whose key begins so go into files of their own, named
            after it.
    """

    def __init__(
        self, folder: str, url: str, threads: int, separation_hint: str | None = None
    ) -> None:
        self.folder = folder
        self.url = url
        self._threads = threads
        self._hint = separation_hint
        self._files = _Files()
        self._plan = SavePlan([])
        self._planner: SavePlanner | _Staged = DefaultSavePlanner()
        self._metadata: Metadata | None = None
        self._results: list[WriteResult] = []
        self._writer = _Writer(folder, thread_count=threads, sync_files=False, overwrite=True)
        self._writer.fs = self._files
        self.staging: Staging | None = None

    def plan(
        self,
        state: dict[str, Any],
        planner: SavePlanner,
        ranks: Ranks,
        error: BaseException | None = None,
    ) -> None:
        """Agree on who writes what. Called by every rank, which waits for all others.

        Args:
            state: flat keys with what DCP takes.
            planner: makes the plans.
            ranks: who takes part.
            error: what went wrong on this rank before; then nothing is planned on any.

        Raises:
            CheckpointingException: on every rank, if anything is wrong on one.
        """
        report = b""
        plan = self._plan
        if error is None:
            try:
                with _quiet():
                    planner.set_up_planner(
                        state, self._writer.storage_meta(), is_coordinator=ranks.is_coordinator
                    )
                    self._writer.set_up_storage_writer(ranks.is_coordinator)
                    plan = self._writer.prepare_local_plan(planner.create_local_plan())
                report = pickle.dumps(plan)
            except Exception as problem:
                error = self._own(problem, ranks.rank)

        def decide(reports: list[bytes]) -> bytes:
            local = [pickle.loads(one) for one in reports]
            try:
                plans, self._metadata = planner.create_global_plan(local)
                plans = self._writer.prepare_global_plan(plans)
            except CheckpointingException:
                raise
            except Exception as problem:
                raise CheckpointingException(
                    f"PyTorch DCP refuses what the ranks together save to {self.url}: "
                    f"{type(problem).__name__}: {problem}"
                ) from problem
            # What a rank planned itself it has: it is told what of that others write.
            both = zip(local, plans, strict=True)
            return pickle.dumps([(_kept(mine, final), final.storage_data) for mine, final in both])

        what = f"planning the save to {self.url}"
        answer = ranks.together(report, what=what, error=error, decide=decide)
        kept, storage_data = pickle.loads(answer)[ranks.rank]
        items = plan.items if kept is None else [plan.items[number] for number in kept]
        final = replace(plan, items=items, storage_data=storage_data, planner_data=None)
        self._plan = planner.finish_plan(final)
        self._planner = planner

    def stage(self, *, budget_bytes: int | None, overlap: bool) -> None:
        """Copy what this rank writes, so that the state may be changed; the copy is written then.

        Args:
            budget_bytes: most host memory for the copy; None: as much as it takes.
            overlap: copy in a thread, and return at once.

        Raises:
            ArgumentError: the copy does not fit the budget.
            MemoryError: it does not fit the memory.
        """
        assert isinstance(self._planner, SavePlanner)
        self._planner = _Staged(self._plan.items, self._planner, budget_bytes, self._threads)
        self.staging = self._planner.staging
        self.staging.start(overlap=overlap)
        if self.staging.error is not None:
            raise self.staging.error

    def write(self, rank: int) -> None:
        """Write this rank's files, from the copy if there is one; it speaks to no other rank.

        Raises:
            StorageError: the store refused.
        """
        try:
            if self.staging is not None:
                self.staging.copies()  # copying comes first: somebody may be waiting for it
            for part in self._parts():
                with _quiet(), self._files.errors_kept():
                    written = self._writer.write_data(part, self._planner)  # type: ignore[arg-type]
                self._results += written.wait()
            missing = len(self._plan.items) - len(self._results)
            if missing:
                raise StorageError(
                    f"rank {rank} has not written {missing} of its {len(self._plan.items)} items "
                    f"to {self.url}: a thread of PyTorch DCP ended early, its log says why",
                    rank=rank,
                    url=self.url,
                )
        except OSError as problem:
            raise self._own(problem, rank) from problem.__cause__
        finally:
            self.close()

    def close(self) -> None:
        """Give the memory of the copy back. It may be called again."""
        staging, self.staging = self.staging, None
        if staging is not None:
            staging.close()

    def _parts(self) -> Iterator[SavePlan]:
        """The plan, or what of it goes into files of its own and what does not."""
        plan, hint = self._plan, self._hint
        if not hint:
            yield plan
            return
        prefix = plan.storage_data.prefix
        for own in (False, True):
            items = [item for item in plan.items if item.index.fqn.startswith(hint) == own]
            if items:
                named = replace(plan.storage_data, prefix=hint + prefix if own else prefix)
                yield replace(plan, items=items, storage_data=named)

    def finish(self, ranks: Ranks, error: BaseException | None = None) -> None:
        """Hand in what this rank wrote; the coordinator writes ``.metadata``, without which nothing
        can be read. Called by every rank, which waits for all others.

        Args:
            ranks: who takes part.
            error: what went wrong on this rank; then there will be no ``.metadata``.

        Raises:
            CheckpointingException: on every rank, if anything is wrong on one.
        """

        def decide(reports: list[bytes]) -> bytes:
            assert self._metadata is not None
            try:
                self._writer.finish(self._metadata, [pickle.loads(one) for one in reports])
            except OSError as problem:
                raise self._own(problem, ranks.rank) from problem.__cause__
            return b""

        report = b"" if error is not None else pickle.dumps(self._results)
        ranks.together(report, what=f"saving to {self.url}", error=error, decide=decide)

    def _own(self, error: Exception, rank: int) -> Exception:
        """An error of the system with the place in it; others as they are."""
        if not isinstance(error, OSError) or isinstance(error, CheckpointingException):
            return error
        reason = str(error) if error.errno is None else os.strerror(error.errno)
        own = StorageError(f"writing {self.url} failed on rank {rank}: {reason}")
        own.errno, own.rank, own.url = error.errno, rank, self.url
        return own


def _kept(mine: SavePlan, final: SavePlan) -> list[int] | None:
    """Numbers of a rank's items that it is to write; None for all."""
    if len(mine.items) == len(final.items):
        return None
    kept = {item.index for item in final.items}
    return [number for number, item in enumerate(mine.items) if item.index in kept]


@contextmanager
def _quiet() -> Iterator[None]:
    """DCP warns of what was asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class _Writer(FileSystemWriter):
    """DCP's writer, whose metadata does not name the folder: the commit renames that."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


class _Files(FileSystem):
    """Files whose errors can be kept for the one who waits for all threads.

    DCP's further threads have nobody to raise an error to: it would be printed, and what they have
    not written be missing from the checkpoint.
    """

    def __init__(self) -> None:
        self._kept: list[Exception] | None = None

    @contextmanager
    def errors_kept(self) -> Iterator[None]:
        """Streams raise nothing within; their first error is raised at the end."""
        kept: list[Exception] = []
        self._kept = kept
        try:
            yield
        finally:
            self._kept = None
        if kept:
            raise kept[0]

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """A file to be written."""
        kept = self._kept
        if kept is None:
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        opened = False
        try:
            if not kept:
                with super().create_stream(path, mode) as stream:
                    opened = True
                    yield stream
        except Exception as error:
            kept.append(_system_error(error) or error)
        if not opened:
            # Nothing can be raised here, and nothing more needs writing.
            with open(os.devnull, mode) as nowhere:
                yield nowhere


def _system_error(error: BaseException) -> OSError | None:
    """The error of the system behind another one: torch, closing its archive, raises over it."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, OSError):
        seen = seen.__cause__ or seen.__context__
    return seen


class _Staged:
    """Stands in for a planner: gives DCP's writer the copies.

    Args:
        items: what is to be copied.
        planner: gives what they stand for, now.
        budget_bytes: most memory for the copies.
        threads: threads that copy.

    Attributes:
        staging: the copying, not begun.
    """

    def __init__(
        self,
        items: Sequence[WriteItem],
        planner: SavePlanner,
        budget_bytes: int | None,
        threads: int,
    ) -> None:
        self._bytes: dict[int, io.BytesIO] = {}
        self._tensors: dict[int, torch.Tensor] = {}
        self._numbers: dict[int, int] = {}
        writes: list[ChunkWrite] = []
        size = 0
        for item in items:
            found: Any = planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                self._bytes[id(item)] = found
                size += found.getbuffer().nbytes
                continue
            size += found.nbytes
            if (write := _copied_by_staging(item.index.fqn, found)) is None:
                self._tensors[id(item)] = found.detach().to("cpu", copy=True).contiguous()
            else:
                self._numbers[id(item)] = len(writes)
                writes.append(write)
        if budget_bytes is not None and size > budget_bytes:
            raise ArgumentError(
                f"staging_budget_bytes={budget_bytes}: the format of DCP's files is written from a "
                f"whole copy, which takes {size} bytes on this rank; give that much, or save with "
                "('zarr', 2), which can copy while it writes"
            )
        self._items = items  # their ids stay theirs
        self.staging = Staging(writes, threads=threads)

    def resolve_data(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The copy for an item; waits for it."""
        key = id(item)
        if key in self._bytes:
            return self._bytes[key]
        if key in self._tensors:
            return self._tensors[key]
        return dtypes.as_tensor(self.staging.copies()[self._numbers[key]].data())


def _copied_by_staging(key: str, tensor: torch.Tensor) -> ChunkWrite | None:
    """A tensor as a chunk to be copied; None for a data type that no array has."""
    try:
        name = dtypes.zarr_name(tensor.dtype)
    except CheckpointingException:
        return None
    shape = tuple(tensor.shape)
    array = ArrayMeta(key, "", Grid(shape, tuple(max(1, n) for n in shape)), name)
    on_host = tensor.device.type == "cpu"
    there = DevicePart(tensor.detach(), stream_of(tensor.device))
    source = dtypes.as_numpy(tensor) if on_host else there
    assert math.prod(shape) == tensor.numel()
    return ChunkWrite(array, (0,) * len(shape), source)
