"""The cases of `benchmark disk` and `benchmark s3` by name, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable

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
from bench.context import Context

S3: dict[str, Callable[[Context], None]] = {**object_store.CASES, dcp_s3.CASE: dcp_s3.run}
DISK: dict[str, Callable[[Context], None]] = {
    save_load.CASE: save_load.run,
    flattened.CASE: flattened.run,
    memory.CASE: memory.run,
    small.CASE: small.run,
    reshard.CASE: reshard.run,
    planning.CASE: planning.run,
    dcp.CASE: dcp.run,
}
