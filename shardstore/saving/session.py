"""One save from its first agreement to its commit, as one rank takes part in it.

The ranks speak to each other three times at the most: they agree to begin (which also tells
everybody of a rank whose input is wrong, before a byte is written, and of one that has lost the
connections for the background), they exchange the layouts of
flattened and irregular tensors where there are any, and they hand in their manifests, whereupon the
coordinator commits; in an object store once more between the two, when the documents that a reader
could open are written. A strategy finds the session of the folder that it was told to write to by
:func:`session_of`; called by itself it opens one of its own.
"""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from shardstore.distributed.coordinator import Ranks
from shardstore.errors import AccessPatternError, StorageError
from shardstore.mapping import ShardedTensor
from shardstore.progress import Meter
from shardstore.saving import replicas as shared_writes
from shardstore.saving.replicas import (
    Copies,
    SharedWrites,
    check_written,
    choose_tellers,
    digest_of_copies,
)
from shardstore.saving.staging import Staging
from shardstore.saving.uploads import FilesBeside
from shardstore.storage import arrays
from shardstore.storage.commit import folder as commit
from shardstore.storage.commit.attempt import Attempt
from shardstore.storage.commit.base import BaseChunks, ReusingMover, Writer, adopter, read_base
from shardstore.storage.commit.publish import CONFIG, CONFIG_NAME, commit_record, last_documents
from shardstore.storage.format import names
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.manifest import ChunkRecord, RankManifest
from shardstore.storage.format.merge import Merged, merge
from shardstore.storage.movers.chunks import ChunkWrite
from shardstore.storage.movers.collector import collector_paused
from shardstore.storage.options import SaveOptions
from shardstore.storage.stores.location import Location
from shardstore.strategies.async_utils import AsyncRequest

__all__ = [
    "SaveSession",
    "check_common",
    "check_kinds",
    "check_objects",
    "same_target",
    "session_of",
]

logger = logging.getLogger(__name__)

_open: dict[str, SaveSession] = {}


@dataclass
class SaveSession:
    """A save in progress.

    Attributes:
        ranks: who takes part.
        later: the same, over the group that they meet in once all is planned.
        target: where the checkpoint shall be.
        options: how it is written.
        attempt: where it is written until it is committed.
        manifest: what this rank wrote.
        exchange_layouts: whether any rank holds tensors that others must hear of.
        zarr_format: format of the arrays written, 3 or 2; ``None`` until a strategy of ours wrote
            some.
        deferred: documents of this rank that are written once all manifests are in, where the
            target itself is written to.
        started: :func:`time.perf_counter` at the beginning.
        failure: what went wrong on this rank at the beginning or in the background; then nothing is
            committed.
        over: what a meeting failed with: every rank knows, and none goes to a further meeting.
        plans: whether ranks still meet before they write.
        base: the checkpoint whose chunks are not sent again, if one was given.
        shared: the shards whose chunks this rank's group shares out, if it does.
        staging: the copy of the state that an asynchronous save writes from, if it made one.
        record: after the commit, on every rank: what was committed (bytes, chunks, seconds).
        meter: counts for a progress callback, if there is one.
        files: what is no chunk, on its way to an object store.
        rank_with_dtensors: on the coordinator, if its own state has none: the first whose state has
            some, and whose plain tensors are arrays then.
        common_keys: on the coordinator then, keys that its own plain tensors would have as arrays.
    """

    ranks: Ranks
    later: Ranks
    target: Location
    options: SaveOptions
    attempt: Attempt
    manifest: RankManifest
    exchange_layouts: bool
    common_of_coordinator: bytes
    zarr_format: int | None = None
    deferred: list[tuple[str, bytes]] = field(default_factory=list)
    started: float = field(default_factory=perf_counter)
    failure: BaseException | None = None
    over: BaseException | None = None
    plans: bool = False
    base: BaseChunks | None = None
    shared: SharedWrites | None = None
    staging: Staging | None = None
    record: dict[str, Any] = field(default_factory=dict)
    meter: Meter | None = None
    rank_with_dtensors: int | None = None
    common_keys: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.files = FilesBeside(self.attempt, self.options.budget_bytes)

    @classmethod
    def begin(
        cls,
        ranks: Ranks,
        place: str | Path | Location,
        options: SaveOptions,
        *,
        error: BaseException | None = None,
        exchange_layouts: bool = False,
        common: bytes = b"",
        base: Location | None = None,
        tensors: Sequence[ShardedTensor] = (),
        copies: Copies | None = None,
        later: str | None = None,
        adopts: bool = False,
    ) -> SaveSession:
        """Agree with all ranks to begin. Called by every rank, which waits for all others.

        Args:
            ranks: who takes part.
            place: where the checkpoint shall be.
            options: how it is written.
            error: what went wrong in this rank's preparation, if anything; then it is raised here,
                and on every other rank an
                error that names this one.
            exchange_layouts: whether this rank holds tensors that others must hear of.
            common: handed from the coordinator to all, for comparison.
            base: a committed checkpoint whose chunks are not sent again.
            tensors: this rank's, for sharing.
            copies: what this rank holds copies of alone, to be missed if nobody writes it.
            later: purpose of the group that the ranks meet in once all is planned; default: they
                stay in theirs. Where one rank lacks it, all of them make a new one.
            adopts: whether plain tensors of this rank are arrays, because it has DTensors too.

        Raises:
            CheckpointExistsError, StorageError: on every rank.
            RanksError: another rank failed, or did not answer in time.
        """
        target = Location.of(place)
        if error is None and ranks.world_size > 1 and target.url.startswith("memory://"):
            error = StorageError(
                f"{target.url} is the memory of one process, but {ranks.world_size} ranks save; "
                "give a folder or an object store that all of them see",
                url=target.url,
            )
        mine = b""
        try:
            mine = shared_writes.offer(tensors, options.replica_group)
        except Exception as problem:
            error = error or problem

        with_dtensors: int | None = None

        def decide(reports: list[bytes]) -> bytes:
            nonlocal with_dtensors
            told = [json.loads(report) for report in reports]
            same_target(told)
            if not adopts:
                with_dtensors = next((r for r, about in enumerate(told) if about["adopts"]), None)
            texts = None if base is None else read_base(base)
            attempt = commit.begin(
                target,
                overwrite=options.overwrite,
                allow_unconditional=options.allow_unconditional,
            )
            wanted = any(about["layouts"] for about in told)
            tellers = choose_tellers([about["copies"] for about in told])
            compared = common if ranks.world_size > 1 else b""
            shares = shared_writes.agree([bytes.fromhex(about["replicas"]) for about in told])
            anew = any(about["anew"] for about in told)
            return pickle.dumps((attempt.id, wanted, compared, texts, shares, tellers, anew))

        about = {"target": target.url, "base": None if base is None else base.url}
        about["replicas"] = mine.hex()
        about["copies"] = digest_of_copies(copies or {})
        flags = {"layouts": exchange_layouts, "anew": later is not None and ranks.lacks(later)}
        flags["adopts"] = adopts
        report = json.dumps({**about, **flags}).encode()
        answer = ranks.together(report, what=f"saving to {target.url}", error=error, decide=decide)
        attempt_id, wanted, of_coordinator, texts, shares, tellers, anew = pickle.loads(answer)
        attempt = commit.join(target, attempt_id, overwrite=options.overwrite)
        try:
            then = ranks if later is None else ranks.over(later, anew=anew)
        except BaseException:
            if ranks.is_coordinator:
                attempt.abandon()
            raise
        manifest = RankManifest(ranks.rank)
        session = cls(ranks, then, target, options, attempt, manifest, wanted, of_coordinator)
        if copies and ranks.rank in tellers:
            session.manifest.copies = copies
        if base is not None:
            session.base = BaseChunks(base, texts)
        if not ranks.is_coordinator:
            try:
                attempt.require_seen()
            except Exception as problem:  # met where the ranks meet next
                session.failure = problem
        session.plans = wanted
        session.rank_with_dtensors = with_dtensors
        session.shared = shared_writes.accepted(tensors, mine, shares, ranks.rank)
        return session

    def meet(
        self,
        report: bytes = b"",
        *,
        what: str,
        error: BaseException | None = None,
        decide: Callable[[list[bytes]], bytes] | None = None,
    ) -> bytes:
        """As :meth:`Ranks.together`. A rank with an error goes to the next meeting, whatever it is
        about, and that is the last one for all."""
        try:
            return self.ranks.together(report, what=what, error=error, decide=decide)
        except BaseException as problem:
            self.over = problem
            raise

    def fail_planning(self, error: BaseException) -> None:
        """Let the ranks that wait for this one to plan know of its error, which is met again at the
        end. Called where that end is not now."""
        self.failure = error
        if self.plans and self.over is None:
            with suppress(Exception):
                self.meet(what=self.planning, error=error)

    @property
    def planning(self) -> str:
        """What ranks do that meet before they write, for the text of an error."""
        return f"planning the save to {self.target.url}"

    def mover(self, options: SaveOptions) -> Writer:
        """Who writes the chunks of a strategy with these options."""
        mine = self.options
        options = replace(
            options,
            compression=mine.compression,
            durable=mine.durable,
            verify_base=mine.verify_base,
        )
        location = self.attempt.location
        mover = arrays.mover_for(location, options, self.attempt)
        if self.base is None:
            return mover

        def reused(size: int) -> None:
            self.manifest.reused_bytes += size

        adopt = adopter(self.base.location, location, self.attempt)
        if adopt is None:
            return mover
        return ReusingMover(
            mover,
            self.base,
            adopt,
            reused,
            threads=options.threads,
            budget_bytes=options.budget_bytes,
            verify=options.verify_base,
        )

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds that the block takes to this rank's part of the commit record."""
        start = perf_counter()
        try:
            yield
        finally:
            seconds = self.manifest.seconds
            seconds[name] = seconds.get(name, 0.0) + perf_counter() - start

    def expect(self, writes: Iterable[ArrayMeta]) -> None:
        """Tell who watches what this rank is going to write: the array of each chunk."""
        if self.meter is not None:
            sizes = [array.chunk_bytes for array in writes]
            self.meter.expect(sum(sizes), len(sizes))

    def written(self, item: ChunkWrite, record: ChunkRecord) -> None:
        """Note a chunk that is written. One call at a time."""
        self.manifest.add_chunk(item.array, item.index, record)
        if self.meter is not None and self.meter.add is not None:
            self.meter.add(item.array.chunk_bytes, 1)

    def put(self, name: str, data: bytes) -> None:
        """Write a file that is no chunk, and note it. Errors as those of the store; of an object
        store they may come with a later file, or at the end."""
        if self.attempt.defers_documents:
            self.files.put(name, data)
        else:
            self.attempt.put(name, data)
        self.manifest.add_file(name, data)

    @contextmanager
    def active(self) -> Iterator[Location]:
        """While active, strategies that write to the attempt's folder find this session."""
        _open[self.attempt.location.url] = self
        try:
            yield self.attempt.location
        finally:
            _open.pop(self.attempt.location.url, None)

    def guarded(self, request: AsyncRequest) -> AsyncRequest:
        """A request whose function keeps its error for :meth:`finish`, where all ranks meet.

        Raised in the background it would leave the attempt behind, and reach only who polls here.
        """
        function = request.async_fn
        if function is None:
            return request

        def run(*args: Any, **kwargs: Any) -> None:
            try:
                function(*args, **kwargs)
            except BaseException as error:
                self.failure = self.failure or error

        return request._replace(async_fn=run)

    def finish(
        self,
        error: BaseException | None,
        *,
        attributes: Mapping[str, Any] | None = None,
        documents: Mapping[str, bytes] | None = None,
    ) -> None:
        """Hand in the manifest, and commit. Called by every rank, which waits for all others.

        Args:
            error: what went wrong on this rank; then nothing is committed, and every rank raises.
            attributes: further attributes of the root group.
            documents: further documents below the root, by name.

        Raises:
            AccessPatternError: the shards of all ranks do not cover each tensor exactly once.
            RanksError: another rank failed.
            StorageError: the commit failed; what was at the target is as it was.
        """
        report = b""
        error = error if error is not None else self.failure
        if error is not None:
            self.files.stop(error)
        try:
            # In any case: what is still under way would come after what is cleared away.
            self.files.finish()
        except BaseException as problem:
            error = error or problem
        if self.meter is not None and error is None:
            self.meter.enter("commit")
        if error is None:
            try:
                if self.options.durable and not self.ranks.is_coordinator:
                    self.attempt.flush()
                if not self.ranks.is_coordinator:
                    report = self.manifest.to_bytes()
            except Exception as problem:
                error = problem
        merged: list[Merged] = []

        def check(reports: list[bytes]) -> bytes:
            with collector_paused():
                # The coordinator's own has not been sent anywhere, so it needs no packing.
                own = self.manifest.report()
                merged.append(merge([own, *reports[1:]], check=self.options.validate))
            if self.options.validate:
                check_objects(merged[0].objects)
                check_kinds(merged[0])
                if self.zarr_format is not None:
                    keys = {meta.key for meta in merged[0].arrays}
                    check_written(merged[0].copies, keys, merged[0].objects)
            names.check_collisions(meta.key for meta in merged[0].arrays)
            check_common(merged[0], self.common_keys, self.rank_with_dtensors)
            return b""

        def publish(_: list[bytes]) -> bytes:
            self._publish(merged[0], attributes or {}, documents or {})
            return json.dumps(self.record).encode()

        def decide(reports: list[bytes]) -> bytes:
            check(reports)
            return publish(reports)

        try:
            if self.over is not None:
                raise error or self.over
            what = f"committing {self.target.url}"
            if self.attempt.defers_documents:
                self.meet(report, what=what, error=error, decide=check)
                try:
                    self.attempt.put_all(self.deferred)
                except Exception as problem:
                    error = problem
                answer = self.meet(what=what, error=error, decide=publish)
            else:
                answer = self.meet(report, what=what, error=error, decide=decide)
            self.record = json.loads(answer)
            self._committed()
            if self.base is not None and self.ranks.is_coordinator:
                logger.info(
                    "%s: %d of %d bytes were taken over from %s",
                    self.target.url,
                    self.record["reused_bytes"],
                    self.record["stored_bytes"],
                    self.base.location.url,
                )
        except BaseException:
            if self.meter is not None:
                self.meter.enter("failed")
            if self.ranks.is_coordinator:
                self.attempt.abandon()
            raise

    def _committed(self) -> None:
        if self.meter is not None:
            self.meter.enter("done")
        if not self.ranks.is_coordinator:
            return
        seconds = perf_counter() - self.started
        size = self.record.get("stored_bytes", 0)
        logger.info(
            "%s: committed, %d bytes in %.3f s",
            self.target.url,
            size,
            seconds,
            extra={
                "event": "commit",
                "url": self.target.url,
                "bytes": size,
                "chunks": self.record.get("chunks", 0),
                "seconds": round(seconds, 3),
                "bytes_per_second": round(size / max(seconds, 1e-9)),
                "world_size": self.ranks.world_size,
            },
        )

    def _publish(
        self, merged: Merged, attributes: Mapping[str, Any], further: Mapping[str, bytes]
    ) -> None:
        written = list(further.items())
        if self.zarr_format != 2 and (self.zarr_format == 3 or merged.arrays):
            seconds = perf_counter() - self.started
            config = further.get(CONFIG_NAME)
            members = {} if config is None else {CONFIG: json.loads(config)}
            with collector_paused():
                self.record = commit_record(self.attempt, merged, self.ranks.world_size, seconds)
                written += last_documents(merged, self.record, attributes, members)
        self.attempt.commit(written, durable=self.options.durable)


def session_of(place: str | Path | Location) -> SaveSession | None:
    """The session whose attempt is written at a place, in this process."""
    return _open.get(Location.of(place).url)


def same_target(reports: list[dict[str, Any]]) -> None:
    """All ranks save to one place, upon one base; by what each told at the beginning."""
    first = reports[0]["target"]
    for rank, report in enumerate(reports):
        if report["target"] != first:
            raise AccessPatternError(
                f"rank 0 saves to {first} but rank {rank} to {report['target']}; give every rank "
                "the same place",
                rank=rank,
            )
        if report["base"] != reports[0]["base"]:
            raise AccessPatternError(
                f"rank 0 saves with base={reports[0]['base']} but rank {rank} with "
                f"base={report['base']}; give every rank the same",
                rank=rank,
            )


def check_kinds(merged: Merged) -> None:
    """No key is both a tensor's and an object's: loading could not tell which is meant."""
    objects = {unique_key.rpartition("/shard_")[0] for unique_key in merged.objects}
    for meta in merged.arrays:
        if meta.key in objects:
            raise AccessPatternError(
                f"Invalid access pattern: key {meta.key!r} is both a tensor's and a sharded "
                "object's; rename one of them",
                key=meta.key,
            )


def check_objects(objects: Mapping[str, list[int]]) -> None:
    """Each sharded object written once, and each grid of objects complete."""
    grids: dict[tuple[str, str], int] = {}
    for unique_key, ranks in objects.items():
        if len(ranks) > 1:
            raise AccessPatternError(
                f"Invalid access pattern: object {unique_key!r} was written by ranks "
                f"{sorted(ranks)}; only one may hold it as main "
                "replica",
                key=unique_key,
            )
        key, _, shard = unique_key.rpartition("/shard_")
        shape = shard.rpartition("_")[2]
        grids[key, shape] = grids.get((key, shape), 0) + 1
    for (key, shape), count in grids.items():
        wanted = 1
        for n in shape.split("."):
            wanted *= int(n) if n else 1
        if count != wanted:
            raise AccessPatternError(
                f"Invalid access pattern: {count} of the {wanted} objects of key {key!r} (global "
                f"shape {shape.replace('.', ' x ')}) "
                "were written; every part needs one main replica",
                key=key,
            )


def check_common(merged: Merged, common_keys: frozenset[str], rank: int | None) -> None:
    """Nothing is both an array and common state: it could not be loaded.

    Args:
        merged: what was written.
        common_keys: keys of plain tensors that the coordinator keeps in the common state.
        rank: one whose state has DTensors, so that its plain tensors are arrays.
    """
    both = sorted({meta.key for meta in merged.arrays} & common_keys)
    if both:
        raise AccessPatternError(
            f"the plain tensor {both[0]!r} is common state on rank 0, whose state has no DTensors, "
            f"and an array on rank {rank}, whose state has some ({len(both)} such tensor(s)); "
            "leave it out of the state of the one or the other, or make it a ShardedTensor on "
            "every rank that has it",
            key=both[0],
            rank=rank,
        )
