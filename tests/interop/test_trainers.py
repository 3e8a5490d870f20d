"""Real trainers over shardstore: the programs of their guides, and Lightning's Fabric and Trainer,
which call PyTorch DCP somewhere inside, by one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import zarr

import shardstore
from shardstore.storage.stores.location import Location
from testing.s3_servers import S3Server
from tests.helpers.programs import run_page, run_text
from tests.helpers.trainers import for_bridge, run, whole

PAGES = sorted((Path(__file__).parents[2] / "docs" / "guides" / "trainers").glob("*.md"))


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


def test_no_module_imports_its_trainer(tmp_path: Path) -> None:
    """Modules in the places of the trainers can be imported."""
    trainers = "lightning lightning_fabric megatron pytorch_lightning torchtitan verl"
    for name in trainers.split():
        (tmp_path / f"{name}.py").touch()
    program = """if True:
        import importlib, sys
        sys.path.insert(0, sys.argv[1])
        import shardstore.bridge, shardstore.lightning, shardstore.torchtitan, shardstore.verl
        shardstore.bridge.CheckpointManager
        try:
            shardstore.verl.install(storage_options="x")
        except ValueError as error:
            assert "storage_options" in str(error), error
        else:
            raise AssertionError
        trainers = set(sys.argv[2:])
        assert not trainers & set(sys.modules)
        for name in trainers:
            assert importlib.import_module(name).__file__ == f"{sys.argv[1]}/{name}.py"
    """
    done = run_text(program, tmp_path, *trainers.split())
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_what_a_strategy_of_lightning_refuses(python: Path, tmp_path: Path) -> None:
    run(python, "lightning_errors.py", tmp_path, ranks=1)
