"""Write a model as safetensors files, each byte once, by the ranks that hold it.

All ranks send the coordinator their layouts, and get the files, and the ranges that each rank
writes. A second step at the end makes the model visible. An error of any rank is raised on every
rank, and nothing is visible then.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias, TypedDict, Unpack

import numpy as np
import torch

from shardstore import errors
from shardstore.async_handle import RANKS_PURPOSE, AsyncSave, begin_background
from shardstore.coverage import ShardReport, keys_of, report_shards
from shardstore.dict_utils import dotted, leaves
from shardstore.distributed.coordinator import Ranks
from shardstore.distributed.groups import Members, first_of, tell_launched
from shardstore.dtensor.adoption import shard
from shardstore.dtensor.layout import ClaimedTensor
from shardstore.hf.block_writer import BlockWriter, BoxReader, ExportPlan, source_of
from shardstore.hf.blocks import held_by, plan_blocks
from shardstore.hf.files import INDEX_NAME, SINGLE_NAME, FileLayout, Names, is_file_name, names_of
from shardstore.hf.places import Receipt, place_for
from shardstore.inspection import opened
from shardstore.inspection.opened import OpenCheckpoint
from shardstore.loading.plan import elements_of, held_regions, whole_tensor
from shardstore.mapping import ShardedTensor, StateDict, apply_factories, local_box
from shardstore.progress import log_event
from shardstore.saving.plain import sample
from shardstore.saving.plan import data_of, plain_tensor
from shardstore.storage.checkpoint import settled
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box
from shardstore.storage.format.names import COMMITS, is_inside
from shardstore.storage.movers.chunks import RegionRead, SmallFiles
from shardstore.storage.options import require_bool, require_number
from shardstore.storage.runtime.parallel import collector_paused
from shardstore.storage.stores.location import Location, shown
from shardstore.strategies.async_utils import AsyncRequest

logger = logging.getLogger(__name__)

FileArgument: TypeAlias = Iterable[str | os.PathLike[str]] | Mapping[str, str | bytes]

FILE_BYTES = 5 * 2**30
CAST_FROM = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Data types that ``dtype=`` casts. Others, such as integers and 8-bit floats, stay as they are."""


class ExportKeywords(TypedDict, total=False):
    """The keywords of :func:`save`."""

    dtype: torch.dtype | None
    file_bytes: int
    names: Names
    files: FileArgument
    overwrite: bool
    durable: bool
    storage_options: Mapping[str, Any] | None


def save(
    state_dict: StateDict,
    place: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    file_bytes: int = FILE_BYTES,
    names: Names = None,
    files: FileArgument = (),
    *,
    overwrite: bool = False,
    durable: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    process_group: Any = None,
) -> None:
    """Write a model as ``model.safetensors``, or as several files with an index, as transformers
    does; completely or not at all.

    Every rank calls it with its own part and waits for all others twice, and for an asynchronous
    save to the same place before it. Each byte is written once,
    by a rank that holds it; replicas divide the writing. On a disk each rank writes its memory to
    its place in the files. In an S3 bucket each file is one multipart upload, whose parts the ranks
    write. In other stores, one rank writes each file.

    Args:
        state_dict: nested dicts and lists with DTensors, plain tensors, sharded tensors and
            factories, on any device. Plain tensors are equal on the ranks that have them; of those
            that differ, the first rank's are written, with a warning. The name of a tensor is its
            key, or its path joined by dots. Other values are left out.
        place: folder or URL. On a disk, the finished folder takes the place in one step.
        dtype: data type to write tensors of float64, float32, float16 and bfloat16 in; ``None``:
            their own.
        file_bytes: largest size of a file's tensors; a larger tensor is a file by itself.
        names: names in the files by key, as a mapping (other keys keep theirs, without the parts
            of ``torch.compile``) or a function, which agree on all ranks; ``None`` as a name leaves
            the tensor out.
        files: paths of files to add, such as ``config.json`` and those of the tokenizer, or
            name -> content. Only those of the first rank count.
        overwrite: replace the model at the place. On a disk it stays until the new one takes its
            place; in an object store it is deleted first. Other files stay. A checkpoint is not
            replaced.
        durable: wait until everything is on the disk.
        storage_options: options of the object store, see :func:`shardstore.save`.
        process_group: the ranks that hold the model; default: all.

    Tensors that share their memory on all ranks (tied weights) are written once, under the first of
    their names; the metadata of the first file has the others, as that of ``safetensors.torch``
    does.

    Raises:
        CheckpointExistsError: the place holds a checkpoint, or a model and ``overwrite`` was not
            given.
        AccessPatternError: an element is on no rank, or in different shards.
        DTypeMismatchError: safetensors lacks a data type.
        KeyNameError: two tensors have one name.
        ArgumentError: an argument is wrong, or the header of a file would be too large.
        StorageError: the disk or the store failed.
        RanksError: another rank failed, or did not answer in time.
    """
    arguments = _Arguments(
        place, dtype, file_bytes, names, files, overwrite, durable, storage_options
    )
    held = partial(tensors_of, state_dict)
    _run(Export(Ranks.of(process_group), arguments, held, memory_of))


def async_save(
    state_dict: StateDict,
    place: str | os.PathLike[str],
    *,
    process_group: Any = None,
    **keywords: Unpack[ExportKeywords],
) -> AsyncSave:
    """Write a model while training continues, with the arguments of :func:`save`.

    The state may be changed after the call: each rank has copied what it writes to host memory, in
    the data type that it is written in. The call waits for an asynchronous save before it.

    Returns:
        The handle of the export on this rank. The result has the numbers of tensors and bytes.
    """
    arguments, ranks = _Arguments(place, **keywords), Ranks.of(process_group)

    def begin() -> tuple[Export, AsyncRequest]:
        export = Export(ranks, arguments, partial(tensors_of, state_dict), memory_of)
        export.begin()
        export.stage()
        export.ranks = ranks.over(RANKS_PURPOSE)
        return export, AsyncRequest(export.write, (), [export.finish])

    return begin_background(begin)


def export(
    checkpoint: str | os.PathLike[str],
    place: str | os.PathLike[str],
    *,
    checkpoint_options: Mapping[str, Any] | None = None,
    process_group: Any = None,
    **keywords: Unpack[ExportKeywords],
) -> None:
    """Write the tensors of a checkpoint as a model, with the other arguments of :func:`save`.

    Every rank calls it, or one process alone; the ranks divide the tensors. Each needs a few blocks
    of 16 MiB; the first one also the plain tensors of the checkpoint, such as buffers. ``names``
    chooses the tensors, such as those of the model without the optimizer.

    Args:
        checkpoint: folder or URL of a checkpoint.
        place: folder or URL of the model.
        checkpoint_options: options of the checkpoint's object store, see :func:`shardstore.save`.
        process_group: the ranks; default: all.
        **keywords: as for :func:`save`.

    Raises:
        CheckpointingException: as :func:`save` and :func:`shardstore.open`.
    """
    arguments, ranks = _Arguments(place, **keywords), Ranks.of(process_group)
    found = list[OpenCheckpoint]()

    def held() -> list[ShardedTensor]:
        found.append(opened.open(Location.of(checkpoint, checkpoint_options)))
        metas = found[0].metas.values()
        arrays = [whole_tensor(m.key, m.shape, dtypes.torch_dtype(m.dtype)) for m in metas]
        return arrays + (_plain_tensors(found[0]) if ranks.is_coordinator else [])

    def read(tensor: ShardedTensor) -> Iterator[tuple[Box, BoxReader]]:
        box = local_box(tensor)
        if tensor.data is not None:
            yield from memory_of(tensor)
        elif box.size:
            yield box, partial(_stored, found[0], found[0].metas[tensor.key])

    _run(Export(ranks, arguments, held, read))


def _run(export: Export) -> None:
    export.begin()
    try:
        export.write()
    except BaseException:  # an interrupt; the other ranks notice that this one is gone
        export.abandon()
        raise
    export.finish()


@dataclass(frozen=True)
class _Arguments:
    """The arguments of :func:`save` on one rank, except for the ranks and the tensors."""

    place: str | os.PathLike[str]
    dtype: torch.dtype | None = None
    file_bytes: int = FILE_BYTES
    names: Names = None
    files: FileArgument = ()
    overwrite: bool = False
    durable: bool = True
    storage_options: Mapping[str, Any] | None = None

    def target(self) -> Location:
        """Return the place, after a check of all arguments.

        Raises:
            ArgumentError: one of them is wrong.
        """
        target = Location.of(self.place, self.storage_options)
        if is_file_name(target.name):
            raise target.error(
                " is the name of a file; give the model's folder, and rename the file in it",
                errors.ArgumentError,
            )
        require_bool("overwrite", self.overwrite)
        require_bool("durable", self.durable)
        require_number("file_bytes", self.file_bytes)
        if self.dtype is not None and self.dtype not in CAST_FROM:
            known = ", ".join(map(str, CAST_FROM))
            raise errors.ArgumentError(f"dtype={self.dtype!r:.100} must be one of {known}, or None")
        return target

    def documents(self) -> list[tuple[str, bytes]]:
        """Return names and contents of :attr:`files`.

        Raises:
            ArgumentError: they are no paths or texts, a file does not exist, or a name is refused
                or there twice.
        """
        given: Any = self.files
        try:
            if isinstance(given, str | os.PathLike):
                raise TypeError("one path")
            if not isinstance(given, Mapping):
                paths = dict.fromkeys(os.path.abspath(os.fsdecode(path)) for path in given)
                named = {path.rpartition("/")[2]: path for path in paths}
                for path in paths.keys() - named.values():
                    raise errors.ArgumentError(
                        f"files names {path} and {named[path.rpartition('/')[2]]}, which have the "
                        "same name; give one of them, or name -> content"
                    )
                given = {name: _content(path) for name, path in named.items()}
            found = [
                (name, text.encode() if isinstance(text, str) else bytes(memoryview(text)))
                for name, text in given.items()
            ]
        except errors.ArgumentError:  # which is a TypeError too
            raise
        except TypeError:
            text = f"files={self.files!r:.100} must be a list of paths, or name -> text or bytes"
            raise errors.ArgumentError(text) from None
        for name, _ in found:
            known = isinstance(name, str) and is_inside(name) and "/" not in name
            if not known or name.startswith(".") or is_file_name(name) or name in COMMITS:
                raise errors.ArgumentError(
                    f"files has the name {name!r}, which the export does not write"
                )
        return found


def _content(path: str) -> bytes:
    folder, _, name = path.rpartition("/")
    data = Location.of(folder or "/").read_if_there(name)
    if data is None:
        what = "is a folder; give its files" if os.path.isdir(path) else "does not exist"
        raise errors.ArgumentError(f"files names {path}, which {what}")
    return data


class _HeldShards(NamedTuple):
    """A rank's report at the beginning of an export.

    Attributes:
        same: place, data type and size of files, which are the same on all ranks.
        names: its keys that have another name, or none, with that name.
        shards: its tensors.
        ties: result of :func:`tied`.
        samples: result of :func:`samples`.
    """

    same: tuple[Any, ...]
    names: dict[str, str | None]
    shards: ShardReport
    ties: dict[str, str]
    samples: dict[str, bytes]


@dataclass
class Export(BlockWriter):
    """An export on one rank. :meth:`begin` sets the target, the place and the plan.

    Attributes:
        arguments: the arguments of this rank.
        held: returns this rank's tensors.
        sources_of: yields the boxes of a tensor, each with what returns parts of it.
        target: its target.
        documents: files to add; on the coordinator.
        renamed: its keys with other names, see :class:`_HeldShards`.
        record: numbers of tensors and bytes; empty before the end.
    """

    arguments: _Arguments
    held: Callable[[], Iterable[ShardedTensor]]
    sources_of: Callable[[ShardedTensor], Iterator[tuple[Box, BoxReader]]]
    target: Location = field(init=False)
    documents: SmallFiles = ()
    renamed: dict[str, str | None] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    started: float = 0.0
    staging: None = None

    @collector_paused()
    def begin(self) -> None:
        """Agree with all ranks on the files. Every rank calls it and waits for all others."""
        what = f"exporting to {shown(self.arguments.place)}"
        try:
            with self.ranks.meet(what, self._decide) as meeting:
                tensors = self._prepare()
                meeting.report = self._report(tensors)
            self.plan = meeting.answer
        except BaseException:
            self.abandon()
            raise
        self.started = perf_counter()
        with self.keeping():  # raised in the next step of all ranks
            self.place.join(self.plan.state, self.plan.layout)
            wanted = self.pieces
            for name, tensor in tensors:
                for box, source in self.sources_of(tensor):
                    if (name, box) in wanted:
                        self.sources[name, box] = source

    def _prepare(self) -> list[tuple[str, ShardedTensor]]:
        """Check the arguments, and return this rank's tensors with their names in the files."""
        given = self.arguments
        target = self.target = given.target()
        target.require_shared(self.ranks.world_size)
        settled(target)
        if self.ranks.world_size == 1:
            tell_launched(target.url)
        if self.ranks.is_coordinator:
            self.documents = given.documents()
        self.place = place_for(target, overwrite=given.overwrite, durable=given.durable)
        tensors = list(self.held())
        names = names_of(keys := [tensor.key for tensor in tensors], given.names)
        self.renamed = {key: name for key in keys if (name := names.get(key)) != key}
        return [(names[tensor.key], tensor) for tensor in tensors if tensor.key in names]

    def _report(self, tensors: Sequence[tuple[str, ShardedTensor]]) -> _HeldShards:
        """Return what this rank holds."""
        given = self.arguments
        same = self.target.url, given.dtype, given.file_bytes
        shards = [
            replace(tensor, key=name, data=None, dtype=written_as(tensor, given.dtype))
            for name, tensor in tensors
        ]
        sampled = samples(tensors) if self.ranks.world_size > 1 else {}
        return _HeldShards(same, self.renamed, report_shards(shards), tied(tensors), sampled)

    def _decide(self, described: list[_HeldShards]) -> ExportPlan:
        """Plan and begin the export. The coordinator calls it."""
        members, place, target = self.ranks.members, self.place, self.target
        _require_same([one.same for one in described], self.ranks)
        _require_same_names(described, members)
        ties = united(one.ties for one in described)
        arrays, holders = held_by([one.shards for one in described], members)
        sampled = {rank: one.samples for rank, one in zip(members, described, strict=True)}
        for name in _differing(sampled, target.url):
            holders[name] = {box: ranks[:1] for box, ranks in holders[name].items()}
        arrays = [meta for meta in arrays if meta.key not in ties]
        if not arrays:
            raise target.error(": no rank has a tensor to export; see names=", errors.ArgumentError)
        layout = FileLayout.of(arrays, self.arguments.file_bytes, ties, SINGLE_NAME)
        parts = place.part_bytes(layout)
        blocks = plan_blocks(layout, arrays, holders, members, parts, place.in_order)
        written = {meta.key: dtypes.torch_dtype(meta.dtype) for meta in arrays}
        return ExportPlan(layout, blocks, written, place.begin(layout))

    def finish(self) -> None:
        """Make the model visible. Every rank calls it and waits for all others.

        Raises:
            CheckpointingException: an error of any rank; nothing is visible then.
        """
        layout, documents = self.plan.layout, list(self.documents)
        about = {"tensors": len(layout.places), "bytes": sum(layout.sizes.values())}
        if SINGLE_NAME not in layout.heads:
            documents.append((INDEX_NAME, layout.index()))

        def commit(receipts: list[Receipt]) -> None:
            self.place.commit(layout, receipts, documents)

        what = f"committing {self.target.url}"
        try:
            with self.ranks.meet(what, commit, error=self.failure) as meeting:
                meeting.report = dict(self.place.finish())
        except BaseException:
            self.abandon()
            raise
        self.record = about
        if self.ranks.is_coordinator:
            url, size, seconds = self.target.url, about["bytes"], perf_counter() - self.started
            text = f"{url}: exported {about['tensors']} tensors, {size} bytes in {seconds:.3f} s"
            told = {"chunks": len(self.plan.blocks), "world_size": self.ranks.world_size}
            log_event(logger, "commit", text, url=url, bytes=size, seconds=seconds, **told)

    def abandon(self) -> None:
        """Remove what was written, on the coordinator."""
        if self.ranks.is_coordinator and hasattr(self, "place"):  # else the arguments were wrong
            self.place.abandon()

    def abort(self) -> None:
        """Stop writing at the next block."""
        text = f"the export to {self.target.url} was aborted; nothing of it is visible"
        self.failure = self.failure or errors.SaveInProgressError(text, url=self.target.url)


def _require_same(same: Sequence[tuple[Any, ...]], ranks: Ranks) -> None:
    """Raise :class:`AccessPatternError` if the ranks export to different places, or differently."""
    for rank, one in zip(ranks.members, same, strict=True):
        if one != same[0]:
            raise errors.AccessPatternError(
                f"rank {ranks.members[0]} exports to {same[0]} (place, dtype, file_bytes) "
                f"but rank {rank} to {one}; give every rank the same",
                rank=rank,
            )


def _require_same_names(described: Sequence[_HeldShards], members: Members) -> None:
    """Raise :class:`AccessPatternError` if ranks give a key different names."""
    known: dict[str, tuple[str | None, int]] = {}
    for rank, one in zip(members, described, strict=True):
        kept = keys_of([one.shards]).difference(one.names.values())
        for key, name in chain(one.names.items(), zip(kept, kept, strict=True)):
            first = known.setdefault(key, (name, rank))
            if first[0] != name:
                raise errors.AccessPatternError(
                    f"names= gives key {key!r} the name {first[0]!r} on rank {first[1]} and "
                    f"{name!r} on rank {rank}; give every rank the same",
                    key=key,
                    rank=rank,
                )


def _differing(sampled: Mapping[int, Mapping[str, bytes]], url: str) -> list[str]:
    """Return the names of plain tensors that differ between ranks, after a warning.

    Args:
        sampled: :func:`samples` by rank.
        url: target of the export.
    """
    held: dict[str, dict[bytes, int]] = {}
    for rank, found in sampled.items():
        for name, digest in found.items():
            held.setdefault(name, {}).setdefault(digest, rank)
    differing = [name for name, ranks in held.items() if len(ranks) > 1]
    if differing:
        logger.warning(
            "%s: %d plain tensor(s) differ between ranks, such as %r on ranks %s, and those of the "
            "first rank are written. Make DTensors of shards, and give tensors of single ranks "
            "names of their own (names=)",
            url,
            len(differing),
            differing[0],
            first_of(held[differing[0]].values(), between=", "),
        )
    return differing


# -- the tensors of a rank -------------------------------------------------------------------------


def tensors_of(state_dict: StateDict) -> list[ShardedTensor]:
    """Return the tensors of a state dict.

    Raises:
        DTypeMismatchError: a tensor is not dense, or is inside of a tuple.
    """
    state = shard(state_dict)
    apply_factories(state)
    tensors, left_out = [], []
    for path, value in leaves(state):
        if isinstance(value, ShardedTensor):
            tensors.append(value)
        elif isinstance(value, torch.Tensor):
            key = dotted(path)
            text = f"key {key!r} is a tensor of layout {value.layout}, or inside of a tuple: only "
            text += "dense tensors in dicts and lists are exported (to_dense() makes one)"
            raise errors.DTypeMismatchError(text, key=key)
        else:
            left_out.append(dotted(path))
    if left_out:
        text = "%d value(s) are no tensors and are left out of the model: %s"
        logger.info(text, len(left_out), ", ".join(left_out[:8]))
    return tensors


def written_as(tensor: ShardedTensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the data type that a tensor is written in."""
    return tensor.dtype if dtype is None or tensor.dtype not in CAST_FROM else dtype


def memory_of(tensor: ShardedTensor) -> Iterator[tuple[Box, BoxReader]]:
    """Yield the boxes of the global tensor that a shard consists of, each with what returns parts
    of its memory.

    Raises:
        ArgumentError: it has no data, or its memory was freed.
        DTypeMismatchError: it is not dense memory.
    """
    if tensor.data is None:
        raise errors.ArgumentError(
            f"key {tensor.key!r} has no data; give its tensor", key=tensor.key
        )
    data = plain_tensor(tensor.data, tensor.key)
    dtypes.require_memory(data)
    for box, memory in held_regions(tensor, local_box(tensor), data):
        if box.size:
            yield box, source_of(data_of(memory, tensor.key), box)


def _plain_tensors(checkpoint: OpenCheckpoint) -> list[ShardedTensor]:
    """Return the tensors among the common values of a checkpoint."""
    text = "%s: tensors among the common values are left out: %s"
    try:
        common = checkpoint.common
    except errors.UnsafeObjectError as error:
        logger.warning(text, checkpoint.url, error)
        return []
    found = opened.plain_tensors(common)
    tensors = [path for path, value in leaves(common) if isinstance(value, torch.Tensor)]
    if sparse := [dotted(path) for path in tensors if path not in found]:
        what = f"{len(sparse)} not dense, or inside of a tuple, such as {', '.join(sparse[:8])}"
        logger.warning(text, checkpoint.url, what)
    return [*found.values()]


def _stored(checkpoint: OpenCheckpoint, meta: ArrayMeta, box: Box) -> torch.Tensor:
    out = np.empty(box.shape, dtypes.numpy_dtype(meta.dtype))
    checkpoint.read([RegionRead(meta, box, out)])
    return dtypes.as_tensor(out)


def samples(tensors: Iterable[tuple[str, ShardedTensor]]) -> dict[str, bytes]:
    """Return name -> :func:`.sample` of each plain tensor. It shows whether ranks hold copies of
    one tensor, or shards and tensors of their own."""
    return {
        name: sample(tensor.data)
        for name, tensor in tensors
        if isinstance(tensor, ClaimedTensor) and not tensor.holders and tensor.data is not None
    }


def tied(tensors: Iterable[tuple[str, ShardedTensor]]) -> dict[str, str]:
    """Return name -> the first name with the same memory and values, that name itself for most.
    Names of which this rank holds no element are left out."""
    first: dict[Any, str] = {}
    found: dict[str, str] = {}
    for name, tensor in tensors:
        data = tensor.data
        if data is None or not data.numel() or not dtypes.is_plain(data):
            continue
        region = local_box(tensor), tensor.global_shape, repr(tensor.flattened_range)
        memory = data.device, data.is_conj(), data.is_neg(), *elements_of(data), *region
        found[name] = first.setdefault(memory, name)
    return found


def united(ties: Iterable[dict[str, str]]) -> dict[str, str]:
    """Return the names that are tied to another one on every rank that holds them, with that
    name."""
    found: dict[str, set[str]] = {}
    for one in ties:
        for name, other in one.items():
            found.setdefault(name, set()).add(other)
    sure = {name: others.pop() for name, others in found.items() if len(others) == 1}
    return {name: other for name, other in sure.items() if name != other == sure.get(other)}
