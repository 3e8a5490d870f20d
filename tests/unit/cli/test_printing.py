"""What is printed: within the width of a terminal, and nothing that a terminal would obey."""

from __future__ import annotations

import io
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import shardstore
from shardstore.cli.printing import print_table
from shardstore.inspection.opened import cells, clean
from tests.helpers.cli_checkpoints import Cli
from tests.helpers.cli_processes import run_commands
from tests.helpers.programs import run_text
from tests.helpers.terminal import plain, run_in_terminal

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
    shardstore.save(shardstore.shard(values), place)
    return place


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("odd") / "a")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("odd") / "b", 2.5)


@pytest.mark.parametrize("command", ["ls", "ls --flat", "stats", "diff", "show", "info"])
def test_lines_are_as_wide_as_the_terminal(
    odd: Path, other: Path, command: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, *options = command.split()
    words = [name, odd, *{"diff": [other], "show": [LONG]}.get(name, []), *options]
    code, drawn = run_in_terminal("stdout", *words, columns=40)
    assert code == (1 if command == "diff" else 0), drawn
    lines = plain(drawn).splitlines()
    assert len(lines) > 3
    assert max(map(cells, lines)) <= 40, lines
    if command == "info":
        return
    # Whole on demand, and for programs.
    _, wide = run_in_terminal("stdout", *words, "--wide", columns=40)
    assert not letters(plain(wide)) - letters(plain(drawn))
    monkeypatch.setenv("COLUMNS", "40")
    assert plain(wide) == cli(*words).out
    if command not in ("ls", "show"):
        assert max(len(line) for line in wide.splitlines() if LONG in line) > 80


def letters(text: str) -> Counter[str]:
    return Counter("".join(text.split()))


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
    state = shardstore.shard({"w": torch.ones(2)})
    shardstore.save({**state, HOSTILE: torch.eye(2).to_sparse()}, tmp_path / "c")
    program = "from shardstore.cli.app import main; main()"
    done = run_text(program, "convert", tmp_path / "c", tmp_path / "m.safetensors")
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


def test_letters_that_the_encoding_lacks_are_escaped(odd: Path) -> None:
    commands = (["ls", odd], ["stats", odd], ["ls", "--json", odd], ["show", odd, "層"])
    ran = run_commands(commands, LC_ALL="C", PYTHONIOENCODING="ascii")
    assert (ran.codes, ran.err.count("\n")) == ([0, 0, 0, 2], 1)
    assert ran.out.isascii()
    assert ran.out.count(r"\u5c64\u5c64\u5c64.w") == 3


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-", "2>/dev/full"])
def test_closed_streams_are_no_failure(odd: Path, other: Path, closed: str) -> None:
    commands = (["verify", odd], ["ls", odd, "--json"], ["diff", odd, other], ["rm", odd])
    ran = run_commands(commands, closed)
    assert ran.codes == [0, 0, 1, 2]
    assert bool(ran.out) == closed.startswith("2>")
    assert ran.err.count("\n") == (closed == ">&-")  # what rm says
    assert (odd / "zarr.json").exists()


TEXTS = st.text(st.sampled_from("ab層é. /_\u0301"), min_size=1, max_size=80)


@given(st.lists(st.tuples(TEXTS, TEXTS, TEXTS), min_size=1, max_size=5), st.integers(20, 120))
@example([("\u0301", "_" * 40, "a")], 20)  # a column of marks that take no room
def test_tables_keep_all_cells(rows: list[tuple[str, str, str]], width: int) -> None:
    with redirect_stdout(io.StringIO()) as out:
        print_table(rows, "<><", width)
    assert max(map(cells, out.getvalue().splitlines())) <= width
    assert letters(out.getvalue()) == letters("".join(map("".join, rows)))
