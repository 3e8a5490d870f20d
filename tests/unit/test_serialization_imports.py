"""What a process pays for its first save and load on a local disk."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.helpers.processes import run_to_end

PROGRAM = """
import json, sys
import torch, torch.distributed
before = set(sys.modules)
import shardstore

def state():
    return {
        "w": shardstore.ShardedTensor.from_rank_offsets("w", torch.ones(64, 8).bfloat16()),
        "o": shardstore.ShardedObject("o", {"a": 1}, (1,), (0,)),
        "step": 3,
    }

shardstore.save(state(), sys.argv[1])
shardstore.async_save(state(), sys.argv[1] + "-async").result()
shardstore.load(state(), sys.argv[1])
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules.keys() - before})))
"""


def test_local_saves_and_loads_import_no_store(tmp_path: Path) -> None:
    ran = run_to_end([sys.executable, "-c", PROGRAM, tmp_path / "c"], check=True)
    imported = set(json.loads(ran.stdout))
    assert "shardstore" in imported
    # torch itself imports asyncio.
    assert not imported & {"zarr", "tensorstore", "fsspec", "s3fs", "obstore", "asyncio"}
    assert not imported & {"numcodecs", "aiohttp", "botocore", "xarray"}
