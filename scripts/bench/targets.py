"""The figures that the project set itself, and whether a run reached them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.cases import (
    dcp,
    dcp_s3,
    flattened,
    memory,
    object_store,
    planning,
    reshard,
    save_load,
    small,
)
from bench.clients import DCP_OURS, MEGATRON, OURS, RAW, RAW_DOCUMENTS, ROOT_ONLY
from bench.results import LOAD_COLD, LOAD_WARM, SAVE, SAVE_SYNC, Results, Verdict

MIB = 2**20
# Times of a plan are microseconds: "flat" allows them this much of noise.
FLAT = 1.5
BUDGET_MIB = 256


def verdicts(results: Results) -> list[Verdict]:
    """One verdict a target, in the order of the cases; only for cases that were run."""
    run = results.notes.get("cases", [])
    found: list[Verdict] = []
    for case, judge in (
        (save_load.CASE, _save_load),
        (flattened.CASE, _flattened),
        (memory.CASE, _memory),
        (small.CASE, _small),
        (reshard.CASE, _reshard),
        (planning.CASE, _planning),
        (dcp.CASE, _dcp),
        (object_store.CHUNKS, _object_chunks),
        (object_store.ARRAYS, _object_arrays),
        (object_store.LATENCY, _object_latency),
        (object_store.METADATA, _object_metadata),
        (object_store.MEMORY, _object_memory),
        (object_store.RESHARD, _object_reshard),
        (dcp_s3.CASE, _dcp_s3),
    ):
        if case in run:
            found += judge(results)
    return found


def at_most(case: str, target: str, value: float | None, bound: float) -> Verdict:
    """A target that is met from below."""
    return Verdict(case, target, value, None if value is None else value <= bound)


def at_least(case: str, target: str, value: float | None, bound: float) -> Verdict:
    """A target that is met from above."""
    return Verdict(case, target, value, None if value is None else value >= bound)


def _quotient(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


def _save_load(results: Results) -> Iterator[Verdict]:
    case = save_load.CASE
    for world in results.notes["ranks"]:

        def against(peer: str, measure: str, world: int = world) -> float | None:
            ours = results.median(case, world, OURS, measure)
            return _quotient(results.median(case, world, peer, measure), ours)

        def to_raw(measure: str, world: int = world) -> float | None:
            ours = results.median(case, world, OURS, measure)
            return _quotient(ours, results.fastest(case, world, RAW, measure))

        at = f"{world} rank(s): "
        unsynced, warm = (1.7, 1.15) if world == 1 else (2.0, 1.4)
        value = to_raw(SAVE_SYNC)
        yield at_most(case, at + "save + sync at most 1.25x raw", value, 1.25)
        value = against("dcp-best", SAVE_SYNC)
        yield at_least(case, at + "save + sync no slower than DCP at its best", value, 1.0)
        value = against("dcp-default", SAVE_SYNC)
        yield at_least(case, at + "save + sync 1.2x faster than DCP's default", value, 1.2)
        value = against(MEGATRON, SAVE_SYNC)
        yield at_least(case, at + "save + sync 1.3x faster than megatron zarr", value, 1.3)
        value = to_raw(SAVE)
        yield at_most(case, at + f"save, no sync at most {unsynced}x raw", value, unsynced)
        value = to_raw(LOAD_WARM)
        yield at_most(case, at + f"warm load at most {warm}x raw", value, warm)
        value = against("dcp-best", LOAD_WARM)
        yield at_least(case, at + "warm load 3x faster than DCP at its best", value, 3.0)
        value = against(MEGATRON, LOAD_WARM)
        yield at_least(case, at + "warm load 5x faster than megatron zarr", value, 5.0)
        yield at_most(case, at + "cold load at most 1.15x raw", to_raw(LOAD_COLD), 1.15)


def _dcp(results: Results) -> Iterator[Verdict]:
    case = dcp.CASE
    for world in results.notes["ranks"]:

        def against(measure: str, world: int = world) -> float | None:
            ours = results.median(case, world, DCP_OURS, measure)
            return _quotient(results.fastest(case, world, dcp.PEERS, measure), ours)

        at = f"{world} rank(s): "
        for measure, what in ((SAVE_SYNC, "save + sync"), (SAVE, "save, no sync")):
            yield at_least(case, at + f"{what} no slower than DCP's own", against(measure), 1.0)
        yield at_least(case, at + "warm load 2x faster than DCP's own", against(LOAD_WARM), 2.0)


def _flattened(results: Results) -> Iterator[Verdict]:
    case, world = flattened.CASE, flattened.WORLD

    def against(measure: str) -> float | None:
        ours = results.median(case, world, OURS, measure)
        return _quotient(results.median(case, world, MEGATRON, measure), ours)

    for measure in (SAVE_SYNC, SAVE):
        yield at_least(case, f"{measure} 20x faster than megatron zarr", against(measure), 20.0)
    yield at_least(case, "warm load 5x faster than megatron zarr", against(LOAD_WARM), 5.0)
    read = max(results.values(case, world, OURS, flattened.READ), default=None)
    yield at_most(case, "each rank reads at most 1.1 of what it wants", read, 1.1)


def _memory(results: Results) -> Iterator[Verdict]:
    for world in results.notes["ranks"]:
        for measure, name, bound in ((memory.SAVE, "save", 32), (memory.LOAD, "load", 128)):
            grown = results.values(memory.CASE, world, OURS, measure)
            value = max(grown) / MIB if grown else None
            target = f"{world} rank(s): {name} at most {bound} MiB above the state"
            yield at_most(memory.CASE, target, value, bound)


def _small(results: Results) -> Iterator[Verdict]:
    case = small.CASE

    def against(measure: str) -> float | None:
        ours = results.median(case, 1, OURS, measure)
        return _quotient(results.fastest(case, 1, small.DCP, measure), ours)

    for measure in (SAVE_SYNC, SAVE):
        yield at_least(case, f"{measure} no slower than DCP", against(measure), 1.0)
    yield at_least(case, "warm load 5x faster than DCP", against(LOAD_WARM), 5.0)
    many = results.median(case, 1, OURS, small.DOCUMENTS)
    one = results.median(case, 1, OURS, small.DOCUMENTS_OF_ONE)
    more = None if many is None or one is None else many - one
    yield at_most(case, "documents read beyond those of a checkpoint of one array: 0", more, 0.0)


def _reshard(results: Results) -> Iterator[Verdict]:
    for axis in reshard.AXES:
        for before, after in reshard.CHANGES:
            name = reshard.label(reshard.RATIO, before, after, axis)
            value = results.median(reshard.CASE, 1, OURS, name)
            target = f"{before} -> {after} along axis {axis}: at most 1.25 bytes for each wanted"
            yield at_most(reshard.CASE, target, value, 1.25)


def _planning(results: Results) -> Iterator[Verdict]:
    case = planning.CASE
    times = [results.median(case, world, OURS, planning.MEASURE) for world in planning.WORLDS]
    target = f"world of {planning.WORLDS[-1]:,}: under 1 ms a tensor"
    yield at_most(case, target, times[-1], 1.0)
    spread = _quotient(times[-1], times[0])
    target = f"flat: world of {planning.WORLDS[-1]:,} at most {FLAT}x a world of 16"
    yield at_most(case, target, spread, FLAT)


def _object_chunks(results: Results) -> Iterator[Verdict]:
    case = object_store.CHUNKS
    for measure in (object_store.SAVE, object_store.LOAD):
        ours = results.median(case, 1, OURS, measure)
        raw = _quotient(results.fastest(case, 1, RAW, measure), ours)
        yield at_least(case, f"{measure}: at least 0.9 of plain puts or gets", raw, 0.9)
        dcp = _quotient(results.median(case, 1, "dcp-s3", measure), ours)
        yield at_least(case, f"{measure}: 2x faster than DCP over s3fs", dcp, 2.0)


def _object_arrays(results: Results) -> Iterator[Verdict]:
    case, save, load = object_store.ARRAYS, object_store.SAVE, object_store.LOAD

    def against(peers: Sequence[str], client: str, measure: str) -> float | None:
        ours = results.median(case, 1, client, measure)
        return _quotient(results.fastest(case, 1, peers, measure), ours)

    target = f"{save}: at least 0.8 of plain puts of as many objects"
    yield at_least(case, target, against(RAW_DOCUMENTS, OURS, save), 0.8)
    target = f"{save}: at least 0.8 of plain puts of the chunks alone, half as many objects"
    yield at_least(case, target, against(RAW, OURS, save), 0.8)
    target = f"{save} without array documents: at least 0.8 of plain puts"
    yield at_least(case, target, against(RAW, ROOT_ONLY, save), 0.8)
    target = f"{load}: at least 0.8 of plain gets"
    yield at_least(case, target, against(RAW, OURS, load), 0.8)


def _object_latency(results: Results) -> Iterator[Verdict]:
    case = object_store.LATENCY
    ours = results.median(case, 1, OURS, object_store.SAVE)
    ideal = results.median(case, 1, "ideal", object_store.IDEAL)
    target = f"save with {object_store.LATENCY_MS} ms a request: at most 3x the ideal"
    yield at_most(case, target, _quotient(ours, ideal), 3.0)


def _object_metadata(results: Results) -> Iterator[Verdict]:
    number = results.notes.get("metadata arrays", 0)
    gets = results.median(object_store.METADATA, 1, OURS, object_store.GETS)
    target = f"metadata of {number:,} arrays: one GET"
    yield at_most(object_store.METADATA, target, gets, 1.0)


def _object_memory(results: Results) -> Iterator[Verdict]:
    case = object_store.MEMORY
    for measure in (object_store.MEMORY_SAVE, object_store.MEMORY_LOAD):
        grown = results.values(case, 1, OURS, measure)
        value = max(grown) / MIB if grown else None
        target = f"{measure}: at most the budget of {BUDGET_MIB} MiB and a tenth"
        yield at_most(case, target, value, 1.1 * BUDGET_MIB)


def _object_reshard(results: Results) -> Iterator[Verdict]:
    case = object_store.RESHARD
    for before, after in object_store.CHANGES:
        measure = f"{object_store.READ}, {before} -> {after}"
        value = results.median(case, 1, OURS, measure)
        yield at_most(case, f"{before} -> {after}: at most 1.25 bytes for each wanted", value, 1.25)


def _dcp_s3(results: Results) -> Iterator[Verdict]:
    case = dcp_s3.CASE
    for measure in (object_store.SAVE, object_store.LOAD):
        ours = results.median(case, 1, DCP_OURS, measure)
        for peer, settings in dcp_s3.PEERS.items():
            value = _quotient(results.median(case, 1, peer, measure), ours)
            target = f"{measure} through DCP: 2x faster than DCP over s3fs {settings}"
            yield at_least(case, target, value, 2.0)
