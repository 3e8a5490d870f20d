"""A fuzzer that knows the grammars of what a checkpoint holds, and what each input must not do.

Input ``N`` of a seed is always the same, so that a failure is replayed by itself::

    python -m tests.hostile.fuzzing SEED FIRST COUNT

An input is a checkpoint, of which one file was changed in its own grammar: JSON by members and
values, pickles by opcodes, archives by members, all of them by bytes too. It is given to a reader.
Nothing but an error of ours may come of it: no other exception, no crash, no 512
MiB, no path outside of the folder.
"""

from __future__ import annotations

import copy
import faulthandler
import io
import json
import os
import pickle
import pickletools
import random
import shutil
import sys
import tempfile
import traceback
import warnings
import zipfile
import zlib
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer

import shardstore
from shardstore import ShardedObject, hf
from shardstore.cli.app import app
from shardstore.convert.conversion import convert
from shardstore.dcp.files import DcpFiles
from shardstore.errors import CheckpointingException
from shardstore.inspection.verify import verify
from shardstore.manager.steps import Steps
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.commit.checkpoints import delete_checkpoint, sweep
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ROOT_SUM
from shardstore.storage.format.grid import Box
from shardstore.storage.movers.chunks import RegionRead
from shardstore.storage.runtime.checksums import crc32c
from shardstore.storage.stores.location import Location
from testing.memory import peak_rss_bytes

MOST_BYTES = 512 * 1024**2
STUCK_SECONDS = 600
"""Of the clock, after which one of fifty inputs counts as stuck on a busy machine too."""

# -- JSON ------------------------------------------------------------------------------------------


def words(text: str) -> list[str]:
    return text.split()


TYPES = words("""float tuple set frozenset Size complex bytes bytearray dtype device numpy text dict
    OrderedDict Counter defaultdict deque Namespace SimpleNamespace ndarray numpy.dtype Tensor
    Parameter BytesIO range slice date datetime time timedelta Decimal UUID Path PurePosixPath
    Fraction""")
NAMES = words("""zarr_format node_type attributes shardstore format_version commit content config
    values chunk_crc32c file_crc32c file_bytes consolidated_metadata metadata shape data_type
    chunk_grid chunk_shape
    configuration chunk_key_encoding separator codecs name fill_value key shard_shape state_dict
    paths files array_documents endian checkpoint_manager sharded_backend dtype data_offsets
    __metadata__ weight_map w b ranks $type value root_crc32c step metrics saved_ns
    packs arrays constant""")
TEXTS = ["", ".", "..", "../x", "/etc/passwd", "a/b", "w", "b", "\0", "\ud800", "é", "a" * 400]
TEXTS += words("c.0 zarr.json common.pt float32 bfloat16 int4 r16 blosc zstd crc32c")
TEXTS += ["sharding_indexed", "gzip", "array", "group", "default", "v2", "nan", "AAAA", "=", "F32"]
TEXTS += [".packs/0.0.zip", "AAAAAAAAAAAAAAAAJAAAAA==", "0x7fc00001"]
TEXTS += ["shard_0_1.pt", "shard_99999999999_1.json", "%2e%2e", "1e400000000", "1/0", "<f4", "|O"]
NUMBERS = [-1, 0, 1, 2, 3, 7, 255, 2**31, 2**32, 2**53, 2**62, 2**63, 2**64, 10**40, 0.5, 1e308]
NUMBERS += [float("nan"), float("inf"), -0.0]


def value(rng: random.Random, depth: int = 0) -> Any:
    """Some JSON."""
    kind = rng.randrange(10 if depth < 4 else 6)
    if kind < 2:
        return rng.choice(TEXTS)
    if kind < 5:
        return rng.choice(NUMBERS)
    if kind == 5:
        return rng.choice([None, True, False, [], {}])
    if kind == 6:
        return [value(rng, depth + 1) for _ in range(rng.choice([1, 2, 3, 70]))]
    if kind == 7:
        return {"$type": rng.choice(TYPES), "value": value(rng, depth + 1)}
    if kind == 8 and rng.random() < 0.05:
        deep: Any = 0
        for _ in range(300):
            deep = [deep] if rng.random() < 0.5 else {"a": deep}
        return deep
    return {rng.choice(NAMES + TEXTS): value(rng, depth + 1) for _ in range(rng.randint(1, 3))}


def somewhere(rng: random.Random, tree: Any) -> tuple[Any, ...]:
    """Path of a part of a tree."""
    path: tuple[Any, ...] = ()
    while isinstance(tree, dict | list) and tree and rng.random() < 0.85:
        name = rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))
        tree, path = tree[name], (*path, name)
    return path


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def mutated(rng: random.Random, tree: Any) -> Any:
    """A tree of JSON with some changes."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        path = somewhere(rng, tree)
        if not path:
            if rng.random() < 0.1:
                tree = value(rng)
            continue
        above, last = at(tree, path[:-1]), path[-1]
        how = rng.randrange(7)
        if how <= 1:
            above[last] = value(rng)
        elif how == 2:
            above[last] = copy.deepcopy(at(tree, somewhere(rng, tree)))
        elif how == 3:
            del above[last]
        elif isinstance(above, dict):
            if how == 4:
                above[rng.choice(NAMES + TEXTS)] = above.pop(last)
            else:
                above[rng.choice(NAMES + TEXTS)] = value(rng)
        elif how == 4:
            above.insert(last, value(rng))
        elif isinstance(above[last], int) and not isinstance(above[last], bool):
            above[last] = rng.choice([-above[last], above[last] * 2, above[last] + 1, 2**62])
    return tree


def dumped(rng: random.Random, tree: Any) -> bytes:
    """The text of a tree; sometimes with names twice, or as bytes that are no text."""
    blanks = rng.choice([(",", ":"), (",", ":"), (", ", ": ")])
    try:
        text = json.dumps(tree, separators=blanks, ensure_ascii=rng.random() < 0.3)
        data = text.encode("utf-8", rng.choice(["surrogatepass", "replace"]))
    except (RecursionError, ValueError):
        data = b"[" * 5000
    return damaged(rng, data) if rng.random() < 0.1 else data


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Bytes with some changes."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 3, 10])):
        if not changed:
            break
        place, count = rng.randrange(len(changed)), rng.choice([1, 1, 2, 8, 100])
        how = rng.randrange(5)
        if how <= 1:
            changed[place] ^= 1 << rng.randrange(8)
        elif how == 2:
            changed[place : place + count] = rng.randbytes(count)
        elif how == 3:
            del changed[place : place + count]
        else:
            other = rng.randrange(len(changed))
            changed[place:place] = changed[other : other + count]
    return bytes(changed)


def root(rng: random.Random, data: bytes) -> bytes:
    """A root document: signed as a save does, without a checksum, or as another program writes."""
    tree = mutated(rng, json.loads(data))
    about = at(tree, ("attributes", "shardstore")) if _has_ours(tree) else None
    if about is None or rng.random() < 0.3:
        return dumped(rng, tree)
    about.pop(ROOT_SUM, None)
    if rng.random() < 0.3:
        return dumped(rng, tree)
    attributes = {**tree["attributes"], "shardstore": {ROOT_SUM: "-" * 8, **about}}
    ours = {"shardstore": attributes.pop("shardstore"), **attributes}
    first = {"zarr_format": 3, "node_type": "group", "attributes": ours}
    first.update({name: part for name, part in tree.items() if name not in first})
    try:
        text = json.dumps(first, separators=(",", ":"), ensure_ascii=False)
        data = text.encode("utf-8", "replace")
    except (RecursionError, ValueError):
        return b"[" * 5000
    head, _, rest = data.partition(b"-" * 8)
    return b"%s%08x%s" % (head, crc32c(rest, 0), rest)


def _has_ours(tree: Any) -> bool:
    attributes = tree.get("attributes") if isinstance(tree, dict) else None
    return isinstance(attributes, dict) and isinstance(attributes.get("shardstore"), dict)


def document(rng: random.Random, data: bytes) -> bytes:
    """A JSON document."""
    return dumped(rng, mutated(rng, json.loads(data)))


# -- archives, pickles, headers --------------------------------------------------------------------


def manifest(rng: random.Random, data: bytes) -> bytes:
    """A manifest: its members, the JSON in it, or its bytes."""
    if rng.random() < 0.2:
        return damaged(rng, data)
    with np.load(io.BytesIO(data)) as found:
        columns: dict[str, Any] = dict(found)
    rows = json.loads(zlib.decompress(columns["arrays"].tobytes()))
    if rng.random() < 0.6:
        packed = zlib.compress(dumped(rng, mutated(rng, rows)))
        columns["arrays"] = np.frombuffer(packed, np.uint8)
    else:
        name = rng.choice(list(columns))
        column = columns[name]
        columns[name] = rng.choice(
            [
                lambda: column[:-1],
                lambda: np.concatenate([column, column]),
                lambda: column.astype(rng.choice(["f8", "i1", "U3", "c16", "M8[s]", "u8"])),
                lambda: column.reshape(1, *column.shape),
                lambda: np.zeros((0,), column.dtype),
                lambda: np.array(7),
                lambda: np.zeros(len(column), [("a", "i4"), ("b", "f8")]),
            ]
        )()
        if rng.random() < 0.2:
            del columns[name]
    out = io.BytesIO()
    np.savez(out, allow_pickle=False, **columns)
    return damaged(rng, out.getvalue()) if rng.random() < 0.1 else out.getvalue()


GLOBALS = """builtins range|builtins list|builtins bytearray|builtins eval|builtins getattr|
    collections OrderedDict|collections defaultdict|collections deque|collections Counter|
    torch._utils _rebuild_tensor_v2|torch FloatStorage|torch.storage UntypedStorage|torch Size|
    torch._utils _rebuild_parameter|numpy._core.multiarray _reconstruct|numpy ndarray|numpy dtype|
    numpy._core.multiarray scalar|_codecs encode|datetime datetime|datetime timedelta|
    decimal Decimal|fractions Fraction|uuid UUID|pathlib PosixPath|argparse Namespace|io BytesIO|
    os system|numpy._core.numeric _frombuffer|torch float32|builtins slice|builtins complex|
    torch.distributed.checkpoint.metadata Metadata|
    torch.distributed.checkpoint.metadata MetadataIndex|
    torch.distributed.checkpoint.metadata TensorStorageMetadata|
    torch.distributed.checkpoint.metadata ChunkStorageMetadata|
    torch.distributed.checkpoint.metadata TensorProperties|
    torch.distributed.checkpoint.filesystem _StorageInfo|builtins set|builtins frozenset"""
PAIRS = [tuple(pair.split()) for pair in GLOBALS.replace("\n", "").split("|")]
PLAIN = b"N\x88\x89)]}\x8f(.0210tueasbR\x85\x86\x87\x90\x91\x93\x94\x81Q"
"""Opcodes without arguments."""


def pickled(rng: random.Random, data: bytes) -> bytes:
    """A pickle, changed by its opcodes."""
    try:
        ops = [(op, arg, pos) for op, arg, pos in pickletools.genops(data)]
    except Exception:
        return damaged(rng, data)
    ends = [pos for _, _, pos in ops[1:]] + [len(data)]
    parts = [data[pos:end] for (_, _, pos), end in zip(ops, ends, strict=True)]
    for _ in range(rng.choice([1, 1, 2, 4])):
        place, how = rng.randrange(len(parts)), rng.randrange(8)
        if how == 0:
            parts[place] = b""
        elif how == 1:
            parts.insert(place, parts[rng.randrange(len(parts))])
        elif how == 2:
            other = rng.randrange(len(parts))
            parts[place], parts[other] = parts[other], parts[place]
        elif how == 3:
            parts.insert(place, bytes([rng.choice(PLAIN)]))
        elif how == 4:
            number = rng.choice([0, 1, -1, 2**31 - 1, 2**31, 2**62, 10**30])
            parts[place] = pickle.dumps(number, 2)[2:-1]
        elif how == 5:
            module, name = rng.choice(PAIRS)
            parts[place] = f"c{module}\n{name}\n".encode()
        elif how == 6:
            parts[place] = pickle.dumps(rng.choice(TEXTS), 2)[2:-1]
        else:
            parts[place] = damaged(rng, parts[place])
    return b"".join(parts)


def archive(rng: random.Random, data: bytes) -> bytes:
    """A file of torch.save: its pickle, its records, or its bytes."""
    if rng.random() < 0.2:
        return damaged(rng, data)
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as given, zipfile.ZipFile(out, "w") as made:
        for info in given.infolist():
            content = given.read(info)
            if info.filename.endswith("data.pkl"):
                content = pickled(rng, content)
            elif rng.random() < 0.05:
                content = damaged(rng, content)
            elif rng.random() < 0.02:
                continue
            how = zipfile.ZIP_DEFLATED if rng.random() < 0.02 else zipfile.ZIP_STORED
            made.writestr(info.filename, content, compress_type=how)
    return out.getvalue()


def header(rng: random.Random, data: bytes) -> bytes:
    """A safetensors file, changed in its header."""
    length = int.from_bytes(data[:8], "little")
    text = document(rng, data[8 : 8 + length])
    size = rng.choice([len(text)] * 8 + [0, len(text) + 1, 2**40, 2**63])
    return size.to_bytes(8, "little") + text + data[8 + length :]


def note(rng: random.Random, _: bytes) -> bytes:
    """The note of an attempt's owner, as version 0.1.0 wrote it."""
    return document(rng, b'{"host": "a", "pid": 1, "boot": "b", "pidns": 1, "started": "1"}')


# -- readers ---------------------------------------------------------------------------------------


def wanted() -> dict[str, Any]:
    tensors = {"w": torch.zeros(4, 6), "b": torch.zeros(3, dtype=torch.bfloat16)}
    return {**shardstore.shard(tensors), "o": ShardedObject("o", None, (1,), (0,))}


def look(place: Path) -> None:
    found = shardstore.open(place)
    _ = repr(found), found.info, found.content_metadata, found.nbytes
    for key in list(found)[:3]:
        _ = repr(found[key]), found[key].meta
        if found[key].nbytes < 2**20:
            _ = found[key][...]
    for key in list(found.objects)[:3]:
        _ = found.objects[key]
    _ = found.common


def steps(place: Path) -> None:
    there = Steps(Location.of(place.parent), "step-")
    there.infos()


def verified(place: Path) -> None:
    verify(StoredCheckpoint(Location.of(place)), lambda finding: None, hashes=True)


def converted(place: Path) -> None:
    convert(place, place.parent / "converted")


_cli = typer.main.get_command(app)  # made once: it takes longer than most commands


def weights(place: Path) -> None:
    state = {"w": torch.zeros(4, 6), "b": torch.zeros(3, dtype=torch.bfloat16)}
    hf.load(state, place, strict="return_all")


def command(place: Path) -> None:
    sizes = [path.stat().st_size for path in place.rglob("*") if path.is_file()]
    name = COMMANDS[sum(sizes) % len(COMMANDS)]
    # The program prints errors of the system, and what values cannot be, in one line.
    with redirect_stdout(io.StringIO()), suppress(OSError, ValueError, MemoryError):
        code = _cli.main([*name.split(), str(place)], "shardstore", standalone_mode=False)
        assert code in (None, 0, 1, 2), code


def dcp(place: Path) -> None:
    files = DcpFiles.open(place)
    for key, meta in files.arrays.items():
        if 0 <= np.prod(meta.shape, dtype=float) < 2**20 and min(meta.shape, default=0) >= 0:
            out = np.zeros(meta.shape, dtypes.numpy_dtype(meta.dtype))
            box = Box((0,) * len(meta.shape), meta.shape)
            files.read([RegionRead(files.arrays[key], box, out)])
    for key in files.objects:
        files.read_object(key)


COMMANDS = ["ls", "ls --json", "info", "info --json", "verify", "verify --json", "stats"]
COMMANDS += ["report -o /dev/null"]
LOOKS: list[Callable[[Path], Any]] = [
    lambda place: shardstore.load(wanted(), place),
    lambda place: shardstore.load_plain_tensors(place),
    lambda place: shardstore.load_tensors_metadata(place),
    lambda place: shardstore.load_sharded_metadata(place),
    lambda place: shardstore.load_content_metadata(place),
    lambda place: shardstore.load_common_state_dict(place),
    look,
    steps,
    verified,
    verified,
    converted,
    lambda place: shardstore.remove_sharded_tensors(str(place), "w"),
    lambda place: delete_checkpoint(place),
    lambda place: sweep(place.parent),
    command,
]
SWEEPS: list[Callable[[Path], Any]] = [
    lambda place: sweep(place.parent, dry_run=False),
    lambda place: shardstore.save({"a": 1}, place, overwrite=True),
    lambda place: shardstore.save({"a": 1}, place.parent / "step-2"),
]
COMMON: list[Callable[[Path], Any]] = [
    lambda place: shardstore.load_common_state_dict(place),
    look,
    verified,
]

# -- inputs ----------------------------------------------------------------------------------------


class Inputs:
    """All inputs of a seed, carried out in a folder."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.kinds = self._kinds()

    def _kinds(self) -> list[tuple[str, str, Callable[[random.Random, bytes], bytes], list[Any]]]:
        """Checkpoint, file, mutator and readers."""
        pristine = self.folder / "pristine"
        tensors = {"w": torch.rand(4, 6), "b": torch.ones(3, dtype=torch.bfloat16)}
        state = {**shardstore.shard(tensors), "o": ShardedObject("o", {"a": [1]}, (1,), (0,))}
        common = {
            "lr": 0.5,
            "t": torch.ones(3),
            "p": torch.nn.Parameter(torch.ones(2)),
            "n": np.arange(4.0),
            "s": np.float32(2),
            "x": [(1, 2), {3}, b"x", "y", 2**70, range(3), torch.Size([1])],
        }
        about = {"content_metadata": {"run": 1}}
        shardstore.save({**state, **common}, pristine / "step-1", **about)
        shardstore.save({**state}, pristine / "bare", array_documents=False, compression="zstd")
        shardstore.save({**state, **common}, pristine / "packed", pack=True)
        shardstore.save({**state, **common}, pristine / "old", ("zarr", 1))
        convert(pristine / "step-1", pristine / "st" / "model.safetensors")
        convert(pristine / "step-1", pristine / "dcp", target_format="dcp")
        convert(pristine / "dcp", pristine / "values")
        ours = ["step-1", "bare", "values", "packed"]
        kinds: list[Any] = [(name, "zarr.json", root, LOOKS) for name in ours * 4]
        kinds += [(name, "manifest.npz", manifest, LOOKS) for name in ours]
        kinds += [("packed", ".packs/0.0.zip", damaged, LOOKS)]
        kinds += [("step-1", "w/zarr.json", document, LOOKS), ("old", "w/.zarray", document, LOOKS)]
        kinds += [(name, "metadata.json", document, LOOKS) for name in ("step-1", "old")]
        kinds += [(name, "common.pt", archive, COMMON) for name in ("step-1", "old") * 3]
        kinds += [("step-1", "o/shard_0_1.pt", archive, COMMON)]
        kinds += [("step-1", f"../.step-{n}.attempt-x/.owner.json", note, SWEEPS) for n in (1, 2)]
        kinds += [("dcp", ".metadata", pickled, [dcp, dcp, converted])] * 3
        (pristine / "hf").mkdir()
        shutil.copy(pristine / "st" / "model.safetensors", pristine / "hf" / "m1.safetensors")
        index = {"weight_map": {"w": "m1.safetensors", "b": "m1.safetensors"}}
        (pristine / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
        kinds += [("st", "model.safetensors", header, [converted, weights])] * 2
        kinds += [("hf", "m1.safetensors", header, [weights])]
        kinds += [("hf", "model.safetensors.index.json", document, [weights])]
        return kinds

    def one(self, number: int) -> str:
        """Carry out an input; says what it was."""
        rng = random.Random(f"{self.seed}/{number}")
        name, file, change, readers = rng.choice(self.kinds)
        work = self.folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(self.folder / "pristine" / name, work / name)
        path, reader = work / name / file, rng.choice(readers)
        data = change(rng, path.read_bytes() if path.exists() else b"")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        if name in ("step-1", "bare", "packed") and file not in ("zarr.json", "manifest.npz"):
            _unname(work / name)  # its checksum would stop every reader at once
        what = f"{name}/{file} {getattr(reader, '__name__', reader)}"
        with Watched(work), suppress(CheckpointingException):
            reader(work / name)
        return what


def _unname(place: Path) -> None:
    tree = json.loads((place / "zarr.json").read_bytes())
    for member in ("file_crc32c", "file_bytes"):
        tree["attributes"]["shardstore"].pop(member, None)
    (place / "zarr.json").write_text(json.dumps(tree))


# -- what an input must not do ---------------------------------------------------------------------

_inside: list[str] = []
_outside: list[str] = []
_WRITES = {"os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"}
_WRITES |= {"shutil.rmtree", "os.chmod", "os.unlink"}
_LISTS = {"os.listdir", "os.scandir"}


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _inside or event not in {"open", *_WRITES, *_LISTS}:
        return
    flags = args[2] or 0 if event == "open" else 0
    writes = event in _WRITES or bool(flags & (os.O_WRONLY | os.O_RDWR))
    two = event in ("os.rename", "os.link")
    for path, folder in zip(args[: 1 + two], args[-1 - two :], strict=True):
        if isinstance(path, int) or path is None:
            continue
        text = os.fsdecode(path)
        if not text.startswith("/") and event in _WRITES and type(folder) is int and folder >= 0:
            text = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)
        elif not text.startswith("/") and event == "open":
            continue  # below a folder that was opened, as shutil.rmtree does
        text = os.path.abspath(text)
        known = (_inside[0], "/dev/null", *(() if writes else _READ))
        if not text.startswith(known) and not _inside[0].startswith(text):
            _outside.append(f"{event} {text}")


_READ = (sys.prefix, sys.base_prefix, "/proc", "/sys", "/dev", "/usr", "/etc", os.getcwd())


class Watched:
    """Holds what goes on within against the limits."""

    def __init__(self, work: Path) -> None:
        self.work = work

    def __enter__(self) -> None:
        self.before = peak_rss_bytes()
        _outside.clear()
        _inside.append(str(self.work))

    def __exit__(self, *error: object) -> None:
        _inside.clear()
        more = peak_rss_bytes() - self.before
        assert not _outside, f"outside of the folder: {_outside[:3]}"
        assert more < MOST_BYTES, f"{more >> 20} MiB"


def fuzz(seed: int, first: int, count: int) -> list[str]:
    """Carry out inputs of a seed; returns what went wrong."""
    warnings.simplefilter("ignore")
    sys.dont_write_bytecode = True  # of what is imported while an input is carried out
    sys.addaudithook(_audit)
    failures = []
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        inputs = Inputs(Path(folder), seed)
        for number in range(first, first + count):
            if number % 50 == 0:
                faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
            if number % 500 == 0:
                print(f"{seed} {number}", file=sys.stderr, flush=True)
            try:
                inputs.one(number)
            except Exception as error:
                frames = traceback.extract_tb(error.__traceback__)
                ours = [frame for frame in frames if "/shardstore/" in frame.filename]
                where = (ours or frames)[-1]
                text = f"{type(error).__name__}: {str(error)[:300]}"
                failures.append(
                    f"input {number} of seed {seed}: {text} at {where.filename}:{where.lineno}"
                )
                print(failures[-1], flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(bool(fuzz(*map(int, sys.argv[1:4]))))
