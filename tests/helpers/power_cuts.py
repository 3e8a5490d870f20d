"""What may be on a disk after a cut of power: file system calls traced, and replayed in part.

The model is stricter than any file system. A change of a directory is durable once the directory,
or the file system, was synced after it; written bytes once the file was. What is not durable at the
cut may be there or not, each change by itself; written bytes may be zeros, or end half way.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

CALLS = (
    "mkdir,mkdirat,openat,open,creat,write,pwrite64,writev,pwritev,pwritev2,rename,renameat,"
    "renameat2,link,linkat,symlink,symlinkat,unlink,unlinkat,rmdir,fsync,fdatasync,syncfs,sync,"
    "ftruncate,truncate,fallocate,copy_file_range,sendfile"
)
KINDS = ("kept", "lost", "zeroed", "torn")
_LINE = re.compile(r"(\d+) +(\w+)\((.*)\) += (-?\d+)(.*)")
_CUT = re.compile(r"(\d+) +(\w+\(.*) <unfinished \.\.\.>")
_RESUMED = re.compile(r"(\d+) +<\.\.\. \w+ resumed>(.*)")
_FD = re.compile(r"(?:\d+|AT_FDCWD)<((?:\\x[0-9a-f]{2})*)>")
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')


@dataclass(frozen=True)
class Change:
    """One call: entries of directories, or bytes of a file.

    Attributes:
        entries: (directory, name) -> what is there afterwards.
        file, offset, data: written bytes.
    """

    text: str
    entries: dict[tuple[int, str], int | None] = field(default_factory=dict)
    file: int = -1
    offset: int = 0
    data: bytes = b""


@dataclass
class Trace:
    """The calls of some processes below a folder, from the beginning to the end."""

    base: dict[tuple[int, str], int] = field(default_factory=dict)
    contents: dict[int, bytes] = field(default_factory=dict)
    calls: list[Change | int | None] = field(default_factory=list)
    """Changes, and syncs: of a file or directory by its number, or of everything: ``None``."""

    @classmethod
    def of(cls, lines: Sequence[str], folder: Path, before: Path) -> Trace:
        """Args: the trace, the folder that was written to, and a copy of it from before."""
        trace = cls()
        trace._import(before, 0)
        now, files = dict(trace.base), dict.fromkeys(trace.contents)
        numbers = iter(range(len(now) + 1, 10**9))
        offsets: dict[int, int] = {}

        def find(path: str) -> tuple[int, str]:
            parts = Path(os.path.relpath(path, folder)).parts
            at = 0
            for part in parts[:-1]:
                at = now[at, part]
            return at, parts[-1]

        def change(text: str, **entries: tuple[tuple[int, str], int | None]) -> None:
            done = dict(entries.values())
            trace.calls.append(Change(text, done))
            now.update(done)  # type: ignore[arg-type]
            for place in [p for p, number in now.items() if number is None]:
                del now[place]

        for name, arguments, result in _calls(lines):
            if name in ("syncfs", "sync"):
                trace.calls.append(None)
                continue
            paths = [p for p in _paths(name, arguments) if f"{p}/".startswith(f"{folder}/")]
            if not paths:
                continue
            about = f"{name} {' '.join(os.path.relpath(p, folder) for p in paths)}"
            if name in ("fsync", "fdatasync"):
                at = paths[0]
                trace.calls.append(0 if at == str(folder) else now[find(at)])
            elif name in ("open", "openat", "creat"):
                place = find(paths[0]) if paths[0] != str(folder) else (0, ".")
                if "O_CREAT" in arguments and place not in now:
                    change(about, new=(place, number := next(numbers)))
                    files[number] = None
                assert "O_TRUNC" not in arguments or place in now
                if place in now:
                    offsets[now[place]] = 0
            elif name in ("write", "pwrite64"):
                (data,) = [bytes.fromhex(t.replace("\\x", "")) for t in _TEXT.findall(arguments)]
                number = now[find(paths[0])]
                start = offsets.get(number, 0)
                if name == "pwrite64":
                    start = int(arguments.rpartition(",")[2])
                data = data[: int(result)]
                offsets[number] = start + len(data)
                trace.calls.append(Change(about, {}, number, start, data))
            elif name.startswith("mkdir"):
                change(about, new=(find(paths[0]), next(numbers)))
            elif name.startswith("rename"):
                one, other = map(find, paths)
                swapped = now[other] if "RENAME_EXCHANGE" in arguments else None
                change(about, a=(one, swapped), b=(other, now[one]))
            elif name.startswith("link"):
                change(about, new=(find(paths[1]), now[find(paths[0])]))
            elif name.startswith("unlink") or name == "rmdir":
                change(about, old=(find(paths[0]), None))
            else:
                raise AssertionError(f"a call that the model does not know: {about}")
        return trace

    def _import(self, folder: Path, at: int) -> None:
        for entry in sorted(folder.iterdir()):
            number = len(self.base) + 1
            self.base[at, entry.name] = number
            if entry.is_dir():
                self._import(entry, number)
            else:
                self.contents[number] = entry.read_bytes()

    def pending(self, cut: int) -> tuple[list[Change], list[Change]]:
        """The changes before a cut that are durable, and those that are not."""
        durable, open_ = [], []
        for number, call in enumerate(self.calls[:cut]):
            if not isinstance(call, Change):
                continue
            later = [c for c in self.calls[number:cut] if not isinstance(c, Change)]
            touched = {call.file} - {-1}
            # Of a rename the folder that it goes to.
            gone = {d for (d, _), n in call.entries.items() if n is None}
            touched |= {d for d, _ in call.entries} - (gone if len(call.entries) > 1 else set())
            touched = touched or gone
            synced = None in later or touched.issubset({c for c in later if c is not None})
            (durable if synced else open_).append(call)
        return durable, open_

    def states(self, cut: int, most: int, seed: int) -> Iterator[dict[int, str]]:
        """What may happen to each of the changes that are not durable: nothing, all, each one
        alone, all but each one, and any."""
        _, changes = self.pending(cut)
        numbers = range(len(changes))
        yield dict.fromkeys(numbers, "lost")
        if not changes:
            return
        yield dict.fromkeys(numbers, "kept")
        chance = random.Random(seed * 100_003 + cut)

        def kind(number: int) -> str:
            return chance.choice(KINDS if changes[number].file >= 0 else KINDS[:2])

        single = [
            {n: ("kept", "lost")[(n == one) ^ flip] for n in numbers}
            for one in numbers
            for flip in (0, 1)
        ]
        chance.shuffle(single)
        yield from single[: most // 2]
        for _ in range(most - most // 2):
            yield {number: kind(number) for number in numbers}

    def tree(self, cut: int, state: dict[int, str]) -> dict[str, bytes | None]:
        """The files and folders (``None``) that are there then."""
        durable, changes = self.pending(cut)
        happened = {id(change): "kept" for change in durable}
        happened |= {id(change): state[n] for n, change in enumerate(changes)}
        entries: dict[tuple[int, str], int | None] = dict(self.base)
        contents = {number: bytearray(data) for number, data in self.contents.items()}
        for call in self.calls[:cut]:
            how = happened.get(id(call), "lost")
            if not isinstance(call, Change) or how == "lost":
                continue
            entries.update(call.entries)
            if call.file >= 0:
                data = call.data
                if how != "kept":
                    sound = 0 if how == "zeroed" else len(data) // 2
                    data = data[:sound] + bytes(len(data) - sound)
                file = contents.setdefault(call.file, bytearray())
                file.extend(bytes(max(0, call.offset + len(data) - len(file))))
                file[call.offset : call.offset + len(data)] = data
        below: dict[int, dict[str, int]] = {}
        for (folder, name), number in entries.items():
            if number is not None:
                below.setdefault(folder, {})[name] = number
        written = {c.file for c in self.calls if isinstance(c, Change)} | set(self.contents)
        found: dict[str, bytes | None] = {}

        def walk(number: int, path: str) -> None:
            for name, inner in below.get(number, {}).items():
                if inner in below or inner not in written:
                    found[path + name] = None if not self._is_file(inner) else b""
                    walk(inner, f"{path}{name}/")
                else:
                    found[path + name] = bytes(contents.get(inner, b""))

        walk(0, "")
        return found

    def _is_file(self, number: int) -> bool:
        made = (c for c in self.calls if isinstance(c, Change) and number in c.entries.values())
        first = next(made, None)
        return first is not None and first.text.startswith(("open", "creat"))


def _calls(lines: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Name, arguments and result of each call that succeeded, in the order of their ends. A folder
    comes where its mkdir began: another rank may use it before strace has seen the end."""
    begun: dict[str, tuple[int, str]] = {}
    done: list[tuple[int, tuple[str, str, str]]] = []
    for number, line in enumerate(lines):
        at = number
        if found := _CUT.fullmatch(line):
            begun[found[1]] = number, found[2]
            continue
        if found := _RESUMED.fullmatch(line):
            first, text = begun.pop(found[1])
            line = f"{found[1]} {text}{found[2]}"
            at = first if text.startswith("mkdir") else number
        if (found := _LINE.fullmatch(line)) and int(found[4]) >= 0:
            done.append((at, (found[2], found[3], found[4])))
    return (call for _, call in sorted(done, key=itemgetter(0)))


def _paths(name: str, arguments: str) -> list[str]:
    """The absolute paths that a call names."""

    def plain(text: str) -> str:
        return bytes.fromhex(text.replace("\\x", "")).decode()

    if name in ("fsync", "fdatasync", "write", "pwrite64", "ftruncate", "fallocate", "writev"):
        return [plain(_FD.match(arguments)[1])]  # type: ignore[index]
    found, above = [], "/"
    for match in re.finditer(f"{_FD.pattern}|{_TEXT.pattern}", arguments):
        if match[1] is not None:
            above = plain(match[1])
        else:
            found.append(os.path.join(above, plain(match[2])))
    return found


def attached(pids: Sequence[int], out: Path) -> subprocess.Popen[bytes]:
    """strace of processes that run; it ends with them."""
    command = ["strace", "-f", "-y", "-xx", "-qq", "-s", "1000000", "-o", str(out)]
    process = subprocess.Popen(
        [*command, "-e", f"trace={CALLS}", *(word for pid in pids for word in ("-p", str(pid)))]
    )
    deadline = time.monotonic() + 30
    while not all(f"TracerPid:\t{process.pid}\n" in _status(pid) for pid in pids):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


def _status(pid: int) -> str:
    return Path(f"/proc/{pid}/status").read_text()
