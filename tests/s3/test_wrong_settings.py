"""Wrong bucket, key, region or endpoint, at defaults: a clear error, soon, and no secret in it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

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
from tests.helpers.range_server import Quiet, answering
from tests.helpers.s3_checkpoints import Run, credential_process, state, use_profile

Work = Callable[[str, dict[str, Any]], object]


def save(url: str, options: dict[str, Any]) -> None:
    shardstore.save(state(1), url, storage_options=options)


def load(url: str, options: dict[str, Any]) -> None:
    shardstore.load({}, url, storage_options=options)


def save_model(url: str, options: dict[str, Any]) -> None:
    hf.save({"w": torch.ones(2)}, url, storage_options=options)


def load_array(url: str, options: dict[str, Any]) -> None:
    tensor = ShardedTensor.from_rank_offsets("w", torch.zeros(2))
    zarr_strategy._load_from_array(tensor, Location.of(url, options))


VERBS: list[Work] = [
    save,
    load,
    lambda url, options: shardstore.check_is_distributed_checkpoint(url, storage_options=options),
    lambda url, options: shardstore.latest(url, storage_options=options),
    lambda url, options: shardstore.delete_checkpoint(url, storage_options=options),
]


def refused(
    options: dict[str, Any], url: str, *words: str, works: Sequence[Work] = (save, load)
) -> None:
    """All of ``works`` fail with all these words."""
    for work in works:
        with pytest.raises((StorageError, NotACheckpointError)) as caught:
            work(url, options)
        text = str(caught.value)
        for word in (url.rsplit("/", 1)[0], *words):
            assert word in text, text
        for name in ("key", "secret"):
            assert not options.get(name) or options[name] not in repr(caught.value)


def test_an_absent_bucket_is_named(any_s3_server: S3Server) -> None:
    url = "s3://shardstore-nowhere-0815/run/x"
    refused(any_s3_server.storage_options, url, "the bucket does not exist", works=VERBS)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"key": "AKSTRANGER0000000000", "secret": "of-nobody-at-all"}, "refuses the credentials"),
        ({"secret": "of-nobody-at-all"}, "refuses the credentials"),
        ({"bogus": 1}, "storage options"),
        ({"profile": "no-such-profile", "key": None, "secret": None}, "AWS_PROFILE"),
    ],
)
def test_credentials_and_options_that_do_not_fit_are_named(
    any_s3_server: S3Server, change: dict[str, Any], word: str
) -> None:
    if any_s3_server.name == "embedded" and change.keys() == {"secret"}:
        pytest.skip("the embedded server reads no signatures")
    url = f"s3://{any_s3_server.new_bucket()}/run/x"
    refused({**any_s3_server.storage_options, **change}, url, word, works=VERBS)


def test_an_endpoint_where_nobody_listens(s3_server: S3Server) -> None:
    dead = s3_server.at(f"http://127.0.0.1:{free_port()}").storage_options
    refused(dead, "s3://bucket/run/x", "endpoint", "does not answer", works=VERBS)


def test_an_endpoint_that_never_answers(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save, a load and a read of one array give up after the time for a first answer."""
    assert 2 * 2**20 / remote.SLOWEST_BYTES_PER_S < remote.FIRST_DEADLINE_S == 20
    monkeypatch.setattr(remote, "FIRST_DEADLINE_S", 2.0)
    monkeypatch.setattr(remote, "SLOWEST_BYTES_PER_S", 2**20)
    url, said = "s3://bucket/run/x", "no answer within 2 s"
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        silent = s3_server.at(f"http://127.0.0.1:{listener.getsockname()[1]}").storage_options
        refused(silent, url, "endpoint", said)
        # Of another store, by its settings.
        refused({**silent, "key": "AKOTHER0000000000000"}, url, said, works=[load_array])


def always_answering(status: int, kind: str, content: bytes) -> AbstractContextManager[str]:
    """A server that gives every request the same answer."""

    class Handler(Quiet):
        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.end(status, {"Content-Type": kind}, content)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer  # noqa: N815 (its names)

    return answering(Handler)


REGION_ERRORS = {
    "malformed": "<Error><Code>AuthorizationHeaderMalformed</Code><Message>The authorization "
    "header is malformed; the region 'us-east-1' is wrong; expecting 'eu-west-3'</Message>"
    "<Region>eu-west-3</Region></Error>",
    "constraint": "<Error><Code>IllegalLocationConstraintException</Code><Message>The us-east-1 "
    "location constraint is incompatible for the region specific endpoint this request was sent "
    "to.</Message></Error>",
}


@pytest.mark.parametrize("kind", REGION_ERRORS)
def test_a_wrong_region_is_named(s3_server: S3Server, kind: str) -> None:
    """As Amazon's servers answer; the two that run here take any region."""
    with always_answering(400, "application/xml", REGION_ERRORS[kind].encode()) as endpoint_url:
        refused(s3_server.at(endpoint_url).storage_options, "s3://bucket/run/x", "region")


@pytest.mark.parametrize("page", [b"default backend - 404", b"<html>not found</html>"])
def test_a_server_that_is_no_store_is_named(s3_server: S3Server, page: bytes) -> None:
    """Such as an ingress of Kubernetes. That it has nothing there does not make a bucket empty."""
    with always_answering(404, "text/html", page) as endpoint_url:
        options = s3_server.at(endpoint_url).storage_options
        refused(options, "s3://bucket/run/x", "the endpoint", works=[save, *VERBS[3:]])


CHARACTERS: dict[str, Callable[[str], dict[str, Any]]] = {
    "key": lambda text: {"key": text},
    "secret": lambda text: {"secret": text},
    "token": lambda text: {"token": text},
    "region_name": lambda text: {"client_kwargs": {"region_name": text}},
    "SSEKMSKeyId": lambda text: {
        "s3_additional_kwargs": {"SSEKMSKeyId": text, "ServerSideEncryption": "aws:kms"}
    },
    "user_agent_extra": lambda text: {"config_kwargs": {"user_agent_extra": text}},
}
ANSWERS = {
    "access key": "AccessKeyId",
    "secret key": "SecretAccessKey",
    "session token": "SessionToken",
}
TEXTS = ["us-east-1\n", "us-\r\neast-1", "us-east-1\x7f", "\x01us-east-1"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *((name, TEXTS[0]) for name in (*CHARACTERS, *ANSWERS)),
        *((name, text) for name in ("region_name", "session token") for text in TEXTS[1:]),
    ],
)
def test_a_character_that_no_header_may_have_is_named_at_once(
    s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    """The client libraries refuse it inside this process, and try that again and again."""
    url = f"s3://{s3_server.new_bucket()}/run"
    if name in ANSWERS:
        answer = {"AccessKeyId": "AKPROCESS00000000000", "SecretAccessKey": "s" * 20}
        command = credential_process(tmp_path, **{**answer, ANSWERS[name]: text})
        use_profile(tmp_path, monkeypatch, credential_process=command)
        options: dict[str, Any] = {"endpoint_url": s3_server.endpoint_url}
    else:
        options = {**s3_server.storage_options, **CHARACTERS[name](text)}
        options["client_kwargs"]["endpoint_url"] = s3_server.endpoint_url
    for work in (save, load):
        with pytest.raises(StorageError, match=f"{name} has a character") as caught:
            work(url, options)
        assert "us-east-1" not in str(caught.value)


SSO = {"sso_account_id": "1" * 12, "sso_role_name": "R"}
START = "https://corp.awsapps.com/start"
ROLE = {"role_arn": "arn:aws:iam::123456789012:role/x"}


@pytest.mark.parametrize(
    "options",
    [
        {"sso_session": "corp", **SSO},
        {"sso_start_url": START, "sso_region": "us-east-1", **SSO},
        {"credential_process": "/bin/false"},
        {"credential_process": "/bin/echo no JSON, but AKSECRET000"},
        {"credential_process": "/nowhere/tool"},
        {"credential_process": "/etc/hostname"},
        {**ROLE, "source_profile": "nowhere"},
        {**ROLE, "web_identity_token_file": "/nowhere/token"},
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
    session = f"[sso-session corp]\nsso_region = us-east-1\nsso_start_url = {START}\n"
    use_profile(tmp_path, monkeypatch, session, **options, endpoint_url=s3_server.endpoint_url)
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


def test_a_program_that_gives_no_credentials_in_time_is_named(
    s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no store that does not answer."""
    monkeypatch.setattr(remote, "FIRST_DEADLINE_S", 0.5)
    profile = {"credential_process": "/bin/sleep 5", "endpoint_url": s3_server.endpoint_url}
    use_profile(tmp_path, monkeypatch, **profile)
    with pytest.raises(StorageError, match=r"finding credentials .*run credential_process by hand"):
        shardstore.latest(f"s3://{s3_server.new_bucket()}/run")


@pytest.mark.parametrize("by", ["tensorstore", "boto", ""])
def test_a_refusal_to_read_says_that_nothing_may_be_there(
    proxied: S3Server, proxy: FaultProxy, by: str
) -> None:
    """Amazon answers 403 for a missing key if the credentials may not list."""
    url = f"s3://{proxied.new_bucket()}/run"
    proxy.add(Fault.DENIED, client=f"(?i){by}", count=None)
    with pytest.raises(StorageError, match=r"ListBucket") as caught:
        load(url, proxied.storage_options)
    assert "credentials" in str(caught.value)


either_client = pytest.mark.parametrize("client", ["(?i)tensorstore", "(?i)boto"])


@either_client
def test_an_archived_object_is_named_so(proxied: S3Server, proxy: FaultProxy, client: str) -> None:
    """Such as those that a rule of the bucket has moved to Glacier."""
    url, options = f"s3://{proxied.new_bucket()}/run", proxied.storage_options
    save(url, options)
    proxy.add(Fault.ARCHIVED, methods=("GET",), client=client, count=None)
    with pytest.raises(StorageError, match=r"InvalidObjectState.*archived.*restore") as caught:
        shardstore.load_plain_tensors(url, storage_options=options)
    assert "credentials" not in str(caught.value)


@either_client
def test_an_object_lock_is_named_with_the_remedy(
    proxied: S3Server, proxy: FaultProxy, client: str
) -> None:
    """Such a bucket takes no object without a checksum. The remedy sends one with every object."""
    url, options = f"s3://{proxied.new_bucket()}/run", proxied.storage_options
    proxy.add(Fault.LOCKED, methods=("PUT",), client=client, count=None)
    with pytest.raises(StorageError, match=r"s3_additional_kwargs.*ChecksumAlgorithm"):
        save(url, options)
    proxy.clear()
    save(url, {**options, "s3_additional_kwargs": {"ChecksumAlgorithm": "SHA256"}})
    puts = proxy.passed("PUT")
    assert len(puts) > 8
    assert all("x-amz-checksum-sha256" in put.headers for put in puts)


@either_client
def test_a_store_that_refuses_conditions_is_named(s3_server: S3Server, client: str) -> None:
    url = f"s3://{s3_server.new_bucket()}/run"
    with FaultProxy(s3_server.endpoint_url) as proxy:
        proxy.add(Fault.UNKNOWN, conditional=True, client=client, count=None)
        with pytest.raises(StorageError, match=r"NotImplemented.*honours conditional writes"):
            save(url, s3_server.at(proxy.endpoint_url).storage_options)


@pytest.mark.parametrize("end", ["//", "/?region=x", "#x"])
def test_an_endpoint_with_more_than_a_host_and_a_path(s3_server: S3Server, end: str) -> None:
    wrong = s3_server.at(f"{s3_server.endpoint_url}{end}").storage_options
    refused(wrong, "s3://bucket/run/x", "endpoint_url has")


@pytest.mark.parametrize("end", ["", "/"])
def test_an_endpoint_that_ends_with_the_bucket(s3_server: S3Server, end: str) -> None:
    """As the consoles of some stores show it. Objects would be below BUCKET/BUCKET, if anywhere."""
    bucket = s3_server.new_bucket()
    wrong = s3_server.at(f"{s3_server.endpoint_url}/{bucket}{end}").storage_options
    for work in (save, load, load_array, save_model):
        with pytest.raises(
            ArgumentError, match=rf"ends with the bucket.* {s3_server.endpoint_url}$"
        ):
            work(f"s3://{bucket}/x", wrong)
    assert s3_server.keys(bucket) == []


def test_the_environment_alone_suffices(
    any_s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in any_s3_server.environment.items():
        monkeypatch.setenv(name, value)
    run = Run(any_s3_server, any_s3_server, any_s3_server.new_bucket(), {})
    run.save(1)
    assert run.version(1) == 1
    # A profile in place of them all.
    for name in any_s3_server.environment:
        monkeypatch.delenv(name)
    use_profile(
        tmp_path, monkeypatch, region=any_s3_server.region, endpoint_url=any_s3_server.endpoint_url
    )
    (tmp_path / "credentials").write_text(
        f"[of-the-test]\naws_access_key_id = {any_s3_server.key}\n"
        f"aws_secret_access_key = {any_s3_server.secret}\n"
    )
    run.save(2)
    assert run.version(2) == 2
    assert Location.of(run.url(2)).remote.exists("zarr.json")
