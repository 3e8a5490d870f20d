"""Wrong bucket, key, region or endpoint, at defaults: a clear error, soon, and no secret in it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

import shardstore
from scripts.s3_servers import S3Server, free_port
from shardstore.errors import NotACheckpointError, StorageError
from shardstore.mapping import ShardedTensor
from shardstore.storage.stores import remote
from shardstore.storage.stores.location import Location
from shardstore.strategies import zarr as zarr_strategy
from tests.helpers.s3_checkpoints import Run, state

LIMIT_S = 30
ROOT = Path(__file__).resolve().parents[2]


def save(server: S3Server, url: str) -> None:
    shardstore.save(state(1), url, storage_options=server.storage_options)


def load(server: S3Server, url: str) -> None:
    shardstore.load({}, url, storage_options=server.storage_options)


def load_array(server: S3Server, url: str) -> None:
    tensor = ShardedTensor.from_rank_offsets("w", torch.zeros(2))
    zarr_strategy._load_from_array(tensor, Location.of(url, server.storage_options))


def refused(
    server: S3Server,
    url: str,
    *words: str,
    works: Sequence[Callable[[S3Server, str], None]] = (save, load),
) -> None:
    """All of ``works`` fail, soon, with all these words."""
    for work in works:
        began = time.monotonic()
        with pytest.raises((StorageError, NotACheckpointError)) as caught:
            work(server, url)
        assert time.monotonic() - began < LIMIT_S, f"{work.__name__} took too long"
        text = str(caught.value)
        for word in (url.rsplit("/", 1)[0], *words):
            assert word in text, text
        assert server.secret not in repr(caught.value)
        assert server.key not in repr(caught.value)


def test_a_bucket_that_is_not_there(any_s3_server: S3Server) -> None:
    refused(any_s3_server, "s3://shardstore-nowhere-0815/run/x", "bucket")


def test_a_wrong_key(any_s3_server: S3Server) -> None:
    url = f"s3://{any_s3_server.new_bucket()}/run/x"
    stranger = replace(any_s3_server, key="AKSTRANGER0000000000", secret="of-nobody-at-all")
    refused(stranger, url, "credentials")


def test_a_wrong_secret(radosgw_server: S3Server) -> None:
    """By the Ceph gateway only: the embedded server reads no signatures."""
    url = f"s3://{radosgw_server.new_bucket()}/run/x"
    refused(replace(radosgw_server, secret="of-nobody-at-all"), url, "credentials")


def test_an_endpoint_where_nobody_listens(s3_server: S3Server) -> None:
    dead = s3_server.at(f"http://127.0.0.1:{free_port()}")
    refused(dead, "s3://bucket/run/x", "endpoint")


def test_an_endpoint_that_never_answers(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save, a load and a read of one array give up after the time for a first answer."""
    assert 2 * 2**20 / remote.SLOWEST_BYTES_PER_S < remote.FIRST_DEADLINE_S == 20
    monkeypatch.setattr(remote, "FIRST_DEADLINE_S", 2.0)
    monkeypatch.setattr(remote, "SLOWEST_BYTES_PER_S", 2**20)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        silent = s3_server.at(f"http://127.0.0.1:{listener.getsockname()[1]}")
        refused(silent, "s3://bucket/run/x", "endpoint", "no answer within 2 s")
        refused(
            replace(silent, key="AKOTHER0000000000000"),  # of another store, by its settings
            "s3://bucket/run/x",
            "no answer within 2 s",
            works=[load_array],
        )


REGION_ERRORS = {
    "malformed": (
        400,
        "<Error><Code>AuthorizationHeaderMalformed</Code><Message>The authorization header is "
        "malformed; the region 'us-east-1' is wrong; expecting 'eu-west-3'</Message>"
        "<Region>eu-west-3</Region></Error>",
    ),
    "constraint": (
        400,
        "<Error><Code>IllegalLocationConstraintException</Code><Message>The us-east-1 location "
        "constraint is incompatible for the region specific endpoint this request was sent to."
        "</Message></Error>",
    ),
}


@contextmanager
def answering(status: int, body: str) -> Iterator[str]:
    """The address of a server that answers everything so."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body.encode())

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer  # noqa: N815 (its names)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("kind", REGION_ERRORS)
def test_a_wrong_region(s3_server: S3Server, kind: str) -> None:
    """As Amazon's servers answer; the two that run here take any region."""
    with answering(*REGION_ERRORS[kind]) as endpoint_url:
        refused(s3_server.at(endpoint_url), "s3://bucket/run/x", "region")


PROGRAM = """
import json, logging, os, sys, traceback
logging.basicConfig(level=logging.INFO)
logging.getLogger("shardstore").setLevel(logging.DEBUG)
import shardstore
from shardstore.storage.stores.location import Location
from shardstore.strategies import zarr as zarr_strategy
from tests.helpers.s3_checkpoints import state
about = json.loads(sys.stdin.readline())
options, bucket = about["options"], about["bucket"]
given = dict(storage_options=options) if options else {}
def attempt(work):
    try:
        print("SUCCEEDED", work())
    except Exception as error:
        print(repr(error), vars(error))
        traceback.print_exc()
url = f"s3://{bucket}/run/step-1"
attempt(lambda: shardstore.save(state(1), url, **given))
attempt(lambda: shardstore.save(state(1), url, **given))
attempt(lambda: shardstore.save(state(1), "s3://shardstore-nowhere-0815/x", **given))
attempt(lambda: shardstore.load({"w": state(0)["w"]}, url, **given))
attempt(lambda: shardstore.load({}, url + "-not", **given))
attempt(lambda: shardstore.load({}, "s3://shardstore-nowhere-0815/x", **given))
attempt(lambda: shardstore.load({}, url, storage_options={**options, "no_such_option": 1}))
print(Location.of(url, options), repr(Location.of(url, options)))
print(shardstore.load_tensors_metadata(url, **given))
print("files:", list(os.walk(os.environ["TMPDIR"])))
print("arguments:", open("/proc/self/cmdline").read())
"""


@pytest.mark.parametrize(
    ("fixture", "how"), [("s3_server", "options"), ("radosgw_server", "environment")]
)
def test_credentials_are_in_nothing_written_printed_or_logged(
    request: pytest.FixtureRequest, tmp_path: Path, fixture: str, how: str
) -> None:
    server: S3Server = request.getfixturevalue(fixture)
    bucket = server.new_bucket()
    about = {"bucket": bucket, "options": server.storage_options if how == "options" else {}}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
    environment |= {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    if how == "environment":
        environment |= server.environment
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(about) + "\n",
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    said = ran.stdout + ran.stderr
    assert ran.returncode == 0, said
    assert said.count("SUCCEEDED ") == 2, said
    for path in tmp_path.rglob("*"):
        if path.is_file():
            said += path.read_bytes().decode("latin-1")
    client = server.client()
    keys = server.keys(bucket)
    assert any(key.endswith("step-1/zarr.json") for key in keys)
    for key in keys:
        said += key + client.get_object(Bucket=bucket, Key=key)["Body"].read().decode("latin-1")
    assert server.secret not in said
    assert server.key not in said


def test_the_environment_alone_suffices(
    any_s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in any_s3_server.environment.items():
        monkeypatch.setenv(name, value)
    run = Run(any_s3_server, any_s3_server, any_s3_server.new_bucket(), {})
    run.save(1)
    assert run.version(1) == 1
    # A profile in place of keys.
    (tmp_path / "credentials").write_text(
        f"[trainer]\naws_access_key_id = {any_s3_server.key}\n"
        f"aws_secret_access_key = {any_s3_server.secret}\n"
    )
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "trainer")
    run.save(2)
    assert run.version(2) == 2
    assert Location.of(run.url(2)).remote.exists("zarr.json")
