"""torchtitan's components with this package's checkpoint manager, on real ranks that are killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr
from safetensors.torch import load_file

import shardstore
from shardstore.storage.stores.location import Location
from testing.s3_servers import S3Server
from tests.helpers.processes import run_to_end
from tests.helpers.trainers import run, run_torchrun, whole

PROGRAM = "titan_manager.py"
EVERY_2 = {"interval": 2}


def runs(
    python: Path, *asked: dict[str, Any], ranks: int = 2, **environment: str
) -> list[dict[str, Any]]:
    """What each of several runs found, all in the same processes."""
    output = run(python, PROGRAM, *map(json.dumps, asked), ranks=ranks, **environment)
    return [json.loads(line) for line in output.splitlines()]


def killed(python: Path, asked: dict[str, Any]) -> None:
    ended = run_torchrun(python, PROGRAM, json.dumps(asked))
    assert ended.returncode != 0
    assert "SIGKILL" in ended.stderr, ended.stderr[-20000:]


@pytest.fixture(scope="module")
def unbroken(python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, list[float]]:
    """The losses of ten steps, with and without the data loader."""
    base = str(tmp_path_factory.mktemp("unbroken"))
    asked = {"steps": 10, "base": base, "config": {"folder": "a", "interval": 100}}
    both = runs(python, {**asked, "loader": True}, {**asked, "config": {"folder": "b"}})
    return {bool(1 - number): found["losses"] for number, found in enumerate(both)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "where"), [("async", "s3"), ("disabled", "disk"), ("async_with_pinned_mem", "disk")]
)
def test_a_killed_run_resumes_with_the_same_losses(
    python: Path,
    unbroken: dict[bool, list[float]],
    tmp_path: Path,
    s3_server: S3Server,
    mode: str,
    where: str,
) -> None:
    """Between two saves, and again during a save; with torchtitan's data loader."""
    options = s3_server.storage_options if where == "s3" else None
    url = f"s3://{s3_server.new_bucket()}/run" if where == "s3" else str(tmp_path / "run")
    config = {
        "interval": 2,
        "keep_latest_k": 2,
        "async_mode": mode,
        "folder": url,
        "storage_options": options,
    }
    common = {"steps": 10, "loader": True, "config": config}
    killed(python, {**common, "kill_at": 7})
    folder = Location.of(url, options)
    assert shardstore.latest(url, storage_options=options) == folder.child("step-6").url
    killed(python, {**common, "die_in_save": 10, "seed": 1})
    assert shardstore.latest(url, storage_options=options) == folder.child("step-8").url
    (found,) = runs(python, {**common, "seed": 2})
    assert (found["from"], found["counts"]) == (8, [8, 32, 32])
    assert found["losses"] == unbroken[True][8:]
    manager = shardstore.CheckpointManager(url, storage_options=options)
    assert manager.steps() == [8, 10]  # keep_latest_k
    for step in manager.steps():
        assert whole(manager.url(step), **(options or {}))


@pytest.mark.long
def test_its_own_manager_saves_and_resumes_once_dcp_is_installed(
    python: Path, unbroken: dict[bool, list[float]], tmp_path: Path, s3_server: S3Server
) -> None:
    """On disk in the background, in a store in the foreground."""
    url = f"s3://{s3_server.new_bucket()}/run"
    places = ((str(tmp_path), "async", {}), (url, "disabled", s3_server.storage_options))
    asked = []
    for root, mode, _ in places:
        config = {**EVERY_2, "keep_latest_k": 2, "async_mode": mode}
        own = {"base": root, "manager": "torchtitan", "installed": True, "config": config}
        asked += [{**own, "steps": 8}, {**own, "steps": 10, "seed": 1}]
    found = runs(python, *asked, **s3_server.environment)
    for resumed in found[1::2]:
        assert (resumed["from"], resumed["losses"]) == (8, unbroken[False][8:])
    for root, _, options in places:
        folder = Location.of(f"{root}/checkpoint", options)
        assert shardstore.latest(folder.url, storage_options=options) == f"{folder.url}/step-10"
        steps = set(folder.listing())
        assert "step-2" not in steps  # its own retention removed it
        assert {"step-8", "step-10"} <= steps
        for step in steps:
            assert whole(f"{folder.url}/{step}", **options)
    group = zarr.open_group(tmp_path / "checkpoint" / "step-10", mode="r")
    assert group["0.weight"].shape == (10, 6)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["tp", "none"])
def test_a_run_resumes_on_another_mesh(
    python: Path, unbroken: dict[bool, list[float]], tmp_path: Path, layout: str
) -> None:
    """Two ranks with FSDP, then one rank, then two ranks with another layout."""
    asked = {"base": str(tmp_path), "config": EVERY_2}
    runs(python, {**asked, "steps": 4})
    (one,) = runs(python, {**asked, "steps": 6, "layout": "none", "seed": 1}, ranks=1)
    two, three = runs(
        python,
        {**asked, "steps": 8, "layout": layout, "seed": 2},
        {**asked, "steps": 10, "seed": 3},
    )
    assert [found["from"] for found in (one, two, three)] == [4, 6, 8]
    losses = one["losses"] + two["losses"] + three["losses"]
    assert losses == pytest.approx(unbroken[False][4:], rel=1e-4)


@pytest.mark.long
def test_stages_of_a_pipeline_are_saved_and_joined(python: Path, tmp_path: Path) -> None:
    """The load at the end waits for the asynchronous save; the last skips a damaged step."""
    config = {**EVERY_2, "async_mode": "async"}
    asked = {"base": str(tmp_path), "config": config, "layout": "stages", "reloads": True}
    trained, again = runs(python, {**asked, "steps": 2}, {**asked, "steps": 4, "seed": 1})
    assert again["weight"] == trained["trained"]
    saved = shardstore.load_plain_tensors(tmp_path / "checkpoint" / "step-4")
    assert {"0.weight", "1.weight", "optimizer.state.1.weight.exp_avg"} <= set(saved)
    for file in (tmp_path / "checkpoint" / "step-4" / "0.weight").rglob("*"):
        if file.is_file() and file.name != "zarr.json":
            file.write_bytes(b"\0" * file.stat().st_size)
    (joined,) = runs(python, {**asked, "steps": 6, "seed": 2}, ranks=1)
    assert (joined["from"], joined["weight"]) == (2, trained["trained"])


@pytest.mark.long
def test_options(python: Path, tmp_path: Path) -> None:
    """``load_only``, ``initial_load_path``, ``exclude_from_loading``, ``load_step``, and the errors
    of wrong input, on every rank."""
    a, b, c, d = (str(tmp_path / name) for name in "abcd")
    (tmp_path / "b" / "checkpoint" / "step-9").mkdir(parents=True)  # a step that is not whole
    exclude = {"exclude_from_loading": ["dataloader"]}
    trained, own, only, initial, whole_state, from_dcp, back, *errors = runs(
        python,
        {"steps": 4, "base": a, "config": {**EVERY_2, "enable_first_step_checkpoint": True}},
        {"steps": 2, "base": c, "manager": "torchtitan", "config": EVERY_2, "seed": 5},
        {"steps": 6, "base": a, "config": {**EVERY_2, "load_only": True}, "seed": 1},
        {"base": b, "config": {"initial_load_path": f"{a}/checkpoint/step-4"}, "seed": 1},
        {
            "base": b,
            "config": {
                "initial_load_path": f"{a}/checkpoint/step-4",
                "initial_load_model_only": False,
                "exclude_from_loading": ["lr_scheduler"],
            },
        },
        {
            "base": b,
            "config": {
                "initial_load_path": f"{c}/checkpoint/step-2",
                "initial_load_model_only": False,
            },
        },
        {"base": a, "config": {}, "load_step": 2, "seed": 1},
        {"base": a, "config": {}, "load_step": 3, "expect": "existing steps: 1, 2, 4"},
        {"base": c, "config": EVERY_2, "expect": "has steps of torchtitan's own manager"},
        {"base": b, "config": {"initial_load_path": c}, "expect": "the folder of one step"},
        {"base": b, "config": {"exclude_from_loading": ["x"]}, "expect": "must name some of"},
        {"base": b, "config": {"async_mode": "x"}, "expect": "must be one of"},
        {"base": b, "config": {"last_save_in_hf": True}, "expect": "no sd_adapter"},
        {"base": a, "config": {}, "refuses": 1, "expect": "'train_state' does not accept"},
        {"base": a, "config": {}, "loader": True, "expect": "exclude_from_loading=['dataloader']"},
        {"base": a, "config": exclude, "loader": True, "seed": 1},
        {"steps": 2, "base": d, "loader": True, "config": EVERY_2},
    )
    weight = trained["trained"]
    assert (only["from"], only["weight"]) == (4, weight)
    assert sorted(entry.name for entry in (tmp_path / "a" / "checkpoint").iterdir()) == [
        "step-1",
        "step-2",
        "step-4",
    ]  # load_only saved nothing
    assert (initial["from"], initial["weight"]) == (0, weight)
    assert (whole_state["from"], whole_state["weight"]) == (4, weight)
    assert (from_dcp["from"], from_dcp["weight"]) == (2, own["trained"])
    assert [found["counts"][0] for found in (initial, whole_state, from_dcp)] == [0, 4, 2]
    assert (back["from"], back["weight"] != weight) == (2, True)
    *errors, excluded, _ = errors
    assert all("error" in found for found in errors)
    assert (excluded["from"], excluded["weight"]) == (4, weight)
    # The data loader refuses another degree of data parallelism.
    asked = {"base": d, "loader": True, "layout": "none"}
    refused, found = runs(
        python,
        {**asked, "config": {}, "expect": "exclude_from_loading=['dataloader']"},
        {**asked, "config": exclude},
        ranks=1,
    )
    assert "dp_degree" in refused["error"]
    assert found["from"] == 2


@pytest.mark.long
@pytest.mark.parametrize("where", ["s3", "disk"])
def test_the_last_step_is_exported(
    python: Path, tmp_path: Path, s3_server: S3Server, where: str
) -> None:
    options = s3_server.storage_options if where == "s3" else None
    root = f"s3://{s3_server.new_bucket()}" if where == "s3" else str(tmp_path / "run")
    own, full, hugging = (
        {"folder": f"{root}/{name}", "storage_options": options, "interval": 2}
        for name in ("own", "full", "hugging")
    )
    bfloat16 = {"export_dtype": "bfloat16"}
    last = {"steps": 3, "last": 3}
    first, second, third, again = runs(
        python,
        {**last, "config": {**own, **bfloat16}},
        {**last, "config": {**full, "last_save_model_only": False, **bfloat16}},
        {**last, "config": {**hugging, "last_save_in_hf": True, **bfloat16}, "adapter": True},
        {"config": hugging, "seed": 1},
    )
    weight = torch.tensor(first["trained"])
    tensors = shardstore.load_plain_tensors(f"{root}/own/step-3", storage_options=options)
    assert set(tensors) >= {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert not any(key.startswith("optimizer") for key in tensors)
    assert torch.equal(tensors["0.weight"].flatten(), weight.bfloat16())
    tensors = shardstore.load_plain_tensors(f"{root}/full/step-3", storage_options=options)
    assert torch.equal(tensors["0.weight"].flatten(), torch.tensor(second["trained"]))
    assert "optimizer.state.0.weight.exp_avg" in tensors
    place = Location.of(f"{root}/hugging", options)
    assert set(place.listing()) == {"step-2", "step-3"}  # nothing is left of the way there
    for name in (names := place.listing("step-3")):
        (tmp_path / name).write_bytes(place.read(f"step-3/{name}"))
    assert "model.safetensors" in names or "model.safetensors.index.json" in names
    exported: dict[str, torch.Tensor] = {}
    for file in tmp_path.glob("*.safetensors"):
        exported |= load_file(file)
    assert set(exported) == {f"model.{n}.{kind}" for n in (0, 1) for kind in ("weight", "bias")}
    assert torch.equal(
        exported["model.0.weight"].flatten(), torch.tensor(third["trained"]).bfloat16()
    )
    assert again["from"] == 2  # an export is no step to resume from
    if where == "disk":
        (found,) = runs(
            python,
            {
                "base": str(tmp_path / "other"),
                "adapter": True,
                "seed": 1,
                "config": {
                    "initial_load_in_hf": True,
                    "initial_load_path": str(tmp_path / "run/hugging/step-3"),
                },
            },
        )
        assert torch.equal(torch.tensor(found["weight"]).bfloat16(), weight.bfloat16())


@pytest.fixture
def main_branch(python: Path) -> None:
    """Skip the test where torchtitan's managers have no storage, as in 0.3.0."""
    find = "import importlib.util as u; print(u.find_spec('torchtitan').origin)"
    package = Path(run_to_end([python, "-c", find]).stdout.strip()).parent
    if "CheckpointStorage" not in (package / "components/checkpointer/__init__.py").read_text():
        pytest.skip("this torchtitan has no CheckpointStorage: 0.3.0; its main branch has")


@pytest.mark.parametrize("where", ["s3", "disk"])
@pytest.mark.usefixtures("main_branch")
def test_the_policies_of_torchtitan_s_base_class(
    python: Path, tmp_path: Path, s3_server: S3Server, where: str
) -> None:
    """They find, load and delete steps by the manager's storage and hooks: an export counts as a
    step, and an attempt without a commit is abandoned. ``purge_exempt`` keeps a step."""
    options = s3_server.storage_options if where == "s3" else None
    root = f"s3://{s3_server.new_bucket()}/run" if where == "s3" else str(tmp_path / "run")
    config = {"folder": root, "storage_options": options, "interval": 2, "keep_latest_k": 3}
    place = Location.of(root, options)
    place.write("step-20/0.weight/c/0/0", b"not committed")
    place.write("step-3/model.safetensors", b"an export")
    (found,) = runs(python, {"steps": 12, "config": config, "exempt": [2], "seam": True})
    seam = found["seam"]
    assert (seam["newest"], seam["loaded"], seam["step"]) == (12, True, 12)
    assert seam["weight"] == found["trained"]
    # The manager kept 8, 10 and 12, and 2; torchtitan's purge leaves room for the step to come.
    assert seam["names"] == ["step-10", "step-12", "step-2"]


@pytest.mark.long
def test_torchtitan_s_own_trainer(python: Path, tmp_path: Path) -> None:
    """Its debug model of llama 3: resumed with FSDP, and then with tensor parallelism."""

    def train(folder: str, *steps_and_mesh: int) -> list[float]:
        output = run(python, "titan_trainer.py", tmp_path / folder, *steps_and_mesh)
        losses: list[float] = json.loads(output.splitlines()[-1])
        return losses

    unbroken = train("unbroken", 6, 2, 1)
    assert len(set(unbroken)) == 6
    assert train("broken", 4, 2, 1) == unbroken[:4]
    assert train("broken", 6, 2, 1) == unbroken[4:]
    assert len(train("broken", 8, 1, 2)) == 2
    steps = shardstore.CheckpointManager(tmp_path / "broken" / "checkpoint")
    assert steps.steps() == [2, 4, 6, 8]
    assert whole(steps.url(8))
