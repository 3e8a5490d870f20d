"""The pages are true: their programs and commands run as they are printed (see
:mod:`tests.helpers.programs`), their links lead somewhere, and their tables name all there is."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
import pkgutil
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardstore.errors
import shardstore.progress
from shardstore.dcp import StorageReader, StorageWriter
from testing.s3_servers import S3Server
from tests.helpers.processes import run_to_end
from tests.helpers.programs import run_page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(page.relative_to(ROOT)) for page in DOCS.rglob("*.md")),
]
OTHERS = [
    "CHANGELOG.md",
    "docker/README.md",
    "shardstore/storage/FORMAT.md",
    "shardstore/storage/PROTOCOL.md",
]
ERRORS, EVENTS, SETTINGS = (
    (DOCS / "reference" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("errors", "events", "settings")
)

_LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


@pytest.mark.parametrize("page", [page for page in PAGES if "/trainers/" not in page])
def test_every_program_of_a_page_runs(page: str, tmp_path: Path, s3_server: S3Server) -> None:
    store = {**s3_server.environment, "BUCKET": s3_server.new_bucket()}
    text = (ROOT / page).read_text(encoding="utf-8")
    run_page(text, tmp_path, store, torchrun=2 if page == "README.md" else 0)


def test_every_error_is_listed() -> None:
    errors = shardstore.errors
    own = [name for name, kind in vars(errors).items() if type(kind) is type and name[0] != "_"]
    assert len(own) > 10
    for name in own:
        assert f"`{name}`" in ERRORS or f"`shardstore.{name}`" in ERRORS, name
    for name, builtin in re.findall(r"^\| `(\w+)`.* \| `([\w.]+)` \|", ERRORS, re.MULTILINE):
        base = __import__("pickle").UnpicklingError if "." in builtin else eval(builtin)
        assert issubclass(getattr(shardstore.errors, name), base), name


def test_every_public_name_is_described() -> None:
    api = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    for module in (shardstore, shardstore.hf, shardstore.dcp):
        for name in module.__all__:
            assert re.search(rf"^::: {module.__name__}\.(\w+\.)*{name}$", api, re.MULTILINE), name


def test_every_event_is_listed() -> None:
    rows = re.findall(r"^\| `(\w+)` \| \w.*\|$", EVENTS, re.MULTILINE)
    assert rows == list(shardstore.progress.EVENTS)


def test_every_way_to_save_and_load_logs_the_fields_of_the_page(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|[^|]*\|([^|]*)\|$", EVENTS, re.MULTILINE)
    fields = {event: re.findall(r"`(\w+)`", cell) for event, cell in rows}
    caplog.set_level(logging.INFO, "shardstore")
    state = {"w": torch.ones(4)}
    given, own = shardstore.shard(state), ("torch_dist", 1)
    a, b, c, d, e = (str(tmp_path / name) for name in "abcde")
    for event, call in [
        ("commit", lambda: shardstore.save(given, a)),
        ("load", lambda: shardstore.load(given, a)),
        ("commit", lambda: shardstore.async_save(given, b).result(60)),
        ("load", lambda: shardstore.load_plain_tensors(b)),
        ("commit", lambda: dcp.save(state, storage_writer=StorageWriter(c), no_dist=True)),
        ("load", lambda: dcp.load(state, storage_reader=StorageReader(c), no_dist=True)),
        ("commit", lambda: shardstore.save(given, d, own)),
        ("load", lambda: shardstore.load(given, d)),
        ("commit", lambda: shardstore.hf.save(state, e)),
        ("load", lambda: shardstore.hf.load(state, e)),
    ]:
        caplog.clear()
        call()  # type: ignore[no-untyped-call]
        (record,) = (record for record in caplog.records if hasattr(record, "event"))
        assert record.event == event
        assert not set(fields[event]) - vars(record).keys()
        assert record.world_size == 1
        assert event == "commit" or record.bytes == 16


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 200


@pytest.mark.parametrize("page", [*PAGES, *OTHERS])
def test_links_and_scripts_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in _LINK.findall(text):
        assert (ROOT / page).parent.joinpath(target).exists(), target
    for script in re.findall(r"scripts/\w+\b(?!\.)", text):
        assert os.access(ROOT / script, os.X_OK), script


def test_every_step_of_a_save_and_of_a_load_is_a_function() -> None:
    """Each step links to its function, which is there and is described on the page."""
    text = (DOCS / "concepts" / "life-of-a-save.md").read_text(encoding="utf-8")
    linked = re.findall(r"\(#(shardstore\.[\w.]+)\)", text)
    assert len(linked) >= 14
    for name in linked:
        assert inspect.getdoc(pkgutil.resolve_name(name)), name
        assert f"\n::: {name}\n" in text, name


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="no extra docs")
def test_the_site_is_built_strictly(tmp_path: Path) -> None:
    """Broken links and anchors, and names that the API has no docstring for, are errors."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = run_to_end(command, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for page in PAGES[2:]:
        assert (tmp_path / Path(page).relative_to("docs").with_suffix(".html")).exists(), page


def test_every_setting_is_listed() -> None:
    """Each optional argument of what the table speaks of is in the table."""
    from shardstore import CheckpointManager, async_save, load, load_plain_tensors, save
    from shardstore.convert import convert
    from shardstore.dcp import StorageWriter
    from shardstore.storage.options import SaveKeywords, WriterKeywords
    from shardstore.strategies.zarr import ZarrSaveShardedStrategy

    told = set(re.findall(r"(\w+)=\)?`", SETTINGS))
    not_settings = {"checkpoint_dir", "source_format", "target_format", "url"}
    for function in (
        save,
        async_save,
        load,
        load_plain_tensors,
        ZarrSaveShardedStrategy,
        CheckpointManager,
        StorageWriter,
        convert,
    ):
        for name, parameter in inspect.signature(function).parameters.items():
            optional = parameter.default is not parameter.empty
            if optional and not name.startswith("_") and name not in not_settings:
                assert name in told, f"{function.__name__}({name}=)"
    assert (SaveKeywords.__annotations__ | WriterKeywords.__annotations__).keys() <= told


def test_defaults_are_those_that_the_pages_name() -> None:
    from shardstore.distributed.coordinator import DEADLINE_VARIABLE, DEFAULT_DEADLINE_S
    from shardstore.storage.options import SaveOptions
    from shardstore.storage.runtime.parallel import MAX_THREADS

    options = SaveOptions()
    rows = dict(re.findall(r"^\| (`.*?`[^|]*?) \| ([^|]+) \|", SETTINGS, re.MULTILINE))
    assert rows["`save(..., overwrite=)`"] == f"`{options.overwrite}`"
    assert rows["`save(..., durable=)`"] == f"`{options.durable}`"
    chunk = rows["`ZarrSaveShardedStrategy(..., target_chunk_bytes=)`"]
    assert chunk == f"{options.target_chunk_bytes >> 20} MiB"
    assert f"at most {MAX_THREADS}" in rows["`ZarrSaveShardedStrategy(..., threads=)`"]
    assert rows[f"`{DEADLINE_VARIABLE}`"] == str(int(DEFAULT_DEADLINE_S))
