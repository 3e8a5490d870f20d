"""Documents and chunks travel by two clients: what is given, found or left out holds for both."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import numpy as np
import pytest
import zarr
import zarr.codecs

import shardstore
from shardstore import CheckpointManager
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
from tests.helpers.s3_checkpoints import state
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


@pytest.mark.parametrize("protocol", ["s3", "s3a"])
@pytest.mark.parametrize(
    "given",
    [{}, {"config_kwargs": {"s3": {"addressing_style": "path"}}}, {"asynchronous": True}],
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


@pytest.mark.parametrize("name", ["asynchronous", "skip_instance_cache"])
def test_how_a_program_shares_its_file_system_does_not_matter(target: Target, name: str) -> None:
    place = target("run")
    saved_and_loaded(place.url, {**place.options, name: True})


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


@pytest.mark.parametrize("source", ["option", "client", "AWS_ENDPOINT_URL", "S3", "profile"])
def test_a_slash_at_the_end_of_an_endpoint_is_in_no_request(
    s3_server: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    source: str,
) -> None:
    options: dict[str, Any] = {"key": s3_server.key, "secret": s3_server.secret}
    with FaultProxy(s3_server.endpoint_url) as proxy:
        endpoint = f"{proxy.endpoint_url}/"
        if source == "option":
            options["endpoint_url"] = endpoint
        elif source == "client":
            options["client_kwargs"] = {"endpoint_url": endpoint}
        elif source == "profile":
            (tmp_path / "config").write_text(f"[profile of-here]\nendpoint_url = {endpoint}\n")
            monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
            monkeypatch.setenv("AWS_PROFILE", "of-here")
        else:
            monkeypatch.setenv("AWS_ENDPOINT_URL_S3" if source == "S3" else source, endpoint)
        saved_and_loaded(f"s3://{s3_server.new_bucket()}/run", options)
        paths = [request.path for request in proxy.passed()]
    assert len(paths) > 20
    assert [path for path in paths if path.startswith("//")] == []


def test_two_slashes_in_the_endpoint_of_a_profile_are_named(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bucket = s3_server.new_bucket()
    (tmp_path / "config").write_text(
        f"[profile of-here]\nendpoint_url = {s3_server.endpoint_url}//s3\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "of-here")
    options = {"key": s3_server.key, "secret": s3_server.secret}
    with pytest.raises(ArgumentError, match=r"endpoint_url of the profile .*two slashes"):
        shardstore.save(state(3), f"s3://{bucket}/run", storage_options=options)
    assert s3_server.keys(bucket) == []


def converted(url: str, options: dict[str, Any]) -> object:
    with tempfile.TemporaryDirectory() as folder:
        convert(url, f"{folder}/copy", source_options=options)
        return shardstore.load(state(0), f"{folder}/copy")["b"][0]


READERS: dict[str, Callable[[str, dict[str, Any]], object]] = {
    "load": lambda url, options: shardstore.load(state(0), url, storage_options=options)["b"][0],
    "one array": lambda url, options: zarr_strategy._load_from_array(
        state(0)["b"], Location.of(url, options)
    )[0],
    "open": lambda url, options: shardstore.open(url, options)["b"][0],
    "tensorstore": lambda url, options: shardstore.open(f"{url}/of-others", options)["b"][0],
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


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("fault", "client"), [("ABSENT", "tensorstore"), ("DENIED", "tensorstore"), ("DENIED", "")]
)
def test_what_one_client_does_not_find_is_no_damage(
    s3_server: S3Server, caplog: pytest.LogCaptureFixture, reader: str, fault: str, client: str
) -> None:
    """As behind a proxy, or at an address, that only one of the clients uses."""
    bucket = s3_server.new_bucket()
    with FaultProxy(s3_server.endpoint_url) as proxy:
        options = s3_server.at(proxy.endpoint_url).storage_options
        url = f"s3://{bucket}/run/step-1"
        shardstore.save(state(3), url, storage_options=options)
        group = zarr.open_group(f"{url}/of-others", mode="w", storage_options=options)
        group.create_array("b", data=np.full(7, 3.0), compressors=zarr.codecs.GzipCodec())
        proxy.add(Fault[fault], path="/c[./]0" if client == "" else "", client=client, count=None)
        said = ""
        try:
            assert READERS[reader](url, options) == 3
        except StorageError as error:
            said = str(error)
        said += caplog.text
        assert "damage" not in said.lower()
        if fault == "ABSENT":
            assert "different servers" in said or reader in ("one array", "verify")


def test_a_chunk_that_no_client_finds_is_missing(s3_server: S3Server) -> None:
    """Of a checkpoint; another program's arrays have the fill value there."""
    bucket, options = s3_server.new_bucket(), s3_server.storage_options
    url = f"s3://{bucket}/run"
    shardstore.save(state(3), url, storage_options=options)
    group = zarr.open_group(f"s3://{bucket}/others", mode="w", storage_options=options)
    array = group.create_array(
        "b", shape=8, chunks=4, dtype="f4", fill_value=5, compressors=zarr.codecs.GzipCodec()
    )
    array[:4] = 3
    s3_server.client().delete_object(Bucket=bucket, Key="run/b/c.0")
    with pytest.raises(ChunkMissingError, match="'b'"):
        shardstore.load(state(0), url, storage_options=options)
    opened = shardstore.open(f"s3://{bucket}/others", options)
    assert opened["b"][:].tolist() == [3] * 4 + [5] * 4


@contextmanager
def giving_credentials(server: S3Server, lasting: timedelta) -> Iterator[tuple[str, list[str]]]:
    """What a container asks for its role's credentials, and what was said to be allowed to."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers.get("Authorization", ""))
            until = (datetime.now(UTC) + lasting).strftime("%Y-%m-%dT%H:%M:%SZ")
            about = {"AccessKeyId": server.key, "SecretAccessKey": server.secret}
            body = json.dumps({**about, "Token": "", "Expiration": until}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    host = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=host.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{host.server_port}/credentials", asked
    finally:
        host.shutdown()
        host.server_close()


@pytest.mark.parametrize("minutes", [360, 2])
def test_credentials_that_end_are_those_of_both_clients(
    any_s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, minutes: int
) -> None:
    """Those of two minutes are asked for again and again, as they are about to end."""
    bucket = any_s3_server.new_bucket()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    with giving_credentials(any_s3_server, timedelta(minutes=minutes)) as (url, asked):
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", url)
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", "of-this-container")
        endpoint = {"endpoint_url": any_s3_server.endpoint_url, "region_name": "us-east-1"}
        # An option that no other test has: its client is made here.
        options = {
            "client_kwargs": endpoint,
            "config_kwargs": {"max_pool_connections": 17 + minutes},
        }
        saved_and_loaded(f"s3://{bucket}/run", options)
    assert set(asked) == {"of-this-container"}
    assert (len(asked) > 1) == (minutes < 10)


@pytest.mark.parametrize("style", ["path", "virtual"])
def test_a_proxy_and_how_buckets_are_addressed(s3_server: S3Server, style: str) -> None:
    """No name below that of the hosts is known: every request has to go by the proxy."""
    bucket = s3_server.new_bucket()
    with FaultProxy(s3_server.endpoint_url) as proxy:
        options = {
            "key": s3_server.key,
            "secret": s3_server.secret,
            "endpoint_url": f"http://{VIRTUAL_HOSTS}",
            "config_kwargs": {
                "proxies": {"http": proxy.endpoint_url},
                "s3": {"addressing_style": style},
            },
        }
        saved_and_loaded(f"s3://{bucket}/run", options)
        hosts = {request.headers["host"].partition(":")[0] for request in proxy.passed()}
    assert hosts == {VIRTUAL_HOSTS if style == "path" else f"{bucket}.{VIRTUAL_HOSTS}"}
    assert "run/w/c.0.0" in s3_server.keys(bucket)


def test_tensorstore_finds_the_bucket_in_the_host_s_name(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below the hosts no name is known: a proxy that both clients read from a variable sends their
    requests to the server."""
    bucket = s3_server.new_bucket()
    with FaultProxy(s3_server.endpoint_url) as proxy:
        monkeypatch.setenv("http_proxy", proxy.endpoint_url)
        options = {
            "key": s3_server.key,
            "secret": s3_server.secret,
            "endpoint_url": f"http://{VIRTUAL_HOSTS}",
            "config_kwargs": {"s3": {"addressing_style": "virtual"}},
        }
        saved_and_loaded(f"s3://{bucket}/run", options)
        requests = list(proxy.passed())
    assert {r.headers["host"].partition(":")[0] for r in requests} == {f"{bucket}.{VIRTUAL_HOSTS}"}
    chunks = [request for request in requests if "/w/c" in request.path]
    assert {request.method for request in chunks} == {"GET", "PUT"}
    assert not any("boto" in request.headers["user-agent"].lower() for request in chunks)
    assert "run/w/c.0.0" in s3_server.keys(bucket)


def test_an_encryption_is_asked_for_with_every_object(s3_server: S3Server) -> None:
    with FaultProxy(s3_server.endpoint_url) as proxy:
        server = s3_server.at(proxy.endpoint_url)
        arguments = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "key-of-the-lab"}
        options = {**server.storage_options, "s3_additional_kwargs": arguments}
        saved_and_loaded(f"s3://{server.new_bucket()}/run", options)
        sent = [request for request in proxy.passed("PUT") if "/run/" in request.path]
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
    s3_server: S3Server, caplog: pytest.LogCaptureFixture, options: dict[str, Any], why: str | None
) -> None:
    """Once a process and bucket it is said why."""
    caplog.set_level("INFO", "shardstore")
    url = f"s3://{s3_server.new_bucket()}/run"
    with FaultProxy(s3_server.endpoint_url) as proxy:
        server = s3_server.at(proxy.endpoint_url)
        saved_and_loaded(url, {**server.storage_options, **options})
        chunks = [request for request in proxy.passed() if "/w/c" in request.path]
    assert {request.method for request in chunks} == {"GET", "PUT"}
    by_s3fs = {"boto" in request.headers["user-agent"].lower() for request in chunks}
    assert by_s3fs == {why is not None}
    said = [r.getMessage() for r in caplog.records if "fsspec moves chunks" in r.getMessage()]
    assert len(said) == (why is not None)
    assert why is None or why in said[0]
    pays = {request.headers.get("x-amz-request-payer") for request in chunks}
    assert pays == ({"requester"} if "requester_pays" in options else {None})


def test_a_silent_server_is_given_up_and_the_next_request_works(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where TensorStore has no limit of its own. A request that is left keeps its place in the
    context: here it is the only one."""
    monkeypatch.setattr(remote, "DEADLINE_S", 1.0)
    monkeypatch.setattr(tensorstore, "REQUESTS", 1)
    fresh = cache(tensorstore.shared_context.__wrapped__)
    monkeypatch.setattr(tensorstore, "shared_context", fresh)
    with FaultProxy(s3_server.endpoint_url) as proxy:
        server = s3_server.at(proxy.endpoint_url)
        place = Location.of(f"s3://{server.new_bucket()}/run", server.storage_options)
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
