"""Arguments as people get them wrong: each is one error of ours that says what to give instead, and
nothing is written to a place that nobody meant."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zarr
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

import shardstore
from shardstore import CheckpointManager, ShardedObject, ShardedTensor, hf
from shardstore.cli.app import run
from shardstore.convert import convert
from shardstore.dcp import StorageReader, StorageWriter
from shardstore.errors import (
    AccessPatternError,
    ArgumentError,
    DTypeMismatchError,
    NotACheckpointError,
    StorageError,
)
from shardstore.storage.commit.identity import is_checkpoint
from shardstore.storage.stores.location import Location


def sharded(data: Any, key: str = "w") -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, data)


def state() -> dict[str, Any]:
    return {"w": sharded(torch.arange(6.0).reshape(2, 3)), "step": 3}


def save_later(*args: Any) -> object:
    return shardstore.async_save(*args).result()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    place = tmp_path / "stored"
    shardstore.save(state(), place)
    return place


# -- places ------------------------------------------------------------------------------------

PLACES = {
    "empty": ("", "empty"),
    "blank": ("  ", "empty"),
    "none": (None, "NoneType"),
    "number": (5, "int"),
    "bytes": (b"x", "bytes"),
    "no bucket": ("s3://", "bucket"),
    "only slashes": ("s3:///", "bucket"),
    "no folder": ("file://", "empty"),
    # What pathlib.Path("s3://bucket/run") has made of the URL.
    "path of a URL": (Path("s3://bucket/run"), "'s3://bucket/run' as a string"),
    "one slash": ("gs:/bucket/run", "'gs://bucket/run' as a string"),
    "NUL": ("a\0b", "NUL"),
}
NO_NAMES = "part between slashes that is empty, '.' or '..'"
NOT_ONE_PLACE = [
    ("s3://bucket/runs//step-1", NO_NAMES),
    ("s3://b/./x", NO_NAMES),
    ("gs://b/run/../x", NO_NAMES),
    # Clients read these differently.
    ("s3://b/a?versionId=3", "give 's3://b/a'"),
    ("s3a://b/run/a?versionId=", "give 's3a://b/run/a'"),
    ("s3://b/a?x=1&versionId=3/step-1", "give 's3://b/a'"),
    ("s3://b?versionId=3", "give 's3://b'"),
    ("gs://b/a?generation=17", "give 'gs://b/a'"),
    ("az://b/a?versionid=2020-01-01", "give 'az://b/a'"),
    ("s3:///b/a", "give 's3://b/a'"),
    ("gs:////b", "give 'gs://b'"),
    ("simplecache::memory://x/s", "chain of URLs"),
    ("zip://s::file:///x.zip", "chain of URLs"),
    ("zip::x.zip", "chain of URLs"),
]
PLACES |= {url: (url, says) for url, says in NOT_ONE_PLACE}
ENTRIES: dict[str, Callable[[Any], object]] = {
    "save": lambda place: shardstore.save(state(), place),
    "async_save": lambda place: shardstore.async_save(state(), place),
    "load": lambda place: shardstore.load(state(), place),
    "load_plain_tensors": shardstore.load_plain_tensors,
    "load_tensors_metadata": shardstore.load_tensors_metadata,
    "load_common_state_dict": shardstore.load_common_state_dict,
    "delete_checkpoint": shardstore.delete_checkpoint,
    "latest": shardstore.latest,
    "sweep": shardstore.sweep,
    "manager": CheckpointManager,
    "open": shardstore.open,
    "writer": StorageWriter,
}


@pytest.mark.parametrize(
    ("case", "entry"),
    # The place of a writer of DCP may come later, in `reset`.
    [pair for pair in product(PLACES, ENTRIES) if pair != ("none", "writer")],
)
def test_a_place_of_a_wrong_form_is_refused(
    here: Path, tmp_path_factory: pytest.TempPathFactory, case: str, entry: str
) -> None:
    if entry == "load":  # it looks whether an asynchronous save to its place has ended
        shardstore.async_save({"n": 1}, tmp_path_factory.mktemp("elsewhere") / "c").result()
    place, says = PLACES[case]
    with pytest.raises(ArgumentError) as caught:
        ENTRIES[entry](place)
    assert says in str(caught.value)
    assert os.listdir(here) == []
    assert Path.cwd() == here


@pytest.mark.parametrize(
    "url", ["s3://AKNOBODY:of/a+secret@bucket/run", "s3a://AKNOBODY:of/a+secret@bucket"]
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    for call in (*ENTRIES.values(), lambda place: shardstore.latest(f"memory::{place}")):
        with pytest.raises(ArgumentError) as caught:
            call(url)
        said = f"{caught.value!r} {vars(caught.value)} {caught.value.__cause__!r}"
        assert "of/a+secret" not in said
        assert "AKNOBODY" not in said


def test_a_tilde_is_the_home_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here / "home"))
    shardstore.save(state(), "~/run/step-1")
    assert sorted(os.listdir(here)) == ["home"]
    assert shardstore.latest("~/run") == str(here / "home" / "run" / "step-1")
    # A folder of that name is one to whoever says so.
    shardstore.save(state(), "./~/step-1")
    assert sorted(os.listdir(here)) == ["home", "~"]


OF_A_ROOT: dict[str, Callable[[Path], object]] = {
    "sweep": shardstore.sweep,
    "latest": shardstore.latest,
    "steps": lambda root: CheckpointManager(root).steps(),
    "restore": lambda root: CheckpointManager(root).restore(state()),
    "latest step": lambda root: CheckpointManager(root).latest(),
    "save": lambda root: CheckpointManager(root).save(1, state()),
}


@pytest.mark.parametrize("entry", ["sweep", "latest", "steps", "restore"])
def test_a_file_instead_of_a_root_folder_is_an_error(tmp_path: Path, entry: str) -> None:
    """Taken for an empty root, a run would begin anew and nobody would hear of it."""
    file = tmp_path / "run.pt"
    file.write_bytes(b"x")
    with pytest.raises(StorageError, match=r"run\.pt is a file"):
        OF_A_ROOT[entry](file)


@pytest.mark.parametrize("entry", [*OF_A_ROOT][1:])
def test_a_checkpoint_instead_of_a_root_folder_is_an_error(stored: Path, entry: str) -> None:
    """Other programs resume from the path of a step."""
    before = sorted(stored.rglob("*"))
    above = re.escape(str(stored.parent))
    with pytest.raises(ArgumentError, match=rf"is a checkpoint itself.*give {above}"):
        OF_A_ROOT[entry](stored)
    assert sorted(stored.rglob("*")) == before


def test_steps_below_a_checkpoint_are_found(stored: Path) -> None:
    shardstore.save(state(), stored / "step-1")
    assert shardstore.latest(stored) == str(stored / "step-1")
    assert CheckpointManager(stored).steps() == [1]


def test_a_folder_of_steps_is_no_checkpoint_but_names_the_newest(tmp_path: Path) -> None:
    for step in (2, 9, 10):
        shardstore.save(state(), tmp_path / f"step-{step}")
    for call in (shardstore.open, partial(shardstore.load, state())):
        with pytest.raises(NotACheckpointError, match=r"are below it .*give \S*/step-10$"):
            call(tmp_path)


# -- state dicts and tensors -------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [None, 3.0, [1, 2], np.ones(3)], ids=lambda v: type(v).__name__)
def test_data_that_is_no_tensor_is_refused_by_key(wrong: Any) -> None:
    flat = partial(ShardedTensor.from_rank_offsets_flat, flattened_range=slice(0, 3))
    for make in (sharded, lambda data: flat("w", data, (3,))):
        with pytest.raises(DTypeMismatchError, match=rf"'w'.*{type(wrong).__name__}.*torch"):
            make(wrong)


BACKENDS = [("zarr", 2), ("zarr", 1), ("torch_dist", 1)]


@pytest.mark.parametrize("value", [lambda t: t, lambda t: [t], lambda t: (1, t)])
def test_a_tensor_without_values_is_refused_among_plain_values(
    tmp_path: Path, value: Callable[[torch.Tensor], Any]
) -> None:
    """Offloaded parameters are such tensors; a checkpoint with them would lack the weights."""
    state = {"n": torch.ones(2), "w": value(torch.ones(2, device="meta"))}
    with pytest.raises(DTypeMismatchError, match=r"'w.*meta device"):
        shardstore.save(state, tmp_path / "place")
    assert not is_checkpoint(Location.of(tmp_path / "place"))


LAZY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "neg": lambda t: torch._neg_view(t.real.contiguous()),
    "imag of conj": lambda t: t.conj().imag,
    "conj": lambda t: t.conj(),
}


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("kind", LAZY)
def test_views_that_negate_or_conjugate_are_saved_and_loaded(
    tmp_path: Path, kind: str, backend: tuple[str, int]
) -> None:
    """Their memory holds other values than they do."""
    view = LAZY[kind](torch.complex(torch.arange(6.0), torch.arange(6.0) + 7).reshape(2, 3))
    assert view.is_neg() or view.is_conj()
    values = view.clone().resolve_neg().resolve_conj()
    shardstore.save({"w": sharded(view)}, tmp_path / "place", backend)
    plain = torch.zeros_like(values)
    shardstore.load({"w": sharded(plain)}, tmp_path / "place")
    assert torch.equal(plain, values)
    into = LAZY[kind](torch.zeros(2, 3, dtype=torch.complex64))
    loaded = shardstore.load({"w": sharded(into)}, tmp_path / "place")
    assert torch.equal(into, values)
    assert torch.equal(loaded["w"], values)
    flat = LAZY[kind](torch.zeros(4, dtype=torch.complex64))
    part = ShardedTensor.from_rank_offsets_flat("w", flat, (2, 3), flattened_range=slice(1, 5))
    if backend[0] == "zarr":
        shardstore.load({"w": part}, tmp_path / "place", validate_access_integrity=False)
        assert torch.equal(flat, values.reshape(-1)[1:5])


# -- replicas that nobody saves ----------------------------------------------------------------


@pytest.mark.parametrize("replica_id", [1, -1, (0, 1)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_a_tensor_without_main_replica_is_not_left_out(
    tmp_path: Path, replica_id: Any, backend: tuple[str, int]
) -> None:
    weight = ShardedTensor.from_rank_offsets("lost", torch.ones(3), replica_id=replica_id)
    rng = ShardedObject("rng", 5, (1,), (0,), replica_id=replica_id)
    for wrong, name in (({"a": weight}, "'lost'"), ({"b": rng}, "'rng/shard_0_1'")):
        for save in (shardstore.save, save_later):
            with pytest.raises(AccessPatternError, match=f"{name}.*no main replica.*replica_id=0"):
                save({**wrong, **state()}, tmp_path / "place", backend)
            assert not (tmp_path / "place").exists()


@pytest.mark.parametrize("replica_id", [None, "a", 0.5], ids=str)
def test_replica_ids_of_a_wrong_type_are_refused(tmp_path: Path, replica_id: Any) -> None:
    weight = ShardedTensor.from_rank_offsets("w", torch.ones(3), replica_id=replica_id)
    with pytest.raises(ArgumentError, match=f"replica_id={replica_id!r}"):
        shardstore.save({"w": weight}, tmp_path / "place")


def test_rank_offsets_that_are_no_whole_numbers_are_refused() -> None:
    for offset in (("a", 0, 2), (0, 0.5, 2), (0, 1)):
        with pytest.raises(AccessPatternError, match="three whole numbers"):
            ShardedTensor.from_rank_offsets("w", torch.ones(2, 3), offset)  # type: ignore[arg-type]


# -- checkpoints of other kinds ----------------------------------------------------------------


def of_other_kinds(folder: Path) -> dict[str, tuple[Path, str]]:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=folder / "dcp", no_dist=True)
    (folder / "hub").mkdir()
    save_file({"w": torch.ones(3)}, folder / "hub" / "model.safetensors")
    torch.save({"w": torch.ones(3)}, folder / "model.pt")
    (folder / "run").mkdir()
    shardstore.save(state(), folder / "run" / "step-7")
    zarr.open_group(folder / "group", mode="w").create_array("x", data=np.ones(3))
    (folder / "empty").mkdir()
    convert_it = "shardstore convert"
    return {
        "dcp": (folder / "dcp", convert_it),
        "safetensors": (folder / "hub", convert_it),
        "safetensors file": (folder / "hub" / "model.safetensors", convert_it),
        "torch": (folder / "model.pt", "torch.load"),
        "above": (folder / "run", f"give {folder / 'run' / 'step-7'}"),
        "array": (folder / "run" / "step-7" / "w", f"{folder / 'run' / 'step-7'}"),
        "group": (folder / "group", "another program"),
        "empty": (folder / "empty", "it is an empty folder"),
    }


def test_the_error_says_what_a_place_is_instead_of_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place, says in of_other_kinds(tmp_path).values():
        for load in (lambda p: shardstore.load(state(), p), shardstore.load_plain_tensors):
            with pytest.raises(NotACheckpointError) as caught:
                load(place)
            assert says in str(caught.value)
        with pytest.raises(CheckpointException) as failed:
            dcp.load({"w": torch.ones(3)}, storage_reader=StorageReader(place), no_dist=True)
        assert says in str(failed.value)
        if place.name == "group":
            continue  # which the command line shows
        assert run(["ls", str(place)]) == 2
        shown = capsys.readouterr().err
        assert says in shown
        assert shown.count("\n") == 1


def test_a_file_of_torch_is_not_taken_for_safetensors(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "model.pt")
    with pytest.raises(NotACheckpointError, match=r"model\.pt is a file.*torch\.load"):
        convert(tmp_path / "model.pt", tmp_path / "out")
    assert os.listdir(tmp_path) == ["model.pt"]


def test_the_working_directory_is_not_replaced(here: Path) -> None:
    for place in (".", here):
        with pytest.raises(StorageError, match="working directory"):
            shardstore.save(state(), place, overwrite=True)
    assert Path.cwd() == here


# -- a disk that is full -------------------------------------------------------------------------


@pytest.fixture
def full_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of 64 KiB with a whole checkpoint and no room for another."""
    place = tmp_path / "disk"
    place.mkdir()
    size = getattr(request, "param", "size=64k")
    mount = ["mount", "-t", "tmpfs", "-o", size, "none", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("full_disk", ["nr_inodes=16"], indirect=True)
def test_a_disk_without_inodes_is_told_with_the_remedy(full_disk: Path) -> None:
    many = shardstore.shard({f"w{i}": torch.rand(4) for i in range(20)})
    with pytest.raises(StorageError, match=r"df -i.*pack=True"):
        shardstore.save(many, full_disk / "save")
    shardstore.save(many, full_disk / "packed", pack=True, array_documents=False)


def test_a_full_disk_names_what_it_could_not_write(full_disk: Path, tmp_path: Path) -> None:
    shardstore.save(state(), full_disk / "before")
    large = {"w": sharded(torch.rand(2**15))}
    shardstore.save(large, tmp_path / "source")
    source = tmp_path / "source"
    tries: dict[str, Callable[[Path], object]] = {
        "save": lambda to: shardstore.save(large, to),
        "pack": lambda to: shardstore.save(large, to, pack=True),
        "old layout": lambda to: shardstore.save(large, to, ("zarr", 1)),
        "torch_dist": lambda to: shardstore.save(large, to, ("torch_dist", 1)),
        "async": lambda to: save_later(large, to),
        "manager": lambda to: CheckpointManager(to).save(1, large),
        "convert": lambda to: convert(source, to),
        "to dcp": lambda to: convert(source, to, target_format="dcp"),
        "to safetensors": lambda to: convert(source, to, target_format="safetensors"),
        "export": lambda to: hf.save(large, to),
    }
    for name, attempt in tries.items():
        to = full_disk / name.replace(" ", "-")
        with pytest.raises(StorageError, match="No space left") as caught:
            attempt(to)
        if name in ("save", "async"):
            assert caught.value.key == "w"
            assert "the disk is full: free space or choose another place" in str(caught.value)
        assert caught.value.key in ("w", None), name  # a pack has many keys
        assert str(full_disk) in str(caught.value), name
        assert caught.value.errno == errno.ENOSPC, name
        assert not to.exists() or name == "manager", name
    with suppress(OSError), open(full_disk / "rest", "wb") as rest:
        while True:
            rest.write(b"x" * 4096)
            rest.flush()
    # Not a byte is left: the journal, the first thing written, names itself too.
    with pytest.raises(StorageError, match="No space left"):
        convert(source, full_disk / "again", target_format="safetensors")
    loaded = shardstore.load_plain_tensors(full_disk / "before")
    assert torch.equal(loaded["w"], torch.arange(6.0).reshape(2, 3))
