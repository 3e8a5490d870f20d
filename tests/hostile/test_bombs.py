"""Files that claim to be larger than they are: refused before the memory is asked for."""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numcodecs import blosc, zstd

import shardstore
from shardstore import ShardedTensor
from shardstore.cli.app import run
from shardstore.errors import CheckpointingException, ChunkCorruptError
from shardstore.storage.runtime.checksums import crc32c
from shardstore.storage.stores.location import Location
from testing.memory import peak_rss_bytes, reset_peak
from tests.helpers.root_documents import about, members, rewrite

MOST_BYTES = 512 * 1024**2


@contextmanager
def bounded(most_bytes: int = MOST_BYTES) -> Iterator[None]:
    """Assert that this process takes little more memory within, at any time."""
    before = reset_peak()
    yield
    assert peak_rss_bytes() - before < most_bytes


@pytest.mark.parametrize("compression", ["zstd", "blosc"])
@pytest.mark.parametrize("place", ["disk", "memory"])
def test_a_chunk_that_unpacks_to_gigabytes(tmp_path: Path, compression: str, place: str) -> None:
    """Of a checkpoint whose commit lacks the sizes of chunks, as older ones do; sizes that it has
    are the subject of test_larger_than_committed."""
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.rand(300_000))}
    url = str(tmp_path / "c") if place == "disk" else f"memory://{tmp_path.name}/c"
    shardstore.save(state, url, compression=compression)
    zeros = np.zeros(2**28, np.uint8)
    packed = (zstd.Zstd() if compression == "zstd" else blosc.Blosc()).encode(zeros)
    del zeros
    data = bytes(packed) + crc32c(packed, 0).to_bytes(4, "little")
    Location.of(url).write("w/c.0", data)
    rewrite(url, lambda root: about(root).pop("chunk_bytes"), sign=False)
    told = "decompresses to 268435456 bytes, not 1200000"
    with bounded(64 * 1024**2), pytest.raises(ChunkCorruptError, match=told):
        shardstore.load_plain_tensors(url)


def manifests(data: bytes) -> dict[str, bytes]:
    with np.load(io.BytesIO(data)) as found:
        columns = dict(found)
    zeros = zlib.compress(b" " * 2**28)
    bombs = {}
    packed = {**columns, "arrays": np.frombuffer(zeros, np.uint8)}
    out = io.BytesIO()
    np.savez(out, **packed)
    bombs["json"] = out.getvalue()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, column in columns.items():
            member = io.BytesIO()
            np.save(member, np.zeros(2**28, np.uint8) if name == "crc32c" else column)
            archive.writestr(f"{name}.npy", member.getvalue())
    bombs["zip"] = out.getvalue()
    return bombs


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4, 6)), "lr": 1}
    shardstore.save(state, tmp_path / "c")
    return tmp_path / "c"


def test_a_manifest_that_unpacks_to_gigabytes(saved: Path) -> None:
    """Of a checkpoint whose commit lacks the sizes of files, as older ones do."""
    rewrite(saved, lambda root: about(root).pop("file_bytes"), sign=False)
    for name, bomb in manifests((saved / "manifest.npz").read_bytes()).items():
        (saved / "manifest.npz").write_bytes(bomb)
        with bounded(MOST_BYTES // 8):
            assert run(["verify", str(saved)]) == 1, name


HUGE = 2**62
SHAPES = [
    ([HUGE], [HUGE], True),
    ([HUGE], [1], True),
    ([HUGE, HUGE], [1, HUGE], False),
    ([2**40], [1], False),
    ([2**58], [2**20], True),
    ([2**58], [2**58], False),
    ([0, HUGE], [1, 1], False),
    ([1] * 5000, [1] * 5000, True),
]
"""Shapes, those of chunks, and whether the commit has their checksums."""
COMMANDS = ["verify", "ls", "stats", "report", "info", "diff"]


@pytest.mark.parametrize(("shape", "chunks", "sums"), SHAPES)
def test_shapes_that_nothing_holds(
    saved: Path, shape: list[int], chunks: list[int], sums: bool, capsys: Any
) -> None:
    def change(root: dict[str, Any]) -> None:
        array = members(root)["w"]
        array["shape"], array["chunk_grid"]["configuration"]["chunk_shape"] = shape, chunks
        array["dimension_names"] = ["x"] * len(shape)
        array["attributes"]["shardstore"]["shard_shape"] = [1] * len(shape)
        (saved / "w" / "zarr.json").write_text(json.dumps(array))
        del about(root)["commit"]["content"]
        if not sums:
            del about(root)["chunk_crc32c"]

    rewrite(saved, change, sign=True)
    (saved / "manifest.npz").unlink()
    readers: list[Callable[[], Any]] = [lambda: shardstore.load_plain_tensors(saved)]
    readers += [lambda: shardstore.open(saved).info]
    readers += [lambda: shardstore.load_tensors_metadata(saved)]
    arguments = [[name, str(saved), *([str(saved)] * (name == "diff"))] for name in COMMANDS]
    arguments += [["convert", str(saved), str(saved.parent / "d")]]
    readers += [lambda args=args: run(args) for args in arguments]
    for read in readers:
        with bounded(), suppress(CheckpointingException):
            read()
        assert "please report" not in capsys.readouterr().err
    assert run(["verify", str(saved)]) == 1
    assert run(["rm", "--yes", str(saved)]) == 0
