"""The cases of `benchmark disk` and `benchmark s3`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from bench.bucket import Bucket
from bench.clients import (
    DCP_OURS,
    DCP_PACKED,
    DCP_ROOT_ONLY,
    DIRECT,
    HF,
    HF_DCP,
    HF_UNSIGNED,
    MEGATRON,
    MULTIPART,
    MULTIPART_SIGNED,
    OURS,
    PACKED,
    RAW_DOCUMENTS,
    ROOT_ONLY,
    S3_DIRECT,
)
from bench.clients.raw_s3 import SMALL_CONCURRENCY
from bench.runs import Case, Figures, Run, Turn
from bench.worker import Rank
from bench.workload import Entry, build, gpt
from testing.machine import drop_from_cache
from testing.memory import BytesRead

MIB = 2**20
SAVE_SYNC, SAVE = "save + one sync", "save, no sync"
WARM, COLD = "load, warm cache", "load, cold cache"
S3_SAVE, S3_LOAD = "save to s3", "load from s3"
READ = "bytes read / wanted, worst rank"
SAVE_MEMORY, LOAD_MEMORY = (
    f"anonymous memory above the state, {what}" for what in ("save", "load")
)
RESIDENT = "all resident memory above the state, load"
REQUESTS = "requests of a save"
OVER_IDEAL = "save over the ideal with that latency"
LATENCY_MS = 50
CHANGES = ((4, 16, 0), (16, 4, 0), (4, 16, 1), (16, 4, 1))
"""Ranks at the save, ranks at the load, axis that is cut."""


def save_and_load(run: Run, turn: Turn) -> Figures:
    """A save and a load of one client; on a disk also a cold load, and a save without a sync."""
    crew, client = turn.crew, turn.client
    target = run.store.new(client)
    saved = crew.save(client, target).seconds
    loaded = crew.load(client, target)
    crew.check()
    if not isinstance(target, Path):
        run.store.done(target)
        return {S3_SAVE: saved, S3_LOAD: loaded.seconds}
    found: Figures = {SAVE_SYNC: saved, WARM: loaded.seconds}
    pairs = zip(loaded.ranks, crew.setup, strict=True)
    found[READ] = (max(r["bytes_read"] / s["wanted_bytes"] for r, s in pairs), "ratio")
    drop_from_cache(target)
    found[COLD] = crew.load(client, target, cold=True).seconds
    crew.check()
    run.store.done(target)
    found[SAVE] = crew.save(client, target, sync=False).seconds
    run.store.done(target)
    return found


def memory(workload: str, run: Run, turn: Turn) -> Figures:
    """Growth of memory during a first and a second save and load, on the worst rank.

    A small state is saved and loaded before, so that imports do not count. Loads go into tensors
    that exist already.
    """
    crew, client = turn.crew, turn.client
    found: Figures = {SAVE_MEMORY: [], LOAD_MEMORY: [], RESIDENT: []}
    for sampled in (False, True, True):
        target = run.store.new(client)
        saved = crew.save(client, target, sample=sampled)
        loaded = crew.load(client, target, sample=sampled)
        crew.check()
        run.store.done(target)
        if sampled:
            found[SAVE_MEMORY].append((saved.grown_bytes, "bytes"))
            found[LOAD_MEMORY].append((loaded.grown_bytes, "bytes"))
            resident = max(reply["resident_bytes"] for reply in loaded.ranks)
            found[RESIDENT].append((resident, "bytes"))
        else:
            crew.build(workload, run.scale, [client])
    return found


def reshard(run: Run, turn: Turn) -> Figures:
    """Bytes read for each byte wanted when the number of ranks changes between save and load."""
    found: Figures = {}
    for before, after, axis in CHANGES:
        change = {"before": before, "after": after, "axis": axis, "scale": run.scale}
        target = run.store.new("reshard")
        (ratio,) = turn.crew.call("bench.cases:read_resharded", path=str(target), **change)
        run.store.done(target)
        found[f"bytes read / wanted, {before} -> {after} along axis {axis}"] = (ratio, "ratio")
    return found


def read_resharded(
    rank: Rank, path: str, before: int, after: int, axis: int, scale: float
) -> float:
    """Bytes read over bytes wanted; one process plays all ranks, one after the other.

    On save it holds all shards of every tensor at once, on load the shard of one rank at a time. No
    rank profits from what another one has read.
    """
    import torch

    import shardstore
    from shardstore import ShardedTensor

    def shard(key: str, data: torch.Tensor, index: int, parts: int) -> ShardedTensor:
        cut = (min(axis, data.ndim - 1), index, parts)
        return ShardedTensor.from_rank_offsets(key, data, cut)

    def parts(tensor: torch.Tensor, number: int) -> list[torch.Tensor]:
        cuts = tensor.chunk(number, dim=min(axis, tensor.ndim - 1))
        return [part.contiguous() for part in cuts]

    # Embedding and first layer with both moments: every size of tensor that the GPT has.
    first = [e for e in gpt(scale) if "layers." not in e.key or "layers.0." in e.key]
    entries = [Entry(e.key, e.dtype, e.global_shape) for e in first]
    tensors = build(entries, 0, 1)
    state = {
        f"{key}/{i}": shard(key, part, i, before)
        for key, tensor in tensors.items()
        for i, part in enumerate(parts(tensor, before))
    }
    shardstore.save(state, path, durable=False)
    read = wanted = 0
    for number in range(after):
        expected = {key: parts(tensor, after)[number] for key, tensor in tensors.items()}
        asked = {k: shard(k, torch.zeros_like(p), number, after) for k, p in expected.items()}
        counted = BytesRead()
        loaded: Any = shardstore.load(asked, path, validate_access_integrity=False)
        read += counted.so_far()
        wanted += sum(part.nbytes for part in expected.values())
        wrong = [key for key, part in expected.items() if not torch.equal(loaded[key], part)]
        if wrong:
            raise ValueError(f"rank {number}: {wrong[0]} differs from what was saved")
    return read / wanted


def slow_requests(run: Run, turn: Turn) -> Figures:
    """A save and a load with every request late; the requests of the save are counted.

    The ideal save waits for the objects that a checkpoint has to have, a chunk and a document an
    array, as many at a time as shardstore sends small objects, and for nothing else.
    """
    assert isinstance(run.store, Bucket)
    crew, client, forwarder = turn.crew, turn.client, run.store.forwarder
    target, before = run.store.new(client), forwarder.requests
    saved = crew.save(client, target).seconds
    requests = forwarder.requests - before
    loaded = crew.load(client, target).seconds
    crew.check()
    ideal = 2 * crew.setup[0]["tensors"] / SMALL_CONCURRENCY * LATENCY_MS / 1000
    return {
        REQUESTS: (requests, "count"),
        S3_SAVE: saved,
        S3_LOAD: loaded,
        OVER_IDEAL: (saved / ideal, "ratio"),
    }


_once = partial(Case, worlds=(1,), warmups=0, rounds=1)
_DCP = ("dcp-best", "dcp-default")
DISK = (
    Case("save-load", save_and_load, DIRECT),
    Case("flattened", save_and_load, ("raw-1", OURS, MEGATRON), "flattened", worlds=(8,)),
    Case("memory", partial(memory, "gpt"), DIRECT, "tiny", warmups=0, rounds=1, fresh=True),
    Case("small", save_and_load, ("raw-1", OURS, PACKED, DCP_PACKED, *_DCP), "small", worlds=(1,)),
    _once("reshard", reshard, (OURS,), "tiny"),
    Case("dcp", save_and_load, (DCP_OURS, *_DCP)),
    Case("hf", save_and_load, ("raw-1", HF, HF_DCP)),
)
_LATE = (*S3_DIRECT, ROOT_ONLY, PACKED, DCP_PACKED, "dcp-s3-default")
S3 = (
    Case("s3-chunks", save_and_load, S3_DIRECT, "chunks"),
    Case("s3-arrays", save_and_load, (*_LATE, *RAW_DOCUMENTS), "arrays"),
    Case("s3-latency", slow_requests, _LATE, "arrays", warmups=0, latency_ms=LATENCY_MS),
    _once("s3-memory", partial(memory, "chunks"), S3_DIRECT, "tiny", worlds=None, fresh=True),
    _once("s3-reshard", reshard, (OURS,), "tiny", worlds=None),
    Case("s3-hf", save_and_load, (MULTIPART, MULTIPART_SIGNED, HF, HF_UNSIGNED)),
    Case("s3-dcp", save_and_load, (DCP_OURS, DCP_ROOT_ONLY, "dcp-s3", "dcp-s3-default")),
)
