"""`shardstore.dcp.install()`: programs that give DCP a `checkpoint_id` alone save and load ours,
and load it by DCP's own reader where they name that."""

from __future__ import annotations

import os
import pickle
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import zarr
from torch.distributed.checkpoint import (
    FileSystemReader,
    FileSystemWriter,
    filesystem,
    state_dict_loader,
    state_dict_saver,
)
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard

import shardstore
from shardstore.convert import convert
from shardstore.dcp import StorageReader, StorageWriter, install
from shardstore.errors import ArgumentError, CheckpointExistsError, CheckpointingException
from shardstore.storage.commit.identity import is_ours
from shardstore.storage.stores.location import Location
from tests.helpers.programs import run_text
from tests.helpers.ranks_helper import run_ranks
from tests.helpers.trainers import whole

pytestmark = pytest.mark.filterwarnings("ignore")


def state(value: float = 1.0) -> dict[str, Any]:
    return {"model": {"w": torch.full((4, 3), value)}, "step": int(value)}


def loaded(place: Path | str) -> dict[str, Any]:
    wanted = state(-1.0)
    dcp.load(wanted, checkpoint_id=place, no_dist=True)
    return wanted


def loaded_by(reader: FileSystemReader) -> dict[str, Any]:
    wanted = state(-1.0)
    dcp.load(wanted, storage_reader=reader, no_dist=True)
    return wanted


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return torch.equal(a["model"]["w"], b["model"]["w"]) and a["step"] == b["step"]


@pytest.fixture
def installed() -> Iterator[None]:
    with install(durable=False):
        yield


@pytest.mark.usefixtures("installed")
def test_a_checkpoint_id_alone_uses_our_storage(tmp_path: Path) -> None:
    place = tmp_path / "step-1"
    dcp.save(state(), checkpoint_id=place, no_dist=True)
    assert zarr.open_group(place, mode="r")["model.w"][:].tolist() == [[1.0] * 3] * 4
    assert shardstore.load_plain_tensors(place)["model.w"].shape == (4, 3)
    assert same(loaded(place), state())
    assert same(loaded(str(place)), state())


@pytest.mark.usefixtures("installed")
def test_what_the_trainer_leaves_in_it_hinders_nothing(tmp_path: Path) -> None:
    place = tmp_path / "c"
    place.mkdir()
    for value in (1.0, 2.0):
        dcp.save(state(value), checkpoint_id=place, no_dist=True)
        assert value == 1.0 or torch.load(place / "meta.pt") == {"epoch": 1.0}
        torch.save({"epoch": value}, place / "meta.pt")
    assert same(loaded(place), state(2.0))
    assert torch.load(place / "meta.pt") == {"epoch": 2.0}
    assert whole(place)


def test_the_root_alone_describes_it(tmp_path: Path) -> None:
    place = tmp_path / "c"
    with install(durable=False, array_documents=False):
        for value in (1.0, 2.0):
            dcp.save(state(value), checkpoint_id=place, no_dist=True)
        assert same(loaded(place), state(2.0))
    assert [path.name for path in (place / "model.w").iterdir()] == ["c.0.0"]
    assert zarr.open_group(place, mode="r")["model.w"][:].tolist() == [[2.0] * 3] * 4
    assert whole(place)


@pytest.mark.usefixtures("installed")
def test_a_save_without_a_place_is_an_error_of_dcp() -> None:
    with pytest.raises(RuntimeError, match="checkpoint_id"):
        dcp.save(state(), no_dist=True)


@pytest.mark.usefixtures("installed")
def test_programs_that_look_for_the_file_of_dcp_find_one(tmp_path: Path) -> None:
    place = tmp_path / "c"
    dcp.save(state(), checkpoint_id=place, no_dist=True)
    assert (place / ".metadata").is_file()
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads((place / ".metadata").read_bytes())
    assert whole(place)
    shardstore.delete_checkpoint(place)
    assert not place.exists()


@pytest.mark.usefixtures("installed")
def test_the_reader_of_dcp_reads_ours_where_it_is_named(tmp_path: Path) -> None:
    """With the file of DCP, which ``install`` writes, and without it."""
    dcp.save(state(), checkpoint_id=tmp_path / "c", no_dist=True)
    dcp.save(state(), storage_writer=StorageWriter(tmp_path / "d"), no_dist=True)
    assert not (tmp_path / "d" / ".metadata").exists()
    for place in (tmp_path / "c", str(tmp_path / "c"), tmp_path / "d"):
        assert same(loaded_by(FileSystemReader(place)), state())
    whole_state = tmp_path / "whole.pt"
    dcp_to_torch_save(tmp_path / "c", whole_state)
    assert same(torch.load(whole_state), state())


@pytest.mark.usefixtures("installed")
def test_the_reader_of_dcp_goes_from_its_checkpoints_to_ours_and_back(tmp_path: Path) -> None:
    dcp.save(state(1.0), checkpoint_id=tmp_path / "ours", no_dist=True)
    writer = FileSystemWriter(tmp_path / "theirs")
    dcp.save(state(2.0), storage_writer=writer, no_dist=True)
    reader = FileSystemReader(tmp_path / "theirs")
    for name, value in (("theirs", 2.0), ("ours", 1.0), ("theirs", 2.0)):
        reader.reset(tmp_path / name)
        assert same(loaded_by(reader), state(value))
        assert same(loaded_by(reader), state(value))
        assert reader.checkpoint_id == tmp_path / name


def test_a_reader_of_dcp_may_be_older_than_the_installation_and_outlive_it(tmp_path: Path) -> None:
    class Derived(FileSystemReader):
        pass

    dcp.save(state(2.0), checkpoint_id=tmp_path / "theirs", no_dist=True)
    readers = [FileSystemReader(tmp_path / "ours"), Derived(tmp_path / "ours")]
    with install(durable=False):
        dcp.save(state(), checkpoint_id=tmp_path / "ours", no_dist=True)
        readers += [dcp.FileSystemReader(tmp_path / "ours")]
        readers += [filesystem.FileSystemReader(tmp_path / "ours")]
        for reader in readers:
            assert isinstance(reader, FileSystemReader)
            assert same(loaded_by(reader), state())
    for reader in readers:
        with pytest.raises(CheckpointException, match="invalid load key"):
            loaded_by(reader)
        reader.reset(tmp_path / "theirs")
        assert same(loaded_by(reader), state(2.0))
    with install():
        for reader in readers:
            reader.reset(tmp_path / "ours")
            assert same(loaded_by(reader), state())


@pytest.mark.usefixtures("installed")
def test_what_was_written_last_is_read_or_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "c"
    for value in (1.0, 3.0):
        dcp.save(state(value), checkpoint_id=place, no_dist=True)
        assert same(loaded_by(FileSystemReader(place)), state(value))
        dcp.save(state(value + 1), storage_writer=FileSystemWriter(place), no_dist=True)
        assert same(loaded_by(FileSystemReader(place)), state(value + 1))
        assert same(loaded(place), state(value + 1))
        done = convert(place, tmp_path / "converted", overwrite=True)
        assert done.source_format == "dcp"
        assert same(loaded(tmp_path / "converted"), state(value + 1))
        text = f"{place}: read from shardstore's files, over which PyTorch DCP saved newer values"
        assert text not in caplog.text
        assert shardstore.load({}, place)
        assert shardstore.open(place)
        assert same(loaded_by(StorageReader(place)), state(value))
        assert caplog.text.count(text) == 3
        caplog.clear()
    (place / ".metadata").unlink()
    os.mkfifo(place / ".metadata")  # not readable, as one that another user keeps private
    assert shardstore.load({}, place)
    assert shardstore.open(place)
    assert same(loaded_by(StorageReader(place)), state(value))


@pytest.mark.usefixtures("installed")
def test_the_reader_of_dcp_is_as_ever_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"\.metadata"):
        FileSystemReader(tmp_path / "nothing").read_metadata()
    place = tmp_path / "of_one_rank"
    dcp.save(state(), storage_writer=FileSystemWriter(place), no_dist=True)
    (place / ".metadata").rename(place / "__0.metadata")
    assert same(loaded_by(FileSystemReader(place)), state())
    dcp.save(state(), checkpoint_id=tmp_path / "ours", no_dist=True)
    with pytest.raises(FileNotFoundError, match="__0"):
        FileSystemReader(tmp_path / "ours").read_metadata(rank=0)


@pytest.mark.usefixtures("installed")
def test_damage_is_told_by_the_reader_of_dcp(tmp_path: Path) -> None:
    place = tmp_path / "c"
    dcp.save(state(), checkpoint_id=place, no_dist=True)
    (chunk,) = (path for path in (place / "model.w").glob("c*") if path.is_file())
    chunk.unlink()
    with pytest.raises(CheckpointException, match="load an earlier one"):
        loaded_by(FileSystemReader(place))


def test_an_installation_can_be_taken_back(tmp_path: Path) -> None:
    before = [state_dict_saver.__dict__["_storage_setup"], state_dict_loader._storage_setup]
    methods = dict(vars(FileSystemReader))
    with pytest.raises(ArgumentError, match="threads"):
        install(threads=0)
    assert dict(vars(FileSystemReader)) == methods
    installation = install()
    assert dict(vars(FileSystemReader)) != methods
    installation.uninstall()
    assert [state_dict_saver.__dict__["_storage_setup"], state_dict_loader._storage_setup] == before
    assert dict(vars(FileSystemReader)) == methods
    dcp.save(state(), checkpoint_id=tmp_path / "c", no_dist=True)
    assert list((tmp_path / "c").glob("*.distcp"))


def test_the_last_one_counts_until_it_is_taken_back(tmp_path: Path) -> None:
    with install(), install(overwrite=False):
        dcp.save(state(), checkpoint_id=tmp_path / "c", no_dist=True)
        with pytest.raises(CheckpointException) as caught:
            dcp.save(state(), checkpoint_id=tmp_path / "c", no_dist=True)
    failure = next(iter(caught.value.failures.values()))[0]
    assert isinstance(failure, CheckpointExistsError)
    dcp.save(state(2.0), storage_writer=None, checkpoint_id=tmp_path / "d", no_dist=True)
    assert list((tmp_path / "d").glob("*.distcp"))


def test_a_pytorch_that_chooses_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(state_dict_loader, "_storage_setup")
    with pytest.raises(CheckpointingException, match="StorageWriter or StorageReader"):
        install()


def _background(rank: int, world_size: int, folder: str) -> bool:
    mesh = init_device_mesh("cpu", (world_size,))

    def made(value: float) -> DTensor:
        return DTensor.from_local(torch.full((4, 3), value + rank), mesh, [Shard(0)])

    group = dist.new_group(backend="gloo")
    thread = AsyncCheckpointerType.THREAD
    how = {"checkpoint_id": f"{folder}/step-5", "process_group": group}
    with install(durable=False):
        async_save({"w": made(5.0)}, **how, async_checkpointer_type=thread).result()
        wanted = {"w": made(-1.0)}
        dcp.load(wanted, checkpoint_id=how["checkpoint_id"])
    return torch.equal(wanted["w"].to_local(), made(5.0).to_local())


def test_asynchronous_saves_of_several_ranks(tmp_path: Path) -> None:
    assert run_ranks(_background, 2, str(tmp_path)) == [True, True]


def _fsdp1(rank: int, world_size: int, folder: str) -> bool:
    def made(seed: int) -> tuple[Fsdp1, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        # Rows that two ranks share unevenly, or that one of them has alone.
        layers = [torch.nn.Linear(6, 5), torch.nn.Linear(5, 1), torch.nn.Linear(1, 4)]
        model = Fsdp1(
            torch.nn.Sequential(*layers),
            auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        Fsdp1.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        return model, torch.optim.AdamW(model.parameters(), lr=0.05, amsgrad=True)

    def step(model: Fsdp1, optimizer: torch.optim.Optimizer, number: int) -> None:
        torch.manual_seed(world_size * number + rank)
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()

    def parts(model: Fsdp1, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        found = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            own = optimizer.state[parameter]
            found += [own[name].clone() for name in sorted(own)]
        return found

    model, optimizer = made(0)
    step(model, optimizer, 1)
    with install(durable=False):
        state = {
            "model": model.state_dict(),
            "optim": Fsdp1.optim_state_dict(model, optimizer),
        }
        dcp.save(state, checkpoint_id=folder)
        again, its_optimizer = made(1)
        step(again, its_optimizer, 2)
        wanted = {"model": again.state_dict()}
        reader = FileSystemReader(folder)
        dcp.load(wanted, storage_reader=reader)
        again.load_state_dict(wanted["model"])
        found = load_sharded_optimizer_state_dict(wanted["model"], "optim", reader)
    flat = Fsdp1.optim_state_dict_to_load(again, its_optimizer, found["optim"])
    its_optimizer.load_state_dict(flat)
    for number in (3, 4):
        ours, theirs = parts(again, its_optimizer), parts(model, optimizer)
        if not all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)):
            return False
        step(model, optimizer, number)
        step(again, its_optimizer, number)
    return True


def test_sharded_states_of_fsdp1_with_an_optimizer(tmp_path: Path) -> None:
    assert run_ranks(_fsdp1, 2, str(tmp_path / "c")) == [True, True]
    assert whole(tmp_path / "c")


class Mine(FileSystemWriter):
    """A writer of the program's own."""


def test_writers_that_a_program_names(tmp_path: Path) -> None:
    """Only DCP's own writer is served, and only if asked for."""
    cases: tuple[tuple[dict[str, Any], Callable[..., Any], bool], ...] = (
        ({}, FileSystemWriter, False),
        ({"named_writers": True}, FileSystemWriter, True),
        ({"named_writers": True}, Mine, False),
        ({"named_writers": True}, partial(FileSystemWriter, overwrite=False), False),
        ({"named_writers": True}, FsspecWriter, False),
    )
    for number, (options, kind, is_served) in enumerate(cases):
        place = tmp_path / str(number)
        with install(durable=False, **options):
            dcp.save(state(), storage_writer=kind(place), no_dist=True)
            assert (place / "zarr.json").exists() == is_served
            assert bool(list(place.glob("*.distcp"))) != is_served
            assert same(loaded_by(FileSystemReader(place)), state())


def test_a_save_in_the_background_is_waited_for_by_what_relies_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, begun, real = threading.Event(), threading.Event(), StorageWriter.write_data

    def held(self: StorageWriter, *args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            go.wait(60)
        return real(self, *args)

    monkeypatch.setattr(StorageWriter, "write_data", held)
    old = tmp_path / "old"
    for call in (
        lambda: dcp.save(state(3.0), checkpoint_id=tmp_path / "next"),
        lambda: dcp.load(state(), checkpoint_id=tmp_path / "new"),
        lambda: loaded_by(FileSystemReader(tmp_path / "new")),
        lambda: shutil.rmtree(old),
    ):
        old.mkdir(exist_ok=True)
        go.clear()
        begun.clear()
        with install(asynchronous=True, durable=False):
            given = state(2.0)
            assert dcp.save(given, checkpoint_id=tmp_path / "new") is None
            given["model"]["w"].fill_(-7)  # the state is copied
            assert begun.wait(60)
            assert not is_ours(Location.of(tmp_path / "new"))
            (tmp_path / "of a child").mkdir()
            if (child := os.fork()) == 0:  # as a worker of a data loader, which has no such thread
                shutil.rmtree(tmp_path / "of a child")
                os._exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            assert not (tmp_path / "of a child").exists()
            threading.Timer(0.1, go.set).start()
            call()
            assert same(loaded(tmp_path / "new"), state(2.0))
        shardstore.delete_checkpoint(tmp_path / "new")
    assert not old.exists()


def test_an_error_in_the_background_deletes_nothing_and_is_raised_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "old"
    old.mkdir()
    with install(asynchronous=True, durable=False):
        with monkeypatch.context() as patch:
            patch.setattr("shardstore.storage.commit.folder.os.rename", _no_space)
            patch.setattr("os.rename", _no_space)
            dcp.save(state(), checkpoint_id=tmp_path / "new")
            with pytest.raises(CheckpointException, match="No space"):
                shutil.rmtree(old, ignore_errors=True)
        assert old.exists()
        dcp.save(state(2.0), checkpoint_id=tmp_path / "new")
        shutil.rmtree(old)
        assert not old.exists()
        assert same(loaded(tmp_path / "new"), state(2.0))


def _no_space(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def test_the_end_of_a_program_waits_for_its_save_and_tells_its_error(tmp_path: Path) -> None:
    program = (
        "import os, sys, torch, shardstore.dcp, torch.distributed.checkpoint as dcp\n"
        "def fails(*_, **__):\n"
        "    raise OSError(28, 'No space left on device')\n"
        "if sys.argv[2] == 'full':\n"
        "    os.rename = fails\n"
        "shardstore.dcp.install(asynchronous=True)\n"
        "dcp.save({'w': torch.ones(1000)}, checkpoint_id=sys.argv[1])\n"
    )
    done = run_text(program, tmp_path / "good", "")
    assert done.returncode == 0, done.stderr
    assert whole(tmp_path / "good")
    done = run_text(program, tmp_path / "none", "full")
    assert done.returncode == 1
    assert f"the asynchronous save to {tmp_path / 'none'} failed" in done.stderr
    assert "No space left on device" in done.stderr
    assert not (tmp_path / "none").exists()


def save_by_a_part_of_the_ranks(rank: int, world_size: int, folder: Path) -> None:
    group = dist.new_group([1, 2])
    with install(asynchronous=True, durable=False):
        for place in (folder / "all", folder / "again"):
            dcp.save(state(2.0), checkpoint_id=place)
        if rank > 0:
            dcp.save(state(3.0), checkpoint_id=folder / "part", process_group=group)
    dist.barrier()  # to uninstall waits for the last save
    for place, value in ((folder / "again", 2.0), *([(folder / "part", 3.0)] * rank)):
        wanted = state(-1.0)
        dcp.load(wanted, storage_reader=StorageReader(place), no_dist=True)
        assert same(wanted, state(value))


def test_ranks_of_a_group_save_in_the_background(tmp_path: Path) -> None:
    run_ranks(save_by_a_part_of_the_ranks, 3, tmp_path)
    assert whole(tmp_path / "part")
