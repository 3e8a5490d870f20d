"""What the coordinator makes of all ranks' reports: the chunks that several ranks hold, and the
record of the state dict.

Knows reports and DCP's metadata; not how the reports came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.distributed.checkpoint.metadata import Metadata

from shardstore.dcp.write_items import Piece, Report
from shardstore.errors import AccessPatternError, KeyNameError
from shardstore.storage.commit.attempt import Attempt
from shardstore.storage.commit.publish import write_chunks
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.manifest import RankManifest
from shardstore.storage.movers.chunks import ChunkWrite
from shardstore.storage.options import SaveOptions
from shardstore.values.record import StateRecord

__all__ = ["put_together", "state_record"]


def state_record(metadata: Metadata, reports: Sequence[Report]) -> StateRecord:
    """Values, files and paths of the state dict, from what each rank wrote of it.

    Raises:
        AccessPatternError: something in the metadata was written by nobody.
        KeyNameError: a path is not made of text and numbers.
    """
    values: dict[str, Any] = {}
    files: list[str] = []
    for report in reports:
        values.update(report.values)
        files += report.files
    tensors = {key for key, about in metadata.state_dict_metadata.items() if hasattr(about, "size")}
    missing = sorted(set(metadata.state_dict_metadata) - tensors - set(values) - set(files))
    if missing:
        raise AccessPatternError(
            f"keys {missing[:4]} are in the state dict, but no rank wrote them; save without a "
            "cached plan (enable_plan_caching=False)",
            key=missing[0],
        )
    paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    for key, path in paths.items():
        if not all(isinstance(name, str | int) for name in path):
            raise KeyNameError(f"key {key!r} has a path that is not made of text: {path}", key=key)
    return StateRecord({key: tuple(path) for key, path in paths.items()}, values, sorted(files))


def put_together(
    reports: Sequence[Report], rank: int, attempt: Attempt, options: SaveOptions
) -> bytes:
    """Write the chunks that several ranks hold. Called by the coordinator.

    Args:
        reports: of all ranks.
        rank: the coordinator's.
        attempt: where to.
        options: how.

    Returns:
        A manifest of these chunks.

    Raises:
        AccessPatternError: the ranks together hold less, or more, than a whole chunk.
        StorageError: the store refused.
    """
    start = perf_counter()
    manifest = RankManifest(rank)
    metas: dict[str, ArrayMeta] = {}
    chunks: dict[tuple[str, tuple[int, ...]], list[Piece]] = {}
    for report in reports:
        metas.update(report.metas)
        for piece in report.pieces:
            chunks.setdefault((piece.key, piece.index), []).append(piece)
    writes = [
        ChunkWrite(metas[key], index, _joined(metas[key], index, pieces))
        for (key, index), pieces in chunks.items()
    ]
    used = {key: metas[key] for key, _ in chunks}
    write_chunks(attempt, options, manifest, [(meta, False) for meta in used.values()], writes)
    manifest.seconds = {"write": perf_counter() - start}
    return manifest.to_bytes()


def _joined(meta: ArrayMeta, index: tuple[int, ...], pieces: Sequence[Piece]) -> NDArray[Any]:
    box = meta.grid.box(index)
    dtype = dtypes.numpy_dtype(meta.dtype)
    held = sum(piece.within.size for piece in pieces)
    if held != box.size:
        raise AccessPatternError(
            f"Invalid access pattern: the ranks together hold {held} of the {box.size} elements "
            f"of key {meta.key!r} offset {box.offset} shape {box.shape}",
            key=meta.key,
            chunk=index,
        )
    out: NDArray[Any] = np.empty(box.shape, dtype)
    for piece in pieces:
        data = np.frombuffer(piece.data, np.uint8).view(dtype).reshape(piece.within.shape)
        where: tuple[Any, ...] = (..., *piece.within.slices)
        out[where] = data
    return out
