"""``shardstore convert``: there and back to the bit, and one line for whatever is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import shardstore
from tests.helpers.cli_checkpoints import Cli, flip, values

GOLDEN = Path(__file__).parents[2] / "golden" / "megatron-core-0.15.3-zarr" / "tp2dp2"


def test_to_safetensors_and_back(pristine: Path, tmp_path: Path, cli: Cli) -> None:
    file, back = tmp_path / "m.safetensors", tmp_path / "back"
    outcome = cli("convert", "--json", "--memory-budget", "4KiB", pristine, file)
    assert (outcome.code, outcome.err) == (0, "")
    found = outcome.json
    assert (found["source_format"], found["target_format"]) == ("shardstore", "safetensors")
    assert found["tensors"] == len(values())
    assert found["total_bytes"] == sum(value.nbytes for value in values().values())
    assert found["verified"] is True
    stored = load_file(file)
    assert stored.keys() == values().keys()
    for key, value in values().items():
        assert torch.equal(_bits(stored[key]), _bits(value)), key

    outcome = cli("convert", file, back)
    assert outcome.code == 0
    assert outcome.out.startswith(f"safetensors -> shardstore: {len(values())} tensors, ")
    assert cli("verify", back).code == 0
    assert cli("diff", "--no-files", pristine, back).code == 0


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_megatron_to_dcp(tmp_path: Path, cli: Cli) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    assert cli("convert", "--json", GOLDEN, ours).json["source_format"] == "megatron-zarr"
    assert cli("convert", "--to", "dcp", "--json", ours, theirs).json["target_format"] == "dcp"
    back = tmp_path / "back"
    assert cli("convert", "--from", "dcp", theirs, back).code == 0
    expected = shardstore.load_plain_tensors(str(ours))
    found = shardstore.load_plain_tensors(str(back))
    # A tensor among the common values becomes an object of DCP, and is a common value again. So
    # are the parts of sharded objects, which DCP knows nothing of.
    assert all("/shard_" in key for key in found.keys() ^ expected.keys())
    assert torch.equal(expected["loss_history"], found["loss_history"])
    for key in shardstore.load_tensors_metadata(str(ours)):
        assert torch.equal(_bits(expected[key]), _bits(found[key])), key


def test_only_overwrite_replaces(pristine: Path, tmp_path: Path, cli: Cli) -> None:
    target = tmp_path / "t"
    assert cli("convert", GOLDEN, target).code == 0
    before = (target / "zarr.json").read_bytes()
    text = cli.refused("convert", pristine, target)
    assert "already exists" in text
    assert "pass --overwrite to replace it" in text
    assert (target / "zarr.json").read_bytes() == before
    assert cli("convert", "--overwrite", pristine, target).code == 0
    assert cli("diff", "--no-files", pristine, target).code == 0


def test_what_the_library_has_the_command_has(pristine: Path, tmp_path: Path, cli: Cli) -> None:
    folder = tmp_path / "several"
    several = ["--file-bytes", "4000", "--to", "safetensors"]
    assert cli("convert", "--no-verify", *several, pristine, folder).out.endswith(
        "; not verified\n"
    )
    assert len(list(folder.glob("*.safetensors"))) > 1
    outcome = cli("convert", "--no-resume", "--no-verify", "--json", pristine, tmp_path / "copy")
    assert (outcome.code, outcome.json["verified"]) == (0, False)
    assert "is not a size" in cli.refused("convert", "--file-bytes", "0", pristine, tmp_path / "no")


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("model.pt",), "or give --to='shardstore' for"),
        (("c", "--to", "x"), "--to='x'"),
        (("c", "--from", "x"), "--from='x'"),
    ],
)
def test_errors_name_the_options_of_the_command(
    pristine: Path, tmp_path: Path, cli: Cli, arguments: tuple[str, ...], option: str
) -> None:
    target, *options = arguments
    text = cli.refused("convert", pristine, tmp_path / target, *options)
    assert option in text
    assert "_format" not in text


def test_a_damaged_source_is_not_converted(place: Path, tmp_path: Path, cli: Cli) -> None:
    flip(place / "layers.0.weight" / "c.0.0")
    outcome = cli("convert", place, tmp_path / "t")
    assert (outcome.code, outcome.out) == (1, "")
    assert "layers.0.weight" in outcome.err
    assert outcome.err.count("\n") == 1
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--from", "tar"], "'tar'"),
        (["--to", "tar"], "'tar'"),
        (["--memory-budget", "much"], "is not a size"),
    ],
)
def test_wrong_options(
    pristine: Path, tmp_path: Path, cli: Cli, options: list[str], said: str
) -> None:
    assert said in cli.refused("convert", *options, pristine, tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_wrong_places_are_refused(tmp_path: Path, cli: Cli) -> None:
    assert "does not exist" in cli.refused("convert", tmp_path / "none", tmp_path / "t")
    assert "nosuch://" in cli.refused("convert", "nosuch://bucket/none", tmp_path / "t")
    assert "TARGET" in cli.refused("convert", tmp_path)


@pytest.mark.parametrize("where", ["", "inside", "inside/deeper", "link", "link/inside"])
def test_not_into_its_own_source(pristine: Path, tmp_path: Path, cli: Cli, where: str) -> None:
    (tmp_path / "link").symlink_to(pristine)
    target = tmp_path / where if where.startswith("link") else pristine / where
    for options in ((), ("--overwrite",), ("--to", "dcp")):
        line = cli.refused("convert", *options, pristine, target)
        assert "nothing was converted" in line
        assert str(target) in line
    assert cli("verify", "--strict", pristine).code == 0
