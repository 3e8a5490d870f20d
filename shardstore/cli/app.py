"""The command ``shardstore``: its arguments, and how it ends.

Each command parses its arguments here, imports the room that does the work, and hands over.
Whatever goes wrong is one line on standard error and an exit code, never a traceback.
"""

from __future__ import annotations

import gc as gc_module
import os
import sys
from enum import StrEnum
from typing import Annotated

import typer

from shardstore.cli.shared import (
    WRONG_USE,
    complain,
    locate,
    open_stored,
    parse_options,
    parse_size,
    require_no_array,
)
from shardstore.errors import CheckpointingException, DamagedCheckpointError

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
Memory = Annotated[str, typer.Option(help="Memory for values, such as 512MiB.")]
Output = Annotated[str, typer.Option("-o", "--output", help="File to write.")]


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
    depth: Annotated[int | None, typer.Option(min=1, help="Levels of the tree to show.")] = None,
    as_json: Json = False,
    storage_option: Options = None,
) -> None:
    """List the arrays: data type, shape, chunks, shards, size."""
    from shardstore.cli.listing import ls as run

    stored = open_stored(checkpoint, storage_option or [])
    run(stored, keys or [], flat=flat, depth=depth, as_json=as_json)


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
    threads: Annotated[int | None, typer.Option(min=1, help="Threads that read.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Findings to print.")] = 100,
    as_json: Json = False,
    storage_option: Options = None,
) -> None:
    """Verify every checksum, document and file. Exits with 1 where there is damage."""
    from shardstore.cli.checking import run_verify
    from shardstore.storage.checkpoint import StoredCheckpoint

    location = locate(checkpoint, storage_option or [])
    if not location.exists("zarr.json"):
        open_stored(checkpoint, storage_option or [])
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
    as_json: Json = False,
    storage_option: Options = None,
) -> None:
    """Compare two checkpoints, by hashes first. Exits with 1 where they differ."""
    from shardstore.cli.checking import run_diff

    options = storage_option or []
    left, right = open_stored(a, options), open_stored(b, options)
    budget = parse_size(memory)
    code = run_diff(
        left, right, keys or [], files=files and not keys, budget_bytes=budget, as_json=as_json
    )
    raise typer.Exit(code)


@app.command()
def stats(
    checkpoint: Checkpoint,
    keys: Patterns = None,
    memory: Memory = "256MiB",
    as_json: Json = False,
    storage_option: Options = None,
) -> None:
    """Norm, mean, range, zeros, NaNs and infinities of arrays, by streaming."""
    from shardstore.cli.values import run_stats

    stored = open_stored(checkpoint, storage_option or [])
    budget = parse_size(memory)
    raise typer.Exit(run_stats(stored, keys or [], budget_bytes=budget, as_json=as_json))


@app.command()
def show(
    checkpoint: Checkpoint,
    key: Annotated[str, typer.Argument(metavar="KEY[SLICE]", help="Such as 'w[0, :5]'.")],
    limit: Annotated[int, typer.Option(min=1, help="Most values that --json prints.")] = 100_000,
    as_json: Json = False,
    storage_option: Options = None,
) -> None:
    """Print values of an array, all or a slice of them."""
    from shardstore.cli.values import run_show

    run_show(open_stored(checkpoint, storage_option or []), key, limit=limit, as_json=as_json)


@app.command()
def plot(
    kind: Annotated[Plot, typer.Argument(help="What to draw.")],
    checkpoint: Checkpoint,
    key: Annotated[str | None, typer.Argument(help="The array, for layout and histogram.")] = None,
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
    source: Annotated[str, typer.Argument(help="Folder, safetensors file or its index; or URL.")],
    target: Annotated[str, typer.Argument(help="Folder, or NAME.safetensors; or URL.")],
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
    run_convert(
        source,
        target,
        source_format=source_format,
        target_format=target_format,
        memory_budget=parse_size(memory_budget),
        overwrite=overwrite,
        as_json=as_json,
        source_options=parse_options(of_source),
        target_options=parse_options(target_storage_option or of_source),
    )


@app.command()
def gc(
    root: Annotated[str, typer.Argument(help="Folder or URL below which checkpoints are saved.")],
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


def run(arguments: list[str] | None = None) -> int:
    """Carry out a command line and return its exit code."""
    try:
        code = app(arguments, prog_name="shardstore", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except typer.Abort:
        complain("interrupted")
        return 130
    except KeyboardInterrupt:
        complain("interrupted")
        return 130
    except DamagedCheckpointError as error:
        complain(error)
        return 1
    except CheckpointingException as error:
        complain(error)
        return WRONG_USE
    except BrokenPipeError:
        return _seen_enough()
    except SystemExit as error:
        # How typer ends where the pipe broke while it was its turn.
        if isinstance(error.__context__, BrokenPipeError):
            return _seen_enough()
        raise
    except ImportError as error:
        complain(f"{error}; a part that this needs is not installed")
        return WRONG_USE
    except (OSError, ValueError) as error:
        complain(f"{type(error).__name__}: {error}")
        return WRONG_USE
    except Exception as error:
        complain(_usage(error))
        return WRONG_USE


def _seen_enough() -> int:
    """The reader (head, less) has seen enough, and all is well; Python would complain again at its
    end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)
    return 0


def _usage(error: Exception) -> str:
    """A line about wrong arguments; typer has moved its errors from one module to another."""
    format_message = getattr(error, "format_message", None)
    if format_message is None:
        return f"unexpected {type(error).__name__}: {error}; please report this"
    context = getattr(error, "ctx", None)
    path = getattr(context, "command_path", "shardstore")
    text = str(format_message()).strip().rstrip(".")
    return f"{text}; see `{path} --help`"


def main() -> None:
    """Entry point of the console script."""
    # A listing makes many objects and then ends: looking for rubbish among them only costs time.
    gc_module.set_threshold(200_000)
    sys.exit(run())
