"""One save on one rank, from the first agreement of the ranks to the commit.

The ranks communicate two to four times. First they agree to begin; every rank learns of wrong
input on any rank before a byte is written. If they do not all hold the same tensors and objects,
they compare what they say about them. Then they exchange the layouts of flattened and irregular
tensors, if there are any. At the end they send their manifests to the coordinator, which
commits. The background of an asynchronous save communicates with no rank before that: pieces of
chunks are exchanged in the caller's thread, by all ranks in the same order, even after an error on
one of them.

A strategy of this package takes the session in place of a folder. One of another program
takes the folder, and what it calls finds the session by :func:`session_of`.
"""

from __future__ import annotations

import logging
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardstore import coverage
from shardstore.dict_utils import Path
from shardstore.distributed.coordinator import Ranks, block_size
from shardstore.distributed.groups import Members
from shardstore.errors import AccessPatternError, SaveInProgressError
from shardstore.mapping import ShardedObject, ShardedTensor, StateDict
from shardstore.progress import Meter, callback_of, log_event
from shardstore.saving import replicas
from shardstore.saving.plain import PlainValues
from shardstore.saving.plan import CutChunk, WritePlan, fetched, needing_layouts
from shardstore.saving.staging import Staging, Take
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.commit.attempt import Attempt
from shardstore.storage.commit.base import ReusingMover
from shardstore.storage.commit.inventory import write_integrity
from shardstore.storage.commit.packing import ChunkWriter, PackingMover, most_bytes, write_pack
from shardstore.storage.commit.publish import Files, RootContent, commit, merge_reports
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.manifest import ChunkRecord, RankManifest
from shardstore.storage.format.merge import Merged, joined
from shardstore.storage.format.names import INTEGRITY_NAME
from shardstore.storage.format.packs import MOST_BYTES, SMALL_BYTES
from shardstore.storage.movers.chunk_bytes import as_bytes
from shardstore.storage.movers.chunks import ChunkWrite
from shardstore.storage.movers.mover import Mover
from shardstore.storage.options import SaveOptions
from shardstore.storage.runtime.parallel import in_rounds
from shardstore.storage.stores.location import Location
from shardstore.strategies.async_utils import AsyncRequest, OwnProcessCall
from shardstore.strategies.base import SaveCommonStrategy, SaveShardedStrategy, running

logger = logging.getLogger(__name__)

ROUND_BYTES = 16 * 1024 * 1024
"""Largest number of bytes of a round of shared chunks; a larger chunk is a round by itself."""
MANY_SMALL = 1000
"""From more small chunks than this on, a save says what packs would gain."""


class Strategies(NamedTuple):
    """The strategies of a save.

    Attributes:
        sharded: the one for tensors.
        common: the one for common values; ``None``: these are not saved.
    """

    sharded: SaveShardedStrategy
    common: SaveCommonStrategy | None


@dataclass(kw_only=True)
class SplitState:
    """The state of one rank, split into what is saved in different ways, and how it is saved.

    Attributes:
        target: target of the save.
        options: options of the save.
        shards: tensors and objects, with factories built.
        common: common values.
        plain: the values that are not sharded, if there are several ranks.
        strategies: the strategies for tensors and for common values.
        about: further content of the root document.
        base: a committed checkpoint whose chunks are reused.
        copies: shards of which the rank holds only copies; an error if no rank writes them.
        background: purpose of the connections for the steps of an asynchronous save after planning;
            ``""``: the same ones; ``None``: the save is synchronous.
        verify_integrity: see :func:`shardstore.save`.
    """

    target: Location
    options: SaveOptions
    shards: list[ShardedTensor | ShardedObject]
    common: StateDict
    strategies: Strategies
    about: RootContent
    plain: PlainValues | None = None
    base: Location | None = None
    copies: Sequence[str] = ()
    background: str | None = None
    verify_integrity: bool = False

    @cached_property
    def tensors(self) -> list[ShardedTensor]:
        """The tensors in :attr:`shards`."""
        return [shard for shard in self.shards if isinstance(shard, ShardedTensor)]


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The coordinator's answer at the beginning of a save.

    Attributes:
        attempt_id: ID of the attempt that the coordinator began, for the other ranks.
        exchange_layouts: whether any rank has irregular or flattened tensors.
        common: the coordinator's common state, for comparison, if a rank's state has
            Megatron-Core's types; pickled, because a rank may lack a class of it, and still saves.
        digests: the coordinator's :attr:`PlainValues.digests`, if no rank's state has such types
            and the values of the ranks differ.
        base_documents: documents of the checkpoint whose chunks are reused.
        shares: groups that divide the writing, see :func:`replicas.agree_on_groups`.
        copy_reporters: ranks that report their copies: the first rank with each set of copies.
        owners: the writer of each claimed shard, see :func:`decide_claims`.
    """

    exchange_layouts: bool
    base_documents: Mapping[str, bytes] | None
    copy_reporters: Sequence[int]
    attempt_id: str = ""
    common: bytes = b""
    digests: Mapping[Path, bytes] | None = None
    shares: Mapping[Members, int] = field(default_factory=dict)
    owners: Mapping[Any, int] = field(default_factory=dict)


class SaveSession:
    """A save in progress. :func:`shardstore.saving.run.begin` makes it.

    Attributes:
        ranks: the ranks of the save.
        commit_ranks: the same ranks, over the connections of the steps after planning.
        target: the target of the save.
        options: options of the save; a strategy may replace some of them.
        about: further content of the root document.
        background, verify_integrity: see :class:`SplitState`.
        attempt: the attempt that is written and committed.
        agreed: the agreement of the ranks.
        manifest: the arrays, chunks and files that this rank wrote.
        files: files other than chunks.
        zarr_format: format of the written arrays, 3 or 2; ``None`` until a built-in strategy
            writes one.
        failure: an error of this rank, which prevents the commit.
        planning: name of the planning step, for error texts.
        awaits_plan: whether the ranks have yet to meet to plan.
        base: the checkpoint whose chunks are reused, ``None`` without one.
        reusing: the writer that reuses chunks of the base, once there was one to write.
        shared_writes: the shards whose chunks this rank's group divides.
        staging: the copy of the state that an asynchronous save writes from, if it made one.
        record: the commit record (bytes, chunks, seconds); empty before the commit.
        meter: counts for a progress callback.
    """

    def __init__(
        self, ranks: Ranks, state: SplitState, agreed: Agreement, attempt: Attempt
    ) -> None:
        self.ranks = ranks
        self.commit_ranks = ranks.over(state.background) if state.background else ranks
        # Not the state itself, which refers to the caller's tensors.
        self.target, self.options, self.about = state.target, state.options, state.about
        self.background, self.verify_integrity = state.background, state.verify_integrity
        self.attempt, self.agreed = attempt, agreed
        self.manifest = RankManifest(ranks.rank)
        if ranks.rank in agreed.copy_reporters:
            self.manifest.copies = state.copies
        self.files = Files(attempt, self.manifest, state.options.budget_bytes)
        callback = state.options.progress
        if callback == "bar":
            callback = callback_of(callback, shows=ranks.is_coordinator)
        self.meter = Meter("save", state.target.url, callback)
        self.base = None
        if state.base is not None:
            self.base = StoredCheckpoint(state.base, documents=agreed.base_documents)
        self.reusing: ReusingMover | None = None
        self.shared_writes = replicas.SharedWrites()
        if agreed.shares:
            group = state.options.replica_group
            self.shared_writes = replicas.accepted(state.tensors, group, agreed.shares, ranks.rank)
        self.zarr_format: int | None = None
        self.failure: BaseException | None = None
        meets = getattr(state.strategies[0], "meets_to_plan", "never")
        self.awaits_plan = meets == "always" or (meets == "layouts" and agreed.exchange_layouts)
        self.staging: Staging | None = None
        self.record: dict[str, Any] = {}
        self.planning = f"planning the save to {state.target.url}"
        self._started = perf_counter()

    @property
    def place(self) -> str | os.PathLike[str]:
        """The folder or URL that is written to, for strategies of other programs."""
        return self.attempt.location.place

    def rest(self, request: AsyncRequest | None) -> AsyncRequest:
        """Return the request that writes and commits an asynchronous save. It raises errors, which
        only this rank would see before. ``request``: what the strategy returned."""
        if self.failure is not None and self.awaits_plan and not self.ranks.failed:
            with suppress(Exception):  # other ranks wait for this one's plan
                self.ranks.together(what=self.planning, error=self.failure)
        request = request or AsyncRequest(None, (), [])
        guarded = self._guarded()  # as a decorator
        write = guarded(request.async_fn or (lambda *_, **__: None))
        ends = [*map(guarded, request.finalize_fns), self.finish]
        if not (request.async_fn_args or request.async_fn_kwargs):
            write = OwnProcessCall(write)
            ends.insert(0, write.join)
        preload = request.preload_fn and guarded(request.preload_fn)
        return request._replace(async_fn=write, finalize_fns=ends, preload_fn=preload)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Keep an error of the block, or of a decorated function. :meth:`finish` raises it on all
        ranks."""
        try:
            yield
        except BaseException as problem:
            self.failure = self.failure or problem

    @property
    def _loose(self) -> int:
        """Bytes below which a rank sends its pack with its report. What the ranks of a block send
        fits into one pack."""
        return most_bytes(self.options) // block_size(self.ranks.world_size)

    @cached_property
    def mover(self) -> ChunkWriter:
        """The writer of chunks: reuses those of the base and packs small ones, if asked."""
        plain = Mover.of(self.attempt.location, self.options, self.attempt.check)
        mover: ChunkWriter = plain
        if self.base is not None:
            mover = self.reusing = ReusingMover(plain, self.base, self.attempt, self.manifest)
        if self.options.pack:
            mover = PackingMover(mover, self.attempt, self.manifest, self.options, self._loose)
        return mover

    def write(self, chunks: Sequence[ChunkWrite]) -> None:
        """Write chunks, at the same time as other pending files, and add them to the manifest.

        Raises:
            StorageError: the store failed.
        """
        with self.timed("write"):
            self.mover.write(chunks, self._written, self.files.taken())

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the duration of the block to this rank's part of the commit record."""
        start = perf_counter()
        try:
            yield
        finally:
            seconds = self.manifest.seconds
            seconds[name] = seconds.get(name, 0.0) + perf_counter() - start

    def _written(self, item: ChunkWrite, record: ChunkRecord) -> None:
        self.manifest.add_chunk(item.array, item.index, record)
        if self.meter.is_watched:
            self.meter.count(item.array.chunk_bytes)
        if self.failure is not None:
            raise self.failure

    def abort(self) -> None:
        """Stop an asynchronous save at its next chunk."""
        error = SaveInProgressError(
            f"the asynchronous save to {self.target.url} was aborted before its commit; "
            "the target is unchanged",
            rank=self.ranks.rank,
            url=self.target.url,
        )
        self.failure = self.failure or error
        if self.staging is not None:
            self.staging.fail(error)

    def finish(self) -> None:
        """Send the manifest to the coordinator, which commits. Every rank calls it and waits for
        all others.

        Raises:
            AccessPatternError: the shards of all ranks do not cover each tensor exactly once.
            RanksError: another rank failed.
            StorageError: the commit failed; the target is unchanged.
            BaseException: :attr:`failure`; nothing is committed, and every rank raises an error.
        """

        what = f"committing {self.target.url}"
        try:
            if self.failure is not None and self.ranks.failed:  # no rank begins a further step
                raise self.failure
            ranks, error = self.commit_ranks, self.failure
            with ranks.meet(what, self._commit, self._join, error=error) as meeting:
                meeting.report = self._report()
            self.record = meeting.answer
        except BaseException:
            self.give_up()
            raise
        self.meter.tell("done")
        if self.ranks.is_coordinator:
            self._log_commit()
        if self.verify_integrity:
            what = f"writing {INTEGRITY_NAME} of {self.target.url}"
            self.commit_ranks.together(what=what, decide=lambda _: write_integrity(self.target))

    def give_up(self) -> None:
        """Remove the attempt. The other ranks notice that this one has failed."""
        self.meter.tell("failed")
        if self.ranks.is_coordinator:
            self.attempt.abandon()

    def _report(self) -> bytes:
        """End the writing, and return this rank's manifest for the coordinator."""
        self.attempt.put_all(self.files.taken())
        if self.reusing is not None:
            self.reusing.warn()
        self.meter.tell("commit")
        if self.ranks.is_coordinator:
            return b""  # the coordinator's own manifest is not sent
        if self.options.durable:
            self.attempt.flush()
        return self.manifest.to_bytes()

    def _commit(self, reports: list[bytes]) -> dict[str, Any]:
        """Commit the attempt, and return the commit record. The coordinator calls it."""
        whole = replace(
            self.about,
            world_size=self.ranks.world_size,
            seconds=perf_counter() - self._started,
            has_root=self.zarr_format == 3,
        )
        return commit(self.attempt, self.options, self._merged(reports), whole)

    def _join(self, reports: list[bytes]) -> bytes:
        """Combine the reports of several ranks on the way to the coordinator. Write a pack of what
        these ranks have left, if that is enough."""
        whole = joined(reports, self.ranks.rank)
        if write_pack(self.attempt, whole, from_bytes=self._loose) and self.options.durable:
            self.attempt.flush()
        return whole.to_bytes()

    def _merged(self, reports: list[bytes]) -> Merged:
        """Merge and check the manifests of all ranks."""
        reported: list[bytes | RankManifest] = [self.manifest, *reports[1:]]
        merged = merge_reports(self.attempt, reported, self.options, self.ranks.rank)
        self._recommend_packs(merged.arrays)
        if self.options.validate_access_integrity:
            _check_objects(merged)
            if self.zarr_format is not None:
                written = {*(meta.key for meta in merged.arrays), *merged.objects}
                for rank, copies in merged.copies.items():
                    if lost := [key for key in copies if key not in written]:
                        raise coverage.without_main_replica(lost, rank)
        return merged

    def _recommend_packs(self, arrays: Sequence[ArrayMeta]) -> None:
        """Log once if many small chunks are files or objects of their own."""
        small = [meta for meta in arrays if meta.chunk_bytes <= SMALL_BYTES]
        count = sum(meta.grid.size for meta in small)
        if count > MANY_SMALL and not self.options.pack:
            packs = 1 + sum(meta.grid.size * meta.chunk_bytes for meta in small) // MOST_BYTES
            logger.info(
                f"{self.target.url}: {count} chunks have at most 1 MiB, and each is a file or "
                f"object of its own; pack=True would put them into about {packs} pack(s)"
            )

    def _log_commit(self) -> None:
        url, seconds = self.target.url, perf_counter() - self._started
        size = self.record.get("stored_bytes", 0)
        log_event(
            logger,
            "commit",
            f"{url}: committed, {size} bytes in {seconds:.3f} s",
            url=url,
            bytes=size,
            chunks=self.record.get("chunks", 0),
            seconds=seconds,
            world_size=self.ranks.world_size,
        )
        if self.base is not None and self.record:
            reused, before = self.record["reused_bytes"], self.base.location.url
            logger.info("%s: %d of %d bytes were reused from %s", url, reused, size, before)


def session_of(place: str | os.PathLike[str] | SaveSession) -> SaveSession | None:
    """Return the session that writes at a place; ``None`` without one."""
    if isinstance(place, SaveSession):
        return place
    found = running.get()
    is_here = isinstance(found, SaveSession) and found.place == Location.of(place).place
    return found if is_here else None


@contextmanager
def exchange_layouts(
    session: SaveSession, tensors: Sequence[ShardedTensor]
) -> Iterator[coverage.Layouts]:
    """Exchange the layouts of irregular and flattened tensors, to plan by them in the block. If any
    rank has such tensors, every rank enters it and waits for all others; and again at its end, so
    that no rank waits for pieces of one that could not plan.

    Args:
        session: the save.
        tensors: the tensors of this rank.

    Yields:
        The layouts of all ranks.

    Raises:
        AccessPatternError: flattened ranges overlap or leave a gap; on every rank.
        CheckpointingException: this rank's earlier error.
    """
    if not session.agreed.exchange_layouts:
        if session.failure is not None:
            raise session.failure
        yield coverage.Layouts()
        return
    with session.timed("exchange"):
        layouts = all_layouts(session.ranks, tensors, session.planning, session.failure)
    session.awaits_plan = False
    with session.ranks.meet(session.planning):
        yield layouts


def all_layouts(
    ranks: Ranks, tensors: Sequence[ShardedTensor], what: str, error: BaseException | None = None
) -> coverage.Layouts:
    """Return the layouts of the irregular and flattened tensors of all ranks. Every rank calls it
    and waits for all others; for ``what`` and ``error`` see :meth:`Ranks.together`."""

    def merged(reports: list[coverage.ShardReport]) -> coverage.Layouts:
        return coverage.merge_layouts(reports, ranks.members)

    report = coverage.report_shards(needing_layouts(tensors))
    layouts: coverage.Layouts = ranks.together(report, what=what, error=error, decide=merged)
    return layouts


def _check_objects(merged: Merged) -> None:
    """Check that each sharded object is written once, that grids of objects are complete, and that
    no key names both an object and a tensor."""
    held: dict[int, list[ShardedObject]] = defaultdict(list)
    for unique_key, ranks in merged.objects.items():
        for rank in ranks:
            held[rank].append(ShardedObject.empty_from_unique_key(unique_key))
    reports = [coverage.report_shards(objects) for objects in held.values()]
    if both := coverage.keys_of(reports) & {meta.key for meta in merged.arrays}:
        raise AccessPatternError(
            f"Invalid access pattern: key {min(both)!r} is both a tensor's and a sharded object's; "
            "rename one of them",
            key=min(both),
        )
    coverage.check_reports(reports, [*held])


# -- the chunks of a plan -------------------------------------------------------------------------


def write_chunks(session: SaveSession, plan: WritePlan) -> None:
    """Create the arrays, write this rank's chunks, and merge and write shared chunks.

    Every rank calls it. Ranks that share chunks wait for each other's pieces, before they write
    other chunks, which may take longer on some ranks.
    """
    if plan.cut:
        _exchange(session, plan.cut, session.write, ROUND_BYTES)
    # The largest first, so that threads end at about the same time.
    session.write(sorted(plan.writes, key=lambda write: -write.array.chunk_bytes))


def stage_chunks(session: SaveSession, plan: WritePlan) -> AsyncRequest:
    """Copy the chunks that this rank writes, and return a request that writes the copy.

    Every rank calls it. Pieces of shared chunks are exchanged in this call. Chunks for which the
    budget has no room are written in this call too.
    """
    options = session.options
    budget, brought = options.staging_budget_bytes, list[ChunkWrite]()
    size = sum(array.chunk_bytes for array in plan.written(session.ranks.rank))
    take = brought.extend if budget is None or size <= budget else session.write
    _exchange(session, plan.cut, take, min(ROUND_BYTES, budget or ROUND_BYTES))
    with session.timed("stage"):
        staging = session.staging = Staging(
            plan.writes,
            session.write,
            overlap=options.overlap_staging,
            budget_bytes=budget,
            threads=options.threads,
        )
    plan.writes.clear()

    def write() -> None:
        try:
            session.write([*brought, *staging.copies()])
        finally:
            staging.close()

    return AsyncRequest(write, (), [])


def _exchange(session: SaveSession, cut: Sequence[CutChunk], take: Take, most_bytes: int) -> None:
    """Connect with the ranks that share chunks with this one, and merge the shared chunks that it
    owns, round by round.

    The rounds may differ between ranks, because all ranks exchange chunks in the same order. After
    an error of this rank, or if a rank is lost, the pieces of later rounds are still sent, because
    other ranks wait for them. The first error is raised at the end.

    Args:
        session: the save.
        cut: the chunks that this rank shares.
        take: called with the merged chunks of each round.
        most_bytes: size of a round.
    """
    rank = session.ranks.rank
    holders = {piece.rank for chunk in cut if chunk.owner == rank for piece in chunk.pieces}
    session.ranks.connect(({chunk.owner for chunk in cut} | holders) - {rank})
    error: Exception | None = None
    for batch in in_rounds(cut, lambda chunk: chunk.array.chunk_bytes, most_bytes):
        try:
            with session.timed("exchange"):
                writes = _put_together(session.ranks, batch)
            if writes and error is None:
                take(writes)
        except Exception as problem:
            error = error or problem
    if error is not None:
        raise error


def _put_together(ranks: Ranks, chunks: Sequence[CutChunk]) -> list[ChunkWrite]:
    """Send pieces to the owners of their chunks, and receive those of the chunks that this rank
    owns.

    All ranks use the same global order of chunks, so that no two wait for each other.

    Raises:
        RanksError: a rank is lost.
        Exception: the first error of this rank's sources, at the end. Zeros are sent instead of
            their data, because the owner waits for it; it learns of the error before the commit.
    """
    failed: list[Exception] = []

    def own(chunk: CutChunk, start: int, size: int) -> NDArray[np.uint8]:
        try:
            data = as_bytes(np.ascontiguousarray(fetched(chunk.local[start])))
            if data.size == size:
                return data
            raise ValueError(
                f"key {chunk.array.key!r}, chunk {chunk.index}: a piece has {data.size} bytes, but "
                f"{size} were announced"
            )
        except Exception as problem:
            failed.append(problem)
            return np.zeros(size, np.uint8)

    sends: list[tuple[int, NDArray[np.uint8]]] = []
    receives: list[tuple[int, NDArray[np.uint8]]] = []
    writes: list[ChunkWrite] = []
    for chunk in chunks:
        dtype, is_own = dtypes.numpy_dtype(chunk.array.dtype), chunk.owner == ranks.rank
        merged = np.empty(math.prod(chunk.shape) if is_own else 0, dtype)
        if is_own:
            writes.append(ChunkWrite(chunk.array, chunk.index, merged.reshape(chunk.shape)))
        for start, stop, rank in chunk.pieces:
            place = merged[start:stop].view(np.uint8)
            if rank == ranks.rank and is_own:
                place[:] = own(chunk, start, place.size)
            elif rank == ranks.rank:
                sends.append((chunk.owner, own(chunk, start, (stop - start) * dtype.itemsize)))
            elif is_own:
                receives.append((rank, place))
    if sends or receives:
        ranks.exchange(sends, receives)
    if failed:
        raise failed[0]
    return writes
