"""Credentials: in no log and in no error; exchanged while a program runs."""

from __future__ import annotations

import json
import logging
import os
import pickle
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import shardstore
from shardstore.errors import CheckpointingException, StorageError
from shardstore.storage.stores import tensorstore
from shardstore.storage.stores.errors import keep_quiet_about
from shardstore.storage.stores.location import Location
from shardstore.storage.stores.s3 import S3Settings
from testing.s3_servers import ROOT, S3Server
from tests.helpers.processes import run_to_end
from tests.helpers.s3_checkpoints import credential_process, state, use_profile

WRONG = {
    "key": "AKNOBODY000000000000",
    "secret": "not-the-secret-0123456789",
    "token": "not-a-token-0123456789",
}


def chain(error: BaseException | None, seen: set[int] | None = None) -> Iterator[BaseException]:
    """All that a report of an error may show."""
    seen = set() if seen is None else seen
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    yield error
    yield from chain(error.__cause__, seen)
    yield from chain(error.__context__, seen)


def shown(error: BaseException) -> str:
    return "".join(
        f"{one!r} {one} {vars(one)} {one.args!r} {getattr(one, '__notes__', '')}"
        + pickle.dumps(one).decode("latin-1")
        for one in chain(error)
    )


def failures(server: S3Server, bucket: str) -> Iterator[Callable[[], Any]]:
    """With credentials that the server does not know, and with those that it does."""
    url, nowhere = f"s3://{bucket}/run/step-1", "s3://shardstore-nowhere-0815/x"
    right, options = server.storage_options, {**server.storage_options, **WRONG}
    place = Location.of(url, options)
    yield lambda: shardstore.save(state(1), f"{url}-not", storage_options=options)
    yield lambda: shardstore.load({"w": state(0)["w"]}, url, storage_options=options)
    yield lambda: place.io().get("w/c.0.0")
    yield lambda: place.io().put("w/c.0.0", [b"x"], create=True)
    yield lambda: place.read("zarr.json")
    yield lambda: shardstore.sweep(url, storage_options=options)
    yield lambda: shardstore.save(state(1), url, storage_options=right)
    yield lambda: shardstore.save(state(1), nowhere, storage_options=right)
    yield lambda: shardstore.load({}, nowhere, storage_options=right)
    yield lambda: shardstore.load({}, f"{url}-not", storage_options=right)
    wrong: dict[str, Any]
    for wrong in (
        {"no_such": 1},
        {"client_kwargs": {"no_such": 1}},
        {"config_kwargs": {"no_such": 1}},
        {"client_kwargs": {"aws_access_key_id": "AKTWICE0000000000"}},
        {"key": 1},
    ):
        for given in (options, right):
            given = {**given, **wrong}
            yield lambda given=given: shardstore.load({}, url, storage_options=given)  # type: ignore[misc]


def test_no_client_shows_credentials(s3_server: S3Server) -> None:
    place = Location.of(f"s3://{s3_server.new_bucket()}/run", s3_server.storage_options)
    seen = f"{place!r} {place} {place.place!r} {pickle.dumps(place.place)!r} {place.remote!r}"
    io = tensorstore.KvStoreIO(place.url, place.options)
    seen += f" {s3_server!r} {io.opened()!r} {place.kvstore()!r}"
    assert s3_server.secret not in seen
    assert s3_server.key not in seen


def saved_and_loaded(url: str, options: dict[str, Any]) -> None:
    shardstore.save(state(1), url, storage_options=options)
    shardstore.load({"w": state(0)["w"]}, url, storage_options=options)


def logged_by(caplog: pytest.LogCaptureFixture, work: Callable[[], object]) -> str:
    """All that is logged at any level, with its arguments."""
    for name in (None, "botocore"):
        caplog.set_level(logging.DEBUG, logger=name)
    caplog.clear()  # of the test's own client
    work()
    said = "\n".join([caplog.text, *(f"{r.getMessage()} {r.args!r}" for r in caplog.records)])
    assert "Credential=***" in said  # the libraries did say much
    return said


def test_credentials_are_in_nothing_written_printed_logged_or_raised(
    s3_server: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """In objects and files, by libraries at any level, or with the causes of errors."""
    for name in ("HOME", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    bucket = s3_server.new_bucket()
    url, options = f"s3://{bucket}/run/step-1", s3_server.storage_options
    errors = []

    def work() -> None:
        saved_and_loaded(url, options)
        shardstore.async_save(state(2), f"{url}-2", storage_options=options).result(60)
        for failure in failures(s3_server, bucket):
            with pytest.raises(CheckpointingException) as caught:
                failure()
            errors.append(shown(caught.value))

    said = "".join([logged_by(caplog, work), *errors, *capfd.readouterr()])
    for path in tmp_path.rglob("*"):
        said += f"{path} {path.read_text('latin-1') if path.is_file() else ''}"
    keys = s3_server.keys(bucket)
    assert any(key.endswith("step-1/zarr.json") for key in keys)
    place = Location.of(f"s3://{bucket}", options)
    said += "".join(key + place.read(key).decode("latin-1") for key in keys)
    for value in (*WRONG.values(), s3_server.key, s3_server.secret):
        assert value not in said


@pytest.mark.parametrize("source", ["profile", "program"])
def test_no_log_shows_credentials_that_a_client_found(
    s3_server: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    source: str,
) -> None:
    """Of a profile with a session token; and of a program that is asked for them, which nothing
    here knows before the client does."""
    key, secret = s3_server.key, s3_server.secret
    token = f"IQoJb3JpZ2luX2VjEHMaCXVzLWVhc3Qt+{source}/Qx=="
    if source == "program":
        answer = {"AccessKeyId": key, "SecretAccessKey": secret, "SessionToken": token}
        found = {"credential_process": credential_process(tmp_path, **answer)}
    else:
        found = {"aws_access_key_id": key, "aws_secret_access_key": secret}
        found |= {"aws_session_token": token}
    use_profile(tmp_path, monkeypatch, **found)
    # What other tests made known must not help.
    monkeypatch.setattr("shardstore.storage.stores.errors._hidden", set())
    options = {"endpoint_url": s3_server.endpoint_url, "region_name": s3_server.region}
    url = f"s3://{s3_server.new_bucket()}/run/step-1"
    said = logged_by(caplog, lambda: saved_and_loaded(url, options))
    assert "security-token" in said.lower()
    for value in (key, secret, token):
        assert value not in said


FOUND = {
    "key": "ASIAROLE00000000EXMP",
    "secret": "wJalr/role+K7MDENG0",
    "token": "FwoGZXIvYXdzEJr//role==",
}
ANSWERS = [
    "<AssumeRoleResult><Credentials><AccessKeyId>{key}</AccessKeyId><SecretAccessKey>{secret}"
    "</SecretAccessKey><SessionToken>{token}</SessionToken></Credentials></AssumeRoleResult>",
    'Response body:\nb\'{{"roleCredentials":{{"accessKeyId":"{key}","secretAccessKey":"{secret}",'
    '"sessionToken":"{token}","expiration":1700000000000}}}}\'',
    "{{'AccessKeyId': '{key}', 'SecretAccessKey': '{secret}', 'Token': '{token}'}}",
    "headers={{'Authorization': b'AWS4-HMAC-SHA256 Credential={key}/20260101/us-east-1/s3/"
    "aws4_request, SignedHeaders=host, Signature=00', 'X-Amz-Security-Token': b'{token}'}}"
    "{secret:.0}",
    "CanonicalRequest:\nGET\n/\n\nhost:x\nx-amz-date:20260101T000000Z\nx-amz-security-token:{token}"
    "\n\nhost {key:.0}{secret:.0}",
]


@pytest.mark.parametrize("answer", ANSWERS)
def test_answers_that_bring_credentials_are_logged_without_them(
    answer: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the token service, the single sign-on and the metadata service give them: the first line
    that has them is the one that is to be hidden."""
    monkeypatch.setattr("shardstore.storage.stores.errors._hidden", set())
    keep_quiet_about({})
    caplog.set_level(logging.DEBUG, "botocore.parsers")
    logging.getLogger("botocore.parsers").debug("%s", answer.format(**FOUND))
    for value in FOUND.values():
        assert value not in caplog.text
    for word in ("host", "expiration", "AssumeRoleResult", "us-east-1/s3"):
        assert (word in caplog.text) == (word in answer)
    logging.getLogger("botocore.parsers").debug("path /bucket/run: x-amz-date %s", FOUND["token"])
    assert FOUND["token"] not in caplog.text
    assert "path /bucket/run" in caplog.text


def test_threads_that_open_stores_at_once_find_their_credentials() -> None:
    """TensorStore reads the file of credentials later, with its first request."""
    threads = 16
    barrier = threading.Barrier(threads)

    def opened(secret: str) -> str:
        settings = S3Settings(
            "eu-west-1", "http://127.0.0.1:1", ("someone", secret, None), False, False, ""
        )
        barrier.wait(30)
        spec = tensorstore._open("s3://bucket/place", settings, tensorstore.shared_context()).spec
        file: str = spec["aws_credentials"]["credentials_file"]
        return file

    with ThreadPoolExecutor(threads) as pool:
        for secret in (f"secret-{number}" for number in range(30)):
            for file in list(pool.map(opened, [secret] * threads)):
                assert f"aws_secret_access_key = {secret}\n" in Path(file).read_text()


class Keys:
    """Keys of the gateway's user, one at a time, beside that of the other tests."""

    def __init__(self, server: S3Server) -> None:
        self._user = json.loads(self._admin("user", "list"))
        self._user = next(
            name for name in self._user if server.key in self._admin("user", "info", "--uid", name)
        )
        self.key = self.secret = ""

    def exchange(self) -> None:
        """Make another key, and remove the one before it."""
        old, self.key, self.secret = self.key, secrets.token_hex(10), secrets.token_hex(20)
        about = ("--uid", self._user, "--key-type", "s3")
        given = ("--access-key", self.key, "--secret", self.secret)
        self._admin("key", "create", *about, *given)
        if old:
            self._admin("key", "rm", *about, "--access-key", old)

    def _admin(self, *arguments: str) -> str:
        folder = Path(os.environ.get("SHARDSTORE_S3_SERVER_DIR", ROOT / ".s3-server"))
        command = ["radosgw-admin", "-c", str(folder / "ceph.conf"), "-n", "client.rgw"]
        return run_to_end([*command, *arguments], check=True).stdout


@pytest.fixture(params=["file", "program", "variables"])
def exchange(
    request: pytest.FixtureRequest,
    radosgw_server: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[], None]:
    """Give the program credentials, others with each call, and have the server refuse the last."""
    keys = Keys(radosgw_server)
    names = ("aws_access_key_id", "aws_secret_access_key")
    found = {"retry_mode": "standard"}
    if request.param == "program":
        found = {"credential_process": credential_process(tmp_path)}
    use_profile(tmp_path, monkeypatch, **found)
    if request.param == "variables":
        monkeypatch.delenv("AWS_PROFILE")

    def work() -> None:
        keys.exchange()
        if request.param == "variables":
            for name, value in zip(names, (keys.key, keys.secret), strict=True):
                monkeypatch.setenv(name.upper(), value)
        elif request.param == "program":
            until = (datetime.now(UTC) + timedelta(minutes=5)).strftime("%Y-%m-%dT%H:%M:%SZ")
            answer = {"AccessKeyId": keys.key, "SecretAccessKey": keys.secret}
            credential_process(tmp_path, **answer, Expiration=until)
        else:  # as programs do that renew it: in one step
            text = f"[of-the-test]\n{names[0]} = {keys.key}\n{names[1]} = {keys.secret}\n"
            (tmp_path / "fresh").write_text(text)
            (tmp_path / "fresh").rename(tmp_path / "credentials")

    return work


def test_exchanged_credentials_reach_both_clients(
    exchange: Callable[[], None], radosgw_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two saves, and between two requests of one, once credentials are asked for."""
    bucket = radosgw_server.new_bucket()
    options = {"endpoint_url": radosgw_server.endpoint_url, "region_name": radosgw_server.region}
    exchange()
    url = f"s3://{bucket}/run"
    shardstore.save(state(1), f"{url}/1", storage_options=options)
    place = Location.of(f"{url}/chunks", options)
    under_way = place.io()
    assert under_way.put("first", [b"x"], create=True)
    exchange()
    shardstore.save(state(2), f"{url}/2", storage_options=options)
    for version in (1, 2):
        loaded = shardstore.load(state(0), f"{url}/{version}", storage_options=options)
        assert loaded["step"] == version
    with pytest.raises(StorageError, match="refuses the credentials"):
        under_way.put("second", [b"x"], create=True)
    monkeypatch.setattr(tensorstore, "ASKED_EVERY_S", 0.0)
    assert under_way.put("second", [b"x"], create=True)
    assert under_way.get("first") == b"x"
