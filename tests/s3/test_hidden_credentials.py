"""Credentials in what other libraries log, and in the errors that ours came from."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import shardstore
from scripts.s3_servers import S3Server
from shardstore.errors import StorageError
from shardstore.storage.location import Location
from shardstore.storage.object_io import object_io
from tests.s3.checkpoints import state

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
    place = Location.of(url, **options)
    yield lambda: shardstore.save(state(1), f"{url}-not", storage_options=options)
    yield lambda: shardstore.load({"w": state(0)["w"]}, url, storage_options=options)
    yield lambda: object_io(place).get("w/c.0.0")
    yield lambda: object_io(place).put("w/c.0.0", [b"x"], create=True)
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


def test_no_error_that_ours_came_from_has_them(s3_server: S3Server) -> None:
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


def test_no_log_has_them_at_any_level(
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
