"""Saves and loads of the GPT state: all clients in turn, round after round, on the same disk.

In a round a client saves with one sync, loads from the warm cache, loads from a cold one, and
saves without a sync. Its files are emptied and the disk is at rest before the next client begins.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bench import clients
from bench.context import Context
from bench.crew import Crew
from bench.disk_state import drop_from_cache, retire
from bench.field_of_clients import Field
from bench.results import LOAD_COLD, LOAD_WARM, SAVE, SAVE_SYNC, Sample

CASE = "save-load"


def run(context: Context) -> None:
    """Measure every world that the context names."""
    for world in context.ranks:
        with Field(context, CASE, world, "gpt", context.scale, clients.DIRECT) as field:
            field.rounds(measured(CASE), range(-1, context.repeats))


def measured(case: str) -> Callable[[Context, Crew, str, int], None]:
    """A round of a case: what is measured of one client."""
    return partial(_round, case)


def _round(case: str, context: Context, crew: Crew, client: str, repeat: int) -> None:
    path = context.root / client
    taken: dict[str, float] = {}
    taken[SAVE_SYNC] = crew.save(client, path, sync=True).seconds
    taken[LOAD_WARM] = crew.load(client, path).seconds
    in_place = crew.check()
    drop_from_cache(path)
    taken[LOAD_COLD] = crew.load(client, path, cold=True).seconds
    crew.check()
    retire(path, context.root)
    taken[SAVE] = crew.save(client, path, sync=False).seconds
    retire(path, context.root)
    context.results.notes.setdefault("loads into given tensors", {})[client] = in_place
    line = ", ".join(f"{measure} {seconds:.2f} s" for measure, seconds in taken.items())
    label = "warm-up" if repeat < 0 else f"round {repeat + 1}/{context.repeats}"
    context.say(f"  {case}, {crew.world} rank(s), {label}, {client}: {line}")
    if repeat >= 0:
        for measure, seconds in taken.items():
            context.results.add(Sample(case, crew.world, client, measure, repeat, seconds))
