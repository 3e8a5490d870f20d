"""The fault proxy does what its rules say, to the request that they name and to no other."""

from __future__ import annotations

import socket
import time
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


@pytest.mark.parametrize(
    ("fault", "error", "arrives"),
    [
        (Fault.SLOW_DOWN, ClientError, False),
        (Fault.RESET_BEFORE, HTTPClientError, False),
        (Fault.RESET_IN_REQUEST, HTTPClientError, False),
        (Fault.DROP_ANSWER, HTTPClientError, True),
    ],
)
def test_a_write_fails_before_or_after_the_server_did_it(
    client: Any,
    proxy: FaultProxy,
    server: S3Server,
    bucket: str,
    fault: Fault,
    error: type[Exception],
    arrives: bool,
) -> None:
    rule = proxy.add(fault, methods=("PUT",), path="/x$", skip=1)
    client.put_object(Bucket=bucket, Key="y", Body=BODY)
    client.put_object(Bucket=bucket, Key="x", Body=b"skipped")
    with pytest.raises(error) as caught:
        client.put_object(Bucket=bucket, Key="x", Body=BODY)
    if isinstance(caught.value, ClientError):
        assert caught.value.response["Error"]["Code"] == "SlowDown"
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 503
    assert rule.hits == 1
    stored = server.client().get_object(Bucket=bucket, Key="x")["Body"].read()
    assert stored == (BODY if arrives else b"skipped")
    client.put_object(Bucket=bucket, Key="x", Body=b"again")


@pytest.mark.parametrize(
    ("fault", "error", "least_s"),
    [
        (Fault.RESET_IN_ANSWER, BotoCoreError, 0.0),
        (Fault.TRUNCATE_ANSWER, BotoCoreError, 0.0),
        (Fault.SILENCE, ReadTimeoutError, 1.9),
        (Fault.SILENT_ANSWER, ReadTimeoutError, 1.9),
    ],
)
def test_an_answer_that_ends_early_or_never_is_an_error(
    client: Any,
    proxy: FaultProxy,
    bucket: str,
    fault: Fault,
    error: type[Exception],
    least_s: float,
) -> None:
    client.put_object(Bucket=bucket, Key="x", Body=BODY)
    proxy.add(fault, methods=("GET",))
    began = time.monotonic()
    with pytest.raises(error):
        client.get_object(Bucket=bucket, Key="x")["Body"].read()
    assert time.monotonic() - began >= least_s
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


def test_a_store_that_ignores_conditions(client: Any, proxy: FaultProxy, bucket: str) -> None:
    """Where nothing signs the header, as with the embedded server."""
    client.put_object(Bucket=bucket, Key="x", Body=b"1", IfNoneMatch="*")
    proxy.add(Fault.IGNORE_CONDITIONS, conditional=True, count=None)
    client.put_object(Bucket=bucket, Key="x", Body=b"2", IfNoneMatch="*")
    assert client.get_object(Bucket=bucket, Key="x")["Body"].read() == b"2"


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
