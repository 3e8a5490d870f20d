"""What is printed: within the width of a terminal, and nothing that a terminal would obey."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardstore
from shardstore.cli.printing import print_table
from shardstore.inspection.opened import cells, clean
from shardstore.mapping import ShardedTensor
from tests.helpers.cli_checkpoints import Cli
from tests.helpers.processes import run_to_end
from tests.helpers.terminal import plain, written_to_terminal

LONG = "decoder.layers.0.mlp.experts.local_experts.7.linear_fc1.weight"
HOSTILE = "evil\x1b[31m\nkey\x9b2J"
WIDE_LETTERS = "層層層.wé"


def save(place: Path, factor: float = 1.0) -> Path:
    values = {
        LONG: torch.linspace(-3, 3, 360).reshape(3, 4, 5, 6) * factor,
        "decoder.layers.0.self_attention.linear_qkv.weight": torch.full((48, 24), 1 / 3),
        HOSTILE: torch.ones(3) * factor,
        WIDE_LETTERS: torch.ones(2),
        f"only.{factor}": torch.ones(2),
    }
    state = {key: ShardedTensor.from_rank_offsets(key, value) for key, value in values.items()}
    shardstore.save(state, place)
    return place


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("odd") / "a")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("odd") / "b", 2.5)


COMMANDS = ("ls", "ls --flat", "stats", "diff", "show", "info")


def words(command: str, odd: Path, other: Path) -> list[object]:
    name, *options = command.split()
    more = {"diff": [other], "show": [LONG]}.get(name, [])
    return [name, odd, *more, *options]


@pytest.mark.parametrize("width", [40, pytest.param(80, marks=pytest.mark.long)])
@pytest.mark.parametrize("command", COMMANDS)
def test_lines_are_as_wide_as_the_terminal(
    odd: Path, other: Path, command: str, width: int
) -> None:
    code, drawn = written_to_terminal(*words(command, odd, other), columns=width)
    assert code == (1 if command == "diff" else 0), drawn
    lines = plain(drawn).splitlines()
    assert len(lines) > 3
    assert max(map(cells, lines)) <= width, lines
    if command != "info":
        _, whole = written_to_terminal(*words(command, odd, other), "--wide", columns=width)
        assert not letters(plain(whole)) - letters(plain(drawn))


def letters(text: str) -> Counter[str]:
    return Counter("".join(text.split()))


@pytest.mark.parametrize("command", ["ls --flat", "stats", "diff"])
def test_lines_stay_whole_for_programs_and_on_demand(odd: Path, other: Path, command: str) -> None:
    arguments = words(command, odd, other)
    _, drawn = written_to_terminal(*arguments, "--wide", columns=60)
    done = run_to_end(
        [sys.executable, "-m", "shardstore", *arguments], env={**os.environ, "COLUMNS": "60"}
    )
    assert plain(drawn) == done.stdout
    (line,) = (line for line in done.stdout.splitlines() if LONG in line)
    assert len(line) > 80


@pytest.mark.parametrize(
    "arguments", [["ls"], ["ls", "--flat"], ["stats"], ["diff"], ["show", HOSTILE], ["verify"]]
)
def test_nothing_reaches_the_terminal_raw(
    odd: Path, other: Path, cli: Cli, arguments: list[str]
) -> None:
    name, *more = arguments
    outcome = cli(name, odd, *([other] if name == "diff" else more))
    text = outcome.out + outcome.err
    assert text.replace("\n", "").isprintable()
    if name != "verify":
        assert clean(HOSTILE) in text
        assert r"\x1b[31m\nkey\x9b2J" in text


def test_nothing_in_errors_is_raw(odd: Path, tmp_path: Path, cli: Cli) -> None:
    for arguments in (["show", odd, "evil"], ["ls", odd, "\x1b]0;x\x07"], ["ls", "no\x1b[2J"]):
        line = cli.refused(*arguments)
        assert line.removesuffix("\n").isprintable(), line
    (odd / "stranger\x1b[2J").write_text("")
    found = cli("verify", odd).out
    (odd / "stranger\x1b[2J").unlink()
    assert r"stranger\x1b[2J is not part" in found
    assert cli("report", odd, "-o", tmp_path / "r\x1b.html").out == f"{tmp_path}/r\\x1b.html\n"


def test_warnings_of_the_library_are_lines_of_the_command(tmp_path: Path) -> None:
    state = {
        "w": ShardedTensor.from_rank_offsets("w", torch.ones(2)),
        HOSTILE: torch.eye(2).to_sparse(),
    }
    shardstore.save(state, tmp_path / "c")
    done = run_with("", "convert", tmp_path / "c", tmp_path / "m.safetensors")
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert "evil\\x1b[31m key" in line
    assert "are left out" in line
    assert line.isprintable()


def test_json_has_exact_keys_in_printable_text(odd: Path, cli: Cli) -> None:
    outcome = cli("ls", "--json", odd)
    assert HOSTILE in {entry["key"] for entry in outcome.json["arrays"]}
    assert outcome.out.replace("\n", "").isprintable()
    assert WIDE_LETTERS in {entry["key"] for entry in outcome.json["arrays"]}


def run_with(
    redirect: str, *arguments: object, **variables: str
) -> subprocess.CompletedProcess[str]:
    command = f'exec "$@" {redirect}'
    return run_to_end(
        ["sh", "-c", command, "sh", sys.executable, "-m", "shardstore", *arguments],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **variables},
    )


def test_letters_that_the_encoding_lacks_are_escaped(odd: Path) -> None:
    for command in (["ls"], ["stats"], ["ls", "--json"]):
        done = run_with("", *command, odd, LC_ALL="C", PYTHONIOENCODING="ascii")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.isascii()
        assert r"\u5c64" in done.stdout
    assert WIDE_LETTERS in {entry["key"] for entry in json.loads(done.stdout)["arrays"]}
    done = run_with("", "show", odd, "層", LC_ALL="C", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_failure(odd: Path, other: Path, closed: str) -> None:
    for command in (["verify", odd], ["ls", odd, "--json"]):
        done = run_with(closed, *command)
        assert (done.returncode, done.stderr) == (0, ""), command
        assert bool(done.stdout) == (closed == "2>&-")
    assert run_with(closed, "diff", odd, other).returncode == 1
    assert run_with(closed, "rm", odd).returncode == 2
    assert (odd / "zarr.json").exists()


TEXTS = st.text(st.sampled_from("ab層é. /_\u0301"), min_size=1, max_size=80)


@given(st.lists(st.tuples(TEXTS, TEXTS, TEXTS), min_size=1, max_size=5), st.integers(20, 120))
def test_tables_keep_all_cells(rows: list[tuple[str, str, str]], width: int) -> None:
    with redirect_stdout(io.StringIO()) as out:
        print_table(rows, "<><", width)
    assert max(map(cells, out.getvalue().splitlines())) <= width
    assert letters(out.getvalue()) == letters("".join(map("".join, rows)))
