"""Any tensor of a safetensors file comes back bit for bit under any layout."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from shardstore import hf
from shardstore.storage.runtime.counters import counters
from tests.helpers.layouts import (
    destination,
    expected_part,
    random_layout,
    random_shape,
    random_tensor,
    raw_bytes,
    sharded,
)

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
    layout = random_layout(shape, 1, rng)
    pieces = [p for p in layout.pieces if p.flat is None or p.flat[0] < p.flat[1]]
    given_ = [destination(piece, layout, dtype, rng) for piece in pieces]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "m.safetensors")
        save_file({"before": torch.ones(rng.randint(0, 3)), "w": whole}, path)
        shards = [sharded("w", whole, layout, *pair) for pair in zip(pieces, given_, strict=True)]
        before = counters["bytes_read"]
        loaded = hf.load({"w": shards}, path)
        assert isinstance(loaded, dict)
        found = loaded.get("w", [])
        assert counters["bytes_read"] - before == sum(one.nbytes for one in found)
    for piece, data, got in zip(pieces, given_, found, strict=True):
        want = expected_part(whole, piece, layout.prepended)
        assert got.shape == want.shape
        assert raw_bytes(got) == raw_bytes(want)
        assert data is None or raw_bytes(data) == raw_bytes(want)
