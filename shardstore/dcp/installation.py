"""shardstore under programs that give PyTorch DCP a place and no storage.

torchtitan and Lightning's FSDP2 call ``dcp.save(state, checkpoint_id=path)`` somewhere inside, with
no way to hand in a storage writer. :func:`install` changes what DCP chooses in that case; a call
that names its storage keeps it. It touches three private names of ``torch.distributed.checkpoint``,
and says so where a PyTorch does not have them; and the methods of DCP's own reader.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Unpack

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from shardstore.dcp.reader import StorageReader
from shardstore.dcp.writer import StorageWriter
from shardstore.errors import CheckpointingException
from shardstore.storage.commit.identity import is_ours
from shardstore.storage.format.names import DCP_METADATA_NAME as METADATA_NAME
from shardstore.storage.options import WriterKeywords
from shardstore.storage.stores.location import Location

_METADATA = "read_metadata"
_OTHERS = (
    "set_up_storage_reader",
    "prepare_local_plan",
    "prepare_global_plan",
    "read_data",
)
_KEPT = "_reader_of_shardstore"


def is_of_dcp(location: Location) -> bool:
    """Return whether a checkpoint that DCP's own storage wrote is at a place."""
    return not is_ours(location) and location.exists(METADATA_NAME)


def handing_on(new_reader: Callable[[], StorageReader]) -> dict[tuple[Any, str], Any]:
    """What to change in DCP's ``FileSystemReader`` so that it loads checkpoints of ours too.

    Each load begins with the metadata, and there the place is looked at anew, so that it does not
    matter when a reader was made or where it was sent by ``reset``. A reader over another file
    system than the machine's (``FsspecReader``) stays as it is.

    Args:
        new_reader: makes a reader of ours, without a place.

    Returns:
        The class and the name of each method, and what it is to be.
    """
    read_before = getattr(FileSystemReader, _METADATA)

    @functools.wraps(read_before)
    def read_metadata(self: FileSystemReader, *args: Any, **kwargs: Any) -> Metadata:
        vars(self).pop(_KEPT, None)
        # Metadata of one rank is asked for where there is none of all ranks: DCP alone writes it.
        if kwargs.get("rank") is None and type(self.fs) is FileSystem:
            # As DCP takes it: neither a URL nor the home folder.
            place = os.path.abspath(self.path)
            if is_ours(Location.of(place)):
                reader = new_reader()
                reader.reset(place)
                vars(self)[_KEPT] = reader
                return reader.read_metadata()
        found: Metadata = read_before(self, *args, **kwargs)
        return found

    changes = {(FileSystemReader, name): _handed_on(name) for name in _OTHERS}
    return {(FileSystemReader, _METADATA): read_metadata, **changes}


def _handed_on(name: str) -> Callable[..., Any]:
    """Return the method of that name: ours where the metadata were ours, else as it is now."""
    before = getattr(FileSystemReader, name)

    @functools.wraps(before)
    def method(self: FileSystemReader, *args: Any, **kwargs: Any) -> Any:
        reader = vars(self).get(_KEPT)
        if reader is None:
            return before(self, *args, **kwargs)
        return getattr(reader, name)(*args, **kwargs)

    return method


Place = str | os.PathLike[str]


class Installation(ExitStack):
    """What :func:`install` changed; as a context manager it is taken back at the end."""

    def __init__(self, changes: Mapping[tuple[Any, str], Any]) -> None:
        super().__init__()
        for (module, name), value in changes.items():
            self.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)

    def uninstall(self) -> None:
        """DCP chooses as it did before, and its reader, whenever it was made, reads DCP's own files
        alone. Of several installations the last one goes first."""
        self.close()


def install(
    *,
    allow_pickle: bool = False,
    cast: bool = False,
    **options: Unpack[WriterKeywords],
) -> Installation:
    """Have DCP use shardstore wherever a program names a ``checkpoint_id`` and no storage.

    From then on ``torch.distributed.checkpoint.save``, ``async_save`` (both of its forms) and
    ``load`` write and read checkpoints of ours, by path or URL, in this process. Checkpoints that
    DCP's own storage wrote are still loaded by it, so a run goes on from its last one. Programs
    that name DCP's ``FileSystemReader`` when they load (Lightning's ``FSDPStrategy`` does, for
    optimizers) read ours by it, in local folders; who names a writer of DCP gets DCP's own files.
    What is saved also gets a file ``.metadata`` (a line of text): programs look for it to tell a
    folder that DCP has finished from one that it has not. Called by all ranks, once, before the
    first save.

    Args:
        allow_pickle: as :class:`StorageWriter`.
        cast: as :class:`StorageReader`.
        **options: as :class:`StorageWriter`; ``threads`` and ``storage_options`` are the reader's
            too. ``overwrite`` is on by default: DCP's own storage overwrites, and programs rely on
            it when they save a step again. In a folder the old checkpoint stays readable until the
            new one takes its place; an object store has none for a while.

    Returns:
        A handle to take it back with; it may be dropped.

    Raises:
        ArgumentError: a number makes no sense, or the storage options are no mapping.
        CheckpointingException: this PyTorch chooses its storage in another way.
    """

    storage_options = options.get("storage_options")

    def new_writer() -> StorageWriter:
        given: WriterKeywords = {"overwrite": True, **options}
        return StorageWriter(allow_pickle=allow_pickle, dcp_marker=True, **given)

    def new_reader() -> StorageReader:
        return StorageReader(
            cast=cast, threads=options.get("threads"), storage_options=storage_options
        )

    # Wrong options are told here, not at the first save.
    new_writer()
    saver: Any = state_dict_saver
    loader: Any = state_dict_loader
    try:
        before, _ = saver._storage_setup, loader._storage_setup
        process = saver._ProcessBasedAsyncCheckpointExecutor
    except AttributeError as error:
        raise CheckpointingException(
            f"PyTorch {torch.__version__} chooses its storage in another way ({error}): give each "
            "call a shardstore.dcp.StorageWriter or StorageReader instead, or upgrade shardstore"
        ) from error

    def choose(storage: Any, checkpoint_id: Place | None, reader: bool = False) -> Any:
        if storage is not None or not checkpoint_id:
            return before(storage, checkpoint_id, reader=reader)
        if reader and is_of_dcp(Location.given(checkpoint_id, storage_options)):
            return before(None, checkpoint_id, reader=True)
        chosen: StorageWriter | StorageReader = new_reader() if reader else new_writer()
        chosen.reset(checkpoint_id)
        return chosen

    class InAProcess(process):  # type: ignore[misc, valid-type]
        """The process that saves knows nothing of this one's choice: it is handed the writer."""

        def execute_save(
            self,
            staged: Any,
            *,
            checkpoint_id: Place | None = None,
            storage_writer: Any = None,
            **options: Any,
        ) -> Any:
            return super().execute_save(
                staged,
                checkpoint_id=checkpoint_id,
                storage_writer=choose(storage_writer, checkpoint_id),
                **options,
            )

    choices: dict[tuple[Any, str], Any] = {
        (state_dict_saver, "_storage_setup"): choose,
        (state_dict_loader, "_storage_setup"): choose,
        (state_dict_saver, "_ProcessBasedAsyncCheckpointExecutor"): InAProcess,
    }
    return Installation({**choices, **handing_on(new_reader)})
