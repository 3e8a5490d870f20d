"""Open checkpoints and their arrays travel to other processes, as places and not as values."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch
import zarr
from torch.utils.data import DataLoader, Dataset

import shardstore
from shardstore import ShardedObject, ShardedTensor
from shardstore.errors import ArgumentError, MissingKeyError, NotACheckpointError, StorageError
from testing.s3_servers import S3Server


def state() -> dict[str, Any]:
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.arange(40.0).view(10, 4)),
        "half": ShardedTensor.from_rank_offsets("half", torch.ones(3).bfloat16()),
        "o": ShardedObject("o", {"seed": 1}, (1,), (0,)),
        "step": 7,
    }


@pytest.fixture(scope="module")
def workers() -> Iterator[ProcessPoolExecutor]:
    """One process."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        yield pool


def read(array: Any) -> Any:
    return array[2:4]


def set_variables(variables: dict[str, str]) -> None:
    os.environ.update(variables)


def unpickled(work: Any, data: bytes) -> Any:
    return work(pickle.loads(data))


def look(ckpt: Any) -> Any:
    return list(ckpt), ckpt.common, dict(ckpt.objects), ckpt["w"][0].tolist()


class Rows(Dataset[Any]):
    """What people write: the array is an attribute, and workers read rows of it."""

    def __init__(self, place: Path) -> None:
        self.rows = shardstore.open(place)["w"]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        return torch.from_numpy(self.rows[i])


def test_opened_arrays_travel_to_worker_processes(
    tmp_path: Path, workers: ProcessPoolExecutor
) -> None:
    shardstore.save(state(), tmp_path / "c")
    ckpt = shardstore.open(tmp_path / "c")
    assert np.array_equal(workers.submit(read, ckpt["w"]).result(), ckpt["w"][2:4])
    assert workers.submit(look, ckpt).result() == look(ckpt)
    assert np.array_equal(workers.submit(np.asarray, ckpt["half"]).result(), ckpt["half"][...])


@pytest.mark.parametrize(
    "start_method", [pytest.param("spawn", marks=pytest.mark.long), "forkserver"]
)
def test_arrays_travel_to_workers_of_a_data_loader(tmp_path: Path, start_method: str) -> None:
    shardstore.save(state(), tmp_path / "c")
    loader = DataLoader(
        Rows(tmp_path / "c"), batch_size=5, num_workers=1, multiprocessing_context=start_method
    )
    assert torch.equal(torch.cat(list(loader)), torch.arange(40.0).view(10, 4))


def test_a_pickle_is_a_place(tmp_path: Path) -> None:
    big = ShardedTensor.from_rank_offsets("big", torch.arange(1e6))
    shardstore.save({**state(), "big": big}, tmp_path / "c")
    ckpt = shardstore.open(tmp_path / "c")
    assert len(pickle.dumps(ckpt["big"])) < 1000
    arrays = pickle.loads(pickle.dumps([ckpt["w"], ckpt["half"]]))
    assert arrays[0].checkpoint is arrays[1].checkpoint
    assert copy.deepcopy(ckpt)["w"][0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("what", ["checkpoint", "array"])
def test_a_replaced_checkpoint_is_an_error_in_the_worker(
    tmp_path: Path, workers: ProcessPoolExecutor, what: str
) -> None:
    """Also if the new one has the same values."""
    place = tmp_path / what
    shardstore.save(state(), place)
    ckpt = shardstore.open(place)
    work, sent = (look, ckpt) if what == "checkpoint" else (read, ckpt["w"])
    data = pickle.dumps(sent)
    assert workers.submit(unpickled, work, data).result() is not None
    shardstore.save(state(), place, overwrite=True)
    with pytest.raises(StorageError, match=f"{place} was replaced.*open it again"):
        workers.submit(unpickled, work, data).result()


def test_arrays_of_other_programs_travel_to_workers(
    tmp_path: Path, workers: ProcessPoolExecutor
) -> None:
    """Groups of both formats, and single arrays."""
    for zarr_format in (2, 3):
        place = tmp_path / f"v{zarr_format}"
        group = zarr.open_group(place, mode="w", zarr_format=zarr_format)  # type: ignore[arg-type]
        group.create_array("a/w", data=np.arange(6.0))
        for ckpt, key in ((shardstore.open(place), "a/w"), (shardstore.open(place / "a/w"), "w")):
            assert workers.submit(read, ckpt[key]).result().tolist() == [2, 3]
            assert workers.submit(list, ckpt).result() == [key]


def test_a_place_that_is_gone_is_an_error_in_the_worker(tmp_path: Path) -> None:
    shardstore.save(state(), tmp_path / "c")
    data = pickle.dumps(shardstore.open(tmp_path / "c")["w"])
    (tmp_path / "c").rename(tmp_path / "d")
    with pytest.raises(NotACheckpointError, match="does not exist"):
        pickle.loads(data)


NAMED = {
    "endpoint_url": "http://127.0.0.1:9",
    "profile": "p",
    "region_name": "eu",
    "client_kwargs": {"endpoint_url": "http://127.0.0.1:9", "region_name": "eu"},
    "config_kwargs": {"s3": {"addressing_style": "path"}},
    "key": None,
}
SECRET = "seCr3t/value"
EXPLICIT = [
    ("secret", {"secret": SECRET}),
    ("key", {"key": SECRET}),
    ("token", {"token": SECRET}),
    ("password", {"password": SECRET}),
    ("client_kwargs.aws_secret_access_key", {"client_kwargs": {"aws_secret_access_key": SECRET}}),
    ("config_kwargs.proxies", {"config_kwargs": {"proxies": {"http": f"http://me:{SECRET}@h"}}}),
    ("endpoint_url", {"endpoint_url": f"http://me:{SECRET}@h:9"}),
    ("client_kwargs", {"client_kwargs": SECRET}),
]


def in_memory(options: dict[str, Any], user: str = "") -> Any:
    """An open checkpoint of a store that ignores its options."""
    url = f"memory://{user}place-{uuid4().hex}/c"
    shardstore.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(3))}, url)
    return shardstore.open(url, options)


def test_options_that_name_a_store_travel() -> None:
    ckpt = in_memory(NAMED)
    found = pickle.loads(pickle.dumps(ckpt))
    given = {name: value for name, value in NAMED.items() if value is not None}
    assert found.stored.location.options == given
    assert found["w"][...].tolist() == [1, 1, 1]


@pytest.mark.parametrize(("name", "options"), EXPLICIT)
def test_secrets_do_not_travel(name: str, options: dict[str, Any]) -> None:
    ckpt = in_memory({**NAMED, **options})
    for value in (ckpt, ckpt["w"]):
        with pytest.raises(ArgumentError, match=rf"option {name}\b.*AWS_\* variables") as caught:
            pickle.dumps(value)
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize("user", ["me:seCr3t@", "me@"])
def test_a_url_with_a_user_does_not_travel(user: str) -> None:
    with pytest.raises(ArgumentError, match=r"has a user in its URL.*open it in the") as caught:
        pickle.dumps(in_memory({}, user)["w"])
    assert "seCr3t" not in str(caught.value) + json.dumps(caught.value.url)


def test_arrays_of_an_object_store_travel_to_workers(
    s3_server: S3Server, workers: ProcessPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials come from the worker's own variables."""
    url, options = f"s3://{s3_server.new_bucket()}/run", s3_server.storage_options
    shardstore.save(state(), url, storage_options=options)
    with pytest.raises(ArgumentError, match="option key"):
        pickle.dumps(shardstore.open(url, options))
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    variables = {name: s3_server.environment[name] for name in names}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    named = {name: options[name] for name in ("client_kwargs", "config_kwargs")}
    array = shardstore.open(url, named)["w"]
    assert s3_server.secret.encode() not in pickle.dumps(array)
    workers.submit(set_variables, variables).result()
    assert np.array_equal(workers.submit(read, array).result(), array[2:4])


def test_an_array_that_was_removed(tmp_path: Path) -> None:
    shardstore.save(state(), tmp_path / "c")
    data = pickle.dumps(shardstore.open(tmp_path / "c")["w"])
    shardstore.remove_sharded_tensors(tmp_path / "c", "w")
    with pytest.raises(MissingKeyError, match="w"):
        pickle.loads(data)
