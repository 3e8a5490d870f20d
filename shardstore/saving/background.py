"""The part of a save that runs in the background: documents and chunks, from a copy of the state.

Answers for one rank's writing between the plan and the manifest. It speaks to no other rank: pieces
of chunks that ranks share are exchanged in the caller's thread, and the manifest is handed in
afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from shardstore.errors import SaveInProgressError
from shardstore.saving.session import SaveSession
from shardstore.saving.staging import StagedChunk, Staging
from shardstore.storage import arrays
from shardstore.storage.commit.base import Writer
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.manifest import ChunkRecord
from shardstore.storage.movers.chunks import ChunkWrite
from shardstore.storage.movers.object_mover import ObjectMover
from shardstore.storage.movers.parallel import yield_to_others

__all__ = ["BackgroundWrite", "abort"]


class BackgroundWrite:
    """Writes one rank's part of a save from its copy.

    Args:
        session: the save.
        mover: who writes.
        created: arrays that this rank creates, and their documents.
        staging: the copy of the state; it is closed at the end.
        owned: further chunks, in memory of their own; none where the copy has them.
        threads: threads that create documents.
    """

    _thread: threading.Thread | None = None
    _error: BaseException | None = None

    def __init__(
        self,
        session: SaveSession,
        mover: Writer,
        created: Sequence[tuple[ArrayMeta, str]],
        staging: Staging,
        owned: Sequence[ChunkWrite],
        threads: int | None = None,
    ) -> None:
        self._session = session
        self._mover = mover
        self._created = created
        self._staging = staging
        self._owned = list(owned)
        self._threads = threads
        if not staging.all_at_once and isinstance(mover, ObjectMover):
            # What is under way is not released: leave room for the chunk that is asked for next,
            # and for one that the ring's end is too short for.
            room = staging.arena_bytes - 2 * staging.largest_bytes
            mover.budget_bytes = max(1, min(mover.budget_bytes, room))

    def start(self) -> None:
        """Write in a thread, from now on: where the copy has not room for all, who copies waits for
        who writes."""

        def run() -> None:
            yield_to_others()
            try:
                self._write()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="shardstore-write", daemon=True)
        self._thread.start()

    def __call__(self) -> None:
        """Write everything, or wait for the thread that does.

        Raises:
            StorageError, SaveInProgressError: the store refused; the save was aborted.
        """
        if self._thread is None:
            self._write()
            return
        self._thread.join()
        # Of a copy that failed a writer without chunks has not heard.
        error = self._error or self._staging.error
        if error is not None:
            raise error

    def _write(self) -> None:
        staging = self._staging
        try:
            attempt = self._session.attempt
            if staging.all_at_once:
                staging.wait_queued()  # copying comes first: somebody may be waiting for it
                if staging.error is not None:
                    raise staging.error
            with self._session.timed("write"):
                self._mover.write(staging.writes, self._done)
                self._mover.write(self._owned, self._done)
                if not self._session.manifest.array_documents:
                    arrays.create_folders(attempt.location, [meta for meta, _ in self._created])
                elif not attempt.defers_documents:
                    arrays.create_arrays(attempt.location, self._created, threads=self._threads)
                else:
                    # Here and not at the commit, which the trainer waits for.
                    attempt.put_all(
                        [
                            (f"{meta.node}/{meta.document_name}", text.encode())
                            for meta, text in self._created
                        ]
                    )
                self._session.files.finish()
        except BaseException as error:
            staging.fail(error)
            raise
        finally:
            self._owned.clear()
            staging.close()

    def _done(self, item: ChunkWrite, record: ChunkRecord) -> None:
        self._session.written(item, record)
        if isinstance(item.source, StagedChunk):
            item.source.release()
        if self._session.failure is not None:
            raise self._session.failure


def abort(session: SaveSession) -> None:
    """Stop a save in the background at its next chunk."""
    error = SaveInProgressError(
        f"the asynchronous save to {session.target.url} was aborted before its commit; "
        "what was there is as it was",
        rank=session.ranks.rank,
        url=session.target.url,
    )
    session.failure = session.failure or error
    session.files.stop(error)
    if session.staging is not None:
        session.staging.fail(error)
