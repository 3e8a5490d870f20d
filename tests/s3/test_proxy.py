"""The fault proxy does what its rules say, to the request that they name and to no other."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import botocore.config
import botocore.session
import pytest
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    EndpointConnectionError,
    HTTPClientError,
    ReadTimeoutError,
)

from testing.s3_proxy import Fault, FaultProxy
from testing.s3_servers import S3Server

# What other tests rest on; a release asks it too.
pytestmark = pytest.mark.long

BODY = bytes(range(256)) * 4096  # 1 MiB


@pytest.fixture
def proxy(any_s3_server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(any_s3_server.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def server(any_s3_server: S3Server) -> S3Server:
    return any_s3_server


@pytest.fixture
def bucket(server: S3Server) -> str:
    return server.new_bucket()


@pytest.fixture
def client(server: S3Server, proxy: FaultProxy) -> Any:
    """Through the proxy, with no retry of its own and a limit of two seconds for a silence."""
    return botocore.session.Session().create_client(
        "s3",
        endpoint_url=proxy.endpoint_url,
        region_name=server.region,
        aws_access_key_id=server.key,
        aws_secret_access_key=server.secret,
        config=botocore.config.Config(
            s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}, read_timeout=2
        ),
    )


def test_it_passes_everything_unchanged_and_counts(
    client: Any, proxy: FaultProxy, bucket: str
) -> None:
    client.put_object(Bucket=bucket, Key="a key/with%signs", Body=BODY)
    got = client.get_object(Bucket=bucket, Key="a key/with%signs")["Body"].read()
    assert got == BODY
    assert client.head_object(Bucket=bucket, Key="a key/with%signs")["ContentLength"] == len(BODY)
    listed = client.list_objects_v2(Bucket=bucket)["Contents"]
    assert [entry["Key"] for entry in listed] == ["a key/with%signs"]
    client.delete_object(Bucket=bucket, Key="a key/with%signs")
    assert [entry.method for entry in proxy.log] == ["PUT", "GET", "HEAD", "GET", "DELETE"]
    assert proxy.passed("PUT")[0].sent_bytes >= len(BODY)
    assert proxy.passed("GET", "with%signs")[0].received_bytes == len(BODY)
    assert [entry.status for entry in proxy.passed("PUT")] == [200]


def test_slow_down_reaches_nobody(
    client: Any, proxy: FaultProxy, server: S3Server, bucket: str
) -> None:
    rule = proxy.add(Fault.SLOW_DOWN, methods=("PUT",), path="/x$", skip=1, count=1)
    client.put_object(Bucket=bucket, Key="y", Body=BODY)
    client.put_object(Bucket=bucket, Key="x", Body=b"skipped")
    with pytest.raises(ClientError, match="SlowDown") as caught:
        client.put_object(Bucket=bucket, Key="x", Body=BODY)
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 503
    assert rule.hits == 1
    assert server.client().get_object(Bucket=bucket, Key="x")["Body"].read() == b"skipped"
    client.put_object(Bucket=bucket, Key="x", Body=b"again")


@pytest.mark.parametrize("fault", [Fault.RESET_BEFORE, Fault.RESET_IN_REQUEST])
def test_a_reset_on_the_way_there_leaves_no_object(
    client: Any, proxy: FaultProxy, server: S3Server, bucket: str, fault: Fault
) -> None:
    proxy.add(fault, methods=("PUT",))
    with pytest.raises(HTTPClientError):
        client.put_object(Bucket=bucket, Key="x", Body=BODY)
    assert server.keys(bucket) == []
    client.put_object(Bucket=bucket, Key="x", Body=BODY)
    assert server.keys(bucket) == ["x"]


def test_a_dropped_answer_comes_after_the_work(
    client: Any, proxy: FaultProxy, server: S3Server, bucket: str
) -> None:
    proxy.add(Fault.DROP_ANSWER, methods=("PUT",))
    with pytest.raises(HTTPClientError):
        client.put_object(Bucket=bucket, Key="x", Body=BODY, IfNoneMatch="*")
    assert server.keys(bucket) == ["x"]
    with pytest.raises(ClientError, match="PreconditionFailed"):
        client.put_object(Bucket=bucket, Key="x", Body=BODY, IfNoneMatch="*")


@pytest.mark.parametrize("fault", [Fault.RESET_IN_ANSWER, Fault.TRUNCATE_ANSWER])
def test_an_answer_that_ends_early_is_an_error(
    client: Any, proxy: FaultProxy, bucket: str, fault: Fault
) -> None:
    client.put_object(Bucket=bucket, Key="x", Body=BODY)
    proxy.add(fault, methods=("GET",))
    with pytest.raises(BotoCoreError):
        client.get_object(Bucket=bucket, Key="x")["Body"].read()
    assert client.get_object(Bucket=bucket, Key="x")["Body"].read() == BODY


def test_a_changed_answer_is_not_noticed_by_the_client(
    client: Any, proxy: FaultProxy, bucket: str
) -> None:
    client.put_object(Bucket=bucket, Key="x", Body=BODY)
    which = {"methods": ("GET",), "count": 1}
    proxy.add(Fault.SHORTEN_ANSWER, **which)
    proxy.add(Fault.FLIP_ANSWER, **which)
    # Part of an object: the client has no checksum to hold against it.
    part = {"Bucket": bucket, "Key": "x", "Range": "bytes=0-65535"}
    assert client.get_object(**part)["Body"].read() == BODY[:32768]
    flipped = client.get_object(**part)["Body"].read()
    assert len(flipped) == 65536
    assert sum(a != b for a, b in zip(flipped, BODY, strict=False)) == 1
    assert client.get_object(**part)["Body"].read() == BODY[:65536]


@pytest.mark.parametrize("fault", [Fault.SILENCE, Fault.SILENT_ANSWER])
def test_silence_lasts_until_the_client_gives_up(
    client: Any, proxy: FaultProxy, bucket: str, fault: Fault
) -> None:
    client.put_object(Bucket=bucket, Key="x", Body=BODY)
    proxy.add(fault, methods=("GET",))
    began = time.monotonic()
    with pytest.raises(ReadTimeoutError):
        client.get_object(Bucket=bucket, Key="x")["Body"].read()
    assert time.monotonic() - began >= 1.9
    assert client.get_object(Bucket=bucket, Key="x")["Body"].read() == BODY


def test_a_store_that_ignores_conditions(s3_server: S3Server) -> None:
    """Where nothing signs the header, as with the embedded server."""
    bucket = s3_server.new_bucket()
    with FaultProxy(s3_server.endpoint_url) as proxy:
        through = s3_server.at(proxy.endpoint_url).client()
        through.put_object(Bucket=bucket, Key="x", Body=b"1", IfNoneMatch="*")
        proxy.add(Fault.IGNORE_CONDITIONS, conditional=True, count=None)
        through.put_object(Bucket=bucket, Key="x", Body=b"2", IfNoneMatch="*")
        assert through.get_object(Bucket=bucket, Key="x")["Body"].read() == b"2"


def test_latency_and_bandwidth_are_lower_bounds(
    client: Any, proxy: FaultProxy, bucket: str
) -> None:
    proxy.latency_s = 0.2
    began = time.monotonic()
    client.put_object(Bucket=bucket, Key="x", Body=BODY)
    client.head_object(Bucket=bucket, Key="x")
    assert time.monotonic() - began >= 0.4
    proxy.latency_s, proxy.bytes_per_s = 0.0, 2 * len(BODY)
    began = time.monotonic()
    client.get_object(Bucket=bucket, Key="x")["Body"].read()
    assert time.monotonic() - began >= 0.5


def test_a_stopped_proxy_is_a_dead_server_until_it_starts_again(
    client: Any, proxy: FaultProxy, bucket: str
) -> None:
    client.put_object(Bucket=bucket, Key="x", Body=BODY)
    address = proxy.endpoint_url
    proxy.stop()
    with pytest.raises(EndpointConnectionError):
        client.get_object(Bucket=bucket, Key="x")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=5)
    proxy.start()
    assert proxy.endpoint_url == address
    assert client.get_object(Bucket=bucket, Key="x")["Body"].read() == BODY
