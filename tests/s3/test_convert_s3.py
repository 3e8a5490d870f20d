"""Conversions from and to an object store: to the bit, within a budget, resumed after a kill."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import shardstore
from shardstore.convert import convert
from shardstore.errors import CheckpointExistsError, CheckpointingException, NotACheckpointError
from shardstore.progress import Progress
from shardstore.storage.stores.location import Location
from testing.s3_servers import S3Server
from tests.helpers.cli_checkpoints import Cli
from tests.helpers.conversions import killed_conversion, same, some_tensors, tensors_of

pytestmark = pytest.mark.filterwarnings("ignore")

MIB = 2**20


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{s3_server.new_bucket()}"


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


def copied(source: str | Path, target: str | Path) -> str:
    """A folder, copied between the store and the disk."""
    for name in Location.of(source).walk():
        Location.of(target).write(name, Location.of(source).read(name))
    return str(target)


def listed(place: str) -> list[str]:
    return Location.of(place).remote.walk()


def test_through_every_format_within_the_store(bucket: str, tmp_path: Path) -> None:
    tensors = some_tensors()
    state = {**tensors, "optim": {"lr": 0.1, "groups": [{"params": [0, 1]}]}}
    dcp.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    start = copied(tmp_path / "dcp", f"{bucket}/run/dcp")
    budget = 20_000
    convert(start, f"{bucket}/run/a", memory_budget=budget)
    assert same(tensors_of(f"{bucket}/run/a"), tensors)
    assert shardstore.load_common_state_dict(f"{bucket}/run/a") == {"optim": state["optim"]}

    one = f"{bucket}/run/one.safetensors"
    convert(f"{bucket}/run/a", one, memory_budget=budget)
    copied(f"{bucket}/run", tmp_path / "x")
    assert same(load_file(tmp_path / "x" / "one.safetensors"), tensors)

    how: dict[str, Any] = {"target_format": "safetensors", "file_bytes": 50_000}
    done = convert(one, f"{bucket}/run/many", memory_budget=budget, **how)
    assert (done.source_format, done.tensors, done.verified) == ("safetensors", 6, True)
    names = [name for name in listed(f"{bucket}/run/many") if name.endswith(".safetensors")]
    assert len(names) > 1
    copied(f"{bucket}/run/many", tmp_path / "many")
    files = [load_file(tmp_path / "many" / name) for name in names]
    assert same({key: value for file in files for key, value in file.items()}, tensors)

    convert(f"{bucket}/run/many", f"{bucket}/run/b", memory_budget=budget)
    convert(f"{bucket}/run/b", f"{bucket}/run/back", target_format="dcp", memory_budget=budget)
    wanted: dict[str, Any] = {key: torch.zeros_like(value) for key, value in tensors.items()}
    wanted["optim"] = {"lr": 0, "groups": [{"params": [0]}]}
    place = copied(f"{bucket}/run/back", tmp_path / "back")
    dcp.load(wanted, checkpoint_id=place, no_dist=True)
    assert wanted.pop("optim") == state["optim"]
    assert same(wanted, tensors)
    convert(f"{bucket}/run/back", tmp_path / "end")
    assert same(tensors_of(tmp_path / "end"), tensors)
    # Neither journals nor work of conversions that are complete.
    assert not [name for name in listed(f"{bucket}/run") if ".convert" in name]


def test_a_file_is_put_under_its_very_name(bucket: str, tmp_path: Path) -> None:
    tensors = some_tensors()
    save_file(tensors, tmp_path / "m.safetensors")
    # It is no pattern, as which clients of stores may take it.
    target = f"{bucket}/run [1]*/m.safetensors"
    convert(tmp_path / "m.safetensors", target)
    assert listed(bucket) == ["run [1]*/m.safetensors"]
    (tmp_path / "back").write_bytes(Location.of(f"{bucket}/run [1]*").read("m.safetensors"))
    assert same(load_file(tmp_path / "back"), tensors)


FORMATS = pytest.mark.parametrize(
    "target_format",
    ["shardstore", *(pytest.param(f, marks=pytest.mark.long) for f in ("safetensors", "dcp"))],
)


@FORMATS
def test_the_budget_is_kept(bucket: str, tmp_path: Path, target_format: str) -> None:
    budget = 16 * MIB
    save_file({"w": torch.arange(18 * MIB, dtype=torch.float32)}, tmp_path / "m.safetensors")
    reports: list[Progress] = []
    start = bucket + "/m.safetensors"
    with Location.of(bucket).remote.stream("m.safetensors", 8 * MIB) as file:
        file.write((tmp_path / "m.safetensors").read_bytes())
    tracemalloc.start()
    try:
        convert(
            start,
            f"{bucket}/c",
            target_format=target_format,
            memory_budget=budget,
            progress=reports.append,
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Of DCP's items one exists twice while it is put together; and a few MiB for each thread.
    assert peak < 1.5 * budget + 32 * MIB
    assert reports[-1].bytes_done == reports[-1].bytes_total == 72 * MIB


@FORMATS
def test_a_killed_conversion_goes_on(bucket: str, tmp_path: Path, target_format: str) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = {f"t{i}": torch.rand(200, 200, generator=generator) for i in range(8)}
    save_file(tensors, tmp_path / "m.safetensors")
    source, target = str(tmp_path / "m.safetensors"), f"{bucket}/c"
    assert killed_conversion(source, target, target_format, 250_000) == 9
    with pytest.raises((NotACheckpointError, CheckpointingException)):
        convert(target, tmp_path / "early")
    options: dict[str, Any] = {"target_format": target_format, "file_bytes": 250_000}
    done = convert(source, target, memory_budget=200_000, **options)
    assert 0 < done.resumed_bytes < done.total_bytes
    assert not [name for name in listed(bucket) if ".convert" in name]
    convert(target, tmp_path / "d")
    assert same(tensors_of(tmp_path / "d"), tensors)


def test_a_save_that_came_between_is_not_mixed_with(bucket: str, tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.rand(200, 200) for i in range(8)}
    save_file(tensors, tmp_path / "m.safetensors")
    source, target = str(tmp_path / "m.safetensors"), f"{bucket}/c"
    assert killed_conversion(source, target, "shardstore", 250_000) == 9
    shardstore.save(shardstore.shard({"t0": torch.zeros(200, 200)}), target)
    with pytest.raises(CheckpointExistsError):
        convert(source, target, memory_budget=200_000, file_bytes=250_000)
    assert tensors_of(target).keys() == {"t0"}
    done = convert(source, target, memory_budget=200_000, file_bytes=250_000, overwrite=True)
    assert done.resumed_bytes == 0
    assert same(tensors_of(target), tensors)


@pytest.mark.parametrize("target_format", ["dcp", "safetensors"])
def test_nothing_of_others_is_touched(bucket: str, tmp_path: Path, target_format: str) -> None:
    save_file({"t": torch.ones(3)}, tmp_path / "m.safetensors")
    Location.of(f"{bucket}/c").write("notes.txt", b"mine")
    with pytest.raises(CheckpointExistsError, match=r"notes\.txt"):
        convert(tmp_path / "m.safetensors", f"{bucket}/c", target_format=target_format)
    assert listed(bucket) == ["c/notes.txt"]
    with pytest.raises(CheckpointingException, match="folder"):
        convert(tmp_path / "m.safetensors", bucket)


def test_the_command_line(
    bucket: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    tensors = some_tensors()
    shardstore.save(shardstore.shard(dict(tensors)), f"{bucket}/a")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    options = [f"key={s3_server.key}", f"secret={s3_server.secret}"]
    words = [word for option in options for word in ("--storage-option", option)]
    outcome = cli("convert", "--json", *words, f"{bucket}/a", f"{bucket}/b.safetensors")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.json["target_format"] == "safetensors"
    assert cli("convert", f"{bucket}/b.safetensors", f"{bucket}/c").code == 0
    assert same(tensors_of(f"{bucket}/c"), tensors)
    assert "already exists" in cli.refused("convert", f"{bucket}/a", f"{bucket}/c")
    assert "does not exist" in cli.refused("convert", f"{bucket}/none", f"{bucket}/d")
