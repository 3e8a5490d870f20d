"""``shardstore convert``: there and back to the bit, and one line for whatever is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import shardstore
from tests.helpers.cli_checkpoints import Cli, flip, values
from tests.helpers.conversions import same

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
    assert same(load_file(file), values())

    outcome = cli("convert", file, back)
    assert outcome.code == 0
    assert outcome.out.startswith(f"safetensors -> shardstore: {len(values())} tensors, ")
    assert cli("verify", back).code == 0
    assert cli("diff", "--no-files", pristine, back).code == 0


def test_megatron_to_dcp(tmp_path: Path, cli: Cli) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    assert cli("convert", "--json", GOLDEN, ours).json["source_format"] == "megatron-zarr"
    assert cli("convert", "--to", "dcp", "--json", ours, theirs).json["target_format"] == "dcp"
    back = tmp_path / "back"
    assert cli("convert", "--from", "dcp", theirs, back).code == 0
    expected = shardstore.load_plain_tensors(str(ours))
    found = shardstore.load_plain_tensors(str(back))
    # The parts of sharded objects, which DCP knows nothing of, are common values.
    assert all("/shard_" in key for key in found.keys() ^ expected.keys())
    assert torch.equal(expected["loss_history"], found["loss_history"])
    # A tensor among the common values is a tensor for DCP, and becomes an array.
    differ = cli("diff", "--no-files", "--json", ours, back).json
    assert (differ["only_a"], differ["only_b"]) == ([], ["loss_history"])
    assert differ["equal"] == 15


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("PLACE NEW.pt", "or give --to='shardstore' for"),
        ("PLACE NEW --to x", "--to='x'"),
        ("PLACE NEW --from x", "--from='x'"),
        ("PLACE NEW --memory-budget much", "is not a size"),
        ("PLACE NEW --file-bytes 0", "is not a size"),
        ("NEW/none NEW", "does not exist"),
        ("nosuch://bucket/none NEW", "nosuch://"),
        ("PLACE", "TARGET"),
        ("PLACE PLACE/inside --overwrite", "PLACE/inside lies inside the source"),
    ],
)
def test_wrong_use_is_refused_in_the_words_of_the_command(
    pristine: Path, tmp_path: Path, cli: Cli, arguments: str, said: str
) -> None:
    given = arguments.replace("PLACE", str(pristine)).replace("NEW", f"{tmp_path}/new")
    text = cli.refused("convert", *given.split())
    assert said.replace("PLACE", str(pristine)) in text
    assert "_format" not in text
    assert not [*tmp_path.iterdir()]


def test_a_damaged_source_is_not_converted(place: Path, tmp_path: Path, cli: Cli) -> None:
    flip(place / "layers.0.weight" / "c.0.0")
    outcome = cli("convert", place, tmp_path / "t")
    assert (outcome.code, outcome.out) == (1, "")
    assert "layers.0.weight" in outcome.err
    assert outcome.err.count("\n") == 1
    assert not (tmp_path / "t").exists()
