"""Listing, values and differences, against torch's own numbers."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardstore
from shardstore.cli.looking import parse_selection, split_key
from tests.helpers.cli_checkpoints import Cli, as_float64, flip, save, values
from tests.helpers.programs import run_text


def test_ls_and_info(pristine: Path, cli: Cli) -> None:
    listed = {entry["key"]: entry for entry in cli("ls", "--json", pristine).json["arrays"]}
    assert set(listed) == set(values())
    for key, tensor in values().items():
        assert listed[key]["shape"] == list(tensor.shape)
        assert listed[key]["dtype"] == str(tensor.dtype).removeprefix("torch.")
        assert listed[key]["bytes"] == tensor.nbytes
    assert listed["layers.1.weight"]["shards"] == [1, 2]
    assert listed["layers.0.weight"]["shards"] == [2, 1]
    text = cli("ls", pristine).out
    order = [text.index(word) for word in ("layers", "\n  0.weight", "\n  1.weight", "\n  10.odd")]
    assert order == sorted(order), text  # 10 comes after 1
    assert "bfloat16" in text
    assert "1x2 shards" in text
    assert text.splitlines()[-1].startswith("7 arrays, ")
    assert "layers.10.odd" in cli("ls", "--flat", pristine).out
    assert "0.weight" not in cli("ls", "--depth", 1, pristine).out
    chosen = cli("ls", pristine, "layers", "*.f8", "--json").json["arrays"]
    assert {entry["key"].split(".")[0] for entry in chosen} == {"layers", "embedding"}
    assert len(chosen) == 4

    found = cli("info", "--json", pristine).json
    assert found["commit"]["world_size"] == 2
    assert (found["arrays"], found["writers"]) == (7, 2)
    assert found["bytes"] == sum(tensor.nbytes for tensor in values().values())
    assert found["content_metadata"] == {"note": "<b>small & odd</b>"}
    assert "2 ranks, shardstore" in cli("info", pristine).out


def test_without_documents_of_the_arrays(pristine: Path, tmp_path: Path, cli: Cli) -> None:
    """All commands, on what the root alone describes."""
    place = tmp_path / "root-only"
    save(0, 1, str(place), array_documents=False)
    ordinary = cli("ls", "--json", pristine).json["arrays"]
    listed = cli("ls", "--json", place).json["arrays"]
    assert [entry["key"] for entry in listed] == [entry["key"] for entry in ordinary]
    assert cli("info", "--json", place).json["array_documents"] is False
    assert "only in the root" in cli("info", place).out
    assert cli("info", "--json", pristine).json["array_documents"] is True
    assert "only in the root" not in cli("info", pristine).out
    assert cli("verify", "--strict", "--hashes", place).code == 0
    same = cli("diff", "--no-files", pristine, place)
    assert (same.code, same.err) == (0, "")
    figures = [cli("stats", "--json", at).json["arrays"] for at in (pristine, place)]
    assert figures[0] == figures[1]
    shown = [cli("show", at, "layers.0.weight[3, :5]").out for at in (pristine, place)]
    assert shown[0] == shown[1]
    assert cli("plot", "layout", place, "layers.0.weight", "-o", tmp_path / "a.svg").code == 0
    assert cli("report", place, "-o", tmp_path / "a.html").code == 0
    assert cli("convert", place, tmp_path / "a.safetensors").code == 0
    assert cli("convert", place, tmp_path / "again").code == 0
    assert cli("diff", "--no-files", place, tmp_path / "again").code == 0
    assert cli("rm", place, "--yes").code == 0
    assert not place.exists()


@pytest.mark.parametrize("memory", ["1MiB", "100"])
def test_stats_are_those_of_torch(pristine: Path, cli: Cli, memory: str) -> None:
    outcome = cli("stats", "--json", "--memory", memory, pristine)
    assert (outcome.code, outcome.err) == (0, "")
    found = {entry["key"]: entry for entry in outcome.json["arrays"]}
    for key, tensor in values().items():
        x = as_float64(tensor).reshape(-1)
        finite = x[np.isfinite(x)]
        entry = found[key]
        assert entry["count"] == x.size
        assert entry["nan"] == np.isnan(x).sum()
        assert entry["inf"] == np.isinf(x).sum()
        assert entry["zeros"] == (x == 0).sum()
        if x.size:
            assert (entry["min"], entry["max"]) == (finite.min(), finite.max())
            assert entry["norm"] == pytest.approx(np.linalg.norm(finite), rel=1e-12)
            assert entry["mean"] == pytest.approx(finite.mean(), rel=1e-9, abs=1e-12)
        else:
            assert (entry["min"], entry["max"], entry["mean"]) == (None, None, None)


def test_stats_of_what_overflows(tmp_path: Path, cli: Cli) -> None:
    state = {
        "big": torch.full((300_000,), 1e300, dtype=torch.float64),
        "nan": torch.full((5,), float("nan")),
        "complex": torch.tensor([3 + 4j, 0j]),
        "flags": torch.tensor([True, False, True]),
    }
    shardstore.save(shardstore.shard(state), tmp_path / "c")
    listed = cli("stats", "--json", tmp_path / "c").json["arrays"]
    found = {entry["key"]: entry for entry in listed}
    assert found["big"]["mean"] == pytest.approx(1e300)
    assert found["big"]["norm"] == pytest.approx(1e300 * 300_000**0.5)
    assert (found["nan"]["nan"], found["nan"]["mean"], found["nan"]["norm"]) == (5, None, 0.0)
    assert (found["complex"]["norm"], found["complex"]["mean"]) == (5.0, 2.5)
    assert (found["flags"]["mean"], found["flags"]["zeros"]) == (pytest.approx(2 / 3), 1)
    assert cli("stats", tmp_path / "c", "nan").out.splitlines()[1].split()[-2:] == ["5", "0"]


def test_damage_is_one_line_everywhere(place: Path, cli: Cli) -> None:
    flip(place / "layers.0.weight" / "c.1.0")
    line = "chunk (1, 0) of key 'layers.0.weight'"
    outcome = cli("stats", place, "layers.0")
    assert outcome.code == 1
    assert line in outcome.err
    assert "rank 0" in outcome.err
    assert outcome.err.count("\n") == 1
    assert "layers.0.weight" in outcome.out  # what could be read is told
    outcome = cli("show", place, "layers.0.weight[:40]")
    assert (outcome.code, outcome.err.count("\n")) == (1, 1)
    assert line in outcome.err
    assert cli("show", place, "layers.0.weight[40:]").code == 0
    (place / "manifest.npz").unlink()
    outcome = cli("diff", place, place)
    assert outcome.code == 1
    assert line in outcome.out


def test_show_slices_like_numpy(pristine: Path, cli: Cli) -> None:
    key = "layers.1.weight"
    whole = values()[key].float().numpy()
    for index in ("", "-1", "60:2:-9", "...,3", "1, -2", "2:1"):
        expected = eval(f"whole[{index}]", {"whole": whole}) if index else whole
        found = cli("show", "--json", pristine, f"{key}[{index}]" if index else key).json
        assert found["shape"] == list(expected.shape)
        shown = np.array(found["values"], dtype=np.float32)
        assert np.array_equal(shown.reshape(expected.shape), expected)


def test_show_prints_the_ends_of_what_is_large(pristine: Path, cli: Cli) -> None:
    whole = values()["layers.0.weight"].numpy()
    printed = cli("show", pristine, "layers.0.weight").out
    expected = np.array2string(whole, threshold=0, max_line_width=100)
    assert printed == f"layers.0.weight  float32 [64, 24]\n{expected}\n"
    assert cli("show", pristine, "scalar").out == "scalar  float32 []\n2.5\n"
    assert "[-5497558138880 -4398046511104" in cli("show", pristine, "counts").out
    odd = cli("show", "--json", pristine, "layers.10.odd[3:6]").json["values"]
    assert odd == ["NaN", "Infinity", "-Infinity"]


@given(st.data())
def test_selections_are_those_of_numpy(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=3)))
    parts = []
    for n in shape[: data.draw(st.integers(0, len(shape)))]:
        ends = st.one_of(st.none(), st.integers(-7, 7))
        a, b = data.draw(ends), data.draw(ends)
        step = data.draw(st.one_of(st.none(), st.integers(-3, 3).filter(bool)))
        texts = ["" if x is None else str(x) for x in (a, b, step)]
        index = str(data.draw(st.integers(-n, n - 1))) if n and data.draw(st.booleans()) else None
        parts.append(index or ":".join(texts))
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    text = ",".join(parts)
    expected = eval(f"whole[{text}]", {"whole": whole}) if parts else whole
    assert np.array_equal(whole[parse_selection(text, "k")], expected)


def test_keys_with_brackets() -> None:
    assert split_key("a[0]", {"a": 1}) == ("a", "0")
    assert split_key("a[0]", {"a[0]": 1}) == ("a[0]", "")
    assert split_key("a[0][1:2]", {"a[0]": 1}) == ("a[0]", "1:2")


def test_diff(pristine: Path, tmp_path: Path, cli: Cli) -> None:
    outcome = cli("diff", pristine, pristine, "--json")
    found = outcome.json
    assert (outcome.code, found["same"]) == (0, True)
    assert (found["equal"], found["hashed"], found["bytes_read"]) == (7, 7, 0)

    # Another sharding, other values of one array: hashes do not help where chunks differ.
    other = tmp_path / "other"
    save(0, 1, str(other), scale=1.5)
    outcome = cli("diff", pristine, other, "layers", "--json")
    found = outcome.json
    assert outcome.code == 1
    assert list(found["values"]) == ["layers.1.weight"]
    a = values()["layers.1.weight"]
    b = a * 1.5
    delta = np.abs(as_float64(a) - as_float64(b))
    entry = found["values"]["layers.1.weight"]
    assert entry["elements"] == int((delta > 0).sum())
    assert entry["max_abs"] == delta.max()
    assert entry["norm"] == pytest.approx(np.linalg.norm(delta))
    assert entry["norm_a"] == pytest.approx(np.linalg.norm(as_float64(a)))
    assert found["equal"] == 2
    text = cli("diff", pristine, other).out
    assert "differs    layers.1.weight" in text
    assert "rng/shard_0_1.pt  only in B" in text
    assert "file       common.pt" not in text


def test_diff_of_keys_shapes_and_odd_values(tmp_path: Path, cli: Cli) -> None:
    nan = float("nan")
    a = {
        "gone": torch.ones(2),
        "shape": torch.ones(4),
        "dtype": torch.ones(4),
        "signs": torch.tensor([0.0, nan, 1.0]),
        "big": torch.tensor([2**62, -(2**62), 5]),
    }
    b = {
        "new": torch.ones(2),
        "shape": torch.ones(2, 2),
        "dtype": torch.ones(4).double(),
        "signs": torch.tensor([-0.0, nan, nan]),
        "big": torch.tensor([-(2**62), -(2**62), 8]),
    }
    for name, state in (("a", a), ("b", b)):
        shardstore.save(shardstore.shard({**state, "step": name}), tmp_path / name)
    found = cli("diff", "--json", tmp_path / "a", tmp_path / "b").json
    assert (found["only_a"], found["only_b"]) == (["gone"], ["new"])
    assert found["described"] == {
        "dtype": {"dtype": ["float32", "float64"]},
        "shape": {"shape": [[4], [2, 2]]},
    }
    signs = found["values"]["signs"]
    assert (signs["elements"], signs["nonfinite"], signs["max_abs"]) == (2, 1, 0.0)
    assert found["values"]["big"]["max_abs"] == 2.0**63
    assert found["files"] == {"common.pt": "differs"}
    assert cli("diff", "--no-files", tmp_path / "a", tmp_path / "b", "--json").json["files"] == {}


def test_diff_without_keys_in_common(place: Path, tmp_path: Path, cli: Cli) -> None:
    shardstore.save(shardstore.shard({"other": torch.ones(2)}), tmp_path / "other")
    outcome = cli("diff", "--no-files", place, tmp_path / "other")
    assert outcome.code == 1
    summary = "no keys in common: 7 arrays only in A, 1 array only in B"
    assert outcome.out.splitlines()[-1] == summary


def test_a_file_of_dcp_names_its_folder(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "step").mkdir()
    for name in (".metadata", "__0_0.distcp"):
        file = tmp_path / "step" / name
        file.write_bytes(b"\x80\x02N.")
        for command in (["info", file], ["convert", file, tmp_path / "new"]):
            assert f"give its folder, {tmp_path}/step" in cli.refused(*command)
    assert not (tmp_path / "new").exists()


def test_a_model_beside_a_document_of_another_program_is_no_file_of_a_checkpoint(
    cli: Cli, tmp_path: Path
) -> None:
    (tmp_path / "metadata.json").write_text('{"model": "gpt"}')
    torch.save({}, tmp_path / "model.pt")
    assert "load it with torch.load" in cli.refused("info", tmp_path / "model.pt")


WRONG = [
    (["lss"], "see `shardstore --help`"),
    (["ls"], "Missing argument"),
    (["ls", "PLACE", "--dept", "2"], "--dept"),
    (["ls", "PLACE", "--depth", "many"], "--depth"),
    (["ls", "/no/such/place"], "does not exist"),
    (["ls", "PLACE/common.pt"], "a file of a checkpoint: give its folder, "),
    (["ls", "PLACE/.."], "give "),
    (["convert", "PLACE/..", "/no/such/place"], "give PLACE"),
    (["ls", "PLACE/hollow"], "it is an empty folder"),
    (["convert", "PLACE/hollow", "PLACE-2"], "it is an empty folder"),
    (["ls", "PLACE", "layer.0"], "did you mean layers."),
    (["show", "PLACE", "layers.0.wieght"], "did you mean layers.0.weight"),
    (["show", "PLACE", "layers.0.weight[a]"], "is not an index"),
    (["show", "PLACE", "layers.0.weight[64]"], "out of range for axis 0"),
    (["show", "PLACE", "layers.0.weight[0,0,0]"], "too many"),
    (["show", "PLACE", "layers.0.weight[::0]"], "is not an index"),
    (["show", "PLACE", "layers.0.weight", "--json", "--limit", "10"], "--limit"),
    (["stats", "PLACE", "--memory", "lots"], "is not a size"),
    (["diff", "PLACE"], "Missing argument"),
    (["diff", "PLACE", "/no/such/place"], "does not exist"),
    (["plot", "pie", "PLACE"], "pie"),
    (["plot", "layout", "PLACE"], "needs a key"),
    (["plot", "layout", "PLACE", "nothing"], "'nothing' is not a key"),
    (["report", "PLACE", "-o", "/no/such/folder/r.html"], "is not a folder"),
    (["report", "PLACE", "-o", "PLACE"], "is a folder; give the name of a file"),
    (["plot", "sizes", "PLACE", "-o", "PLACE"], "is a folder; give the name of a file"),
    (["plot", "sizes", "PLACE", "-o", "/no/such/folder/p.svg"], "is not a folder"),
    (["plot", "sizes", "PLACE", "-o", "/proc/p.svg"], "writing /proc/p.svg failed"),
    (["plot", "sizes", "PLACE", "-o", "picture.jpg"], "pictures are SVG"),
    (["info", "s3:/bucket/run"], "has lost a slash"),
    (["gc", "/no/such/place"], "is not a folder"),
    (["gc", "PLACE/..", "--older-than", "inf"], "Invalid value for '--older-than'"),
    (["gc", "PLACE/..", "--older-than", "1e300"], "Invalid value for '--older-than'"),
    (["plot", "sizes", "PLACE", "-o", "s3://bucket/x.png"], "is a URL: give the path of a local"),
    (["report", "PLACE", "-o", "s3:/bucket/x.html"], "is a URL: give the path of a local file"),
    (["report", "PLACE", "-o", "file:///folder/x"], "is a URL: give the path of a local file"),
    (["report", "PLACE", "-o", "-"], "give the path of a file"),
    (["rm", "PLACE"], "--yes"),
    (["rm", "PLACE/counts", "--yes"], "not a checkpoint"),
    (["ls", "PLACE/counts"], "give the checkpoint, "),
    (["verify", "PLACE/counts"], "its key, counts"),
    (["info", "s3://"], "names no bucket"),
    (["plot"], "Choose from: layout, histogram, sizes"),
    (["ls", "nosuchscheme://bucket/x"], "nosuchscheme"),
]


@pytest.mark.parametrize(("arguments", "hint"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
def test_wrong_use_gets_one_helpful_line(
    place: Path, cli: Cli, arguments: list[str], hint: str
) -> None:
    arguments = [argument.replace("PLACE", str(place)) for argument in arguments]
    (place / "hollow").mkdir()
    hint = hint.replace("PLACE", str(place))
    files = sorted(place.rglob("*"))
    assert hint in cli.refused(*arguments)
    assert sorted(place.rglob("*")) == files


def test_a_roundabout_path_is_a_path(pristine: Path, cli: Cli) -> None:
    assert cli("ls", pristine / "counts" / "..").code == 0


def test_mistyped_options_show_no_secret(place: Path, cli: Cli) -> None:
    for option in ("secret:of-a-trainer", "of-a-trainer", "secret of-a-trainer"):
        said = cli.refused("ls", place, "--storage-option", option)
        assert "NAME=VALUE" in said
        assert "of-a-trainer" not in said
    options = ("secret=of-a-trainer", "secret.x=of-a-trainer")
    words = [word for option in options for word in ("--storage-option", option)]
    assert "of-a-trainer" not in cli.refused("ls", place, *words)
    for command in (["ls"], ["rm", "--yes"], ["convert", place]):
        said = cli.refused(*command, "s3://AKNOBODY:of-a-trainer@bucket/run")
        assert "of-a-trainer" not in said
        assert "AKNOBODY" not in said
        assert "credentials" in said


def test_foreign_backends_are_named(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    assert "'torch_dist'" in cli.refused("ls", tmp_path)
    (tmp_path / "metadata.json").write_text("{")
    assert "damaged" in cli.refused("ls", tmp_path)


def test_rm_leaves_what_is_not_the_checkpoints(place: Path, cli: Cli) -> None:
    (place / "train.log").write_text("x")
    outcome = cli("rm", "--yes", "--json", place)
    assert (outcome.code, outcome.json["left"]) == (0, ["train.log"])
    assert [entry.name for entry in place.iterdir()] == ["train.log"]
    assert "not a checkpoint" in cli.refused("rm", "--yes", place)


def test_rm_does_not_follow_a_link(place: Path, tmp_path: Path, cli: Cli) -> None:
    link = tmp_path / "latest"
    link.symlink_to(place)
    files = sorted(place.rglob("*"))
    said = cli.refused("rm", "--yes", link)
    assert f"symbolic link to {place}; nothing was removed" in said
    assert link.is_symlink()
    assert sorted(place.rglob("*")) == files
    assert "link" in cli("rm", "--help").out
    assert "(7 arrays, " in cli("rm", "--yes", place).out
    assert not place.exists()
    shardstore.save(shardstore.shard({"w": torch.ones(3)}), place)
    assert "(1 array, 12 B)" in cli("rm", "--yes", place).out
    shardstore.save(shardstore.shard({"w": torch.ones(3)}), place, ("torch_dist", 1))
    files = len([*place.iterdir()])
    assert f"({files} files)" in cli("rm", "--yes", place).out


def test_rm_takes_a_damaged_checkpoint_too(place: Path, cli: Cli) -> None:
    (place / "zarr.json").write_text("{")
    assert "(damaged)" in cli("rm", "--yes", place).out
    assert not place.exists()


KILLED = """
import os, signal, sys, torch, shardstore
from shardstore.storage.commit import folder as commit
commit.FolderAttempt.commit = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
shardstore.save(shardstore.shard({"w": torch.ones(1000)}), sys.argv[1])
"""


def test_gc_takes_dead_attempts_and_nothing_else(pristine: Path, tmp_path: Path, cli: Cli) -> None:
    shutil.copytree(pristine, tmp_path / "step-1")
    assert run_text(KILLED, tmp_path / "step-2").returncode == -9
    (attempt,) = tmp_path.glob(".step-2.attempt-*")
    # As if another host were writing it.
    other = tmp_path / ".step-3.attempt-0123456789ab-1-1-0123456789abcdef"
    other.mkdir()
    outcome = cli("gc", tmp_path)
    assert outcome.code == 0
    assert attempt.name in outcome.out
    assert "--delete" in outcome.out
    assert other.name not in outcome.out
    assert attempt.exists()
    found = cli("gc", "--delete", "--json", tmp_path).json
    assert [entry["url"] for entry in found["leftovers"]] == [str(attempt)]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [other.name, "step-1"]
    assert "no remains of dead saves" in cli("gc", tmp_path).out
    assert cli("verify", tmp_path / "step-1").code == 0
