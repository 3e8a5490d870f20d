"""What the other tests take for granted of the S3 servers that they run against."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from botocore.exceptions import ClientError

from testing.s3_servers import EmbeddedServer, S3Server, answers

WRITERS = 32

# What other tests rest on; a release asks it too.
pytestmark = pytest.mark.long


def test_one_of_racing_creators_wins(any_s3_server: S3Server) -> None:
    client = any_s3_server.client()
    bucket = any_s3_server.new_bucket()
    start = threading.Barrier(WRITERS)

    def create(number: int) -> bool:
        start.wait()
        try:
            client.put_object(Bucket=bucket, Key="one", Body=b"%d" % number, IfNoneMatch="*")
        except ClientError as error:
            if error.response["Error"]["Code"] != "PreconditionFailed":
                raise
            return False
        return True

    with ThreadPoolExecutor(WRITERS) as pool:
        won = [number for number, created in enumerate(pool.map(create, range(WRITERS))) if created]
    assert len(won) == 1
    body = client.get_object(Bucket=bucket, Key="one")["Body"].read()
    assert body == b"%d" % won[0]


def test_a_bucket_holds_what_was_put_and_only_that(any_s3_server: S3Server) -> None:
    client = any_s3_server.client()
    bucket, other = any_s3_server.new_bucket(), any_s3_server.new_bucket()
    body = bytes(range(256)) * 5000
    client.put_object(Bucket=bucket, Key="a/c.0.0", Body=body)
    assert client.get_object(Bucket=bucket, Key="a/c.0.0")["Body"].read() == body
    part = client.get_object(Bucket=bucket, Key="a/c.0.0", Range="bytes=300-555")
    assert part["Body"].read() == body[300:556]
    assert any_s3_server.keys(bucket) == ["a/c.0.0"]
    assert any_s3_server.keys(other) == []
    client.delete_object(Bucket=bucket, Key="a/c.0.0")
    assert any_s3_server.keys(bucket) == []


def test_an_unknown_key_is_refused(any_s3_server: S3Server) -> None:
    bucket = any_s3_server.new_bucket()
    stranger = S3Server(
        name="stranger",
        endpoint_url=any_s3_server.endpoint_url,
        key="AKSTRANGER0000000000",
        secret="of nobody",
    )
    with pytest.raises(ClientError, match="InvalidAccessKeyId"):
        stranger.client().list_objects_v2(Bucket=bucket)


def test_a_wrong_secret_is_refused(radosgw_server: S3Server) -> None:
    """By the Ceph gateway only: the embedded server reads no signatures."""
    bucket = radosgw_server.new_bucket()
    wrong = S3Server(
        name="wrong secret",
        endpoint_url=radosgw_server.endpoint_url,
        key=radosgw_server.key,
        secret="not the secret",
    )
    with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
        wrong.client().list_objects_v2(Bucket=bucket)


def test_objects_survive_a_kill(own_s3_server: EmbeddedServer) -> None:
    server = own_s3_server.server
    bucket = server.new_bucket()
    server.client().put_object(Bucket=bucket, Key="kept", Body=b"kept")
    own_s3_server.kill()
    assert not answers(server.endpoint_url)
    assert own_s3_server.start() == server
    assert server.client().get_object(Bucket=bucket, Key="kept")["Body"].read() == b"kept"


def test_credentials_stay_out_of_a_report(s3_server: S3Server) -> None:
    assert s3_server.key not in repr(s3_server)
    assert s3_server.secret not in repr(s3_server)
