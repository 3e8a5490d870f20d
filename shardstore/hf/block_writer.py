"""Writes the blocks of a model that fall to one rank, from its memory and that of other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from shardstore.distributed.coordinator import Ranks
from shardstore.hf.blocks import BLOCK_BYTES, Block, Piece, exchange_pieces
from shardstore.hf.files import FileLayout
from shardstore.hf.places import Place
from shardstore.saving.plan import LocalData, data_of, fetched
from shardstore.storage.format import dtypes
from shardstore.storage.format.grid import Box
from shardstore.storage.movers.chunk_bytes import as_bytes
from shardstore.storage.runtime.parallel import in_rounds, run_batched, run_together

BoxReader: TypeAlias = Callable[[Box], torch.Tensor]
"""Returns a box of a tensor, in host memory; several threads call it."""

ROUND_BYTES = 64 * 1024 * 1024
"""Bytes of memory for the blocks that a rank puts together at a time, and for their exchange."""
GATHERED_BYTES = 256 * 1024
"""Pieces of a block that are shorter than this on average are gathered before they are written."""


def source_of(data: LocalData, held: Box) -> BoxReader:
    """Return what returns parts of the memory that holds a box of a tensor."""

    def part(box: Box) -> torch.Tensor:
        where: tuple[Any, ...] = (..., *box.relative_to(held.offset).slices)
        return dtypes.as_tensor(fetched(data[where]))

    return part


class ExportPlan(NamedTuple):
    """What all ranks have agreed on.

    Attributes:
        layout: the files.
        blocks: what each rank writes.
        dtypes: name of a tensor -> data type that it is written in.
        state: what the ranks need to join, see :meth:`Place.begin`.
    """

    layout: FileLayout
    blocks: list[Block]
    dtypes: Mapping[str, torch.dtype]
    state: object


@dataclass
class BlockWriter:
    """The writing of a model on one rank.

    Attributes:
        ranks: the ranks.
        place: writes the files.
        plan: what they agreed on.
        sources: name and box of a tensor -> what returns parts of it on this rank.
        failure: an error of this rank.
    """

    ranks: Ranks
    place: Place = field(init=False)
    plan: ExportPlan = field(init=False)
    sources: dict[tuple[str, Box], BoxReader] = field(init=False, default_factory=dict)
    failure: BaseException | None = field(init=False, default=None)

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep an error of the block for :meth:`finish`, unless there was another before."""
        try:
            yield
        except Exception as problem:
            self.failure = self.failure or problem

    @property
    def pieces(self) -> set[tuple[str, Box]]:
        """Name and box of what this rank brings."""
        rank = self.ranks.rank
        return {
            (p.key, p.held) for block in self.plan.blocks for p in block.pieces if p.rank == rank
        }

    def stage(self) -> None:
        """Copy what this rank brings to host memory. An error is kept for :meth:`finish`."""
        with self.keeping():
            for (name, box), source in self.sources.items():
                copied = source(box).to(self.plan.dtypes[name], copy=True)
                self.sources[name, box] = source_of(data_of(copied, name), box)

    def write(self) -> None:
        """Write this rank's blocks, and send and receive the pieces of shared ones. An error is
        kept for :meth:`finish`."""
        with self.keeping():
            self._write_blocks()

    def _write_blocks(self) -> None:
        """Write the blocks: those that other ranks have pieces of, and beside their exchange those
        of this rank alone.

        After an error the pieces of this rank are still sent, because other ranks wait for them.
        """
        ranks, rank, ordered = self.ranks, self.ranks.rank, self.place.in_order
        shared: list[Block] = []
        own: list[Block] = []
        for block in self.plan.blocks:
            holders = {piece.rank for piece in block.pieces}
            if holders | {block.owner} == {rank} and not ordered:
                own.append(block)
            elif rank in holders or rank == block.owner:
                shared.append(block)
        partners = {p.rank for block in shared for p in block.pieces if block.owner == rank}
        ranks.connect((partners | {block.owner for block in shared}) - {rank})
        run_together(partial(self._write_shared, shared), partial(self._write_own, own))

    def _write_own(self, blocks: Sequence[Block]) -> None:
        """Write blocks that this rank alone has."""

        def write(batch: Sequence[Block]) -> None:
            for block in batch:
                self._write_block(block, None)

        run_batched(
            blocks,
            write,
            threads=self.place.threads,
            weight=attrgetter("size"),
            batch_weight=BLOCK_BYTES,
        )

    def _write_shared(self, blocks: Sequence[Block]) -> None:
        """Exchange the pieces of blocks, and write those that this rank owns."""
        pending: list[Future[None]] = []
        with ThreadPoolExecutor(self.place.threads, "shardstore-io") as pool:
            for batch in in_rounds(blocks, self._memory_of, ROUND_BYTES):
                data: list[tuple[Block, NDArray[np.uint8]]] = []
                with self.keeping():
                    data = self._put_together(batch)
                self._wait(pending)
                pending = [pool.submit(self._write_block, *one) for one in data]
            self._wait(pending)

    def _memory_of(self, block: Block) -> int:
        """Return the bytes that a shared block takes on this rank: its own, and what is received
        for it, or what is sent."""
        is_owner = block.owner == self.ranks.rank
        moved = (p for p in block.pieces if (p.rank == self.ranks.rank) != is_owner)
        return is_owner * block.size + sum(piece.nbytes for piece in moved)

    def _wait(self, pending: Iterable[Future[None]]) -> None:
        for future in pending:
            if error := future.exception():
                self.failure = self.failure or error

    def _write_block(self, block: Block, data: NDArray[np.uint8] | None) -> None:
        """Write a block, unless this rank has failed."""
        if self.failure is not None:
            return
        parts = self._of_one(block) if data is None else [data]
        self.place.write(block.name, block.start, [part.data for part in parts])

    def _of_one(self, block: Block) -> list[NDArray[np.uint8]]:
        """Return the bytes of a block that this rank alone holds: from its memory without a copy,
        if they are few ranges of it."""
        pieces = block.pieces
        is_long = block.size >= GATHERED_BYTES * len(pieces)
        if is_long and all(piece.box == piece.whole for piece in pieces):
            head = np.frombuffer(self._head(block), np.uint8)
            return [part for part in (head, *map(self._fetched, pieces)) if part.size]
        buffer = self._buffer(block)
        for piece in pieces:
            _put(piece, self._fetched(piece), buffer)
        return [buffer]

    def _head(self, block: Block) -> bytes:
        """Return the part of the file's header in a block."""
        return self.plan.layout.heads[block.name][block.start : block.stop]

    def _buffer(self, block: Block) -> NDArray[np.uint8]:
        """Return memory for the bytes of a block, with its part of the header."""
        buffer = np.empty(block.size, np.uint8)
        head = self._head(block)
        buffer[: len(head)] = np.frombuffer(head, np.uint8)
        return buffer

    def _fetched(self, piece: Piece) -> NDArray[np.uint8]:
        """Return the bytes of a piece of this rank, in C order and the written data type."""
        part = self.sources[piece.key, piece.held](piece.box)
        return as_bytes(dtypes.as_numpy(part.to(self.plan.dtypes[piece.key]).contiguous()))

    def _put_together(self, blocks: Sequence[Block]) -> list[tuple[Block, NDArray[np.uint8]]]:
        """Exchange the pieces of some blocks, and return those that this rank writes.

        All ranks exchange the blocks in the same order, so that no two wait for each other. If a
        piece of this rank cannot be read, zeros are sent, and the error is kept for the commit.
        """
        buffers = {id(one): self._buffer(one) for one in blocks if one.owner == self.ranks.rank}

        def give(_: Block, piece: Piece) -> NDArray[np.uint8]:
            with self.keeping():
                return self._fetched(piece)
            return np.zeros(piece.nbytes, np.uint8)

        def take(block: Block, piece: Piece, data: NDArray[np.uint8]) -> None:
            _put(piece, data, buffers[id(block)])

        exchange_pieces(self.ranks, blocks, give, take, to_owner=True)
        return [(one, buffers[id(one)]) for one in blocks if id(one) in buffers]


def _put(piece: Piece, data: NDArray[np.uint8], buffer: NDArray[np.uint8]) -> None:
    """Copy a piece to its place in the bytes of its block."""
    where = piece.within(buffer)
    where[...] = data.view(where.dtype).reshape(where.shape)
