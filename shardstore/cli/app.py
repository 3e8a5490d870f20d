"""The command ``shardstore``: its arguments, and how it ends.

Each command parses its arguments here, imports the room that does the work, and hands over.
Whatever goes wrong is one line on standard error and an exit code, never a traceback.
"""

from __future__ import annotations

import gc as gc_module
import logging
import sys
from enum import StrEnum
from typing import Annotated

import typer

from shardstore.cli.ending import seen_enough, usage
from shardstore.cli.printing import open_streams
from shardstore.cli.shared import (
    WRONG_USE,
    Warnings,
    complain,
    locate,
    open_stored,
    parse_options,
    parse_size,
    require_no_array,
    warn_of_idle_options,
)
from shardstore.errors import CheckpointingException, DamagedCheckpointError
from shardstore.storage.stores.location import Location

__all__ = ["app", "main"]

app = typer.Typer(
    name="shardstore",
    help="Look into, check, compare, convert and remove checkpoints, local or in object stores.",
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Checkpoint = Annotated[str, typer.Argument(help="Path or URL of a checkpoint.", metavar="CKPT")]
Patterns = Annotated[
    list[str] | None,
    typer.Argument(help="Keys: whole, up to a dot, or with * and ?. Default: all.", metavar="KEY"),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        metavar="NAME=VALUE",
        help="For an object store, such as endpoint_url=...; may be repeated.",
    ),
]
Wide = Annotated[bool, typer.Option("--wide", help="Whole lines, however narrow the terminal is.")]
Memory = Annotated[str, typer.Option(metavar="SIZE", help="Memory for values, such as 512MiB.")]
Output = Annotated[str, typer.Option("-o", "--output", metavar="FILE", help="File to write.")]


class Plot(StrEnum):
    """What can be plotted."""

    layout = "layout"
    histogram = "histogram"
    sizes = "sizes"


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(version("shardstore"))
        except PackageNotFoundError:
            print("unknown")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def ls(
    checkpoint: Checkpoint,
    keys: Patterns = None,
    flat: Annotated[bool, typer.Option("--flat", help="Whole keys instead of a tree.")] = False,
    depth: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Levels of the tree to show.")
    ] = None,
    wide: Wide = False,
    as_json: Json = False,
    storage_option: Options = None,
) -> None:
    """List the arrays: data type, shape, chunks, shards, size."""
    from shardstore.cli.listing import ls as run

    stored = open_stored(checkpoint, storage_option or [])
    run(stored, keys or [], flat=flat, depth=depth, as_json=as_json, wide=wide)


@app.command()
def info(checkpoint: Checkpoint, as_json: Json = False, storage_option: Options = None) -> None:
    """Print what is known of a checkpoint as a whole."""
    from shardstore.cli.listing import info as run

    run(open_stored(checkpoint, storage_option or []), as_json=as_json)


@app.command()
def verify(
    checkpoint: Checkpoint,
    keys: Patterns = None,
    hashes: Annotated[
        bool, typer.Option("--hashes", help="Compare the 128-bit hashes too, not only crc32c.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 for notes (foreign files) too.")
    ] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Threads that read.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Findings to print.")] = 100,
    as_json: Json = False,
    storage_option: Options = None,
) -> None:
    """Verify every checksum, document and file. Exits with 1 where there is damage."""
    from shardstore.cli.checking import run_verify
    from shardstore.storage.checkpoint import StoredCheckpoint

    location = locate(checkpoint, storage_option or [])
    if not location.exists("zarr.json"):
        open_stored(location)
    elif not location.exists("metadata.json"):
        require_no_array(location)
    code = run_verify(
        StoredCheckpoint(location),
        keys or [],
        hashes=hashes,
        strict=strict,
        threads=threads,
        as_json=as_json,
        limit=limit,
    )
    raise typer.Exit(code)


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="Path or URL of a checkpoint.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Path or URL of another one.")],
    keys: Patterns = None,
    files: Annotated[bool, typer.Option(help="Compare common.pt and sharded objects too.")] = True,
    memory: Memory = "256MiB",
    wide: Wide = False,
    as_json: Json = False,
    storage_option: Options = None,
) -> None:
    """Compare two checkpoints, by hashes first. Exits with 1 where they differ."""
    from shardstore.cli.checking import run_diff

    options = storage_option or []
    one, other = (Location.of(place, **parse_options(options)) for place in (a, b))
    warn_of_idle_options(options, one, other)
    left, right = open_stored(one), open_stored(other)
    budget = parse_size(memory)
    code = run_diff(
        left,
        right,
        keys or [],
        files=files and not keys,
        budget_bytes=budget,
        as_json=as_json,
        wide=wide,
    )
    raise typer.Exit(code)


@app.command()
def stats(
    checkpoint: Checkpoint,
    keys: Patterns = None,
    memory: Memory = "256MiB",
    wide: Wide = False,
    as_json: Json = False,
    storage_option: Options = None,
) -> None:
    """Norm, mean, range, zeros, NaNs and infinities of arrays, by streaming."""
    from shardstore.cli.values import run_stats

    stored = open_stored(checkpoint, storage_option or [])
    budget = parse_size(memory)
    code = run_stats(stored, keys or [], budget_bytes=budget, as_json=as_json, wide=wide)
    raise typer.Exit(code)


@app.command()
def show(
    checkpoint: Checkpoint,
    key: Annotated[str, typer.Argument(metavar="KEY[SLICE]", help="Such as 'w[0, :5]'.")],
    limit: Annotated[
        int, typer.Option(min=1, metavar="N", help="Most values that --json prints.")
    ] = 100_000,
    wide: Wide = False,
    as_json: Json = False,
    storage_option: Options = None,
) -> None:
    """Print values of an array, all or a slice of them."""
    from shardstore.cli.values import run_show

    stored = open_stored(checkpoint, storage_option or [])
    run_show(stored, key, limit=limit, as_json=as_json, wide=wide)


@app.command()
def plot(
    kind: Annotated[Plot, typer.Argument(metavar="KIND", help="layout, histogram or sizes.")],
    checkpoint: Checkpoint,
    key: Annotated[
        str | None, typer.Argument(metavar="KEY", help="The array, for layout and histogram.")
    ] = None,
    output: Output = "",
    as_json: Json = False,
    storage_option: Options = None,
) -> None:
    """Draw a PNG: how an array is cut over ranks and chunks, its values, or sizes by module."""
    from shardstore.cli.plotting import run_plot

    stored = open_stored(checkpoint, storage_option or [])
    run_plot(stored, kind.value, key, output or f"{kind.value}.png", as_json=as_json)


@app.command()
def report(
    checkpoint: Checkpoint,
    output: Output = "report.html",
    values: Annotated[bool, typer.Option(help="Read all values, for norms and histograms.")] = True,
    check: Annotated[bool, typer.Option("--verify/--no-verify", help="Verify first.")] = True,
    memory: Memory = "256MiB",
    as_json: Json = False,
    storage_option: Options = None,
) -> None:
    """Write one self-contained HTML page about a checkpoint."""
    from shardstore.cli.reporting import run_report

    stored = open_stored(checkpoint, storage_option or [])
    code = run_report(
        stored, output, values=values, check=check, budget_bytes=parse_size(memory), as_json=as_json
    )
    raise typer.Exit(code)


@app.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="Folder, safetensors file or its index; or URL."),
    ],
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="Folder, or NAME.safetensors; or URL.")
    ],
    source_format: Annotated[
        str | None, typer.Option("--from", metavar="FORMAT", help="Default: what it looks like.")
    ] = None,
    target_format: Annotated[
        str | None,
        typer.Option("--to", metavar="FORMAT", help="shardstore, safetensors or dcp."),
    ] = None,
    memory_budget: Memory = "512MiB",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a shardstore checkpoint at TARGET.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on with a conversion that died.")
    ] = True,
    check: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Compare with the source at the end.")
    ] = True,
    file_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Of each of several safetensors files. Default: 5 GB."),
    ] = None,
    as_json: Json = False,
    storage_option: Options = None,
    target_storage_option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Of TARGET, where its store is another one."),
    ] = None,
) -> None:
    """Convert a checkpoint, verified at the end. One that died goes on when run again."""
    from shardstore.cli.converting import run_convert

    of_source = storage_option or []
    if target_storage_option is None:
        warn_of_idle_options(of_source, Location.of(source), Location.of(target))
    else:
        warn_of_idle_options(of_source, Location.of(source))
        warn_of_idle_options(target_storage_option, Location.of(target))
    run_convert(
        source,
        target,
        source_format=source_format,
        target_format=target_format,
        memory_budget=parse_size(memory_budget),
        overwrite=overwrite,
        resume=resume,
        check=check,
        file_bytes=None if file_bytes is None else parse_size(file_bytes),
        as_json=as_json,
        source_options=parse_options(of_source),
        target_options=parse_options(target_storage_option or of_source),
    )


@app.command()
def gc(
    root: Annotated[
        str,
        typer.Argument(metavar="ROOT", help="Folder or URL below which checkpoints are saved."),
    ],
    delete: Annotated[bool, typer.Option("--delete", help="Remove them; default: list.")] = False,
    older_than: Annotated[
        float,
        typer.Option(min=0, metavar="HOURS", help="In object stores: not written to for so long."),
    ] = 24.0,
    as_json: Json = False,
    storage_option: Options = None,
) -> None:
    """List, and with --delete remove, what saves that died left behind."""
    from shardstore.cli.removing import run_gc

    location = locate(root, storage_option or [])
    run_gc(location, delete=delete, older_than_h=older_than, as_json=as_json)


@app.command()
def rm(
    checkpoint: Checkpoint,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
    as_json: Json = False,
    storage_option: Options = None,
) -> None:
    """Remove a checkpoint, its commit first; files of others in its folder stay. A symbolic link is
    refused: name the folder that it leads to."""
    from shardstore.cli.removing import run_rm

    location = locate(checkpoint, storage_option or [])
    run_rm(location, yes=yes, as_json=as_json, confirm=typer.confirm)


INTERRUPTED = 130
"""Exit code: as shells give it to what SIGINT ended."""


def run(arguments: list[str] | None = None) -> int:
    """Carry out a command line and return its exit code."""
    try:
        code = app(arguments, prog_name="shardstore", standalone_mode=False)
        sys.stdout.flush()
        if code == INTERRUPTED:  # typer takes the interrupt itself, and says nothing
            complain("interrupted")
        return code if isinstance(code, int) else 0
    except typer.Abort:
        complain("interrupted")
        return INTERRUPTED
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except DamagedCheckpointError as error:
        complain(error)
        return 1
    except CheckpointingException as error:
        complain(error)
        return WRONG_USE
    except BrokenPipeError:
        return seen_enough()
    except SystemExit as error:
        # How typer ends where the pipe broke while it was its turn.
        if isinstance(error.__context__, BrokenPipeError):
            return seen_enough()
        raise
    except ImportError as error:
        complain(f"{error}; a part that this needs is not installed")
        return WRONG_USE
    except (OSError, ValueError) as error:
        complain(f"{type(error).__name__}: {error}")
        return WRONG_USE
    except Exception as error:
        complain(usage(error))
        return WRONG_USE


def main() -> None:
    """Entry point of the console script."""
    # A listing makes many objects and then ends: looking for rubbish among them only costs time.
    gc_module.set_threshold(1_000_000)
    open_streams()
    logging.getLogger("shardstore").addHandler(Warnings())
    code = run()
    # What is left goes with the process, unsearched.
    gc_module.freeze()
    sys.exit(code)
