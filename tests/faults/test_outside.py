"""Whatever a checkpoint says, and wherever links in it lead: nothing outside of it is changed."""

from __future__ import annotations

import io
import json
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardstore
from shardstore import CheckpointManager
from shardstore.dcp.files import DcpFiles
from shardstore.errors import DamagedCheckpointError, FormatVersionError, StorageError
from shardstore.storage.commit.checkpoints import delete_checkpoint, sweep
from shardstore.storage.commit.folder import _machine, delete
from shardstore.storage.stores.location import Location
from tests.helpers.root_documents import about, members, rewrite

OUTSIDE = ["../precious", "optimizer/../../precious", "a//b", "/etc", "", ".", "..", "./a", "a/"]
NO_FILE = ["a\ud800", "a\0"]
"""Names that the operating system does not take."""


def tensors(*keys: str) -> dict[str, Any]:
    return shardstore.shard({key: torch.ones(4) for key in keys})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    shardstore.save(tensors("optimizer.a", "optimizer.b", "model"), tmp_path / "c")
    return tmp_path / "c"


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """What must stay as it is, and looks like an array of ours."""
    folder = tmp_path / "precious"
    shardstore.save(tensors("w"), tmp_path / "other")
    (tmp_path / "other" / "w").rename(folder)
    (folder / "thesis.tex").write_text("years of work")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def remove(place: Path, prefix: str) -> None:
    shardstore.remove_sharded_tensors(str(place), prefix)


def edit_manifest(place: Path, change: Callable[[list[Any]], None]) -> None:
    with np.load(place / "manifest.npz") as found:
        columns = dict(found)
    arrays = json.loads(zlib.decompress(columns["arrays"].tobytes()))
    change(arrays)
    columns["arrays"] = np.frombuffer(zlib.compress(json.dumps(arrays).encode()), np.uint8)
    np.savez(place / "manifest.npz", **columns)


@pytest.mark.parametrize("name", OUTSIDE + NO_FILE)
def test_a_name_in_the_manifest_touches_nothing_outside(
    saved: Path, precious: Path, name: str
) -> None:
    before = content(precious)

    def rename(arrays: list[Any]) -> None:
        arrays[-1][0] = name

    def leave_out(root: dict[str, Any]) -> None:
        members(root).pop("optimizer.b")
        about(root)["chunk_crc32c"].pop("optimizer.b")
        about(root).pop("file_bytes")  # as before it had one

    edit_manifest(saved, rename)
    rewrite(saved, leave_out, sign=True)
    with pytest.raises(DamagedCheckpointError, match="outside of the checkpoint"):
        remove(saved, "")
    delete_checkpoint(saved)
    assert content(precious) == before


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("kind", ["array", "group"])
def test_a_name_in_the_root_touches_nothing_outside(
    saved: Path, precious: Path, name: str, kind: str
) -> None:
    before = content(precious)

    def rename(root: dict[str, Any]) -> None:
        members(root)[name] = {**members(root).pop("model"), "node_type": kind}

    rewrite(saved, rename, sign=True)
    for attempt in (lambda: remove(saved, ""), lambda: shardstore.load_plain_tensors(str(saved))):
        with pytest.raises(DamagedCheckpointError, match="outside of the checkpoint"):
            attempt()
    assert content(precious) == before


def a_file_outside(root: dict[str, Any]) -> None:
    about(root)["file_crc32c"] = {"../precious/thesis.tex": 1}


def a_separator_that_leads_outside(root: dict[str, Any]) -> None:
    encoding = members(root)["model"]["chunk_key_encoding"]
    encoding["configuration"]["separator"] = "/../../precious/"


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (a_file_outside, DamagedCheckpointError, "outside of the checkpoint"),
        (a_separator_that_leads_outside, FormatVersionError, "separator"),
    ],
)
def test_a_root_that_leads_outside_is_refused(
    saved: Path, change: Any, error: type[Exception], says: str
) -> None:
    rewrite(saved, change, sign=True)
    with pytest.raises(error, match=says):
        shardstore.load_plain_tensors(str(saved))


@pytest.mark.parametrize("name", OUTSIDE + NO_FILE)
def test_a_name_in_the_metadata_of_dcp(tmp_path: Path, name: str) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "d", no_dist=True)
    metadata = pickle.loads((tmp_path / "d" / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = name
    out = io.BytesIO()
    pickle.dump(metadata, out)
    with pytest.raises(DamagedCheckpointError, match="outside of the checkpoint"):
        DcpFiles.parse(Location.of(tmp_path / "d"), out.getvalue())


def test_an_array_that_is_a_link(saved: Path, precious: Path) -> None:
    """Reads follow it; a removal takes the link alone."""
    before = content(precious)
    (saved / "model").rename(saved.parent / "cache")
    (saved / "model").symlink_to(saved.parent / "cache")
    assert torch.equal(shardstore.load_plain_tensors(str(saved))["model"], torch.ones(4))
    kept = content(saved.parent / "cache")
    remove(saved, "model")
    assert not (saved / "model").is_symlink()
    assert content(saved.parent / "cache") == kept
    (saved / "optimizer.a" / "more").symlink_to(precious)
    remove(saved, "optimizer")
    assert not (saved / "optimizer.a").exists()
    assert content(precious) == before


def test_a_node_behind_a_link(saved: Path, precious: Path) -> None:
    (saved / "deep").symlink_to(precious.parent)

    def rename(root: dict[str, Any]) -> None:
        for by_node in (members(root), about(root)["chunk_crc32c"]):
            by_node["deep/precious"] = by_node.pop("model")

    rewrite(saved, rename, sign=True)
    before, root = content(precious), (saved / "zarr.json").read_bytes()
    with pytest.raises(StorageError, match="deep is a symbolic link"):
        remove(saved, "model")
    assert (saved / "zarr.json").read_bytes() == root
    delete_checkpoint(saved)
    assert content(precious) == before


@pytest.mark.parametrize("name", [".owner.json", "zarr.json", "common.pt", "model/c.0"])
def test_a_document_that_is_a_link_touches_nothing_outside(
    saved: Path, precious: Path, name: str
) -> None:
    thesis = precious / "thesis.tex"
    if (saved / name).exists():
        thesis.write_bytes((saved / name).read_bytes())
        (saved / name).unlink()
    (saved / name).symlink_to(thesis)
    before = content(precious)
    delete(Location.of(saved))
    assert content(precious) == before
    assert not saved.exists()


def test_nothing_is_written_through_a_link(tmp_path: Path, precious: Path) -> None:
    before = content(precious)
    place = Location.of(tmp_path / "place")
    place.path.mkdir()
    (place.path / "file").symlink_to(precious / "thesis.tex")
    (place.path / "folder").symlink_to(precious)
    for name in ("file", "folder/thesis.tex", "folder/new"):
        with pytest.raises(StorageError, match="symbolic link"):
            place.write(name, b"x")
    with pytest.raises(StorageError, match="symbolic link"):
        place.replace("folder/thesis.tex", b"x")
    with pytest.raises(StorageError, match="symbolic link"):
        place.delete("folder/thesis.tex")
    place.replace("file", b"x")
    assert (place.path / "file").read_bytes() == b"x"
    place.delete("folder")
    assert content(precious) == before


def test_retention_and_a_step_that_is_a_link(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run", keep_last=1)
    manager.save(1, tensors("w"))
    manager.wait()
    (step,) = (tmp_path / "run").iterdir()
    step.rename(tmp_path / "elsewhere")
    step.symlink_to(tmp_path / "elsewhere")
    before = content(tmp_path / "elsewhere")
    manager.save(2, tensors("w"))
    manager.save(3, tensors("w"))
    manager.wait()
    manager.close()
    assert not step.is_symlink()
    assert content(tmp_path / "elsewhere") == before


def test_sweeps_and_an_attempt_that_is_a_link(tmp_path: Path, precious: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    for number, folder in enumerate((precious, tmp_path / "empty")):
        folder.mkdir(exist_ok=True)
        (root / f".step-4.attempt-{_machine()}-1-1-{number:016x}").symlink_to(folder)
    before = content(precious)
    sweep(root, dry_run=False)
    shardstore.save(tensors("w"), root / "step-4")
    assert content(precious) == before
    assert (tmp_path / "empty").is_dir()
