"""What a stranger types wrongly at the scripts: one line that helps, exit code 2, and nothing
installed, started or measured before."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import run_to_end

ROOT = Path(__file__).resolve().parents[2]


def refused(script: str, *arguments: object, **environment: str) -> str:
    """The one line that a wrong command line gets."""
    done = run_to_end(
        ["bash", str(ROOT / "scripts" / script), *arguments],
        env={**os.environ, "PYTHON": sys.executable, "BENCH_PYTHON": "", **environment},
    )
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


NOWHERE = {"SHARDSTORE_VENV": "/proc/no/venv"}
"""No environment can be made there: what is refused is refused without one."""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--stpes", 3], "--stpes"),
        (["--steps"], "--steps: expected one argument"),
        (["--steps", "many"], "'many' is no whole number"),
        (["--steps", 2], "--steps has to be at least 4"),
        (["--dir", "/proc/none"], "/proc/none cannot be made"),
        (["--dir", __file__], "is a file, not a folder"),
        (["--dir", ROOT], "is not empty"),
        (["--dir", "/proc"], "nothing can be written to /proc"),
        (["--checkpoint", "runs/1"], "'runs/1' is no URL"),
        (["--checkpoint", ""], "is no URL"),
        (["--s3", "--checkpoint", "s3://b/c"], "not allowed with"),
    ],
    ids=str,
)
def test_wrong_arguments_of_the_quickstart_get_one_line(arguments: list[object], said: str) -> None:
    line = refused("quickstart", *arguments, **NOWHERE)
    assert said in line
    assert line.startswith("scripts/quickstart: ")


def test_quickstart_without_a_python_or_a_place_to_install_to(tmp_path: Path) -> None:
    assert "PYTHON=/no/python" in refused("quickstart", PYTHON="/no/python")
    assert "/proc/no/venv cannot be made" in refused("quickstart", **NOWHERE)
    (tmp_path / "mine").write_text("keep")
    said = refused("quickstart", SHARDSTORE_VENV=str(tmp_path))
    assert "is no virtual environment" in said
    assert (tmp_path / "mine").read_text() == "keep"


@pytest.mark.parametrize("arguments", [[], ["dsk"], ["--only"]], ids=str)
def test_benchmark_before_anything_is_installed(arguments: list[str]) -> None:
    assert "give one of: disk" in refused("benchmark", *arguments, PYTHON="/no/python")
    assert "BENCH_PYTHON=/no/python" in refused("benchmark", "disk", BENCH_PYTHON="/no/python")


ARGUMENTS: list[tuple[list[object], str]] = [
    (["disk", "--onyl", "x"], "--onyl"),
    (["disk", "--only", "x"], "unknown: 'x'; known: save-load"),
    (["disk", "--repeats", 0], "'0' is no whole number of at least 1"),
    (["disk", "--scale", "nan"], "'nan' is no number above 0"),
    (["disk", "--ranks", "1,"], "'' is no whole number"),
    (["disk", "--dir", "/proc/none"], "/proc/none cannot be made"),
    (["disk", "--json", "/no/folder/x.json"], "there is no folder /no/folder"),
    (["async", "--only", "x"], "unknown: 'x'"),
    (["scale", "--json", ROOT], "is a folder: name a file"),
    (["page", "/no/file.json"], "/no/file.json cannot be read: No such file"),
    (["page", ROOT / "README.md", "--markdown", "/proc/x.md"], "is not what"),
]
ANSWERS = """
import contextlib, io, json, sys
from bench.__main__ import main

for arguments in json.loads(sys.argv[1]):
    sys.argv[:] = ["benchmark", *arguments]
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        try:
            code = main()
        except SystemExit as error:
            code = error.code
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


def test_wrong_arguments_of_the_benchmark_get_one_line() -> None:
    """One process answers all of them, because it imports the clients first."""
    given = json.dumps([list(map(str, arguments)) for arguments, _ in ARGUMENTS])
    where = {**os.environ, "PYTHONPATH": f"{ROOT / 'scripts'}:{ROOT}"}
    done = run_to_end([sys.executable, "-c", ANSWERS, given], env=where)
    assert done.returncode == 0, done.stderr
    answers = map(json.loads, done.stdout.splitlines())
    for (arguments, said), (code, out, err) in zip(ARGUMENTS, answers, strict=True):
        assert (code, out, err.count("\n")) == (2, "", 1), (arguments, err)
        assert said in err, arguments
        assert err.startswith("scripts/benchmark"), arguments
    assert "--onyl" in refused("benchmark", "disk", "--onyl", "x", BENCH_PYTHON=sys.executable)


def test_test_knows_its_help_before_it_installs() -> None:
    run = ["bash", str(ROOT / "scripts" / "test"), "--help"]
    environment = {**os.environ, **NOWHERE}
    done = run_to_end(run, env=environment)
    assert done.returncode == 0
    assert "Arguments go to pytest" in done.stdout
    assert "/proc/no/venv cannot be made" in refused("test", **NOWHERE)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give a command: start, kill, env, stop"),
        (["strat"], "no command strat"),
        (["start", "--instal"], "no option --instal"),
        (["start", "Another"], "no name for another gateway: Another"),
        (["start", "a", "b"], "takes no argument b"),
        (["kill", "nobody"], "there is no gateway nobody"),
        (["kill", "../x"], "no name for another gateway: ../x"),
        (["stop", "a"], "stop takes no argument a"),
        (["env", "a"], "env takes no argument a"),
    ],
    ids=str,
)
def test_wrong_arguments_of_the_s3_server_get_one_line(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    line = refused("s3_server", *arguments, SHARDSTORE_S3_SERVER_DIR=str(tmp_path / "s3"))
    assert said in line
    assert line.startswith("s3_server: ")
    assert not (tmp_path / "s3").exists()


@pytest.mark.parametrize("taken", [True, False])
def test_s3_server_sees_that_its_port_is_taken(tmp_path: Path, taken: bool) -> None:
    """By another program, while the gateway was down: it would be taken for the gateway."""
    text = (ROOT / "scripts" / "s3_server").read_text()
    function = text[text.index("is_taken() {") : text.index("\nstart() {")]
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        if taken:
            other.listen()
        else:
            other.close()
        script = f"{function}\nis_taken http://127.0.0.1:{port}"
        done = subprocess.run(["bash", "-c", script], timeout=60, check=False)
    assert done.returncode == (0 if taken else 1)
