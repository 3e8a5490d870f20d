"""PyTorch DCP over our storage and over its own in an object store: the GPT state, one rank."""

from __future__ import annotations

from bench import clients
from bench.cases.object_store import one_round, places
from bench.context import Context
from bench.field_of_clients import Field

CASE = "s3-dcp"
PEERS = {"dcp-s3-default": "at its defaults", "dcp-s3": "with two threads"}


def run(context: Context) -> None:
    """Save and load, client by client in every round."""
    names = (clients.DCP_OURS, clients.DCP_ROOT_ONLY, *PEERS)
    with places() as place, Field(context, CASE, 1, "gpt", context.scale, names) as field:
        field.rounds(
            lambda context, crew, client, repeat: one_round(
                CASE, context, crew, client, repeat, place(client)
            ),
            range(-1, context.repeats),
        )
