"""Credentials in what other libraries log, and in the errors that ours came from."""

from __future__ import annotations

import json
import logging
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import shardstore
from shardstore.errors import StorageError
from shardstore.storage.stores import tensorstore
from shardstore.storage.stores.errors import keep_quiet_about
from shardstore.storage.stores.location import Location
from shardstore.storage.stores.s3 import S3Settings
from testing.s3_servers import S3Server
from tests.helpers.s3_checkpoints import state

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
    url, options = f"s3://{bucket}/run/step-1", {**server.storage_options, **WRONG}
    place = Location.of(url, options)
    yield lambda: shardstore.save(state(1), f"{url}-not", storage_options=options)
    yield lambda: shardstore.load({"w": state(0)["w"]}, url, storage_options=options)
    yield lambda: place.io().get("w/c.0.0")
    yield lambda: place.io().put("w/c.0.0", [b"x"], create=True)
    yield lambda: place.read("zarr.json")
    yield lambda: shardstore.sweep(url, storage_options=options)
    wrong: dict[str, Any]
    for wrong in (
        {"no_such": 1},
        {"client_kwargs": {"no_such": 1}},
        {"config_kwargs": {"no_such": 1}},
        {"client_kwargs": {"aws_access_key_id": "AKTWICE0000000000"}},
        {"key": 1},
    ):
        given = {**options, **wrong}
        yield lambda given=given: shardstore.load({}, url, storage_options=given)  # type: ignore[misc]


def test_no_error_or_its_cause_shows_credentials(s3_server: S3Server) -> None:
    bucket = s3_server.new_bucket()
    shardstore.save(
        state(1), f"s3://{bucket}/run/step-1", storage_options=s3_server.storage_options
    )
    for work in failures(s3_server, bucket):
        with pytest.raises(StorageError) as caught:
            work()
        said = shown(caught.value)
        for value in (*WRONG.values(), s3_server.key, s3_server.secret):
            assert value not in said


def test_no_client_shows_credentials(s3_server: S3Server) -> None:
    place = Location.of(f"s3://{s3_server.new_bucket()}/run", s3_server.storage_options)
    seen = f"{place!r} {place} {place.place!r} {pickle.dumps(place.place)!r} {place.remote!r}"
    seen += f"{tensorstore.KvStoreIO(place.url, place.options).opened()!r} {place.kvstore()!r}"
    assert s3_server.secret not in seen
    assert s3_server.key not in seen


def test_no_log_shows_credentials_at_any_level(
    s3_server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = s3_server.new_bucket()
    url, options = f"s3://{bucket}/run/step-1", s3_server.storage_options
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, logger="botocore")
    shardstore.save(state(1), url, storage_options=options)
    shardstore.async_save(state(2), f"{url}-2", storage_options=options).result(60)
    shardstore.load({"w": state(0)["w"]}, url, storage_options=options)
    for work in failures(s3_server, bucket):
        with pytest.raises(StorageError):
            work()
    said = "\n".join([caplog.text, *(f"{r.getMessage()} {r.args!r}" for r in caplog.records)])
    assert "Credential=***" in said  # the libraries did say much
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
    token = f"IQoJb3JpZ2luX2VjEHMaCXVzLWVhc3Qt+{source}/Qx=="
    lines = {
        "aws_access_key_id": s3_server.key,
        "aws_secret_access_key": s3_server.secret,
        "aws_session_token": token,
    }
    if source == "program":
        answer = {
            "Version": 1,
            "AccessKeyId": s3_server.key,
            "SecretAccessKey": s3_server.secret,
            "SessionToken": token,
        }
        (tmp_path / "answer.py").write_text(f"print({json.dumps(answer)!r})")
        lines = {"credential_process": f"{sys.executable} {tmp_path}/answer.py"}
    text = "\n".join(f"{name} = {value}" for name, value in lines.items())
    (tmp_path / "config").write_text(f"[profile of-the-test]\n{text}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_PROFILE", "of-the-test")
    # What other tests made known must not help.
    monkeypatch.setattr("shardstore.storage.stores.errors._hidden", set())
    options = {"endpoint_url": s3_server.endpoint_url, "region_name": s3_server.region}
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, logger="botocore")
    url = f"s3://{s3_server.new_bucket()}/run/step-1"
    caplog.clear()  # of the test's own client
    shardstore.save(state(1), url, storage_options=options)
    shardstore.load({"w": state(0)["w"]}, url, storage_options=options)
    said = "\n".join([caplog.text, *(f"{r.getMessage()} {r.args!r}" for r in caplog.records)])
    assert "Credential=***" in said
    assert "security-token" in said.lower()
    for value in (s3_server.key, s3_server.secret, token):
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
