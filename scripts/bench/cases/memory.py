"""Memory above the state itself: growth of anonymous memory during a first save and load.

Each client runs in processes of its own, so that no buffer kept from an earlier sample hides what
it needs; one tensor of 4 KiB is saved and loaded before, so that imports do not count. Loads go
into tensors that exist already. What counts is the worst rank, and the worse of two operations.
"""

from __future__ import annotations

from bench import clients
from bench.context import Context
from bench.crew import Crew
from bench.disk_state import retire
from bench.field_of_clients import Field
from bench.results import Sample

CASE = "memory"
SAVE = "anonymous memory above the state, save"
LOAD = "anonymous memory above the state, load"
RESIDENT_SAVE = "all resident memory above the state, save"
RESIDENT_LOAD = "all resident memory above the state, load"
OPERATIONS = 2


def run(context: Context) -> None:
    """Measure every client alone, in every world that the context names."""
    for world in context.ranks:
        for name in clients.NAMES:
            if name not in context.clients:
                continue
            with Field(context, CASE, world, "tiny", 1.0, [name]) as field:
                field.rounds(_measure, range(1))


def _measure(context: Context, crew: Crew, client: str, _: int) -> None:
    path = context.root / client
    crew.save(client, path, sync=True)
    crew.load(client, path)
    crew.check()
    retire(path, context.root)
    crew.change_workload("gpt", context.scale)
    for repeat in range(OPERATIONS):
        saved = crew.save(client, path, sync=True, sample=True)
        loaded = crew.load(client, path, sample=True)
        crew.check()
        retire(path, context.root)
        for measure, timing in ((SAVE, saved), (LOAD, loaded)):
            grown = timing.anonymous_peak_bytes or 0
            context.results.add(Sample(CASE, crew.world, client, measure, repeat, grown, "bytes"))
        for measure, timing in ((RESIDENT_SAVE, saved), (RESIDENT_LOAD, loaded)):
            grown = max(reply["peak_rss_above_bytes"] for reply in timing.ranks)
            context.results.add(Sample(CASE, crew.world, client, measure, repeat, grown, "bytes"))
        context.say(
            f"  {CASE}, {crew.world} rank(s), {client}: save "
            f"{(saved.anonymous_peak_bytes or 0) / 2**20:.0f} MiB, load "
            f"{(loaded.anonymous_peak_bytes or 0) / 2**20:.0f} MiB"
        )
