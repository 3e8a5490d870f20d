"""Megatron-Core and this package answer alike about checkpoints in files: errors, metadata, files.

What three releases of Megatron-Core answered is kept under tests/golden. Where the environment is
at hand, this package answers in their place; before a release, they are asked again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.megatron_releases import PROGRAMS, ROOT, run

GOLDEN = ROOT / "tests" / "golden" / "megatron-core-file-answers.json"
VERSIONS = ("0.15.3", "0.17.1", "0.19.2")
MEGATRON = "megatron.core.dist_checkpointing"

# What we answer otherwise, and why; the table "Answers that differ" of the guide says the same.
OTHERWISE = {
    "a checkpoint with damaged .metadata": "0.15 raises UnpicklingError",
    "a checkpoint with damaged metadata.json": "Megatron-Core raises JSONDecodeError",
    "a checkpoint of an unknown backend": "since 0.16 it is read as torch_dist",
    "a checkpoint without common.pt": "0.15 raises AttributeError",
    "default sharded strategy of ('torch_dist', 1)": "0.19 has no versions",
    "default sharded strategy of ('torch_dist', 2)": "since 0.16 it is version 1",
    "default sharded strategy of ('x',)": "since 0.16 it is torch_dist",
    "default sharded strategy of ('x', 1)": "since 0.16 it is torch_dist",
    "default common strategy of ()": "since 0.16 there is none",
    "other saves with cached metadata": "Megatron-Core fails if the structure changed",
    "remove_sharded_tensors": "0.15 and 0.17 fail",
    "remove_sharded_tensors of another key": "0.17 fails",
    "remove_sharded_tensors of no file": "0.17 fails",
    "save of a common value that cannot be pickled": "0.15 and 0.17 raise AttributeError",
    "save of parts of two shapes": "Megatron-Core raises AssertionError",
    "save to no folder": "Megatron-Core raises FileNotFoundError",
    "sharded metadata of flattened tensors": "their own shape",
    "tensors metadata of flattened tensors": "their own shape",
    "tensors metadata of flattened tensors of 0.15.3": "their own shape",
    "verified load, a byte changed": "0.15 has no verify_integrity",
    "verified load, a file changed": "0.15 has no verify_integrity",
    "verified load, nothing changed": "0.15 has no verify_integrity",
    "verified load, the manifest changed": "0.15 has no verify_integrity",
}
# Without install() the package's own defaults hold.
OWN_DEFAULTS = {
    "default sharded strategy of ()": "zarr",
    "load of another data type": "an error without cast=True",
    "save twice": "an error without overwrite=True",
}


def ask(folder: Path, package: str, version: str | None = None, *, install: bool = False) -> Any:
    """The answers of a package, in the environment of Megatron-Core unless it is ours."""
    arguments = PROGRAMS / "file_answers.py", package, folder / "answers"
    alone = version is not None and not install
    run(version, *arguments, *(["install"] if install else []), alone=alone)
    return json.loads((folder / "answers").read_text())


def kept(version: str) -> dict[str, Any]:
    """What a release answered."""
    answers = json.loads(GOLDEN.read_text())
    return {q: a[version] if isinstance(a, dict) else a for q, a in answers.items()}


def agree(theirs: Any, ours: Any) -> bool:
    """Whether answers agree: an error of ours is also theirs, or a narrower one."""
    if isinstance(theirs, list) or isinstance(ours, list):  # for each of two ranks
        pairs = zip(*(a if isinstance(a, list) else [a, a] for a in (theirs, ours)), strict=True)
        return all(agree(*pair) for pair in pairs)
    kinds = theirs.split()
    if kinds[0] == "raises":
        return {"raises", kinds[1]} <= set(ours.split())
    return bool(theirs == ours)


def test_answers_are_those_of_megatron(tmp_path: Path) -> None:
    given, wanted = ask(tmp_path, "shardstore"), kept("0.15.3")
    assert list(given) == list(wanted)
    differing = {q: (a, given[q]) for q, a in wanted.items() if not agree(a, given[q])}
    explained = OTHERWISE | OWN_DEFAULTS
    assert {q: both for q, both in differing.items() if q not in explained} == {}
    assert set(OWN_DEFAULTS) <= set(differing)


@pytest.mark.long
@pytest.mark.megatron
@pytest.mark.parametrize("version", VERSIONS)
def test_megatron_still_answers_so(tmp_path: Path, version: str) -> None:
    assert ask(tmp_path, MEGATRON, version) == kept(version)


@pytest.mark.megatron
@pytest.mark.parametrize(
    "version", [*(pytest.param(old, marks=pytest.mark.long) for old in VERSIONS[:-1]), VERSIONS[-1]]
)
def test_installed_it_answers_as_that_release(tmp_path: Path, version: str) -> None:
    given, wanted = ask(tmp_path, MEGATRON, version, install=True), kept(version)
    differing = {q: (a, given[q]) for q, a in wanted.items() if not agree(a, given[q])}
    assert {q: both for q, both in differing.items() if q not in OTHERWISE} == {}


@pytest.mark.long
@pytest.mark.megatron
@pytest.mark.parametrize("version", ["0.15.3", "0.19.2"])
def test_a_fully_parallel_load_takes_less_memory(tmp_path: Path, version: str) -> None:
    found = []
    for options in ([], ["install"]):
        program = PROGRAMS / "load_memory.py", MEGATRON, tmp_path
        run(version, *program, *options, alone=not options)
        found.append(json.loads((tmp_path / "peak").read_text()))
    theirs, ours = found
    # Of 64 MiB in 16 tensors, which both ranks have already and each reads one half of. An
    # algorithm may use memory that the one before it has left, so the largest are compared.
    assert max(ours.values()) <= min(16 << 20, max(theirs.values())), found
