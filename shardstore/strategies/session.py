"""One save from its first agreement to its commit, as one rank takes part in it.

The ranks speak to each other three times at the most: they agree to begin (which also tells
    everybody of a rank whose input
is wrong, before a byte is written), they exchange the layouts of flattened and irregular tensors
where there are any, and they
hand in their manifests, whereupon the coordinator commits; in an object store once more between the
two, when the documents that a reader could open are written. A strategy finds the session of the
folder that it was
told to write to by :func:`session_of`; called by itself it opens one of its own.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

from shardstore.errors import AccessPatternError, StorageError
from shardstore.ranks import Ranks
from shardstore.storage import commit, documents, names
from shardstore.storage.attempt import Attempt
from shardstore.storage.collector import collector_paused
from shardstore.storage.location import Location
from shardstore.storage.manifest import MANIFEST_NAME, Merged, RankManifest, merge
from shardstore.storage.options import SaveOptions

__all__ = ["SaveSession", "session_of"]

_open: dict[str, SaveSession] = {}


@dataclass
class SaveSession:
    """A save in progress.

    Attributes:
        ranks: who takes part.
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
    """

    ranks: Ranks
    target: Location
    options: SaveOptions
    attempt: Attempt
    manifest: RankManifest
    exchange_layouts: bool
    common_of_coordinator: bytes
    zarr_format: int | None = None
    deferred: list[tuple[str, bytes]] = field(default_factory=list)
    started: float = field(default_factory=perf_counter)

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

        Raises:
            CheckpointExistsError, StorageError: on every rank.
        """
        target = Location.of(place)
        if error is None and ranks.world_size > 1 and target.url.startswith("memory://"):
            error = StorageError(
                f"{target.url} is the memory of one process, but {ranks.world_size} ranks save; "
                "give a folder or an object store that all of them see",
                url=target.url,
            )

        def decide(reports: list[bytes]) -> bytes:
            _same_target([json.loads(report) for report in reports])
            attempt = commit.begin(
                target,
                overwrite=options.overwrite,
                allow_unconditional=options.allow_unconditional,
            )
            wanted = any(json.loads(report)["layouts"] for report in reports)
            return pickle.dumps((attempt.id, wanted, common if ranks.world_size > 1 else b""))

        report = json.dumps({"target": target.url, "layouts": exchange_layouts}).encode()
        answer = ranks.together(report, what=f"saving to {target.url}", error=error, decide=decide)
        attempt_id, wanted, of_coordinator = pickle.loads(answer)
        attempt = commit.join(target, attempt_id, overwrite=options.overwrite)
        return cls(
            ranks, target, options, attempt, RankManifest(ranks.rank), wanted, of_coordinator
        )

    @contextmanager
    def active(self) -> Iterator[Location]:
        """While active, strategies that write to the attempt's folder find this session."""
        _open[self.attempt.location.url] = self
        try:
            yield self.attempt.location
        finally:
            _open.pop(self.attempt.location.url, None)

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
        if error is None:
            try:
                if self.options.durable and not self.ranks.is_coordinator:
                    self.attempt.flush()
                report = self.manifest.to_bytes()
            except Exception as problem:
                error = problem
        merged: list[Merged] = []

        def check(reports: list[bytes]) -> bytes:
            with collector_paused():
                merged.append(merge(reports, check=self.options.validate))
            if self.options.validate:
                _check_objects(merged[0].objects)
                _check_kinds(merged[0])
            names.check_collisions(meta.key for meta in merged[0].arrays)
            return b""

        def publish(_: list[bytes]) -> bytes:
            self._publish(merged[0], attributes or {}, documents or {})
            return b""

        def decide(reports: list[bytes]) -> bytes:
            check(reports)
            return publish(reports)

        try:
            what = f"committing {self.target.url}"
            if self.attempt.defers_documents:
                self.ranks.together(report, what=what, error=error, decide=check)
                try:
                    self.attempt.put_all(self.deferred)
                except Exception as problem:
                    error = problem
                self.ranks.together(what=what, error=error, decide=publish)
            else:
                self.ranks.together(report, what=what, error=error, decide=decide)
        except BaseException:
            if self.ranks.is_coordinator:
                self.attempt.abandon()
            raise

    def _publish(
        self, merged: Merged, attributes: Mapping[str, Any], further: Mapping[str, bytes]
    ) -> None:
        written = list(further.items())
        if self.zarr_format != 2 and (self.zarr_format == 3 or merged.arrays):
            written.append((MANIFEST_NAME, merged.manifest.to_bytes()))
            record = {
                "format_version": documents.FORMAT_VERSION,
                documents.CHUNK_SUMS: merged.manifest.chunk_sums(),
                "commit": {
                    "attempt": self.attempt.id,
                    "created": datetime.now(UTC).isoformat(timespec="seconds"),
                    "world_size": self.ranks.world_size,
                    "arrays": len(merged.arrays),
                    "chunks": len(merged.manifest.crc),
                    "stored_bytes": int(merged.manifest.stored.sum()),
                    "seconds": round(perf_counter() - self.started, 3),
                    "shardstore": _version(),
                },
            }
            root = documents.root_document(merged.documents, {**attributes, "shardstore": record})
            written.append(("zarr.json", root.encode()))
        self.attempt.commit(written, durable=self.options.durable)


def session_of(place: str | Path | Location) -> SaveSession | None:
    """The session whose attempt is written at a place, in this process."""
    return _open.get(Location.of(place).url)


def _same_target(reports: list[dict[str, Any]]) -> None:
    first = reports[0]["target"]
    for rank, report in enumerate(reports):
        if report["target"] != first:
            raise AccessPatternError(
                f"rank 0 saves to {first} but rank {rank} to {report['target']}; give every rank "
                "the same place",
                rank=rank,
            )


def _check_kinds(merged: Merged) -> None:
    """No key is both a tensor's and an object's: loading could not tell which is meant."""
    objects = {unique_key.rpartition("/shard_")[0] for unique_key in merged.objects}
    for meta in merged.arrays:
        if meta.key in objects:
            raise AccessPatternError(
                f"Invalid access pattern: key {meta.key!r} is both a tensor's and a sharded "
                "object's; rename one of them",
                key=meta.key,
            )


def _check_objects(objects: Mapping[str, list[int]]) -> None:
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


def _version() -> str:
    try:
        return version("shardstore")
    except PackageNotFoundError:
        return "unknown"
