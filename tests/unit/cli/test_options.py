"""Options and places that do not fit: one line that says what to give, at once and without secrets.

No server is asked: what is wrong here is told before any request.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import shardstore
from shardstore.cli.app import app
from shardstore.cli.options import parse_options, parse_size
from shardstore.errors import CheckpointingException, StorageError
from shardstore.storage.stores.errors import remedy
from shardstore.storage.stores.location import url_of
from shardstore.storage.stores.s3 import problem_of
from tests.helpers.cli_checkpoints import Cli

PASSWORD = "hunter2-hunter2"

WRONG = [
    ("endpoint_url=127.0.0.1:1", "give http://127.0.0.1:1 or https://127.0.0.1:1"),
    ("client_kwargs.endpoint_url=host:9000", "client_kwargs.endpoint_url must begin with http://"),
    ("endpoint_url=ftp://host", "must begin with http://"),
    ("endpoint_url=http://", "names no host"),
    ("endpoint_url=http://host:port", "is no URL"),
    (f"endpoint_url=http://user:{PASSWORD}@127.0.0.1:1", "key and secret"),
    (f"endpoint_url=user:{PASSWORD}@127.0.0.1:1", "key and secret"),
    (f'secret={{"a": "{PASSWORD}"}}', "secret must be a text, not of type dict"),
    (f"secret={PASSWORD}", "secret is given without key"),
    (f"key={PASSWORD}", "key is given without secret"),
    ("config_kwargs.retries=5", "config_kwargs.retries has a value, of type int"),
    ("config_kwargs.timeout=5", "config_kwargs.timeout is unknown"),
    ("client_kwargs=3", "client_kwargs must be a dict, not of type int"),
    ("config_kwargs=many", "config_kwargs must be a dict, not of type str"),
]


@pytest.mark.parametrize(("option", "said"), WRONG, ids=[option for option, _ in WRONG])
def test_options_that_do_not_fit(cli: Cli, option: str, said: str) -> None:
    line = cli.refused("info", "s3://bucket/run", "--storage-option", option)
    assert said in line
    assert PASSWORD not in line
    assert "see the cause" not in line
    assert "Error" not in line.replace("(AttributeError)", "")


def test_the_library_says_the_same() -> None:
    with pytest.raises(StorageError, match="key and secret") as caught:
        shardstore.load_plain_tensors(
            "s3://bucket/run", storage_options={"endpoint_url": f"http://u:{PASSWORD}@h:1"}
        )
    assert PASSWORD not in str(caught.value)
    assert caught.value.__cause__ is None


def test_endpoints_of_the_environment(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "127.0.0.1:1")
    assert "AWS_ENDPOINT_URL must begin with http://" in cli.refused("ls", "s3://bucket/run")
    # One that is not used does not matter.
    assert problem_of({"endpoint_url": "http://host:1"}, {"AWS_ENDPOINT_URL": "x"}) is None


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"anon": True, "endpoint_url": "https://[::1]:9000/"},
        {"key": "a", "secret": "b", "token": None, "client_kwargs": None},
        {"client_kwargs": {"endpoint_url": "http://host", "verify": False}},
        {"config_kwargs": {"retries": {"max_attempts": 2}, "read_timeout": 5, "s3": {}}},
    ],
)
def test_options_that_fit(options: dict[str, object]) -> None:
    assert problem_of(options, {}) is None


def test_options_are_parsed() -> None:
    """Numbers are numbers but for credentials."""
    given = ["key=123", "secret=34", "anon=true", "max_concurrency=2", "region_name=1"]
    client = ["client_kwargs.endpoint_url=http://h", "client_kwargs.aws_session_token=56"]
    assert parse_options([*given, *client, 'config_kwargs={"a": 1}']) == {
        "key": "123",
        "secret": "34",
        "anon": True,
        "max_concurrency": 2,
        "region_name": "1",
        "client_kwargs": {"endpoint_url": "http://h", "aws_session_token": "56"},
        "config_kwargs": {"a": 1},
    }
    assert parse_options(["config_kwargs.read_timeout=7"]) == {"config_kwargs": {"read_timeout": 7}}


def test_sizes_are_parsed() -> None:
    sizes = ["1000", "2k", "3KiB", "1.5MiB", "2G", "10B"]
    assert [parse_size(text) for text in sizes] == [1000, 2048, 3072, 3 * 2**19, 2**31, 10]
    for text in ("", "x", "0", "-1k", "1X", "nan", "9" * 400):
        with pytest.raises(CheckpointingException):
            parse_size(text)


def test_schemes_do_not_mind_capitals(place: Path, cli: Cli) -> None:
    assert url_of("S3://Bucket/Run/") == "s3://Bucket/Run"
    assert url_of("FILE:///tmp/X") == "/tmp/X"
    assert cli("ls", f"File://{place}").code == 0
    assert "s3://bucket/run" in cli.refused("ls", "S3:/bucket/run")
    shown = cli.refused("ls", "S3://bucket/run", "--storage-option", "client_kwargs=3")
    assert shown.startswith("shardstore: s3://bucket/run: ")


def test_who_loads_is_not_told_to_save_less() -> None:
    assert "save" not in remedy("SlowDown", "reading")
    assert "save" not in remedy("SlowDown", "listing")
    assert "save less often" in remedy("SlowDown", "writing")


def test_options_of_stores_have_no_effect_on_disks(place: Path, tmp_path: Path, cli: Cli) -> None:
    option = ["--storage-option", "key=abc"]
    for command in (["ls"], ["info"], ["verify"], ["stats", "--json"], ["diff", place]):
        outcome = cli(command[0], place, *command[1:], *option)
        assert outcome.code == 0
        assert re.fullmatch(r"shardstore: --storage-option has no effect: .*\n", outcome.err)
        assert "abc" not in outcome.err
        assert outcome.out
    outcome = cli("convert", place, tmp_path / "c", *option)
    assert (outcome.code, outcome.err.count("\n")) == (0, 1)
    assert cli("ls", place).err == ""


def test_placeholders_of_arguments_are_capitals(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    commands = [
        command.callback.__name__ for command in app.registered_commands if command.callback
    ]
    assert len(commands) == 12
    for command in commands:
        usage = re.search(rf"Usage: shardstore {command} (.*)", cli(command, "--help").out)
        assert usage[1] == usage[1].upper()


def test_a_file_is_not_a_checkpoint_and_the_remedy_is_named(tmp_path: Path, cli: Cli) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("x")
    for command in ("ls", "info", "verify", "stats", "report"):
        assert "give the folder that save() wrote" in cli.refused(command, file)
