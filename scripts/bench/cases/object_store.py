"""The cases of `benchmark s3`: saves and loads of an object store, all clients in turn.

Each client saves and loads under a prefix of its own. What was saved is deleted when the case ends:
a store that takes deleted objects apart in the background would do so during the samples of the
next client. Where requests or bytes are counted, or made to wait, a proxy stands between clients
and server.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.clients import OURS, RAW_DOCUMENTS, ROOT_ONLY, S3_DIRECT
from bench.clients.raw_s3 import SMALL_CONCURRENCY
from bench.context import Context
from bench.crew import Crew
from bench.field_of_clients import Field
from bench.results import Sample
from bench.workload import METADATA_ARRAYS, OBJECT_ARRAYS

CHUNKS, ARRAYS, LATENCY = "s3-chunks", "s3-arrays", "s3-latency"
METADATA, MEMORY, RESHARD = "s3-metadata", "s3-memory", "s3-reshard"
SAVE, LOAD = "save to s3", "load from s3"
REQUESTS, GETS = "requests of a save", "requests to load the metadata"
IDEAL = "save, ideal with that latency"
MEMORY_SAVE, MEMORY_LOAD = "anonymous memory above the state, save", "the same, load"
READ = "bytes read for each wanted"
LATENCY_MS = 50
CHANGES = ((4, 2), (2, 4))
PROXY = Path(__file__).resolve().parents[3] / "tests" / "helpers" / "s3_proxy.py"


def chunks(context: Context) -> None:
    """2 GiB of 32 MiB, one tensor a chunk."""
    _save_and_load(context, CHUNKS, "chunks")


def arrays(context: Context) -> None:
    """2,000 arrays of 16 KiB, with documents of their own and without, and beside plain puts of
    their bytes those of as many objects as Zarr arrays with documents are."""
    _save_and_load(context, ARRAYS, "arrays", (*S3_DIRECT, ROOT_ONLY, *RAW_DOCUMENTS))


def latency(context: Context) -> None:
    """The same arrays, each request 50 ms late. The ideal: every object that the checkpoint has to
    have (a chunk and a document an array), 64 at a time, nothing but the wait."""
    with places() as place, _proxy(LATENCY_MS) as counters:
        names = (*S3_DIRECT, ROOT_ONLY)
        with Field(context, LATENCY, 1, "arrays", context.scale, names) as field:

            def one(context: Context, crew: Crew, client: str, repeat: int) -> None:
                counters("reset")
                one_round(LATENCY, context, crew, client, repeat, place(client))

            field.rounds(one, range(context.repeats))
            if {OURS, ROOT_ONLY} & set(field.names):
                _counted_save(context, field, counters)
        objects = 2 * max(10, round(OBJECT_ARRAYS * context.scale))
        ideal = objects / SMALL_CONCURRENCY * LATENCY_MS / 1000
        context.results.add(Sample(LATENCY, 1, "ideal", IDEAL, 0, ideal))


def _counted_save(context: Context, field: Field, counters: Callable[[str], Any]) -> None:
    def one(context: Context, crew: Crew, client: str, repeat: int) -> None:
        if client not in (OURS, ROOT_ONLY):
            return
        counters("reset")
        url = _place(client)
        crew.save(client, url, sync=True)
        requests = sum(counters("counters")["requests"].values())
        context.results.add(Sample(LATENCY, 1, client, REQUESTS, 0, requests, "count"))
        _delete(url)

    field.rounds(one, range(1))


def metadata(context: Context) -> None:
    """Load the metadata of 10,000 arrays; what is counted is requests for objects."""
    import torch

    import shardstore
    from shardstore.mapping import ShardedTensor

    number = max(10, round(METADATA_ARRAYS * context.scale))
    state = {
        f"a{i}": ShardedTensor.from_rank_offsets(f"a{i}", torch.full((4,), float(i)))
        for i in range(number)
    }
    url = _place("metadata")
    shardstore.save(state, url)
    with _proxy(0) as counters:
        counters("reset")
        found = shardstore.load_tensors_metadata(url)
        gets = counters("counters")["requests"].get("GET", 0)
    assert len(found) == number
    context.say(f"  {METADATA}: {number} arrays, {gets} GET")
    context.results.notes["metadata arrays"] = number
    context.results.add(Sample(METADATA, 1, OURS, GETS, 0, gets, "count"))
    _delete(url)


def memory(context: Context) -> None:
    """Growth of anonymous memory, each client in a process of its own."""
    for name in S3_DIRECT:
        if name in context.clients:
            with Field(context, MEMORY, 1, "tiny", 1.0, [name]) as field:
                field.rounds(_memory, range(1))


def _memory(context: Context, crew: Crew, client: str, _: int) -> None:
    url = _place(client)
    crew.save(client, url, sync=True)
    crew.load(client, url)
    _delete(url)
    crew.change_workload("chunks", context.scale)
    for repeat in range(2):
        saved = crew.save(client, url, sync=True, sample=True)
        loaded = crew.load(client, url, sample=True)
        crew.check()
        _delete(url)
        for measure, timing in ((MEMORY_SAVE, saved), (MEMORY_LOAD, loaded)):
            grown = timing.anonymous_peak_bytes or 0
            context.results.add(Sample(MEMORY, 1, client, measure, repeat, grown, "bytes"))
            context.say(f"  {MEMORY}, {client}: {measure} {grown / 2**20:.0f} MiB")


def reshard(context: Context) -> None:
    """A GPT's state saved by some ranks and loaded by others: bytes of all answers."""
    for before, after in CHANGES:
        _reshard(context, before, after)


def _reshard(context: Context, before: int, after: int) -> None:
    url = _place(f"reshard-{before}-{after}")

    def save(_: Context, crew: Crew, client: str, __: int) -> None:
        crew.save(client, url, sync=True)

    def load(context: Context, crew: Crew, client: str, _: int) -> None:
        counters("reset")
        # What ranks of another number hold is another state by the workload's rules: no check.
        crew.load(client, url)
        wanted = sum(reply["wanted_bytes"] for reply in crew.setup)
        ratio = counters("counters")["received_bytes"] / wanted
        context.say(f"  {RESHARD}, {before} -> {after}: {ratio:.3f}")
        measure = f"{READ}, {before} -> {after}"
        context.results.add(Sample(RESHARD, 1, client, measure, 0, ratio, "ratio"))

    with Field(context, RESHARD, before, "gpt", context.scale, [OURS]) as field:
        field.rounds(save, (0,))
    with (
        _proxy(0) as counters,
        Field(context, RESHARD, after, "gpt", context.scale, [OURS]) as field,
    ):
        field.rounds(load, (0,))
    _delete(url)


CASES: dict[str, Callable[[Context], None]] = {
    CHUNKS: chunks,
    ARRAYS: arrays,
    LATENCY: latency,
    METADATA: metadata,
    MEMORY: memory,
    RESHARD: reshard,
}


def _save_and_load(
    context: Context, case: str, workload: str, names: Sequence[str] = S3_DIRECT
) -> None:
    with places() as place, Field(context, case, 1, workload, context.scale, names) as field:
        field.rounds(
            lambda context, crew, client, repeat: one_round(
                case, context, crew, client, repeat, place(client)
            ),
            range(-1, context.repeats),
        )


@contextmanager
def places() -> Iterator[Callable[[str], str]]:
    """Gives URLs for what clients save; all that is there is deleted at the end."""
    given: list[str] = []

    def place(name: str) -> str:
        given.append(_place(name))
        return given[-1]

    try:
        yield place
    finally:
        for url in given:
            _delete(url)


def one_round(case: str, context: Context, crew: Crew, client: str, repeat: int, url: str) -> None:
    """A save to ``url`` and a load from there, of one client."""
    taken = {SAVE: crew.save(client, url, sync=True).seconds}
    taken[LOAD] = crew.load(client, url).seconds
    crew.check()
    line = ", ".join(f"{measure} {seconds:.2f} s" for measure, seconds in taken.items())
    context.say(f"  {case}, round {repeat + 1}/{context.repeats}, {client}: {line}")
    if repeat >= 0:
        for measure, seconds in taken.items():
            context.results.add(Sample(case, 1, client, measure, repeat, seconds))


def _place(name: str) -> str:
    return f"s3://{os.environ['BENCH_BUCKET']}/{name}/{os.urandom(4).hex()}"


def _delete(url: str) -> None:
    import fsspec  # type: ignore[import-untyped]

    options = {"config_kwargs": {"s3": {"addressing_style": "path"}}}
    fs, path = fsspec.core.url_to_fs(url, skip_instance_cache=True, **options)
    found = fs.find(path)
    if found:
        fs.rm(found)


@contextmanager
def _proxy(latency_ms: int) -> Iterator[Callable[[str], Any]]:
    """Put a proxy between the server and all that starts inside; gives a way to its counters."""
    upstream = os.environ["AWS_ENDPOINT_URL"]
    process = subprocess.Popen(
        [sys.executable, str(PROXY), upstream, "--latency-ms", str(latency_ms)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    address = process.stdout.readline().strip()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(what: str) -> Any:
        with opener.open(f"{address}/-/{what}", timeout=30) as answer:
            return json.load(answer)

    os.environ["AWS_ENDPOINT_URL"] = address
    try:
        yield ask
    finally:
        os.environ["AWS_ENDPOINT_URL"] = upstream
        process.stdin.close()
        process.wait(timeout=30)
