"""A sharded checkpoint, written by four ranks, read by programs that know nothing of shardstore.

Each reader is a process of its own. One has only NumPy and what storage/FORMAT.md says; the others
are zarr, xarray and TensorStore by themselves.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardstore
from shardstore.mapping import ShardedObject, ShardedTensor
from shardstore.storage.format import dtypes
from shardstore.storage.format.names import node_name
from shardstore.strategies.zarr import ZarrSaveShardedStrategy
from tests.helpers.other_programs import INTERPRETERS, failures
from tests.helpers.ranks_helper import run_ranks

WORLD_SIZE = 4
TARGET_CHUNK_BYTES = 16 * 1024
LONG_KEY = "decoder/" + "block." * 60 + "weight"


def _wholes() -> dict[str, torch.Tensor]:
    """The global tensors by key; each has a value of its own at every place."""
    return {
        "rows": torch.arange(128 * 80, dtype=torch.float32).reshape(128, 80),
        "columns": torch.arange(96 * 64, dtype=torch.int16).reshape(96, 64),
        "uneven": torch.arange(10 * 3, dtype=torch.float64).reshape(10, 3),
        "layers/stacked": torch.arange(4 * 6 * 5, dtype=torch.int64).reshape(4, 6, 5),
        "optimizer.exp_avg": torch.arange(50 * 33, dtype=torch.float32).reshape(50, 33),
        LONG_KEY: torch.arange(64 * 1024, dtype=torch.int32).reshape(64, 1024),
        "zeros": torch.zeros(8, 8, dtype=torch.uint8),
        "step": torch.tensor(1234),
        "nothing": torch.zeros(0, 4),
        "complex": torch.view_as_complex(torch.arange(24.0).reshape(4, 3, 2)),
        **{f"types/{name}": _of_type(getattr(torch, name)) for name in dtypes.names()},
    }


def _of_type(dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.arange(24).reshape(4, 6)
    if dtype.itemsize == 1 and dtype != torch.bool:
        return (10 * numbers).to(torch.uint8).view(dtype)
    return numbers.to(dtype)


def _state(rank: int) -> dict[str, Any]:
    whole = _wholes()
    cut = ShardedTensor.from_rank_offsets
    start, stop = [0, 0, 3, 7, 10][rank], [0, 3, 7, 10][rank]  # the first rank holds no row
    uneven = whole["uneven"][start:stop]
    flat = whole["optimizer.exp_avg"].flatten()
    bounds = [0, 401, 402, 1203, 1650]  # no multiple of a row
    part = slice(bounds[rank], bounds[rank + 1])
    state: dict[str, Any] = {
        "rows": cut("rows", whole["rows"].chunk(4)[rank], (0, rank, 4)),
        "columns": cut("columns", whole["columns"].chunk(4, 1)[rank], (1, rank, 4)),
        "layer": cut(
            "layers/stacked", whole["layers/stacked"][rank], (0, rank, 4), prepend_axis_num=1
        ),
        "long": cut(
            LONG_KEY, whole[LONG_KEY].chunk(2)[rank % 2], (0, rank % 2, 2), replica_id=rank // 2
        ),
        "flat": ShardedTensor.from_rank_offsets_flat(
            "optimizer.exp_avg", flat[part], (50, 33), flattened_range=part
        ),
        "object": ShardedObject("rng", {"rank": rank}, (4,), (rank,)),
        "iteration": 7,
    }
    state["uneven"] = ShardedTensor(
        "uneven", uneven, uneven.dtype, tuple(uneven.shape), (10, 3), (start, 0), None
    )
    for key in ("zeros", "step", "nothing", "complex", *(k for k in whole if k[:6] == "types/")):
        state[key] = cut(key, whole[key], replica_id=rank)
    return state


def _save(rank: int, world_size: int, path: str, array_documents: bool) -> None:
    strategy = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=TARGET_CHUNK_BYTES)
    shardstore.save(
        _state(rank),
        path,
        strategy,
        content_metadata={"made_by": "a test"},
        array_documents=array_documents,
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint; beside it what its arrays have to hold, as bytes, and a list of them."""
    return _saved(tmp_path_factory.mktemp("plain") / "step-7", array_documents=True)


@pytest.fixture(scope="module")
def root_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without documents of the arrays' own."""
    return _saved(tmp_path_factory.mktemp("root-only") / "step-7", array_documents=False)


def _saved(root: Path, *, array_documents: bool) -> Path:
    run_ranks(_save, WORLD_SIZE, str(root), array_documents)
    expected = []
    for number, (key, whole) in enumerate(_wholes().items()):
        data = whole.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        (root.parent / f"{number}.bin").write_bytes(data)
        name = str(whole.dtype).removeprefix("torch.")
        expected.append([key, node_name(key), list(whole.shape), name, f"{number}.bin"])
    (root.parent / "expected.json").write_text(json.dumps(expected))
    return root


START = """
import json, sys
from pathlib import Path
import numpy as np
expected = json.loads((root.parent / "expected.json").read_text())
def same(entry, array):
    key, node, shape, name, file = entry
    assert list(array.shape) == shape, entry
    # ml_dtypes lacks float4_e2m1fn_x2: arrays of it have a field of that name.
    assert (array.dtype.names or (str(array.dtype),)) == (name,), entry
    assert np.ascontiguousarray(array).tobytes() == (root.parent / file).read_bytes(), entry
"""


def _program(script: str, root: Path, never: str) -> str:
    """A reader that ends with an error if one of the modules in ``never`` is there."""
    begin = f"root = __import__('pathlib').Path({str(root)!r})"
    end = f"seen = [m for m in {never.split()!r} if m in sys.modules]\nassert not seen, seen"
    return "\n".join([begin, START, textwrap.dedent(script), end])


FORMAT_READER = """
    import hashlib, math, zlib
    import ml_dtypes  # for the names of short floats alone
    import xxhash

    table = []
    for n in range(256):
        for _ in range(8):
            n = (n >> 1) ^ (0x82F63B78 if n & 1 else 0)
        table.append(n)
    def crc32c(data, crc=0):
        crc ^= 0xFFFFFFFF
        for byte in data:
            crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
        return crc ^ 0xFFFFFFFF
    assert crc32c(b"123456789") == 0xE3069283

    def node_name(key):
        safe = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-"
        name = "".join(chr(b) if b in safe else f"%{b:02X}" for b in key.encode())
        special = ("zarr.json", "metadata.json", "common.pt", "manifest.npz")
        if name[0] == "." or name[:2] == "__" or name.lower() in special:
            name = f"%{ord(name[0]):02X}" + name[1:]
        if len(name) > 200:
            name = name[:166].rstrip("%") + "%~" + hashlib.sha256(key.encode()).hexdigest()[:32]
        return name

    document = json.loads((root / "zarr.json").read_text())
    about = document["attributes"]["shardstore"]
    assert about["format_version"] == 1
    assert document["attributes"]["content_metadata"] == {"made_by": "a test"}
    nodes = document["consolidated_metadata"]["metadata"]
    manifest = np.load(root / "manifest.npz")
    arrays = json.loads(zlib.decompress(manifest["arrays"].tobytes()))
    keys = [nodes[node]["attributes"]["shardstore"]["key"] for node, _, _ in arrays]
    assert keys == sorted(entry[0] for entry in expected)
    by_key = {entry[0]: entry for entry in expected}
    row = boundary = 0
    ranks = set()
    for (node, count, size), key in zip(arrays, keys, strict=True):
        entry = by_key[key]
        assert node == node_name(key) == entry[1]
        array = nodes[node]
        if about.get("array_documents", True):
            assert json.loads((root / node / "zarr.json").read_text()) == array
        else:
            assert not (root / node / "zarr.json").exists()
        assert [codec["name"] for codec in array["codecs"]] == ["bytes", "crc32c"]
        shape = array["shape"]
        edges = array["chunk_grid"]["configuration"]["chunk_shape"]
        assert len(edges) == len(shape) and all(edge >= 1 for edge in edges)
        short = [(array["data_type"], "u1")]
        dtype = np.dtype(short if array["data_type"].endswith("_x2") else array["data_type"])
        counts = [-(-n // e) for n, e in zip(shape, edges, strict=True)]
        assert count == math.prod(counts) and size == math.prod(edges) * dtype.itemsize
        padded = np.empty([c * e for c, e in zip(counts, edges, strict=True)], dtype)
        for index in np.ndindex(*counts):
            data = (root / node / ".".join(["c", *map(str, index)])).read_bytes()
            assert len(data) == size + 4 == manifest["stored_bytes"][row]
            chunk, crc = data[:-4], int.from_bytes(data[-4:], "little")
            assert crc32c(chunk) == crc == manifest["crc32c"][row]
            assert xxhash.xxh3_128(chunk).digest() == manifest["xxh3_128"][row].tobytes()
            ranks.add(int(manifest["rank"][row]))
            block = 4096
            while 32 * block < size:
                block *= 2
            running = 0
            for end in range(block, size, block):
                running = crc32c(chunk[end - block : end], running)
                assert running == manifest["running_crc32c"][boundary]
                boundary += 1
            place = tuple(slice(i * e, i * e + e) for i, e in zip(index, edges, strict=True))
            padded[place] = np.frombuffer(chunk, dtype).reshape(edges)
            row += 1
        whole = padded[tuple(slice(0, n) for n in shape)]
        beyond = np.ones(padded.shape, bool)
        beyond[tuple(slice(0, n) for n in shape)] = False
        assert not any(padded[beyond].tobytes()), "what lies outside of the array is zero"
        same(entry, whole)
    assert row == len(manifest["crc32c"]) == about["commit"]["chunks"]
    assert boundary == len(manifest["running_crc32c"]) > 0
    assert ranks == {0, 1, 2, 3} and about["commit"]["world_size"] == 4
    assert sorted(p.name for p in (root / "rng").iterdir()) == [
        f"shard_{rank}_4.pt" for rank in range(4)
    ]
    config = json.loads((root / "metadata.json").read_text())
    assert (config["sharded_backend"], config["sharded_backend_version"]) == ("zarr", 2)
    # A folder of an array without chunks would hold its document alone.
    own = about.get("array_documents", True)
    top = {node for node, count, _ in arrays if count or own} | {"rng", "zarr.json"}
    top |= {"metadata.json", "common.pt", "manifest.npz"}
    assert {p.name for p in root.iterdir()} == top
"""

ZARR_READER = """
    import zarr
    group = zarr.open_group(root, mode="r")
    names = sorted(name for name, _ in group.members())
    assert sorted(group.keys()) == names == sorted(entry[1] for entry in expected)
    for entry in expected:
        same(entry, np.asarray(group[entry[1]][...]))
        assert group[entry[1]].attrs["shardstore"]["key"] == entry[0]
    assert group.attrs["content_metadata"] == {"made_by": "a test"}
    rows = group["rows"]
    assert (rows[5:40, 7] == np.arange(128 * 80).reshape(128, 80)[5:40, 7]).all()
"""

XARRAY_READER = """
    import xarray
    with xarray.open_zarr(root, chunks=None) as data:
        assert sorted(data.variables) == sorted(entry[1] for entry in expected)
        for entry in expected:
            same(entry, data[entry[1]].values)
"""

TENSORSTORE_READER = """
    import tensorstore as ts
    for entry in expected:
        if entry[3] == "float4_e2m1fn_x2":  # TensorStore lacks it
            continue
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{root}/{entry[1]}/"}}
        store = ts.open({**spec, "fill_missing_data_reads": False}, read=True).result()
        same(entry, store.read().result())
"""


OTHERS = "torch shardstore.storage.checkpoint shardstore.storage.format.documents"


def test_a_reader_made_from_the_format_page(checkpoint: Path, root_only: Path) -> None:
    never = "torch shardstore zarr tensorstore"
    places = {"checkpoint": checkpoint, "root only": root_only}
    programs = {name: _program(FORMAT_READER, root, never) for name, root in places.items()}
    assert failures("here", "import numpy", programs) == {}


@pytest.mark.parametrize("which", INTERPRETERS)
def test_zarr_and_programs_that_use_it_read_a_checkpoint(
    checkpoint: Path, root_only: Path, which: str
) -> None:
    programs = {
        f"{name}, {root.parent.name}": _program(script, root, OTHERS)
        for name, script in {"zarr": ZARR_READER, "xarray": XARRAY_READER}.items()
        for root in (checkpoint, root_only)
    }
    assert failures(which, "import numpy, xarray, zarr", programs) == {}


@pytest.mark.parametrize("which", INTERPRETERS)
def test_tensorstore_reads_a_checkpoint(checkpoint: Path, which: str) -> None:
    program = _program(TENSORSTORE_READER, checkpoint, "torch shardstore zarr")
    assert failures(which, "import numpy", {"tensorstore": program}) == {}


def test_others_notice_a_flipped_bit_too(checkpoint: Path) -> None:
    chunk = checkpoint / "columns" / "c.0.1"
    good = chunk.read_bytes()
    damaged = np.frombuffer(good, np.uint8).copy()
    damaged[100] ^= 1
    scripts = {"zarr": ZARR_READER, "tensorstore": TENSORSTORE_READER}
    programs = {name: _program(script, checkpoint, "torch") for name, script in scripts.items()}
    try:
        chunk.write_bytes(damaged.tobytes())
        failed = failures("here", "import numpy", programs)
    finally:
        chunk.write_bytes(good)
    assert "digest mismatch" in failed["tensorstore"].lower()
    assert "crc32c" in failed["zarr"].lower()
