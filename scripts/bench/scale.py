"""The case of `benchmark scale`: what a save costs beside its bytes in a large world.

One rank of the world prepares its save and packs its manifest, and one process commits what all
ranks report. These are the package's own functions at their real sizes, with the manifests of every
rank; what travels between ranks is not simulated.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from pathlib import Path
from typing import Any

import torch

from bench.clients import OURS
from bench.runs import Case, Figures, Run, Turn
from testing.memory import peak_rss_bytes, reset_peak

RANKS = (1024, 4096, 16384)
TENSORS = (1_000, 10_000, 100_000)
CHUNKS = (10_000, 100_000, 1_000_000)
PREPARE, PACK, COMMIT = "preparation of one rank", "manifest of one rank", "commit"
CHUNK_SIDE = 1024
RECORDS = 64
"""Distinct chunk records; what is in them costs nothing."""


def label(measure: str, number: int, of: str) -> str:
    """Name of a measure at one size."""
    return f"{measure}, {number:,} {of}"


def sizes(run: Run, turn: Turn) -> Figures:
    """Every measure at every size in one world."""
    found: Figures = {}
    for full in TENSORS:
        tensors = max(1, round(full * run.scale))
        found |= _one_rank(turn.world, tensors)
    for full in CHUNKS:
        chunks = max(10, round(full * run.scale))
        tensors = max(1, min(chunks // 10, round(TENSORS[-1] * run.scale)))
        place = Path(run.store.new(f"{turn.world}-{chunks}"))
        found |= _commit(place, turn.world, tensors, chunks)
        run.store.done(place)
    return found


def _one_rank(world: int, tensors: int) -> Figures:
    """Preparation and manifest of a rank in the middle of the world, which holds a shard of every
    tensor: as under FSDP, the most that there can be."""
    from shardstore.mapping import ShardedTensor
    from shardstore.saving.plan import plan_writes
    from shardstore.state_dict_utils import save_preprocess
    from shardstore.storage.format.manifest import RankManifest
    from shardstore.storage.options import SaveOptions
    from shardstore.strategies.zarr import _should_create_array

    rank = world // 2
    data = torch.zeros(4, 64, dtype=torch.bfloat16)
    keys = [f"model.layers.{i}.weight" for i in range(tensors)]
    cut = (0, rank, world)
    state = {key: ShardedTensor.from_rank_offsets(key, data, cut) for key in keys}
    begin = time.perf_counter()
    sharded, _ = save_preprocess(state, validate_access_integrity=False)
    plan = plan_writes(list(sharded.values()), rank, SaveOptions())
    prepared = time.perf_counter() - begin
    assert len(plan.writes) == tensors
    records = _records(plan.writes[0].array)
    begin = time.perf_counter()
    manifest = RankManifest(rank)
    for meta, tensor in zip(plan.arrays, plan.tensors, strict=True):
        manifest.add_array(meta, created=_should_create_array(tensor))
    for i, item in enumerate(plan.writes):
        manifest.add_chunk(item.array, item.index, records[i % RECORDS])
    packed = manifest.to_bytes()
    return {
        label(PREPARE, tensors, "tensors"): prepared,
        label(PACK, tensors, "tensors"): time.perf_counter() - begin,
        label(f"{PACK}, bytes", tensors, "tensors"): (len(packed), "bytes"),
    }


def _records(array: Any) -> list[Any]:
    from shardstore.storage.format.grid import inner_blocks
    from shardstore.storage.format.manifest import ChunkRecord

    size = array.chunk_bytes
    running = list(range(inner_blocks(size)))
    return [ChunkRecord(size + 4, i, os.urandom(16), running) for i in range(RECORDS)]


def _reports(world: int, tensors: int, chunks: int) -> list[bytes]:
    """What all ranks report of `chunks` chunks of 2 MiB, dealt out to them one by one."""
    from shardstore.storage.format.documents import ArrayMeta
    from shardstore.storage.format.grid import Grid
    from shardstore.storage.format.manifest import RankManifest

    each, side = max(1, chunks // tensors), CHUNK_SIDE
    grid = Grid((each * side, side), (side, side))
    metas = [
        ArrayMeta(key, key, grid, "bfloat16", shard_shape=(side, side))
        for key in (f"model.layers.{i}.weight" for i in range(tensors))
    ]
    records = _records(metas[0])
    found = []
    for rank in range(world):
        manifest = RankManifest(rank, seconds={"plan": 0.001, "write": 1.0})
        for place in range(rank, tensors * each, world):
            number, index = divmod(place, each)
            manifest.add_array(metas[number], created=index == 0)
            manifest.add_chunk(metas[number], (index, 0), records[place % RECORDS])
        found.append(manifest.to_bytes())
    return found


def _commit(place: Path, world: int, tensors: int, chunks: int) -> Figures:
    """Everything between the last report and the published checkpoint, on the disk."""
    from shardstore.storage.commit import folder
    from shardstore.storage.commit.publish import RootContent, commit, merge_reports
    from shardstore.storage.options import SaveOptions
    from shardstore.storage.stores.location import Location

    reports = _reports(world, tensors, chunks)
    attempt = folder.begin(Location.of(place), SaveOptions())
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = reset_peak()
    about = RootContent(common_backend=("torch", 1), world_size=world)
    begin = time.perf_counter()
    commit(attempt, SaveOptions(), merge_reports(attempt, reports, SaveOptions()), about)
    seconds = time.perf_counter() - begin
    peak = peak_rss_bytes() - before
    written = sum(entry.stat().st_size for entry in place.iterdir() if entry.is_file())
    return {
        label(COMMIT, chunks, "chunks"): seconds,
        label(f"{COMMIT}, memory beyond the reports", chunks, "chunks"): (peak, "bytes"),
        label("all reports", chunks, "chunks"): (sum(map(len, reports)), "bytes"),
        label("documents of the commit", chunks, "chunks"): (written, "bytes"),
    }


SCALE = (Case("scale", sizes, (OURS,), None, warmups=0),)
