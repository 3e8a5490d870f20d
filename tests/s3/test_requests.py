"""What a save asks of the store: how many requests, and of which kind, counted by a proxy.

Packs take few requests, and meet the same faults as any object.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardstore
from shardstore import ShardedTensor, hf
from shardstore.errors import CheckpointingException
from shardstore.hf.places import PART_BYTES
from shardstore.storage.stores.tensorstore import REQUESTS
from testing.s3_proxy import Fault, FaultProxy
from testing.s3_servers import S3Server
from tests.helpers.s3_checkpoints import Run, requests_of

ARRAYS = 20
CONTROL = 10
"""Requests of a save beside the objects of the checkpoint."""


def state(arrays: int) -> dict[str, Any]:
    return shardstore.shard({f"a{i}": torch.arange(16.0) + i for i in range(arrays)})


@pytest.fixture
def run(own_run: Run) -> Run:
    own_run.save(1)  # the store has been seen to honour conditions
    return own_run


def test_each_object_is_put_once_and_read_once(run: Run, proxy: FaultProxy) -> None:
    """A save asks for none of them, a load for the chunks, a deletion for the root alone."""
    given, deletions = {"storage_options": run.options}, []
    for step, documents in ((2, True), (3, False)):
        url, prefix = run.url(step), f"/{run.bucket}/run/step-{step}/"
        asked = requests_of(
            proxy,
            lambda url=url, documents=documents: shardstore.save(
                state(ARRAYS), url, array_documents=documents, **given
            ),
        )
        objects = [r.path.removeprefix(prefix) for r in asked if ".attempts" not in r.path]
        puts = [r.path.removeprefix(prefix) for r in asked if r.method == "PUT"]
        fixed = {"common.pt", "manifest.npz", "metadata.json", "zarr.json"}
        each = ("c.0", "zarr.json") if documents else ("c.0",)
        wanted = {f"a{i}/{name}" for i in range(ARRAYS) for name in each} | fixed
        assert sorted(name for name in puts if ".attempts" not in name) == sorted(wanted)
        assert {name for name in objects if name.startswith("a")} == wanted - fixed
        assert all(200 <= (r.status or 0) < 300 for r in asked if r.method == "PUT")
        assert "HEAD" not in {r.method for r in asked}
        # "Expect: 100-continue" would take one more round trip.
        assert not [r.path for r in asked if "expect" in r.headers]
        assert len(asked) - len(wanted) <= CONTROL
        asked = requests_of(proxy, lambda url=url: shardstore.load(state(ARRAYS), url, **given))
        names = [r.path.removeprefix(prefix) for r in asked]
        assert sorted(name for name in names if "/" in name) == sorted(
            f"a{i}/c.0" for i in range(ARRAYS)
        )
        asked = requests_of(proxy, lambda url=url: shardstore.delete_checkpoint(url, **given))
        deletions.append(len(asked))
        # Which arrays are ours the root says, and none of their own documents.
        assert proxy.count("GET", rf"/step-{step}/[^/?]+/zarr\.json") == 0
    assert deletions[0] == deletions[1]


def test_independent_requests_are_sent_at_the_same_time(run: Run, proxy: FaultProxy) -> None:
    proxy.latency_s, proxy.most_at_once = 0.3, 0
    shardstore.save(state(ARRAYS), run.url(2), storage_options=run.options)
    assert ARRAYS <= proxy.most_at_once <= REQUESTS


def test_metadata_of_many_arrays_is_one_get(run: Run, proxy: FaultProxy) -> None:
    shardstore.save(state(100), run.url(4), storage_options=run.direct.storage_options)
    found: dict[str, Any] = {}

    def load() -> None:
        found.update(shardstore.load_tensors_metadata(run.url(4), storage_options=run.options))

    (request,) = requests_of(proxy, load)
    assert len(found) == 100
    assert (request.method, request.path) == ("GET", f"/{run.bucket}/run/step-4/zarr.json")


@pytest.mark.parametrize("signs", [None, True, False])
def test_signatures_cover_the_content_unless_told_not_to(
    server: S3Server, proxied: S3Server, proxy: FaultProxy, signs: bool | None
) -> None:
    s3: dict[str, object] = {"addressing_style": "path"}
    if signs is not None:
        s3["payload_signing_enabled"] = signs
    run = Run.new(proxied, server, config_kwargs={"s3": s3})
    large = torch.arange(2**20, dtype=torch.float32)
    saved = {**state(ARRAYS), "large": ShardedTensor.from_rank_offsets("large", large)}
    shardstore.save(saved, run.url(4), storage_options=run.options)
    puts = proxy.passed("PUT")
    signed = {r.path: r.headers["x-amz-content-sha256"] for r in puts}
    of_large = [content for path, content in signed.items() if "/large/c" in path]
    others = [content for path, content in signed.items() if "/large/c" not in path]
    chunks = [c for path, c in signed.items() if path.endswith("/c.0") and "/a" in path]
    assert of_large
    assert len(chunks) == ARRAYS
    if signs is False:  # which TensorStore cannot do: botocore sends all of it
        assert set(of_large + others) == {"UNSIGNED-PAYLOAD"}
    else:
        assert all(len(bytes.fromhex(said)) == 32 for said in of_large + others)
        assert len(set(chunks)) == ARRAYS
    large.zero_()
    shardstore.load(saved, run.url(4), storage_options=run.options)
    assert large[-1] == 2**20 - 1


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, id="botocore"),
        pytest.param({"read_timeout": 30}, id="s3fs"),  # which knows what botocore is not told
        pytest.param({"s3": {"payload_signing_enabled": False}}, id="unsigned"),
    ],
)
def test_parts_of_an_export_are_each_sent_once(
    server: S3Server, proxied: S3Server, proxy: FaultProxy, config: dict[str, Any]
) -> None:
    s3 = {"addressing_style": "path", **config.get("s3", {})}
    run = Run.new(proxied, server, config_kwargs={**config, "s3": s3})
    model = {"w": torch.arange(PART_BYTES // 4 + 1000, dtype=torch.float32)}
    hf.save(model, run.url(5), storage_options=run.options)
    parts = proxy.passed(path="partNumber=")
    assert [r.method for r in parts] == ["PUT", "PUT"]
    signed = {r.headers["x-amz-content-sha256"] for r in parts}
    if "s3" in config:
        assert signed == {"UNSIGNED-PAYLOAD"}
    else:
        assert sorted(len(bytes.fromhex(said)) for said in signed) == [32, 32]
    loaded = {"w": torch.zeros_like(model["w"])}
    asked = requests_of(proxy, lambda: hf.load(loaded, run.url(5), storage_options=run.options))
    assert torch.equal(loaded["w"], model["w"])
    # The client of chunks reads the weights, if it knows the settings, and no byte twice.
    by_chunks = [r.headers["range"] for r in asked if "tensorstore" in r.headers["user-agent"]]
    assert bool(by_chunks) != ("read_timeout" in config)
    assert len(set(by_chunks)) == len(by_chunks)


def test_many_arrays_take_few_requests(run: Run, proxy: FaultProxy) -> None:
    """Parts that lie near each other are one of them."""
    options = {"storage_options": run.options}
    saved = state(60)
    sent = requests_of(proxy, lambda: shardstore.save(saved, run.url(2), pack=True, **options))
    assert len(sent) <= 20
    loaded = shardstore.shard({key: torch.zeros(16) for key in saved})
    asked = requests_of(proxy, lambda: shardstore.load(loaded, run.url(2), **options))
    names = [request.path.rpartition("/step-2/")[2] for request in asked]
    assert sorted(names) == [".packs/0.0.zip", "common.pt", "metadata.json", "zarr.json"]
    assert all(torch.equal(loaded[key].data, part.data) for key, part in saved.items())
    third = {f"a{i}": saved[f"a{i}"] for i in range(0, 60, 3)}
    asked = requests_of(proxy, lambda: shardstore.load(third, run.url(2), **options))
    assert len([request for request in asked if ".packs" in request.path]) == 1
    shardstore.delete_checkpoint(run.url(2), **options)
    assert run.direct.keys(run.bucket, "run/step-2/") == []


@pytest.mark.parametrize("fault", [Fault.DROP_ANSWER, Fault.RESET_IN_REQUEST])
def test_a_pack_survives_one_fault(run: Run, proxy: FaultProxy, fault: Fault) -> None:
    rule = proxy.add(fault, methods=("PUT",), path=r"/\.packs/")
    run.save(2, pack=True)
    assert rule.hits
    assert run.version(2) == 2


def test_a_store_that_refuses_a_pack_leaves_no_checkpoint(run: Run, proxy: FaultProxy) -> None:
    proxy.add(Fault.SLOW_DOWN, methods=("PUT",), path=r"/\.packs/", count=None)
    with pytest.raises(CheckpointingException, match=r"\.packs/0\.0\.zip"):
        run.save(2, pack=True)
    assert run.version(2) is None
    assert run.direct.keys(run.bucket, "run/step-2/") == []
