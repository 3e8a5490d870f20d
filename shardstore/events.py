"""What is logged for machines: names of events, and the fields of each.

Every module logs to :mod:`logging` under its own name below ``shardstore``, texts for people. A
record that tells of an operation has beside its text the attribute ``event``, one of
:data:`EVENTS`, and the fields of it as further attributes, so that a handler can count and chart
without parsing texts. They are of level INFO, but for ``damaged``, ``later_steps`` and
``same_content`` (WARNING).
In a save or a load of several ranks the coordinator alone logs them.

An operation that fails raises, and has no event of its end.
"""

from __future__ import annotations

import logging
from typing import Any

__all__ = ["EVENTS", "log_event"]

EVENTS = {
    "commit": "a save is committed: url, bytes, chunks, seconds, bytes_per_second, world_size",
    "load": "a load is done: url, bytes (on rank 0), seconds, bytes_per_second, world_size",
    "verify_begin": "a verification begins: url",
    "verify": "it is done: url, bytes, seconds, bytes_per_second, arrays, chunks, objects, damage, "
    "notes (numbers of findings)",
    "convert_begin": "a conversion begins: url (of the target), source, source_format, "
    "target_format",
    "convert": "it is done: the same, and tensors, bytes, resumed_bytes, seconds, "
    "bytes_per_second, verified",
    "step": "a manager has saved a step: step, url, bytes, seconds, bytes_per_second, metrics",
    "delete": "a manager has deleted a step: step, url",
    "damaged": "a manager passes over a damaged step: step, url",
    "later_steps": "a run goes on from a step, of which there are later ones that it did not come "
    "from: step, later (their numbers), url where they are looked for",
    "same_content": "a step has the same tensors as an earlier one: step, earlier",
}
"""Name -> when it is logged, and its fields: sizes in bytes, times in seconds."""


def log_event(logger: logging.Logger, event: str, text: str, **fields: Any) -> None:
    """Log an event; one with ``bytes`` and ``seconds`` has their rate too.

    Args:
        logger: of the module that tells it.
        event: one of :data:`EVENTS`.
        text: for people.
        fields: of the event.
    """
    if "bytes" in fields and "seconds" in fields:
        seconds = fields["seconds"]
        rate = round(fields["bytes"] / max(seconds, 1e-9))
        fields = {**fields, "seconds": round(seconds, 3), "bytes_per_second": rate}
    logger.info("%s", text, extra={"event": event, **fields})
