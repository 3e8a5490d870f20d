"""`benchmark scale`: what a save costs beside its bytes in a large world, simulated on one machine.

One rank of the world prepares its save and packs its manifest, and one process commits what all
ranks report: the package's own functions, at their real sizes, the manifests of every rank made and
merged, the documents written and synchronised. DTensors stand on torch's fake process group. What
travels between ranks is not simulated: the time of one report over gloo is measured between two
processes, and multiplied.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from arguments import counts, new_file

from bench import machine, report
from bench.memory import peak_rss_bytes, reset_peak
from bench.results import Results, Sample, Verdict
from bench.subcommand import measuring
from bench.targets import at_most

CASE = "scale"
OURS = "shardstore"
PREPARE, PREPARE_DTENSORS = "preparation of one rank", "preparation of one rank, DTensors"
PACK, PACKED = "manifest of one rank", "manifest of one rank, bytes"
COMMIT_CPU = "commit, processor time"
COMMIT, PEAK = "commit", "commit, peak memory beyond the reports"
REPORTS, WRITTEN = "all reports, bytes", "documents of the commit, bytes"
LAYOUTS, ANSWER = "layouts of flattened ranges", "layouts, bytes sent to each rank"
STAR = "one report over gloo, times the ranks"
MAX_DTENSORS = 10_000
LIMIT_S = 10.0
CHUNK_SIDE = 1024
REPORT_BYTES = 184
"""Of a chunk of 2 MiB in a rank's report."""
RECORDS = 64
"""Distinct chunk records; what is in them costs nothing."""


def add_parser(commands: Any) -> None:
    """Add the subcommand to the command line."""
    parser = measuring(
        commands,
        "scale",
        run,
        help="planning and committing in large worlds, simulated",
        description=__doc__,
        repeats=1,
        folder="folder to commit to (default: the temporary folder)",
    )
    parser.add_argument("--plot", type=new_file, metavar="FILE", help="a picture, PNG or SVG")
    for name, default in (
        ("ranks", "1024,4096,16384"),
        ("tensors", "1000,10000,100000"),
        ("chunks", "10000,100000,1000000"),
    ):
        parser.add_argument(f"--{name}", type=counts, default=counts(default), metavar="N,...")


def run(options: argparse.Namespace) -> int:
    """Run all; 0 if every target that was measured is met."""
    results = Results()
    with tempfile.TemporaryDirectory(prefix="shardstore-bench-", dir=options.dir) as folder:
        root = Path(folder)
        results.notes.update(
            machine=machine.describe(root), cases=[CASE], repeats=options.repeats, scale=1.0
        )
        for number in range(options.repeats):
            for world in options.ranks:
                for tensors in options.tensors:
                    _say(f"one of {world:,} ranks, {tensors:,} tensors")
                    _one_rank(results, world, tensors, number)
                for chunks in options.chunks:
                    _say(f"commit of {chunks:,} chunks of {world:,} ranks")
                    tensors = min(chunks // 10, max(options.tensors))
                    _commit(results, root / f"{number}-{world}-{chunks}", world, tensors, chunks)
                _say(f"layouts of {world:,} ranks")
                _layouts(results, world, max(options.chunks), number)
            _star(results, options.ranks, max(options.chunks), number)
    judged = list(_verdicts(results, options.ranks, options.chunks))
    code = report.publish(results, judged, options)
    if options.plot:
        from bench.plot import draw_scale

        draw_scale(results.as_dict(), options.plot)
    return code


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def label(measure: str, number: int, of: str) -> str:
    """Name of a measure at one size."""
    return f"{measure}, {number:,} {of}"


def _add(
    results: Results, world: int, measure: str, number: int, value: float, unit: str = "s"
) -> None:
    results.add(Sample(CASE, world, OURS, measure, number, value, unit))


# -- one rank ----------------------------------------------------------------------------------


def _one_rank(results: Results, world: int, tensors: int, number: int) -> None:
    """Preparation and manifest of a rank in the middle of the world, which holds a shard of every
    tensor: as under FSDP, the most that there can be."""
    from shardstore.mapping import ShardedTensor
    from shardstore.storage.format.manifest import RankManifest

    rank = world // 2
    data = torch.zeros(4, 64, dtype=torch.bfloat16)
    state: dict[str, Any] = {
        f"model.layers.{i}.weight": ShardedTensor.from_rank_offsets(
            f"model.layers.{i}.weight", data, (0, rank, world)
        )
        for i in range(tensors)
    }
    begin = time.perf_counter()
    plan = _prepared(state, rank)
    seconds = time.perf_counter() - begin
    assert len(plan.writes) == tensors
    _add(results, world, label(PREPARE, tensors, "tensors"), number, seconds)
    manifest = RankManifest(rank)
    for meta, first in plan.arrays:
        manifest.add_array(meta, created=first)
    records = _records(plan.writes[0].array)
    begin = time.perf_counter()
    for i, item in enumerate(plan.writes):
        manifest.add_chunk(item.array, item.index, records[i % RECORDS])
    packed = manifest.to_bytes()
    seconds = time.perf_counter() - begin
    _add(results, world, label(PACK, tensors, "tensors"), number, seconds)
    _add(results, world, label(PACKED, tensors, "tensors"), number, len(packed), "bytes")
    if tensors <= MAX_DTENSORS:
        seconds = _dtensors(world, rank, tensors, data)
        _add(results, world, label(PREPARE_DTENSORS, tensors, "tensors"), number, seconds)


def _prepared(state: dict[str, Any], rank: int) -> Any:
    """From the state dict of the caller to the list of chunks, as `shardstore.save` does it."""
    from shardstore.dtensor.adoption import adopt_for_save
    from shardstore.saving.plan import Layouts, plan_writes
    from shardstore.state_dict_utils import check_lists, save_preprocess
    from shardstore.storage.format.grid import DEFAULT_TARGET_CHUNK_BYTES
    from shardstore.storage.format.manifest import RankManifest
    from shardstore.storage.format.names import check_collisions
    from shardstore.storage.movers.collector import collector_paused
    from shardstore.strategies.zarr import sharded_tensors_of

    adopted = adopt_for_save(state)
    check_lists(adopted)
    sharded, _ = save_preprocess(adopted, validate_access_integrity=False)
    tensors = sharded_tensors_of(sharded)
    with collector_paused():
        check_collisions(tensor.key for tensor in tensors)
        plan = plan_writes(
            tensors,
            rank,
            zarr_format=3,
            target_chunk_bytes=DEFAULT_TARGET_CHUNK_BYTES,
            layouts=Layouts(),
        )
        manifest = RankManifest(rank)
        for meta, first in plan.arrays:
            manifest.add_array(meta, created=first)
    return plan


def _dtensors(world: int, rank: int, tensors: int, data: torch.Tensor) -> float:
    """The same for DTensors cut along axis 0, on torch's fake process group."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        mesh = init_device_mesh("cpu", (world,))
        shape = torch.Size((data.shape[0] * world, *data.shape[1:]))
        state = {
            f"model.layers.{i}.weight": DTensor.from_local(
                data, mesh, [Shard(0)], run_check=False, shape=shape, stride=data.stride()
            )
            for i in range(tensors)
        }
        begin = time.perf_counter()
        plan = _prepared(state, rank)
        seconds = time.perf_counter() - begin
        assert len(plan.writes) == tensors
        return seconds
    finally:
        dist.destroy_process_group()


def _records(array: Any) -> list[Any]:
    from shardstore.storage.format.grid import inner_blocks
    from shardstore.storage.format.manifest import ChunkRecord

    size = array.chunk_bytes
    running = list(range(inner_blocks(size)))
    return [ChunkRecord(size + 4, i, os.urandom(16), running) for i in range(RECORDS)]


# -- the coordinator ---------------------------------------------------------------------------


def reports_of(world: int, tensors: int, chunks: int) -> list[bytes]:
    """What all ranks report of `chunks` chunks of 2 MiB, dealt out to them one by one."""
    from shardstore.storage.format.documents import ArrayMeta
    from shardstore.storage.format.grid import Grid
    from shardstore.storage.format.manifest import RankManifest

    each = max(1, chunks // tensors)
    side = CHUNK_SIDE
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


def _commit(results: Results, place: Path, world: int, tensors: int, chunks: int) -> None:
    """Everything between the last report and the published checkpoint, on the disk."""
    from shardstore.storage.commit import folder as commit
    from shardstore.storage.commit.publish import About, publish
    from shardstore.storage.options import SaveOptions
    from shardstore.storage.stores.location import Location

    reports = reports_of(world, tensors, chunks)
    attempt = commit.begin(Location.of(place))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = reset_peak()
    about = About(common_backend=("torch", 1), world_size=world)
    begin, processor = time.perf_counter(), time.process_time()
    publish(attempt, SaveOptions(), reports, about)
    seconds, processor = time.perf_counter() - begin, time.process_time() - processor
    peak = peak_rss_bytes() - before.rss_bytes
    number = sum(
        1
        for s in results.samples
        if (s.world, s.measure) == (world, label(COMMIT, chunks, "chunks"))
    )
    _add(results, world, label(COMMIT, chunks, "chunks"), number, seconds)
    _add(results, world, label(COMMIT_CPU, chunks, "chunks"), number, processor)
    _add(results, world, label(PEAK, chunks, "chunks"), number, peak, "bytes")
    size = sum(map(len, reports))
    _add(results, world, label(REPORTS, chunks, "chunks"), number, size, "bytes")
    written = sum(entry.stat().st_size for entry in place.iterdir() if entry.is_file())
    _add(results, world, label(WRITTEN, chunks, "chunks"), number, written, "bytes")


def _layouts(results: Results, world: int, ranges: int, number: int) -> None:
    """Flattened ranges are the one thing that ranks have to hear of each other before they write:
    what the coordinator does with everybody's, and what it sends to all."""
    import pickle

    from shardstore.mapping import ShardedTensor
    from shardstore.saving import plan as write_plan

    each = max(1, ranges // world)
    data = torch.zeros(64)

    def told(rank: int) -> bytes:
        mine = slice(64 * rank, 64 * rank + 64)
        tensors = [
            ShardedTensor.from_rank_offsets_flat(
                f"optimizer.{i}", data, (64 * world,), flattened_range=mine
            )
            for i in range(each)
        ]
        return write_plan.local_layouts(tensors, rank)

    reports = [told(rank) for rank in range(world)]
    begin = time.perf_counter()
    answer = pickle.dumps(write_plan.merge_layouts(reports))
    seconds = time.perf_counter() - begin
    _add(results, world, label(LAYOUTS, each * world, "ranges"), number, seconds)
    _add(results, world, label(ANSWER, each * world, "ranges"), number, len(answer), "bytes")


# -- between them ------------------------------------------------------------------------------

ROUNDS = 1000


def _star(results: Results, worlds: Sequence[int], chunks: int, number: int) -> None:
    """Time in which the coordinator takes a report and answers it, times the ranks of the world.

    One process sends it one report after the other, as many ranks would that are ready.
    """
    context = multiprocessing.get_context("spawn")
    for world in worlds:
        size = max(1, chunks // world) * REPORT_BYTES
        answers = context.Queue()
        with tempfile.TemporaryDirectory() as folder:
            processes = [
                context.Process(target=_talker, args=(rank, folder, size, answers))
                for rank in range(2)
            ]
            for process in processes:
                process.start()
            seconds = answers.get(timeout=300)
            for process in processes:
                process.join()
        _add(results, world, label(STAR, chunks, "chunks"), number, seconds * world)


def _talker(rank: int, folder: str, size: int, answers: Any) -> None:
    import torch.distributed as dist

    from shardstore.distributed.messages import Message, Messages

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    messages = Messages(dist.group.WORLD, wait_s=300)
    dist.barrier()
    begin = time.perf_counter()
    if rank == 0:
        for _ in range(ROUNDS):
            messages.receive(1, messages.expect(1))
        for _ in range(ROUNDS):
            messages.send(1, Message(0, b"done"))
        answers.put((time.perf_counter() - begin) / ROUNDS)
    else:
        mine = bytes(size)
        for _ in range(ROUNDS):
            messages.send(0, Message(0, mine))
        for _ in range(ROUNDS):
            messages.receive(0, messages.expect(0))
    dist.barrier()
    dist.destroy_process_group()


def _verdicts(results: Results, worlds: Sequence[int], chunks: Sequence[int]) -> Iterator[Verdict]:
    most, fewer = max(chunks), sorted(chunks)[-2:][0]
    for world in worlds:
        seconds = results.median(CASE, world, OURS, label(COMMIT, most, "chunks"))
        at = f"{world:,} ranks: "
        yield at_most(CASE, f"{at}commit of {most:,} chunks under {LIMIT_S:g} s", seconds, LIMIT_S)
        less = results.median(CASE, world, OURS, label(COMMIT, fewer, "chunks"))
        if seconds is not None and less is not None and most > fewer:
            factor = seconds / less / (most / fewer)
            text = f"{at}a chunk of {most:,} at most 1.5 times one of {fewer:,}"
            yield at_most(CASE, text, factor, 1.5)
