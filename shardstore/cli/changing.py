"""Commands ``convert``, ``gc`` and ``rm``. They remove only what they list or ask about."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from datetime import timedelta
from typing import Annotated

import typer

from shardstore.cli import options as opt
from shardstore.cli.printing import answer
from shardstore.errors import CheckpointingException
from shardstore.inspection.opened import array_bytes, clean, counted, human_bytes
from shardstore.storage.checkpoint import StoredCheckpoint

_LOOKS = "Default: detected."
_TARGETS = "shardstore, safetensors, dcp or megatron. Default: by the name."
_FILES = "Size of each safetensors file. Default: 5 GB."
_OLD = "Age of remains in object stores, and of those of other hosts."
_OTHER = "Options of TARGET's store, if it differs."


def convert(
    source: Annotated[str, opt.argument("SOURCE", "Folder, safetensors file or index; or URL.")],
    target: Annotated[str, opt.argument("TARGET", "Folder, or NAME.safetensors; or URL.")],
    source_format: Annotated[str | None, opt.value("FORMAT", _LOOKS, "--from")] = None,
    target_format: Annotated[str | None, opt.value("FORMAT", _TARGETS, "--to")] = None,
    memory_budget: opt.Memory = "512MiB",
    overwrite: Annotated[bool, opt.flag("--overwrite", "Replace a shardstore checkpoint.")] = False,
    resume: Annotated[bool, opt.flag("--resume/--no-resume", "Continue after a crash.")] = True,
    check: Annotated[bool, opt.flag("--verify/--no-verify", "Compare both at the end.")] = True,
    file_bytes: Annotated[str | None, opt.value("SIZE", _FILES)] = None,
    as_json: opt.Json = False,
    storage_option: opt.Options = None,
    target_storage_option: Annotated[list[str] | None, opt.value("NAME=VALUE", _OTHER)] = None,
) -> None:
    """Convert a checkpoint and compare the result. After a crash, run it again to continue."""
    from shardstore import convert as conversion

    opt.locate([*(storage_option or ()), *(target_storage_option or ())], source, target)
    done = conversion.convert(
        source,
        target,
        source_format=source_format,
        target_format=target_format,
        memory_budget=opt.parse_size(memory_budget),
        overwrite=overwrite,
        resume=resume,
        verify=check,
        file_bytes=opt.parse_size(file_bytes) if file_bytes else conversion.DEFAULT_FILE_BYTES,
        progress=opt.bar(as_json),
        source_options=opt.parse_options(storage_option),
        target_options=opt.parse_options(target_storage_option or storage_option),
    )
    resumed = f", {human_bytes(done.resumed_bytes)} of it before" if done.resumed_bytes else ""
    answer(
        as_json,
        {"source": source, "target": target, **asdict(done)},
        f"{done.source_format} -> {done.target_format}: {counted(done.tensors, 'tensor')}, "
        f"{human_bytes(done.total_bytes)}{resumed}; {'' if done.verified else 'not '}verified",
    )


def gc(
    root: Annotated[str, opt.argument("ROOT", "Folder or URL that holds checkpoints.")],
    delete: Annotated[bool, opt.flag("--delete", "Remove them; default: list.")] = False,
    older_than: Annotated[float, opt.value("HOURS", _OLD, at_least=0, at_most=1_000_000)] = 24.0,
    as_json: opt.Json = False,
    storage_option: opt.Options = None,
) -> None:
    """List remains of dead saves; remove them with --delete."""
    from shardstore.storage.commit.checkpoints import sweep

    (location,) = opt.locate(storage_option, root)
    if location.is_missing() or location.is_file():
        text = " is not a folder; give the folder that holds the checkpoints"
        raise location.error(text, opt.UsageProblem)
    found = sweep(location, dry_run=not delete, older_than=timedelta(hours=older_than))
    size = sum(leftover.stored_bytes for leftover in found)
    total = f"no remains of dead saves below {location.url}"
    if found:
        what = f"{human_bytes(size)} in {len(found)} attempt(s)"
        total = f"removed {what}" if delete else f"{what}; --delete removes them"
    lines = [
        f"{left.kind:<8}{human_bytes(left.stored_bytes):>10}  {left.objects:>8} files  {left.url}"
        for left in found
    ]
    leftovers = [asdict(left) for left in found]
    about = {"url": location.url, "deleted": delete, "bytes": size, "leftovers": leftovers}
    answer(as_json, about, *lines, total)


def rm(
    checkpoint: opt.Checkpoint,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
    as_json: opt.Json = False,
    storage_option: opt.Options = None,
) -> None:
    """Remove a checkpoint. Other files in its folder stay. Refuses symbolic links."""
    from shardstore.storage.commit.checkpoints import delete_checkpoint, require_checkpoint

    (location,) = opt.locate(storage_option, checkpoint)
    if location.is_link():
        target = os.path.realpath(location.url)
        raise opt.UsageProblem(
            f"{location.url} is a symbolic link to {target}; nothing was removed. Give {target} to "
            "remove the checkpoint, or use unlink to remove the link"
        )
    require_checkpoint(location)
    try:
        arrays = StoredCheckpoint(location).arrays.values()
        size = f"{counted(len(arrays), 'array')}, {human_bytes(sum(map(array_bytes, arrays)))}"
        size = size if arrays else counted(len(location.walk()), "file")  # of another backend
    except CheckpointingException:
        size = "damaged"
    what = f"{location.url} ({size})"
    if not yes:
        if as_json or not sys.stdin.isatty():
            raise opt.UsageProblem(f"standard input is not a terminal: give --yes to remove {what}")
        if not typer.confirm(clean(f"Remove {what}?")):
            raise opt.UsageProblem("nothing was removed")
    delete_checkpoint(location)
    lines = [f"removed {what}"]
    if left := location.listing():
        lines.append(f"left other files: {', '.join(left[:8])}")
    answer(as_json, {"url": location.url, "removed": True, "left": left}, *lines)


COMMANDS = (convert, gc, rm)
