"""The README is true: its programs run as they are printed, in order, in one folder.

A comment before a block says on how many ranks it runs: ``<!-- ranks: 4 -->``; ``none`` stands for
a reader that must not need torch, ``s3`` for one rank and a bucket of an embedded server. What
``print(...)  # text`` claims has to be what comes out.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardstore.errors
from scripts.s3_servers import S3Server

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")

_BLOCK = re.compile(r"(?:<!-- ranks: (\w+) -->\n)?```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
_CLAIM = re.compile(r"^ *print\(.*\)  # (.*)$", re.MULTILINE)
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def test_programs(tmp_path: Path, s3_server: S3Server) -> None:
    store = {**s3_server.environment, "BUCKET": s3_server.new_bucket()}
    blocks = _BLOCK.findall(README)
    assert len(blocks) == README.count("```python") >= 6
    for number, (ranks, program) in enumerate(blocks):
        assert ranks, f"no number of ranks before:\n{program}"
        file = tmp_path / f"block_{number}.py"
        if ranks == "none":
            program += "\nimport sys\nassert 'torch' not in sys.modules\n"
        file.write_text(program, encoding="utf-8")
        command = [sys.executable]
        if ranks.isdecimal() and int(ranks) > 1:
            command += ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
            command += ["--nproc-per-node", ranks]
        done = subprocess.run(
            [*command, str(file)],
            cwd=tmp_path,
            env={
                **os.environ,
                **(store if ranks == "s3" else {}),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            },
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, f"{program}\n{done.stdout}\n{done.stderr}"
        assert done.stdout.splitlines() == _CLAIM.findall(program), program


def test_every_error_is_listed() -> None:
    for name in shardstore.errors.__all__:
        assert f"`{name}`" in README or f"`shardstore.{name}`" in README, name
    for name, builtin in re.findall(r"^\| `(\w+)`.* \| `([\w.]+)` \|", README, re.MULTILINE):
        base = __import__("pickle").UnpicklingError if "." in builtin else eval(builtin)
        assert issubclass(getattr(shardstore.errors, name), base), name


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "shardstore/storage/FORMAT.md"])
def test_links_and_scripts_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in _LINK.findall(text):
        assert (ROOT / page).parent.joinpath(target).exists(), target
    for script in re.findall(r"scripts/\w+", text):
        assert os.access(ROOT / script, os.X_OK), script


def test_defaults_are_as_told() -> None:
    from shardstore.ranks import DEADLINE_VARIABLE, DEFAULT_DEADLINE_S
    from shardstore.storage.options import SaveOptions
    from shardstore.storage.parallel import MAX_THREADS

    options = SaveOptions()
    rows = dict(re.findall(r"^\| (`.*?`[^|]*?) \| ([^|]+) \|", README, re.MULTILINE))
    assert rows["`save(..., overwrite=)`"] == f"`{options.overwrite}`"
    assert rows["`save(..., durable=)`"] == f"`{options.durable}`"
    chunk = rows["`ZarrSaveShardedStrategy(..., target_chunk_bytes=)`"]
    assert chunk == f"{options.target_chunk_bytes >> 20} MiB"
    assert f"at most {MAX_THREADS}" in rows["`ZarrSaveShardedStrategy(..., threads=)`"]
    assert rows[f"`{DEADLINE_VARIABLE}` (environment)"] == str(int(DEFAULT_DEADLINE_S))
