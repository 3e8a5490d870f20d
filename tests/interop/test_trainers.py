"""Real trainers over shardstore: the programs of their guides, and those that call PyTorch DCP
somewhere inside, by one line: torchtitan's checkpoint manager, Lightning's Fabric and Trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import zarr

import shardstore
from shardstore.storage.stores.location import Location
from testing.s3_servers import S3Server
from tests.helpers.processes import run_to_end
from tests.helpers.programs import run_page
from tests.helpers.trainers import for_bridge, run, whole

PAGES = sorted((Path(__file__).parents[2] / "docs" / "guides" / "trainers").glob("*.md"))


@pytest.mark.long
@pytest.mark.parametrize("guide", PAGES, ids=lambda page: page.stem)
def test_guide(
    python: Path,
    guide: Path,
    tmp_path: Path,
    s3_server: S3Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The programs that a trainer's page prints."""
    own = for_bridge() if guide.stem == "megatron-bridge" else {}
    for name, value in {**s3_server.environment, **own}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("BUCKET", s3_server.new_bucket())
    run_page(guide.read_text(encoding="utf-8"), tmp_path, {}, python=python)


@pytest.mark.long
def test_torchtitan(python: Path, tmp_path: Path, s3_server: S3Server) -> None:
    """On disk in the background, in a store in the foreground."""
    url = f"s3://{s3_server.new_bucket()}/run"
    run(python, "titan.py", tmp_path, "async", url, "disabled", **s3_server.environment)
    for root, options in ((str(tmp_path), {}), (url, s3_server.storage_options)):
        folder = Location.of(f"{root}/checkpoint", options)
        assert shardstore.latest(folder.url, storage_options=options) == f"{folder.url}/step-8"
        steps = set(folder.listing())
        assert "step-2" not in steps  # its own retention removed it
        assert {"step-6", "step-8"} <= steps
        for step in steps:
            assert whole(f"{folder.url}/{step}", **options)
    group = zarr.open_group(tmp_path / "checkpoint" / "step-8", mode="r")
    assert group["0.weight"].shape == (10, 6)


BOTH = pytest.mark.parametrize("how", [{}, {"ASYNCHRONOUS": "1"}], ids=["foreground", "background"])


@pytest.mark.long
@BOTH
def test_lightning_fabric(python: Path, tmp_path: Path, how: dict[str, str]) -> None:
    run(python, "lightning_fabric.py", tmp_path, **how)
    place = tmp_path / "last.ckpt"
    assert whole(place)
    assert zarr.open_group(place, mode="r")["model.0.weight"].shape == (10, 6)


@pytest.mark.long
@BOTH
def test_lightning_fabric_with_fsdp1(python: Path, tmp_path: Path, how: dict[str, str]) -> None:
    run(python, "lightning_fsdp1.py", tmp_path, **how)
    place = tmp_path / "last.ckpt"
    assert whole(place)
    group = zarr.open_group(place, mode="r")
    assert group["optimizer.state.0.weight.exp_avg"].shape == (10, 6)
    assert not list(place.glob("*.distcp"))


@pytest.mark.long
@BOTH
def test_lightning_trainer_with_fsdp1(python: Path, tmp_path: Path, how: dict[str, str]) -> None:
    run(python, "lightning_trainer.py", "FSDP1", tmp_path, **how)
    for name, step in (("unbroken", 4), ("broken", 2), ("resumed", 4)):
        (place,) = (tmp_path / name).iterdir()  # its own retention removed the others
        assert place.name == f"step={step}.ckpt"
        assert whole(place)
        group = zarr.open_group(place, mode="r")
        assert group["optimizer_0.state.layers.0.weight.momentum_buffer"].shape == (10, 6)


@pytest.mark.long
@BOTH
@pytest.mark.parametrize("kind", ["Fabric", "FSDP1", "FSDP2"])
def test_lightning_in_a_store(
    python: Path, s3_server: S3Server, kind: str, how: dict[str, str]
) -> None:
    """Everything of a checkpoint is in the store, by our subclass of Lightning's strategy."""
    options = s3_server.storage_options
    url = f"s3://{s3_server.new_bucket()}/run"
    how = {**how, "STORE_OPTIONS": json.dumps(options)}
    if kind == "Fabric":
        run(python, "lightning_fabric.py", url, **how)
        run(python, "lightning_fabric.py", url, "resume", ranks=1, **how)
        places = {".": "last.ckpt"}
        key = "optimizer.state.0.weight.exp_avg"
    else:
        # ModelCheckpoint looks for its folder with the credentials of the environment.
        run(python, "lightning_trainer.py", kind, url, **how, **s3_server.environment)
        places = {"unbroken": "step=4.ckpt", "resumed": "step=4.ckpt"}
        # In a store, Lightning deletes the checkpoint that it resumed from too.
        assert Location.of(f"{url}/broken", options).listing() == []
        key = "optimizer_0.state.layers.0.weight.momentum_buffer"
    for folder, name in places.items():
        parent = Location.of(url if folder == "." else f"{url}/{folder}", options)
        assert parent.listing() == [name]  # its own retention removed the others
        assert whole(f"{parent.url}/{name}", **options)
        stored = shardstore.open(f"{parent.url}/{name}", storage_options=options)
        assert stored[key].shape == (10, 6)


def test_the_module_does_not_import_lightning(python: Path) -> None:
    program = """if True:
        import sys
        import shardstore.lightning
        names = {name.partition(".")[0] for name in sys.modules}
        assert not names & {"lightning", "lightning_fabric", "pytorch_lightning"}
        import importlib.util
        assert importlib.util.find_spec("lightning")  # it could have been imported
    """
    assert run_to_end([python, "-c", program]).returncode == 0


@pytest.mark.long
def test_what_a_strategy_of_lightning_refuses(python: Path, tmp_path: Path) -> None:
    run(python, "lightning_errors.py", tmp_path, ranks=1)
