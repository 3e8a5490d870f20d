"""Plans, stages, writes and publishes one rank's part of a save in DCP's own files.

The ranks exchange reports twice: their plans before the writing, and lists of the written items
after it. An asynchronous save writes from a copy. DCP's planner decides which rank writes each item
and makes the metadata. A file is a sequence of items in the format of ``torch.save``.
"""

from __future__ import annotations

import io
import operator
import os
import pickle
import warnings
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem

from shardstore.distributed.coordinator import Ranks
from shardstore.errors import ArgumentError, CheckpointingException, StorageError
from shardstore.saving.sources import TensorSource
from shardstore.saving.staging import Staging
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Grid
from shardstore.storage.format.names import DCP_METADATA_NAME as METADATA_NAME
from shardstore.storage.movers.chunks import ChunkWrite
from shardstore.storage.movers.parallel import run_batched
from shardstore.storage.stores.location import Location

_Copy: TypeAlias = torch.Tensor | io.BytesIO | ChunkWrite


class FilesSave:
    """The part of one rank in a save to DCP's files.

    Args:
        folder: local folder to write to.
        url: name of the folder in errors.
        planner: makes the plans.
        ranks: ranks of the save.
        threads: number of files that this rank writes at a time.
        separation_hint: prefix of keys. Tensors and objects with this prefix go into separate
            files, whose names begin with it too.

    Attributes:
        staging: the copy of the state; None before :meth:`stage`.
    """

    def __init__(
        self,
        folder: str,
        url: str,
        planner: DefaultSavePlanner,
        ranks: Ranks,
        threads: int,
        separation_hint: str | None = None,
    ) -> None:
        self._folder, self._url, self._rank = folder, url, ranks.rank
        self._threads, self._hint = threads, separation_hint
        self._planner = planner
        self._items: list[WriteItem] = []
        self._metadata: Metadata | None = None
        self._copies: dict[MetadataIndex, _Copy] = {}
        self._staged: list[MetadataIndex] = []
        self._written: list[tuple[MetadataIndex, _StorageInfo]] = []
        self.staging: Staging | None = None

    def plan(self, state: dict[str, Any], ranks: Ranks, error: BaseException | None = None) -> None:
        """Decide which items each rank writes. Every rank calls it and waits for all others.

        Args:
            state: flat key -> value for DCP.
            ranks: ranks of the save.
            error: earlier error of this rank. It makes the plan fail on every rank.

        Raises:
            CheckpointingException: some rank failed; raised on every rank.
        """
        report = b""
        if error is None:
            try:
                os.makedirs(self._folder, exist_ok=True)
                with warnings.catch_warnings():  # DCP warns about the options of the planner
                    warnings.simplefilter("ignore")
                    self._planner.set_up_planner(state, is_coordinator=ranks.is_coordinator)
                    plan = self._planner.create_local_plan()
                self._items = plan.items
                report = pickle.dumps(plan)
            except Exception as problem:
                error = self._own(problem)

        def decide(reports: list[bytes]) -> bytes:
            local = [pickle.loads(one) for one in reports]
            held = [{item.index for item in plan.items} for plan in local]
            try:
                plans, self._metadata = self._planner.create_global_plan(local)
            except CheckpointingException:
                raise
            except Exception as problem:
                raise CheckpointingException(
                    f"PyTorch DCP refuses the joint plan of the ranks for {self._url}: "
                    f"{type(problem).__name__}: {problem}"
                ) from problem
            kept = ({item.index for item in plan.items} for plan in plans)
            return pickle.dumps(list(map(operator.sub, held, kept)))

        what = f"planning the save to {self._url}"
        answer = ranks.together(report, what=what, error=error, decide=decide)
        of_others = pickle.loads(answer)[ranks.rank]
        self._items = [item for item in self._items if item.index not in of_others]

    def stage(self, *, budget_bytes: int | None, overlap: bool) -> None:
        """Copy this rank's items, so that the state may be changed. :meth:`write` uses the copy.

        Args:
            budget_bytes: largest size of the copy in host memory; None: no limit.
            overlap: copy in a thread, and return at once.

        Raises:
            ArgumentError: the copy is larger than the budget.
            MemoryError: the host memory is too small for the copy.
        """
        found = {item.index: self._planner.resolve_data(item) for item in self._items}
        size = sum(
            data.getbuffer().nbytes if isinstance(data, io.BytesIO) else data.nbytes
            for data in found.values()
        )
        if budget_bytes is not None and size > budget_bytes:
            raise ArgumentError(
                f"staging_budget_bytes={budget_bytes}: DCP's files are written from a complete "
                f"copy, which takes {size} bytes on this rank; raise the budget to that size, or "
                "save with ('zarr', 2), which can copy while it writes"
            )
        self._copies = {index: _copied(index.fqn, data) for index, data in found.items()}
        chunks = {i: data for i, data in self._copies.items() if isinstance(data, ChunkWrite)}
        self._staged = list(chunks)
        self.staging = Staging(list(chunks.values()), threads=self._threads)
        self.staging.start(overlap=overlap)
        if self.staging.error is not None:
            raise self.staging.error

    def write(self) -> None:
        """Write this rank's files, from the copy if there is one. It waits for no other rank.

        Raises:
            StorageError: the disk failed.
        """
        try:
            if self.staging is not None:
                self._copies.update(zip(self._staged, self.staging.copies(), strict=True))
            run_batched(self._files(), self._write_files, threads=self._threads)
        except Exception as problem:
            raise self._own(problem) from problem
        finally:
            self.close()

    def close(self) -> None:
        """Free the memory of the copy. Further calls do nothing."""
        staging, self.staging = self.staging, None
        self._copies = {}
        if staging is not None:
            staging.close()

    def _files(self) -> list[tuple[str, list[WriteItem]]]:
        """Return the name and the items of each file; files of a prefix have about equal sizes."""
        hint, files = self._hint or "", []
        own = [item for item in self._items if hint and item.index.fqn.startswith(hint)]
        rest = [item for item in self._items if not hint or not item.index.fqn.startswith(hint)]
        for prefix, items in ((hint, own), ("", rest)):
            parts: list[list[WriteItem]] = [[] for _ in range(min(self._threads, len(items)))]
            sizes = [0] * len(parts)
            for item in sorted(items, key=_size_of, reverse=True):
                least = sizes.index(min(sizes))
                parts[least].append(item)
                sizes[least] += _size_of(item)
            names = (f"{prefix}__{self._rank}_{n}.distcp" for n in range(len(parts)))
            files += list(zip(names, parts, strict=True))
        return files

    def _write_files(self, files: Sequence[tuple[str, list[WriteItem]]]) -> None:
        for name, items in files:
            with open(os.path.join(self._folder, name), "wb") as file:
                for item in items:
                    start, data = file.tell(), self._data(item)
                    if isinstance(data, io.BytesIO):
                        file.write(data.getbuffer())
                    else:
                        torch.save(data, file)
                    info = _StorageInfo(name, start, file.tell() - start)
                    self._written.append((item.index, info))

    def _data(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return an item in host memory, from the copy if there is one."""
        data = self._copies.get(item.index)
        if data is None:
            data = self._planner.resolve_data(item)
        if isinstance(data, ChunkWrite):
            data = dtypes.as_tensor(data.data())
        if isinstance(data, torch.Tensor):
            data = data.detach().cpu()
            if data.untyped_storage().size() != data.nbytes:
                data = data.clone()  # torch.save would write the whole storage of a view
        return data

    def finish(self, ranks: Ranks, error: BaseException | None = None) -> None:
        """Report the items that this rank wrote; then the coordinator writes ``.metadata``.

        Without ``.metadata`` nothing can be read. Every rank calls it and waits for all others.

        Args:
            ranks: ranks of the save.
            error: error of this rank. It prevents the writing of ``.metadata``.

        Raises:
            CheckpointingException: some rank failed; raised on every rank.
        """

        def decide(reports: list[bytes]) -> bytes:
            assert self._metadata is not None
            written = [pair for report in reports for pair in pickle.loads(report)]
            self._metadata.storage_data = dict(written)
            self._metadata.storage_meta = StorageMeta()  # no folder: the commit renames the folder
            self._metadata.version = CURRENT_DCP_VERSION
            try:
                Location.of(self._folder).replace(METADATA_NAME, pickle.dumps(self._metadata))
            except Exception as problem:
                raise self._own(problem) from problem
            return b""

        report = b"" if error is not None else pickle.dumps(self._written)
        ranks.together(report, what=f"saving to {self._url}", error=error, decide=decide)

    def _own(self, error: BaseException) -> BaseException:
        """Return a StorageError with rank and place for an OSError or an error that it caused.
        Return other errors unchanged."""
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None or isinstance(error, CheckpointingException):
            return error
        reason = str(cause) if cause.errno is None else os.strerror(cause.errno)
        own = StorageError(f"writing {self._url} failed on rank {self._rank}: {reason}")
        own.errno, own.rank, own.url = cause.errno, self._rank, self._url
        return own


def _size_of(item: WriteItem) -> int:
    """Return the bytes of a tensor's part; 0 for an object, whose size is not known yet."""
    about = item.tensor_data
    return about.chunk.sizes.numel() * about.properties.dtype.itemsize if about else 0


def _copied(key: str, data: torch.Tensor | io.BytesIO) -> _Copy:
    """Return the data to write for an item.

    A tensor becomes a chunk that the staging copies. If no array has its data type, it is copied
    here. The planner's bytes are a copy already.
    """
    if isinstance(data, io.BytesIO):
        return data
    try:
        name = dtypes.zarr_name(data.dtype)
    except CheckpointingException:
        return data.detach().to("cpu", copy=True)
    shape = tuple(data.shape)
    array = ArrayMeta(key, "", Grid(shape, tuple(max(1, n) for n in shape)), name)
    return ChunkWrite(array, (0,) * len(shape), TensorSource(data, key).part())
