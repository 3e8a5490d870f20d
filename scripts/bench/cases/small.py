"""20,000 arrays of 1 KiB on one rank: bound by files and documents, not by bytes."""

from __future__ import annotations

from bench import clients
from bench.context import Context
from bench.crew import Crew
from bench.disk_state import retire, usage
from bench.field_of_clients import Field
from bench.results import LOAD_WARM, SAVE, SAVE_SYNC, Sample

CASE = "small"
DCP = ("dcp-best", "dcp-default")
DOCUMENTS = "documents read by a load"
DOCUMENTS_OF_ONE = "documents read by a load of one array"


def run(context: Context) -> None:
    """Save and load with shardstore, DCP and plain files, round after round."""
    names = ("raw-1", clients.OURS, *DCP)
    with Field(context, CASE, 1, "small", context.scale, names) as field:
        field.rounds(_round, range(-1, context.repeats))
    with Field(context, CASE, 1, "tiny", 1.0, [clients.OURS]) as field:
        field.rounds(_one_array, range(1))


def _round(context: Context, crew: Crew, client: str, repeat: int) -> None:
    path = context.root / client
    taken = {SAVE_SYNC: crew.save(client, path, sync=True).seconds}
    loaded = crew.load(client, path)
    taken[LOAD_WARM] = loaded.seconds
    crew.check()
    files, _ = usage(path)
    context.results.notes.setdefault("files for the small arrays", {})[client] = files
    retire(path, context.root)
    taken[SAVE] = crew.save(client, path, sync=False).seconds
    retire(path, context.root)
    line = ", ".join(f"{measure} {seconds:.2f} s" for measure, seconds in taken.items())
    context.say(f"  {CASE}, {client}: {line}, {files} files")
    if repeat < 0:
        return
    for measure, seconds in taken.items():
        context.results.add(Sample(CASE, 1, client, measure, repeat, seconds))
    if client == clients.OURS:
        read = loaded.ranks[0]["io"]["documents_read"]
        context.results.add(Sample(CASE, 1, client, DOCUMENTS, repeat, read, "count"))


def _one_array(context: Context, crew: Crew, client: str, repeat: int) -> None:
    path = context.root / client
    crew.save(client, path, sync=False)
    read = crew.load(client, path).ranks[0]["io"]["documents_read"]
    retire(path, context.root)
    context.results.add(Sample(CASE, 1, client, DOCUMENTS_OF_ONE, repeat, read, "count"))
