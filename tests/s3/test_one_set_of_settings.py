"""Documents and chunks travel by two clients: what is given, found or left out holds for both."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
import zarr
import zarr.codecs

import shardstore
from shardstore import CheckpointManager, hf
from shardstore.convert import convert
from shardstore.errors import ArgumentError, ChunkMissingError, StorageError
from shardstore.inspection.verify import verify
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.stores import remote, tensorstore
from shardstore.storage.stores.location import Location
from shardstore.storage.stores.prefix import ObjectPrefix
from shardstore.strategies import zarr as zarr_strategy
from testing.s3_proxy import VIRTUAL_HOSTS, Fault, FaultProxy
from testing.s3_servers import S3Server, free_port
from tests.helpers.range_server import Quiet, answering
from tests.helpers.s3_checkpoints import state, use_profile
from tests.helpers.store_suite import Target


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)


def saved_and_loaded(url: str, options: dict[str, Any]) -> None:
    shardstore.save(state(3), url, storage_options=options)
    loaded = shardstore.load(state(0), url, storage_options=options)
    assert loaded["step"] == 3
    assert bool((loaded["b"] == 3).all())
    assert loaded["o"] == "of version 3"


def test_an_endpoint_that_is_given_comes_before_variables(
    any_s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = any_s3_server.new_bucket()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{free_port()}")
    saved_and_loaded(f"s3://{bucket}/run", any_s3_server.storage_options)
    assert "run/w/c.0.0" in any_s3_server.keys(bucket)


@pytest.mark.parametrize(
    ("protocol", "given"),
    [
        ("s3", {}),
        ("s3a", {"config_kwargs": {"s3": {"addressing_style": "path"}}}),
        ("s3", {"asynchronous": True}),
    ],
    ids=str,
)
def test_options_of_the_configuration_of_fsspec(
    s3_server: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    protocol: str,
    given: dict[str, Any],
) -> None:
    """They hold where none of their name is given, as for every program that uses fsspec."""
    monkeypatch.setitem(fsspec.config.conf, protocol, s3_server.storage_options)
    caplog.set_level("DEBUG")
    bucket = s3_server.new_bucket()
    saved_and_loaded(f"s3://{bucket}/run", given)
    assert "run/w/c.0.0" in s3_server.keys(bucket)
    assert s3_server.secret not in caplog.text
    monkeypatch.setitem(fsspec.config.conf, protocol, {"endpoint_url": "host:9000"})
    with pytest.raises(StorageError, match="endpoint_url must begin with http"):
        Location.of(f"s3://{bucket}/run", given).exists()


def test_how_a_program_shares_its_file_system_does_not_matter(target: Target) -> None:
    place = target("run")
    more = {"asynchronous": True, "skip_instance_cache": True}
    saved_and_loaded(place.url, {**place.options, **more})


def test_variables_of_other_credentials_do_not_go_along(
    any_s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token-of-another-role")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    monkeypatch.setenv("AWS_REQUEST_PAYER", "requester")
    with FaultProxy(any_s3_server.endpoint_url) as proxy:
        server = any_s3_server.at(proxy.endpoint_url)
        saved_and_loaded(f"s3://{server.new_bucket()}/run", server.storage_options)
        requests = proxy.passed()
    assert len(requests) > 20
    for request in requests:
        assert "authorization" in request.headers
        assert "x-amz-security-token" not in request.headers
        assert "x-amz-request-payer" not in request.headers


@pytest.mark.parametrize(
    "source", ["option", "client", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "profile"]
)
def test_a_slash_at_the_end_of_an_endpoint_is_in_no_request(
    proxied: S3Server,
    proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    source: str,
) -> None:
    options: dict[str, Any] = {"key": proxied.key, "secret": proxied.secret}
    endpoint = {"endpoint_url": f"{proxied.endpoint_url}/"}
    if source == "option":
        options |= endpoint
    elif source == "client":
        options["client_kwargs"] = endpoint
    elif source == "profile":
        use_profile(tmp_path, monkeypatch, **endpoint)
    else:
        monkeypatch.setenv(source, endpoint["endpoint_url"])
    saved_and_loaded(f"s3://{proxied.new_bucket()}/run", options)
    paths = [request.path for request in proxy.passed()]
    assert len(paths) > 20
    assert [path for path in paths if path.startswith("//")] == []


def test_two_slashes_in_the_endpoint_of_a_profile_are_named(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bucket = s3_server.new_bucket()
    use_profile(tmp_path, monkeypatch, endpoint_url=f"{s3_server.endpoint_url}//s3")
    options = {"key": s3_server.key, "secret": s3_server.secret}
    with pytest.raises(ArgumentError, match=r"endpoint_url of the profile .*two slashes"):
        shardstore.save(state(3), f"s3://{bucket}/run", storage_options=options)
    assert s3_server.keys(bucket) == []


def converted(url: str, options: dict[str, Any]) -> object:
    with tempfile.TemporaryDirectory() as folder:
        convert(url, f"{folder}/copy", source_options=options)
        return shardstore.load(state(0), f"{folder}/copy")["b"][0]


def model(url: str, options: dict[str, Any]) -> object:
    found = {"b": torch.zeros(7)}
    hf.load(found, f"{url}-model", storage_options=options)
    return found["b"][0]


READERS: dict[str, Callable[[str, dict[str, Any]], object]] = {
    "load": lambda url, options: shardstore.load(state(0), url, storage_options=options)["b"][0],
    "one array": lambda url, options: zarr_strategy._load_from_array(
        state(0)["b"], Location.of(url, options)
    )[0],
    "open": lambda url, options: shardstore.open(url, options)["b"][0],
    "tensorstore": lambda url, options: shardstore.open(f"{url}/of-others", options)["b"][0],
    "model": model,
    "verify": lambda url, options: (
        verify(StoredCheckpoint(Location.of(url, options)), print).ok and 3
    ),
    "convert": converted,
    "manager": lambda url, options: (
        CheckpointManager(url.rpartition("/")[0], storage_options=options)
        .restore(state(0))
        .state["b"][0]
    ),
}


@pytest.mark.parametrize(
    ("fault", "client"),
    [
        (Fault.ABSENT, "tensorstore"),
        (Fault.MOVED, "tensorstore"),
        (Fault.DENIED, "tensorstore"),
        (Fault.DENIED, ""),
    ],
)
def test_what_one_client_does_not_find_is_no_damage(
    proxied: S3Server,
    proxy: FaultProxy,
    caplog: pytest.LogCaptureFixture,
    fault: Fault,
    client: str,
) -> None:
    """As behind a proxy, or at an address, that only one of the clients uses; or in another region,
    to which botocore alone follows the store."""
    url, options = f"s3://{proxied.new_bucket()}/run/step-1", proxied.storage_options
    shardstore.save(state(3), url, storage_options=options)
    group = zarr.open_group(f"{url}/of-others", mode="w", storage_options=options)
    group.create_array("b", data=np.full(7, 3.0), compressors=zarr.codecs.GzipCodec())
    hf.save({"b": torch.full((7,), 3.0)}, f"{url}-model", storage_options=options)
    proxy.add(fault, path="" if client else "/c[./]0", client=client, count=None)
    for name, reader in READERS.items():
        caplog.clear()
        tensorstore._warn_once.cache_clear()
        said = ""
        try:
            assert reader(url, options) == 3
        except StorageError as error:
            said = str(error)
        said += caplog.text
        assert "damage" not in said.lower(), name
        if fault == Fault.ABSENT:
            assert "different servers" in said or name in ("one array", "verify")
        if fault == Fault.MOVED:
            assert "AWS_REGION" in said or name == "verify", (name, said)
            assert "failed" not in said or name == "tensorstore", said


def test_a_chunk_that_no_client_finds_is_missing(s3_server: S3Server) -> None:
    """Of a checkpoint; another program's arrays have the fill value there, also in shards."""
    bucket, options = s3_server.new_bucket(), s3_server.storage_options
    url = f"s3://{bucket}/run"
    shardstore.save(state(3), url, storage_options=options)
    group = zarr.open_group(f"s3://{bucket}/others", mode="w", storage_options=options)
    how: dict[str, Any] = {"chunks": (2,), "shards": (4,), "compressors": zarr.codecs.GzipCodec()}
    group.create_array("b", shape=8, dtype="f4", fill_value=5, **how)[:3] = 3
    s3_server.client().delete_object(Bucket=bucket, Key="run/b/c.0")
    with pytest.raises(ChunkMissingError, match="'b'"):
        shardstore.load(state(0), url, storage_options=options)
    opened = shardstore.open(f"s3://{bucket}/others", options)
    assert opened["b"][:].tolist() == [3] * 3 + [5] * 5
    assert shardstore.open(f"s3://{bucket}/others/b", options)["b"][7] == 5


@pytest.mark.parametrize("minutes", [360, 2])
def test_credentials_that_end_are_those_of_both_clients(
    any_s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, minutes: int
) -> None:
    """A container gives those of a role. Those of two minutes are asked for again and again, as
    they are about to end."""
    server, bucket = any_s3_server, any_s3_server.new_bucket()
    asked: list[str] = []

    class Handler(Quiet):
        def _answer(self) -> None:
            asked.append(self.headers.get("Authorization", ""))
            until = datetime.now(UTC) + timedelta(minutes=minutes)
            about = {"AccessKeyId": server.key, "SecretAccessKey": server.secret, "Token": ""}
            about |= {"Expiration": until.strftime("%Y-%m-%dT%H:%M:%SZ")}
            self.end(200, {}, json.dumps(about).encode())

        do_GET = _answer  # noqa: N815 (its name)

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    with answering(Handler) as url:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{url}/credentials")
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", "of-this-container")
        # An option that no other test has: its client is made here.
        options = {
            "client_kwargs": {"endpoint_url": server.endpoint_url, "region_name": "us-east-1"},
            "config_kwargs": {"max_pool_connections": 17 + minutes},
        }
        saved_and_loaded(f"s3://{bucket}/run", options)
    assert set(asked) == {"of-this-container"}
    assert (len(asked) > 1) == (minutes < 10)


@pytest.mark.parametrize(
    ("given_by", "style"), [("option", "path"), ("option", "virtual"), ("variable", "virtual")]
)
def test_a_proxy_and_how_buckets_are_addressed(
    s3_server: S3Server,
    proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
    given_by: str,
    style: str,
) -> None:
    """No name below that of the hosts is known: every request has to go by the proxy, which both
    clients find in a variable."""
    bucket = s3_server.new_bucket()
    config: dict[str, Any] = {"s3": {"addressing_style": style}}
    if given_by == "option":
        config["proxies"] = {"http": proxy.endpoint_url}
    else:
        monkeypatch.setenv("http_proxy", proxy.endpoint_url)
    endpoint = {"endpoint_url": f"http://{VIRTUAL_HOSTS}", "config_kwargs": config}
    options = {"key": s3_server.key, "secret": s3_server.secret, **endpoint}
    saved_and_loaded(f"s3://{bucket}/run", options)
    hosts = {request.headers["host"].partition(":")[0] for request in proxy.passed()}
    assert hosts == {VIRTUAL_HOSTS if style == "path" else f"{bucket}.{VIRTUAL_HOSTS}"}
    chunks = proxy.passed(path="/w/c")
    assert {request.method for request in chunks} == {"GET", "PUT"}
    if given_by == "variable":
        assert not any("boto" in request.headers["user-agent"].lower() for request in chunks)
    assert "run/w/c.0.0" in s3_server.keys(bucket)


def test_an_encryption_is_asked_for_with_every_object(proxied: S3Server, proxy: FaultProxy) -> None:
    arguments = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "key-of-the-lab"}
    options = {**proxied.storage_options, "s3_additional_kwargs": arguments}
    saved_and_loaded(f"s3://{proxied.new_bucket()}/run", options)
    sent = proxy.passed("PUT", "/run/")
    assert len(sent) > 8
    for request in sent:
        assert request.headers.get("x-amz-server-side-encryption") == "aws:kms", request
        key = request.headers.get("x-amz-server-side-encryption-aws-kms-key-id")
        assert key == "key-of-the-lab", request


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"requester_pays": True}, "arguments of requests"),
        ({"s3_additional_kwargs": {"ACL": "private"}}, "arguments of requests"),
        ({"config_kwargs": {"read_timeout": 9}}, "a time limit"),
        ({"config_kwargs": {"signature_version": "s3"}}, "signatures of this version"),
        ({}, None),
    ],
)
def test_s3fs_moves_chunks_where_tensorstore_cannot(
    proxied: S3Server,
    proxy: FaultProxy,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    why: str | None,
) -> None:
    """Once a process and bucket it is said why."""
    caplog.set_level("INFO", "shardstore")
    saved_and_loaded(f"s3://{proxied.new_bucket()}/run", {**proxied.storage_options, **options})
    chunks = proxy.passed(path="/w/c")
    assert {request.method for request in chunks} == {"GET", "PUT"}
    by_s3fs = {"boto" in request.headers["user-agent"].lower() for request in chunks}
    assert by_s3fs == {why is not None}
    said = [r.getMessage() for r in caplog.records if "fsspec moves chunks" in r.getMessage()]
    assert len(said) == (why is not None)
    assert why is None or why in said[0]
    pays = {request.headers.get("x-amz-request-payer") for request in chunks}
    assert pays == ({"requester"} if "requester_pays" in options else {None})


def test_a_silent_server_is_given_up_and_the_next_request_works(
    proxied: S3Server, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where TensorStore has no limit of its own. A request that is left keeps its place in the
    context: here it is the only one."""
    monkeypatch.setattr(remote, "DEADLINE_S", 1.0)
    monkeypatch.setattr(tensorstore, "REQUESTS", 1)
    fresh = cache(tensorstore.shared_context.__wrapped__)
    monkeypatch.setattr(tensorstore, "shared_context", fresh)
    place = Location.of(f"s3://{proxied.new_bucket()}/run", proxied.storage_options)
    place.write("here", b"x")
    io = place.io()
    assert isinstance(io, tensorstore.KvStoreIO)
    proxy.add(Fault.SILENCE, path="/run/silent")
    with pytest.raises(StorageError, match="no answer within 1 s"):
        io.put("silent", [b"x"], create=True)
    assert io.put("next", [b"x"], create=True)
    assert io.get("next", size=1) == b"x"


def test_two_stores_behind_one_url_are_found_out(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, other = s3_server.new_bucket(), s3_server.new_bucket()
    elsewhere = Location.of(f"s3://{other}/run", s3_server.storage_options)
    io = elsewhere.io()
    monkeypatch.setattr(ObjectPrefix, "io", lambda place: io)
    with pytest.raises(StorageError, match="documents and chunks go to different stores"):
        shardstore.save(state(1), f"s3://{bucket}/run", storage_options=s3_server.storage_options)
    assert s3_server.keys(bucket) == []
