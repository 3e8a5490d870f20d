"""Runs what a page prints: its programs and its shell commands, in order, in one folder.

torchrun starts the programs that want a certain number of ranks, if asked to, and all of them if
another Python is given; the others find in their environment what torchrun would have put there.

A comment before a block says how: ``<!-- ranks: 4 -->`` a program on so many ranks, ``none`` for a
reader that must not need torch, ``alone`` for a program that starts ranks itself, ``s3`` for one
rank and a bucket; ``<!-- run -->`` shell commands, line by line, ``<!-- run: s3 -->`` with a
bucket; ``<!-- not run: why -->``. What ``print(...)  # text`` claims has to be what comes out, or
else what the block after ``<!-- output -->`` shows, where the folder is called ``/run``. Programs
for another Python may say nothing of what their trainer prints. A command ends with 0 unless its
comment says "exits with 1".
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from types import ModuleType

import torch.distributed as dist

from tests.helpers.rank_server import start

LIMIT_S = 200
_BLOCK = re.compile(
    r"(?:<!-- (ranks|run|not run)(?:: ([^>]*?))? -->\n)?```(python|sh)\n(.*?)^```"
    r"(?:\n\n<!-- output -->\n```text\n(.*?)^```)?",
    re.DOTALL | re.MULTILINE,
)
_CLAIM = re.compile(r"^ *print\(.*\)  # (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One block of code of a page, what the comment before it says, and its output."""

    how: str
    where: str
    language: str
    text: str
    output: str


def blocks(page: str) -> list[Block]:
    """All blocks of code of a page, each of which has to say how it is run."""
    found = [Block(*match) for match in _BLOCK.findall(page)]
    assert len(found) == len(re.findall(r"^```(?:python|sh)$", page, re.MULTILINE))
    assert sum(bool(block.output) for block in found) == page.count("<!-- output -->")
    for block in found:
        assert block.how, f"nothing says how to run:\n{block.text}"
        assert (block.language == "python") == (block.how == "ranks"), block.text
    return found


def run_page(
    page: str,
    folder: Path,
    store: Mapping[str, str],
    *,
    torchrun: int = 0,
    python: str | os.PathLike[str] | None = None,
) -> None:
    """Run all blocks; ``store`` is the environment of those that need a bucket, ``torchrun`` the
    ranks of programs that it starts, and ``python`` that of another environment, if any."""
    for number, block in enumerate(blocks(page)):
        environment = dict(store) if block.where == "s3" else {}
        if block.how == "ranks":
            file, own = folder / f"block_{number}.py", python is not None
            _program(block, file, environment, own or block.where == str(torchrun), python)
        elif block.how == "run":
            for position, line in enumerate(block.text.splitlines()):
                file = folder / f"command_{number}_{position}.py"
                _command(line, file, environment, python)


def _program(
    block: Block,
    file: Path,
    environment: Mapping[str, str],
    torchrun: bool,
    python: str | os.PathLike[str] | None,
) -> None:
    program = block.text
    if block.where == "none":
        program += "\nimport sys\nassert 'torch' not in sys.modules\n"
    file.write_text(program, encoding="utf-8")
    command = [str(python or sys.executable)]
    ranks = int(block.where) if block.where.isdecimal() else 1
    if torchrun and block.where not in ("none", "alone"):
        command += ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command += ["--nproc-per-node", str(ranks)]
    if torchrun or block.where == "none":
        done = _run([*command, str(file)], file.parent, environment)
    else:
        done = run_forked(file, ranks, environment)
    assert done.returncode == 0, f"{program}\n{done.stdout}\n{done.stderr}"
    shown = block.output.splitlines() or _CLAIM.findall(program)
    if shown or python is None:
        assert done.stdout.replace(str(file.parent), "/run").splitlines() == shown, program


def run_forked(
    file: Path, ranks: int, environment: Mapping[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run a program on so many ranks that need not import torch again."""
    # As with torchrun, who starts the ranks keeps the store by which they find each other.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    alone = {**environment, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    shared = {
        **alone,
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(ranks),
    }
    several = [{**shared, "LOCAL_RANK": str(rank), "RANK": str(rank)} for rank in range(ranks)]
    own = several if ranks > 1 else [alone]
    processes = start((_main, (str(file), environment, arguments)) for environment in own)
    for process in processes:
        process.join(LIMIT_S)
        process.kill()
        process.join()
    codes = [process.exitcode for process in processes]
    out, err = (file.with_suffix(stream).read_text("utf-8") for stream in (".out", ".err"))
    return subprocess.CompletedProcess(str(file), next(filter(None, codes), 0), out, err)


def run_text(
    program: str, *arguments: object, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program in a process that need not import torch again."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "program.py")
        file.write_text(program, encoding="utf-8")
        return run_forked(file, 1, environment, *map(str, arguments))


def _main(file: str, environment: Mapping[str, str], arguments: Sequence[str]) -> None:
    """Become the program, whose names are there to the end of the process."""
    for stream, suffix in ((1, ".out"), (2, ".err")):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        os.dup2(os.open(Path(file).with_suffix(suffix), flags, 0o600), stream)
    os.environ.update(environment)
    os.chdir(Path(file).parent)
    sys.argv[:] = [file, *arguments]
    sys.path[:0] = [str(Path(file).parent)]
    program = sys.modules["__main__"] = ModuleType("__main__")
    program.__file__ = file
    exec(compile(Path(file).read_text("utf-8"), file, "exec"), vars(program))


_SHARDSTORE = "import runpy\nrunpy.run_module('shardstore', run_name='__main__')\n"


def _command(
    line: str, file: Path, environment: Mapping[str, str], python: str | os.PathLike[str] | None
) -> None:
    """Run a command; ``shardstore`` in a process that need not import torch again, or with the
    other Python by bash."""
    command, _, comment = line.partition(" #")
    if python is None:
        program, *words = shlex.split(Template(command).safe_substitute(environment))
        assert program == "shardstore", line
        file.write_text(_SHARDSTORE, encoding="utf-8")
        done = run_forked(file, 1, environment, *words)
    else:
        command = re.sub(r"^python\b", str(python), command)
        command = re.sub(r"^shardstore\b", f"{python} -m shardstore", command)
        done = _run(["bash", "-c", command], file.parent, environment)
    expected = 1 if "exits with 1" in comment else 0
    assert done.returncode == expected, f"{line}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr, line


def _run(
    command: list[str], folder: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
