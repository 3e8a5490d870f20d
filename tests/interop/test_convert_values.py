"""What a conversion writes beside the arrays is read back and compared as well."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardstore
from shardstore import ShardedObject, ShardedTensor
from shardstore.convert import convert
from shardstore.errors import DamagedCheckpointError
from shardstore.progress import Progress
from shardstore.storage.commit.identity import is_checkpoint
from shardstore.storage.stores.location import Location
from shardstore.strategies.common import object_document
from testing.s3_servers import S3Server

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    place = tmp_path / "source"
    objects = [
        ShardedObject("o", {"rank": rank, "x": torch.ones(3)}, (2,), (rank,)) for rank in (0, 1)
    ]
    state = {
        "w": ShardedTensor.from_rank_offsets("w", torch.arange(10.0)),
        "o": objects,
        "step": 41,
        "lr": float("nan"),
        "names": ["first", "second"],
    }
    shardstore.save(state, place)
    return place


def other_object(work: Path) -> None:
    name, data = object_document(ShardedObject("o", {"rank": 1, "x": torch.zeros(3)}, (2,), (1,)))
    assert (work / name).read_bytes() != data
    (work / name).write_bytes(data)


def other_common(work: Path) -> None:
    stream = io.BytesIO()
    state = torch.load(work / "common.pt", weights_only=True)
    torch.save({**state, "step": 42}, stream)
    (work / "common.pt").write_bytes(stream.getvalue())


def missing_object(work: Path) -> None:
    name, _ = object_document(ShardedObject("o", None, (2,), (1,)))
    (work / name).unlink()


def last_item(work: Path) -> None:
    """Of DCP: what is no tensor is behind the tensors."""
    file = max(work.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    place = data.rindex(b"second")
    data[place : place + 6] = b"SECOND"
    file.write_bytes(data)


def head(work: Path) -> None:
    (file,) = work.glob("*.safetensors")
    data = file.read_bytes()
    assert data.count(b"second") == 1
    file.write_bytes(data.replace(b"second", b"SECOND"))


@pytest.mark.parametrize(
    ("target_format", "spoil", "named"),
    [
        ("shardstore", other_object, r"'o/shard_1_2\.pt'.* differs"),
        ("shardstore", missing_object, r"o"),
        ("shardstore", other_common, r"'common\.pt'.* differs"),
        ("dcp", last_item, r"names"),
        ("safetensors", head, r"safetensors'.* differs"),
    ],
)
def test_what_is_written_wrong_beside_the_arrays_is_found(
    source: Path, tmp_path: Path, target_format: str, spoil: Any, named: str
) -> None:
    spoiled = False

    def progress(event: Progress) -> None:
        nonlocal spoiled
        # What is in a header is read back before the tensors are compared.
        when = ("convert", "done") if spoil is head else ("verify", "begin")
        if (event.operation, event.phase) == when and not spoiled:
            spoiled = True
            (work,) = {*tmp_path.glob(".target.*")} - {*tmp_path.glob(".target.*.journal")}
            spoil(work)

    target = tmp_path / "target"
    with pytest.raises(DamagedCheckpointError, match=named):
        convert(source, target, target_format=target_format, progress=progress)
    assert spoiled
    assert not target.exists()
    done = convert(source, target, target_format=target_format, resume=False)
    assert done.verified
    assert target.exists()
    spoiled = False
    convert(source, tmp_path / "unverified", target_format=target_format, verify=False)


def test_values_in_an_object_store_are_converted(
    source: Path, tmp_path: Path, s3_server: S3Server
) -> None:
    url, options = f"s3://{s3_server.new_bucket()}/target", s3_server.storage_options
    name, data = object_document(ShardedObject("o", {"rank": 1, "x": None}, (2,), (1,)))

    def progress(event: Progress) -> None:
        if event.operation == "verify":
            Location.of(url, options).write(name, data)

    with pytest.raises(DamagedCheckpointError, match=r"'o/shard_1_2\.pt'.* differs"):
        convert(source, url, target_options=options, progress=progress)
    assert not is_checkpoint(Location.of(url, options))
    convert(source, url, target_options=options, resume=False)
    back = tmp_path / "back"
    convert(url, back, source_options=options)
    objects = [ShardedObject("o", None, (2,), (rank,)) for rank in (0, 1)]
    loaded: Any = shardstore.load({"o": objects}, back)
    assert (loaded["step"], loaded["o"][1]["rank"]) == (41, 1)


def test_objects_of_other_kinds_pass(tmp_path: Path) -> None:
    """As trainers keep them: random states, optimizer settings, streams of bytes."""
    values = {
        "w": torch.arange(6.0),
        "python": random.getstate(),
        "settings": {"lr": float("nan"), "betas": (0.9, 0.95), 3: [None, b"x"]},
        "zero": -0.0,
        "half": np.float16(1.5),
    }
    dcp.save(values, checkpoint_id=tmp_path / "a", no_dist=True)
    for source, target, kind in (
        ("a", "b", "shardstore"),
        ("b", "c", "dcp"),
        ("c", "d", "shardstore"),
    ):
        convert(tmp_path / source, tmp_path / target, target_format=kind)
    found: Any = shardstore.load_plain_tensors(tmp_path / "d")
    assert found["settings"]["betas"] == (0.9, 0.95)
    convert(tmp_path / "d", tmp_path / "e.safetensors")
    assert convert(tmp_path / "e.safetensors", tmp_path / "f").verified


@pytest.mark.parametrize("target_format", ["dcp", "megatron", "safetensors"])
def test_common_values_that_are_no_dict(tmp_path: Path, target_format: str) -> None:
    """The error is one of this package, as for a load."""
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(3)), "step": 1}
    shardstore.save(state, tmp_path / "a", ("zarr", 1))
    torch.save([1], tmp_path / "a" / "common.pt")
    with pytest.raises(DamagedCheckpointError, match="holds a list, not a dict"):
        convert(tmp_path / "a", tmp_path / "b", target_format=target_format)
