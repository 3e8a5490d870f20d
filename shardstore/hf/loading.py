"""Loads tensors from safetensors files into the state dicts of all ranks.

One rank reads the headers for all. Each rank plans the regions of its shards and reads them. An
error of any rank is raised on every rank at the end of each step, before a tensor changes.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, Literal, NamedTuple, cast

import torch

from shardstore import dict_utils, mapping
from shardstore.distributed.coordinator import Ranks
from shardstore.distributed.groups import Group, Members, gathered
from shardstore.dtensor.adoption import Adoption
from shardstore.errors import ArgumentError, DTypeMismatchError, MissingKeyError
from shardstore.hf import sharing
from shardstore.hf.blocks import Block
from shardstore.hf.files import Names, WeightFiles, names_of
from shardstore.hf.rules import SCALE_SUFFIXES, Rule, Scaled, Sources, SourceTensor
from shardstore.hf.urls import locate, shown_url
from shardstore.loading.plan import (
    LEAVES_OUT,
    HostRead,
    ReadPlan,
    assemble,
    elements_of,
    missing_key,
    plan_reads,
    with_destinations,
)
from shardstore.loading.read import LoadContext, read_chunks
from shardstore.loading.replicas import ReadGroup, groups_reading_alone, read_group
from shardstore.loading.run import LoadRequest
from shardstore.progress import Meter, ProgressCallback, log_event, metered
from shardstore.state_dict_utils import HeldShards, StateSplit, names_its_parts
from shardstore.storage.checkpoint import settled
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta, array_of_one_chunk
from shardstore.storage.format.grid import Box, grid_of
from shardstore.storage.movers.chunks import RegionRead
from shardstore.storage.options import DEFAULT_BUDGET_BYTES, require_number
from shardstore.storage.runtime.parallel import collector_paused
from shardstore.storage.stores.location import Location
from shardstore.validation import StrictHandling, report_keys

logger = logging.getLogger(__name__)

CHUNK_BYTES = 4 * 1024 * 1024
"""Size of the parts of a tensor that the ranks of a replica group read and send."""


def load(
    state_dict: mapping.StateDict,
    place: Any,
    *,
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    cast: bool | Literal["warn"] = False,
    names: Names = None,
    rules: Mapping[str, Rule] | None = None,
    dequantize: Sequence[int] | None = (128, 128),
    process_group: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    map_location: str | torch.device | None = None,
    replica_group: Any = None,
    share_replicas: str = "auto",
    exchange_budget_bytes: int = DEFAULT_BUDGET_BYTES,
    progress: ProgressCallback | Literal["bar"] | None = None,
) -> mapping.StateDict | tuple[mapping.StateDict, set[str], set[str]]:
    """Load the tensors of a model from safetensors files, under any layout.

    Every rank calls it with its own state dict, and waits for the others. One rank reads the index
    and the headers for all. Each rank reads the byte ranges of its shards only, directly into the
    given tensors if their memory has the layout of the file; from a store, the ranks of a host read
    rows of which several want parts once.

    Args:
        state_dict: nested dicts and lists with DTensors, plain tensors, and Megatron-Core's sharded
            tensors and factories. The key of a DTensor or plain tensor is its path, joined by dots.
            Other values stay as they are.
        place: path or URL of a folder, a ``.safetensors`` file or an index: ``s3://bucket/model``,
            ``hf://org/model@revision``, ``https://host/model``. From a web server, which lists no
            names, ``model.safetensors.index.json`` or ``model.safetensors`` is read.
        strict: what to do about keys that only the files or only the state dict has, see
            :class:`~shardstore.validation.StrictHandling`. A key that the files lack is loaded with
            another key if both are the same tensor, as tied weights are, or if they were so at the
            save.
        cast: see :func:`shardstore.load`.
        names: the names in the files, as key -> name or a function of the key; by default the keys.
            ``None`` as a name is an error.
        rules: template of a name -> how the tensor is made of stored tensors, see
            :mod:`shardstore.hf.rules`. The first that matches counts.
        dequantize: shape of the blocks of float8 weights whose scales are stored as
            ``<name>_scale_inv`` or ``<name>_scale``; along an axis there may also be a scale for
            each position, or one for all. A tensor of a larger float type gets the values times
            their scales. ``None``: the scales are tensors like others.
        process_group: see :func:`shardstore.load`.
        storage_options: see :func:`shardstore.save`; for ``hf://``, ``token``.
        map_location: see :func:`shardstore.load`.
        replica_group: see :func:`shardstore.load`.
        share_replicas: see :func:`shardstore.load`. Unless it is ``"never"``, ranks of a host that
            want parts of the same rows of a tensor in a store read the rows once.
        exchange_budget_bytes: see :func:`shardstore.load`.
        progress: see :func:`shardstore.load`.

    Returns:
        The state dict with the loaded tensors. With a ``RETURN_*`` mode, a tuple of this, the
        missing names and the unexpected keys.

    Raises:
        NotACheckpointError: the place holds no safetensors file, or several without an index.
        DamagedCheckpointError: a file is damaged, or does not match the index.
        MissingKeyError, ShapeMismatchError, DTypeMismatchError: names, shapes or data types of
            files and state dict differ.
        ArgumentError: an argument has a wrong type or value.
        KeyNameError: two keys have one name.
        StorageError: the store failed.
        RanksError: another rank failed, or did not answer in time.
    """
    started, url, ranks = perf_counter(), shown_url(place), Ranks.of(process_group)
    call = _Call(
        sharded_state_dict=state_dict,
        checkpoint_dir=place,
        stored_metadata=lambda *_: {},
        strict=strict,
        cast=cast,
        names=names,
        rules=rules,
        dequantize=dequantize,
        ranks=ranks,
        storage_options=storage_options,
        map_location=map_location,
        replica_group=replica_group,
        share_replicas=share_replicas,
        exchange_budget_bytes=exchange_budget_bytes,
        progress=progress,
    )
    with metered("load", url, call.callback) as meter, collector_paused():
        found = call.run(meter)
    if ranks.is_coordinator:
        seconds, size = perf_counter() - started, meter.now.bytes_total
        text = f"{url}: loaded, {size} bytes on rank {ranks.rank} in {seconds:.3f} s"
        world = ranks.world_size
        log_event(logger, "load", text, url=url, bytes=size, seconds=seconds, world_size=world)
    return found if StrictHandling.requires_returning_mismatch_keys(call.mode) else found[0]


@dataclass(kw_only=True, eq=False, repr=False)
class _Call(LoadRequest):
    """A call of :func:`load` on one rank, with its arguments."""

    names: Names
    rules: Mapping[str, Rule] | None
    dequantize: Sequence[int] | None

    @property
    def what(self) -> str:
        """The operation, for error texts."""
        return f"loading {shown_url(self.checkpoint_dir)}"

    def check(self) -> None:
        """Raise :class:`ArgumentError` if one of the arguments of this module is wrong."""
        rules = self.rules if isinstance(self.rules, Mapping) else {"": self.rules}
        if self.rules is not None and not all(
            isinstance(name, str) and (isinstance(rule, str) or callable(rule))
            for name, rule in rules.items()
        ):
            raise ArgumentError(
                f"rules={self.rules!r:.100} must be template -> rule, see shardstore.hf.rules"
            )
        block = () if self.dequantize is None else self.dequantize
        if isinstance(block, str) or not isinstance(block, Sequence):
            raise ArgumentError(
                f"dequantize={block!r:.100} must be the shape of a block, such as (128, 128)"
            )
        for edge in block:
            require_number("dequantize", edge)

    def sources(self, files: WeightFiles) -> Sources:
        """Return the tensors in the files, as the rules see them."""
        block = None if self.dequantize is None else tuple(self.dequantize)
        return Sources(files.arrays, files.location.url, self.rules or {}, files.metadata, block)

    def run(self, meter: Meter) -> tuple[mapping.StateDict, set[str], set[str]]:
        """Load, and return the state dict, the missing and the unexpected keys."""
        meet = partial(self.ranks.meet, self.what)
        with meet(self._open) as meeting:
            asked = self._prepare()
            meeting.report = asked.location.url, asked.group
        files, apart = meeting.answer
        files.location = replace(files.location, options=asked.location.options)
        shares = asked.group and asked.group.shares and asked.group.members not in apart
        group = self.replica_group if shares else None
        with meet(lambda reports: set().union(*reports)) as meeting:
            match = self._find(self.sources(files))
            meeting.report = self._used(match)
        used: set[str] = meeting.answer
        with meet(self._wanted) as meeting:
            planned = self._plan(match, files, used)
            meeting.report = self._scattered(planned.reads, asked.location)
        hosts: sharing.Hosts = meeting.answer
        blocks = sharing.plan_shared(hosts.of(self.ranks.rank), files.arrays, files.places)
        with meet(lambda _: files.require_unchanged()):
            read = self._read(match, planned, files, group, blocks, meter)
        shaped = cast(mapping.StateDict, dict_utils.shaped_like(self.sharded_state_dict, read))
        return shaped, planned.missing, match.unexpected

    def _prepare(self) -> _Asked:
        """Check the arguments."""
        location = locate(self.checkpoint_dir, self.storage_options)
        if self.error is not None:
            raise self.error
        self.check()
        settled(location)
        return _Asked(location, read_group(self.replica_group, self.share_replicas, location))

    def _open(
        self, reports: Sequence[tuple[str, ReadGroup | None]]
    ) -> tuple[WeightFiles, frozenset[Members]]:
        """Read the headers for all ranks. The coordinator calls it."""
        urls, offers = zip(*reports, strict=True)
        if len(set(urls)) > 1:
            raise ArgumentError(f"{self.what}: the ranks give different places: {set(urls)}")
        by_rank = dict(zip(self.ranks.members, offers, strict=True))
        apart = groups_reading_alone(by_rank, urls[0])
        location = locate(self.checkpoint_dir, self.storage_options)
        return WeightFiles.open(location), apart

    def _find(self, sources: Sources) -> _Match:
        """Find the source of each key.

        Raises:
            MissingKeyError: the files lack a key, and the mode does not compare keys.
        """
        state = self.sharded_state_dict
        adopt = _Adoption(None, loading=True, arrays=True)
        adopt.device = self.device or adopt.device
        split = partial(StateSplit, state, loading=True, adopt=adopt, keep=True)
        request = split()
        entries = [entry for _, entry in request.shards]
        found: dict[str, SourceTensor] = {}
        lost: dict[str, str] = {}
        by_key = {entry.key: entry for entry in entries}
        names = names_of(by_key, self.names, sources.arrays)
        for key, entry in by_key.items():
            if (name := names.get(key)) is None:
                raise ArgumentError(
                    f"{self.what}: names= gives the key {key!r} no name; leave it out of the state "
                    "dict",
                    key=key,
                )
            try:
                if isinstance(entry, mapping.ShardedTensor):
                    found[key] = sources.of(name, entry.dtype)
                else:
                    lost[key] = f"{name} (an object, which safetensors files do not hold)"
            except MissingKeyError as error:
                lost[key] = str(error.key)
        held = {_memory(t): t.key for t in entries if t.key in found}
        tied = {t.key for t in entries if t.key in lost and _memory(t) in held}
        for entry in (t for t in entries if t.key in lost and t.key not in tied):
            other = sources.ties.get(lost[entry.key], "")
            if other in sources.arrays and isinstance(entry, mapping.ShardedTensor):
                found[entry.key] = sources.of(other, entry.dtype)  # tied when it was saved
        unexpected = set(lost) - tied - set(found)
        if unexpected and not StrictHandling.requires_explicit_ckpt_mismatch_check(self.mode):
            name = next(name for key, name in lost.items() if key in unexpected)
            raise missing_key(name, sources.arrays, sources.url, LEAVES_OUT)
        if unexpected:
            request = split(keys={*found, *tied})
        return _Match(request, found, tied, unexpected)

    def _used(self, match: _Match) -> set[str]:
        """Return the stored tensors that this rank uses, if a mode needs them."""
        compares = self.compares_all
        return {k for s in match.sources.values() for k in s.keys if compares}

    def _plan(self, match: _Match, files: WeightFiles, used: set[str]) -> _Planned:
        """Compare the keys in the mode of ``strict``, and plan the reads."""
        wanted = {str(number): one for number, (_, one) in enumerate(match.request.shards)}
        missing = set(files.arrays) - used if self.compares_all else set[str]()
        report_keys(self.mode, missing, match.unexpected)
        if self.device is not None:
            wanted = with_destinations(wanted, self.device)
        tensors = [cast(mapping.ShardedTensor, t) for t in wanted.values()]
        tensors = [t for t in tensors if t.key not in match.tied]
        for tensor in tensors if self.cast and self.dequantize is not None else ():
            if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
                # A cast would give the values without their scales.
                _refuse_unscaled(match.sources[tensor.key], files, tensor.key)
        arrays = {k: array_of_one_chunk(k, s.shape, s.dtype) for k, s in match.sources.items()}
        try:
            plan = plan_reads(tensors, arrays, files.location.url, cast=self.cast)
        except DTypeMismatchError as error:
            if error.key in match.sources:
                _refuse_unscaled(match.sources[error.key], files, error.key)
            raise
        for one in plan.values():
            one.regions = [
                (HostRead if isinstance(out, Scaled) else type(region))(array, box, out)
                for region in one.regions
                for array, box, out in match.sources[region.array.key].regions(
                    region.box, region.out
                )
            ]
        return _Planned(wanted, plan, missing)

    def _scattered(self, plan: ReadPlan, location: Location) -> list[tuple[str, Box]]:
        """Return the regions that are read together with other ranks of the host, if they want
        parts of the same tensors."""
        if location.is_local or self.share_replicas == "never":
            return []
        regions = (region for one in plan.values() for region in one.regions)
        # Scales are needed before the values.
        return [
            (region.array.key, region.box)
            for region in regions
            if not region.array.key.endswith(SCALE_SUFFIXES) and sharing.is_scattered(region)
        ]

    def _wanted(self, reports: Sequence[list[tuple[str, Box]]]) -> sharing.Hosts:
        return sharing.wanted_by(dict(zip(self.ranks.members, reports, strict=True)))

    def _read(
        self,
        match: _Match,
        planned: _Planned,
        files: WeightFiles,
        group: Group,
        blocks: Sequence[Block],
        meter: Meter,
    ) -> mapping.StateDict:
        """Read the planned regions, and put the tensors into the state dict."""
        plan, wanted = planned.reads, planned.wanted
        shared = _take_out(plan, {(p.key, p.held) for block in blocks for p in block.pieces})
        if group is not None:
            _fit_grids(files.arrays, plan, group)
        context = LoadContext(
            stored=cast(Any, files),  # has what the reader of a load asks a checkpoint for
            cast=self.cast,
            budget_bytes=self.exchange_budget_bytes,
            group=group,
            meter=meter,
        )
        has_scales = self.dequantize and any(key.endswith(SCALE_SUFFIXES) for key in files.arrays)
        try:
            read_chunks(context, _part(plan, scaled=False) if has_scales else plan)
        finally:  # the other ranks wait for pieces
            if blocks:
                meter.tell("move", bytes_total=sum(region.out.nbytes for region in shared))
                sharing.read_shared(self.ranks, blocks, shared, files.read_range, meter.count)
        if has_scales:
            read_chunks(context, _part(plan, scaled=True))
        tied = {id(t): t.data for t in wanted.values() if t.key in match.tied}
        return match.request.merged({}, assemble(plan, wanted, files.location.url, tied))


class _Asked(NamedTuple):
    """What a rank asks for: the place, and the group whose ranks could share the reading."""

    location: Location
    group: ReadGroup | None


class _Planned(NamedTuple):
    """The wanted tensors by number, the reads for them, and the missing keys."""

    wanted: mapping.ShardedStateDict
    reads: ReadPlan
    missing: set[str]


class _Match(NamedTuple):
    """The sources of this rank's keys.

    Attributes:
        request: the state dict without unexpected keys.
        sources: key -> its source.
        tied: keys that the files lack, whose tensors have the memory of other keys.
        unexpected: all other keys that the files lack.
    """

    request: StateSplit
    sources: dict[str, SourceTensor]
    tied: set[str]
    unexpected: set[str]


@dataclass
class _Adoption(Adoption):
    """Describes the tensors of a state dict. Those on the meta device become real ones, and tied
    ones stay tied.

    Attributes:
        device: device of new tensors.
        real: identity of a tensor on the meta device -> the real one.
    """

    device: torch.device | str = "cpu"
    real: dict[object, torch.Tensor] = field(default_factory=dict)

    def __call__(self, value: Any, path: dict_utils.Path) -> Any:
        """See :class:`Adoption`."""
        local = getattr(value, "_local_tensor", value)
        is_of_torch = type(local) in (torch.Tensor, torch.nn.Parameter)
        if not (is_of_torch and local.is_meta) or names_its_parts(value):
            return super().__call__(value, path)
        memory = local.untyped_storage()._cdata, local.storage_offset(), *elements_of(local)
        if local is value and memory not in self.real:
            self.real[memory] = torch.empty(value.shape, dtype=value.dtype, device=self.device)
        made = super().__call__(self.real.get(memory, value), path)
        if isinstance(made, HeldShards):
            self.real[memory] = made.tensor
        return made


def _memory(entry: Any) -> object:
    """Return the identity of a tensor's memory; unique if it has none."""
    data = getattr(entry, "data", None)
    has_memory = isinstance(data, torch.Tensor) and data.data_ptr()
    return elements_of(cast(torch.Tensor, data)) if has_memory else object()


def _refuse_unscaled(source: SourceTensor, files: WeightFiles, key: str) -> None:
    """Raise an error that advises no cast if the scales of a quantised tensor lie beside it and are
    not applied."""
    for name in source.keys:
        ends = (*SCALE_SUFFIXES, ".scale", ".absmax", ".SCB", ".scale_weight", "_scales", ".scales")
        beside = [one + end for one in (name, name.removesuffix(".weight")) for end in ends]
        found = next((scales for scales in beside if scales in files.arrays), None)
        if found and source.dtype.startswith(("float8", "int8", "uint8")):
            raise DTypeMismatchError(
                f"key {key!r} is stored as {source.dtype} in {files.location.url}, and its scales "
                f"as {found!r}: load both as they are stored, and apply the scales. dequantize= "
                "does so in tensors of a larger float type, for float8 with scales "
                f"{' or '.join(name + s for s in SCALE_SUFFIXES)}",
                key=key,
            )


def _take_out(plan: ReadPlan, wanted: Collection[tuple[str, Box]]) -> list[RegionRead]:
    """Remove regions from a plan, and return them."""
    taken: list[RegionRead] = []
    for one in plan.values():
        regions, one.regions = one.regions, []
        for region in regions:
            is_taken = (region.array.key, region.box) in wanted
            (taken if is_taken else one.regions).append(region)
    return taken


def _part(plan: ReadPlan, *, scaled: bool) -> ReadPlan:
    """Return the plan for the regions that are scaled, or for those that are not."""
    return {
        key: replace(
            one,
            regions=[r for r in one.regions if isinstance(r.out, Scaled) == scaled],
            is_padded=one.is_padded and not scaled,
        )
        for key, one in plan.items()
    }


def _fit_grids(arrays: dict[str, ArrayMeta], plan: ReadPlan, group: Group) -> None:
    """Cut the stored tensors into chunks that fit the regions of a group's ranks, in place. Every
    rank of the group calls it and waits for all."""
    regions = [region for one in plan.values() for region in one.regions]
    boxes: dict[str, set[Box]] = {}
    for wanted in gathered([(region.array.key, region.box) for region in regions], group):
        for key, box in wanted:
            boxes.setdefault(key, set()).add(box)
    for key, found in boxes.items():
        meta = arrays[key]
        size = dtypes.itemsize(meta.dtype)
        grid = grid_of(meta.shape, sorted(found), size, CHUNK_BYTES).grid
        arrays[key] = replace(meta, grid=grid)
    for region in regions:
        region.array = arrays[region.array.key]
