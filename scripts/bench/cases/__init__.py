"""The cases of `benchmark disk` and `benchmark s3` by name, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable

from bench.cases import (
    dcp,
    flattened,
    memory,
    object_store,
    planning,
    reshard,
    save_load,
    small,
)
from bench.context import Context

S3 = object_store.CASES
DISK: dict[str, Callable[[Context], None]] = {
    save_load.CASE: save_load.run,
    flattened.CASE: flattened.run,
    memory.CASE: memory.run,
    small.CASE: small.run,
    reshard.CASE: reshard.run,
    planning.CASE: planning.run,
    dcp.CASE: dcp.run,
}
