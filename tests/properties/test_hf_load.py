"""Any tensor of a safetensors file comes back bit for bit under any layout."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from shardstore import hf
from shardstore.storage.runtime.counters import counters
from tests.helpers.layouts import random_layout, random_shape, random_tensor
from tests.properties.test_resharding import differences

DTYPES = (
    *(torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.complex64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)


@settings(derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.randoms(use_true_random=False), st.sampled_from(DTYPES))
def test_any_layout(rng: random.Random, dtype: torch.dtype) -> None:
    """One process holds all shards, each of which is a box or a flat range. No byte of a file is
    read that no shard holds."""
    shape = random_shape(rng)
    whole = random_tensor(shape, dtype, rng)

    def load(state: dict[str, Any], path: Path) -> Any:
        before = counters["bytes_read"]
        loaded: Any = hf.load(state, path)
        found = sum(one.nbytes for one in loaded.get("w", []))
        assert counters["bytes_read"] - before == found
        return loaded

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "m.safetensors")
        save_file({"before": torch.ones(rng.randint(0, 3)), "w": whole}, path)
        layouts = {"w": random_layout(shape, 1, rng)}
        assert differences({"w": whole}, layouts, 0, path, rng, load=load) == []
