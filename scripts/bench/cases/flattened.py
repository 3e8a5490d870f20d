"""Optimizer state in flattened ranges over eight data-parallel ranks, against the old strategy."""

from __future__ import annotations

from bench import clients
from bench.context import Context
from bench.crew import Crew
from bench.disk_state import retire
from bench.field_of_clients import Field
from bench.results import LOAD_WARM, SAVE, SAVE_SYNC, Sample

CASE = "flattened"
WORLD = 8
SCALE = 1.0
READ = "bytes read / wanted, worst rank"


def run(context: Context) -> None:
    """Save and load with both and with plain files, round after round."""
    names = (clients.RAW[0], clients.OURS, clients.MEGATRON)
    with Field(context, CASE, WORLD, "flattened", context.scale * SCALE, names) as field:
        field.rounds(_round, range(-1, context.repeats))


def _round(context: Context, crew: Crew, client: str, repeat: int) -> None:
    path = context.root / client
    saved = crew.save(client, path, sync=True)
    loaded = crew.load(client, path)
    crew.check()
    retire(path, context.root)
    unsynced = crew.save(client, path, sync=False)
    retire(path, context.root)
    # The kernel counts what goes through read calls, ours also what goes through mappings;
    # neither may flatter, so the larger one counts.
    worst = max(
        max(reply["io"].get("bytes_read", 0), reply["io"]["rchar"]) / setup["wanted_bytes"]
        for reply, setup in zip(loaded.ranks, crew.setup, strict=True)
    )
    context.say(
        f"  {CASE}, {WORLD} ranks, {client}: {SAVE_SYNC} {saved.seconds:.2f} s, {SAVE} "
        f"{unsynced.seconds:.2f} s, {LOAD_WARM} {loaded.seconds:.2f} s, {READ} {worst:.3f}"
    )
    if repeat < 0:
        return
    for measure, value, unit in (
        (SAVE_SYNC, saved.seconds, "s"),
        (SAVE, unsynced.seconds, "s"),
        (LOAD_WARM, loaded.seconds, "s"),
        (READ, worst, "ratio"),
    ):
        context.results.add(Sample(CASE, WORLD, client, measure, repeat, value, unit))
