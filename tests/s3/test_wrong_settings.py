"""Wrong bucket, key, region or endpoint, at defaults: a clear error, soon, and no secret in it."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

import shardstore
from shardstore import hf
from shardstore.errors import ArgumentError, NotACheckpointError, StorageError
from shardstore.mapping import ShardedTensor
from shardstore.storage.stores import remote
from shardstore.storage.stores.location import Location
from shardstore.strategies import zarr as zarr_strategy
from testing.s3_proxy import Fault, FaultProxy
from testing.s3_servers import S3Server, free_port
from tests.helpers.processes import run_to_end
from tests.helpers.s3_checkpoints import Run, state

ROOT = Path(__file__).resolve().parents[2]


def save(server: S3Server, url: str) -> None:
    shardstore.save(state(1), url, storage_options=server.storage_options)


def load(server: S3Server, url: str) -> None:
    shardstore.load({}, url, storage_options=server.storage_options)


def save_model(server: S3Server, url: str) -> None:
    hf.save({"w": torch.ones(2)}, url, storage_options=server.storage_options)


def load_array(server: S3Server, url: str) -> None:
    tensor = ShardedTensor.from_rank_offsets("w", torch.zeros(2))
    zarr_strategy._load_from_array(tensor, Location.of(url, server.storage_options))


def refused(
    server: S3Server,
    url: str,
    *words: str,
    works: Sequence[Callable[[S3Server, str], None]] = (save, load),
) -> None:
    """All of ``works`` fail with all these words."""
    for work in works:
        with pytest.raises((StorageError, NotACheckpointError)) as caught:
            work(server, url)
        text = str(caught.value)
        for word in (url.rsplit("/", 1)[0], *words):
            assert word in text, text
        assert server.secret not in repr(caught.value)
        assert server.key not in repr(caught.value)


def test_an_absent_bucket_is_named(any_s3_server: S3Server) -> None:
    refused(any_s3_server, "s3://shardstore-nowhere-0815/run/x", "bucket")


def test_an_unknown_key_names_the_credentials(any_s3_server: S3Server) -> None:
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
def test_a_wrong_region_is_named(s3_server: S3Server, kind: str) -> None:
    """As Amazon's servers answer; the two that run here take any region."""
    with answering(*REGION_ERRORS[kind]) as endpoint_url:
        refused(s3_server.at(endpoint_url), "s3://bucket/run/x", "region")


def from_process(folder: Path, **about: str) -> dict[str, str]:
    """The options of a profile whose credentials a program gives."""
    said = {"Version": 1, "AccessKeyId": "AKPROCESS00000000000", "SecretAccessKey": "s" * 20}
    (folder / "answer.py").write_text(f"print({json.dumps({**said, **about})!r})")
    return {"credential_process": f"{sys.executable} {folder}/answer.py"}


def profile(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: str) -> None:
    lines = "\n".join(f"{name} = {value}" for name, value in options.items())
    (folder / "config").write_text(f"[profile of-the-test]\n{lines}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "none"))
    monkeypatch.setenv("AWS_PROFILE", "of-the-test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)


CHARACTERS = {
    "key": lambda text, _: {"key": text},
    "secret": lambda text, _: {"secret": text},
    "token": lambda text, _: {"token": text},
    "region_name": lambda text, _: {"client_kwargs": {"region_name": text}},
    "SSEKMSKeyId": lambda text, _: {
        "s3_additional_kwargs": {"SSEKMSKeyId": text, "ServerSideEncryption": "aws:kms"}
    },
    "user_agent_extra": lambda text, _: {"config_kwargs": {"user_agent_extra": text}},
    "access key": lambda text, folder: from_process(folder, AccessKeyId=text),
    "secret key": lambda text, folder: from_process(folder, SecretAccessKey=text),
    "session token": lambda text, folder: from_process(folder, SessionToken=text),
}


@pytest.mark.parametrize("name", CHARACTERS)
@pytest.mark.parametrize("text", ["us-east-1\n", "us-\r\neast-1", "us-east-1\x7f", "\x01us-east-1"])
def test_a_character_that_no_header_may_have_is_named_at_once(
    s3_server: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    text: str,
) -> None:
    """The client libraries refuse it inside this process, and try that again and again."""
    url, options = f"s3://{s3_server.new_bucket()}/run", s3_server.storage_options
    given = CHARACTERS[name](text, tmp_path)
    if "credential_process" in given:
        profile(tmp_path, monkeypatch, **given)
        options = {"endpoint_url": s3_server.endpoint_url}
    else:
        options = {**options, **given}
        if "client_kwargs" in given:
            options["client_kwargs"]["endpoint_url"] = s3_server.endpoint_url
    for work in (
        lambda: shardstore.save(state(1), url, storage_options=options),
        lambda: shardstore.load({}, url, storage_options=options),
    ):
        with pytest.raises(StorageError, match=f"{name} has a character") as caught:
            work()
        assert "us-east-1" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"sso_session": "corp", "sso_account_id": "1" * 12, "sso_role_name": "R"},
        {
            "sso_start_url": "https://corp.awsapps.com/start",
            "sso_region": "us-east-1",
            "sso_account_id": "1" * 12,
            "sso_role_name": "R",
        },
        {"credential_process": "/bin/false"},
        {"credential_process": "/bin/echo no JSON, but AKSECRET000"},
        {"credential_process": "/nowhere/tool"},
        {"credential_process": "/etc/hostname"},
        {"role_arn": "arn:aws:iam::123456789012:role/x", "source_profile": "nowhere"},
        {
            "role_arn": "arn:aws:iam::123456789012:role/x",
            "web_identity_token_file": "/nowhere/token",
        },
    ],
    ids=lambda options: " ".join(options.values())[:30],
)
def test_credentials_that_cannot_be_had_are_an_error_with_the_remedy(
    s3_server: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, str],
) -> None:
    """No file that is missing on this machine is taken for an object that is missing."""
    profile(tmp_path, monkeypatch, **options, endpoint_url=s3_server.endpoint_url)
    with (tmp_path / "config").open("a") as config:
        config.write(
            "[sso-session corp]\nsso_region = us-east-1\n"
            "sso_start_url = https://corp.awsapps.com/start\n"
        )
    url = f"s3://{s3_server.new_bucket()}/run"
    for work in (
        lambda: shardstore.save(state(1), url),
        lambda: shardstore.load({}, url),
        lambda: shardstore.latest(url),
        lambda: Location.of(url).exists("x"),
    ):
        with pytest.raises(StorageError, match=r"aws sso login.*credential_process") as caught:
            work()
        assert "AKSECRET" not in f"{caught.value!r} {vars(caught.value.__cause__)}"
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("by", ["tensorstore", "boto", ""])
def test_a_refusal_to_read_says_that_nothing_may_be_there(s3_server: S3Server, by: str) -> None:
    """Amazon answers 403 for a missing key if the credentials may not list."""
    bucket = s3_server.new_bucket()
    with FaultProxy(s3_server.endpoint_url) as proxy:
        proxy.add(Fault.DENIED, client=f"(?i){by}", count=None)
        server = s3_server.at(proxy.endpoint_url)
        with pytest.raises(StorageError, match=r"ListBucket") as caught:
            load(server, f"s3://{bucket}/run")
        assert "credentials" in str(caught.value)


@pytest.mark.parametrize("client", ["tensorstore", "boto"])
def test_an_archived_object_is_named_so(s3_server: S3Server, client: str) -> None:
    """Such as those that a rule of the bucket has moved to Glacier."""
    url = f"s3://{s3_server.new_bucket()}/run"
    shardstore.save(state(1), url, storage_options=s3_server.storage_options)
    with FaultProxy(s3_server.endpoint_url) as proxy:
        proxy.add(Fault.ARCHIVED, methods=("GET",), client=f"(?i){client}", count=None)
        options = s3_server.at(proxy.endpoint_url).storage_options
        with pytest.raises(StorageError, match=r"InvalidObjectState.*archived.*restore") as caught:
            shardstore.load_plain_tensors(url, storage_options=options)
        assert "credentials" not in str(caught.value)


@pytest.mark.parametrize("client", ["tensorstore", "boto"])
def test_an_object_lock_is_named_with_the_remedy(s3_server: S3Server, client: str) -> None:
    """Such a bucket takes no object without a checksum. The remedy sends one with every object."""
    url = f"s3://{s3_server.new_bucket()}/run"
    with FaultProxy(s3_server.endpoint_url) as proxy:
        rule = proxy.add(Fault.LOCKED, methods=("PUT",), client=f"(?i){client}", count=None)
        options = s3_server.at(proxy.endpoint_url).storage_options
        with pytest.raises(StorageError, match=r"s3_additional_kwargs.*ChecksumAlgorithm"):
            shardstore.save(state(1), url, storage_options=options)
        proxy.rules.remove(rule)
        proxy.log.clear()
        options = {**options, "s3_additional_kwargs": {"ChecksumAlgorithm": "SHA256"}}
        shardstore.save(state(1), url, storage_options=options)
        puts = proxy.passed("PUT")
        assert len(puts) > 8
        assert all("x-amz-checksum-sha256" in put.headers for put in puts)


@pytest.mark.parametrize("client", ["tensorstore", "boto"])
def test_a_store_that_refuses_conditions_is_named(s3_server: S3Server, client: str) -> None:
    url = f"s3://{s3_server.new_bucket()}/run"
    with FaultProxy(s3_server.endpoint_url) as proxy:
        proxy.add(Fault.UNKNOWN, conditional=True, client=f"(?i){client}", count=None)
        options = s3_server.at(proxy.endpoint_url).storage_options
        with pytest.raises(StorageError, match=r"NotImplemented.*honours conditional writes"):
            shardstore.save(state(1), url, storage_options=options)


@pytest.mark.parametrize("end", ["//", "/?region=x", "#x"])
def test_an_endpoint_with_more_than_a_host_and_a_path(s3_server: S3Server, end: str) -> None:
    refused(s3_server.at(f"{s3_server.endpoint_url}{end}"), "s3://bucket/run/x", "endpoint_url has")


@pytest.mark.parametrize("end", ["", "/"])
def test_an_endpoint_that_ends_with_the_bucket(s3_server: S3Server, end: str) -> None:
    """As the consoles of some stores show it. Objects would be below BUCKET/BUCKET, if anywhere."""
    bucket = s3_server.new_bucket()
    wrong = s3_server.at(f"{s3_server.endpoint_url}/{bucket}{end}")
    for work in (save, load, load_array, save_model):
        with pytest.raises(
            ArgumentError, match=rf"ends with the bucket.* {s3_server.endpoint_url}$"
        ):
            work(wrong, f"s3://{bucket}/x")
    assert Location.of(f"s3://{bucket}", s3_server.storage_options).remote.listing() == []


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
    ("fixture", "how"),
    [
        ("s3_server", "options"),
        pytest.param("radosgw_server", "environment", marks=pytest.mark.long),
    ],
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
    ran = run_to_end(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(about) + "\n",
        env=environment,
        cwd=tmp_path,
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
    # A profile in place of them all.
    (tmp_path / "credentials").write_text(
        f"[trainer]\naws_access_key_id = {any_s3_server.key}\n"
        f"aws_secret_access_key = {any_s3_server.secret}\n"
    )
    (tmp_path / "config").write_text(
        f"[profile trainer]\nregion = {any_s3_server.region}\n"
        f"endpoint_url = {any_s3_server.endpoint_url}\n"
    )
    for name in any_s3_server.environment:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "trainer")
    run.save(2)
    assert run.version(2) == 2
    assert Location.of(run.url(2)).remote.exists("zarr.json")
