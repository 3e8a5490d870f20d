"""PyTorch DCP over our storage and over its own: the GPT state, client by client in every round."""

from __future__ import annotations

from bench import clients
from bench.cases.save_load import measured
from bench.context import Context
from bench.field_of_clients import Field

CASE = "dcp"
PEERS = ("dcp-best", "dcp-default")


def run(context: Context) -> None:
    """Measure every world that the context names."""
    for world in context.ranks:
        names = (clients.DCP_OURS, *PEERS)
        with Field(context, CASE, world, "gpt", context.scale, names) as field:
            field.rounds(measured(CASE), range(-1, context.repeats))
