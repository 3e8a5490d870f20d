"""The structure of the package: layers that import downwards, no circles, folders of a size."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from pathlib import Path

import pytest

import shardstore

ROOT = Path(shardstore.__file__).parent
FILES = 139
TOP_MODULES = 20
MODULES_IN_A_FOLDER = 16
UPWARDS = 1

# A room imports from its own layer and from those below it. "" is the package itself.
LAYERS = (
    "__main__ cli",
    "bridge lightning torchtitan verl",
    " convert dcp hf inspection manager megatron",
    "serialization async_handle",
    "strategies",
    "saving loading",
    "coverage distributed dtensor values mapping dict_utils state_dict_utils optimizer "
    "validation exchange_utils core utils",
    "storage",
    "errors progress zarr_dtypes",
)
# The floors of the room `storage`, from the highest. Each imports from itself and the floors below.
FLOORS = ("commit checkpoint", "movers", "stores", "format options", "runtime")
INTERFACES = {"strategies.base": 6, "strategies.async_utils": 6}
"""Modules of a room that rooms below it implement or hand on: name -> their layer."""
LAYER = {room: number for number, rooms in enumerate(LAYERS) for room in rooms.split(" ")}
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names.split()}


def name_of(file: Path) -> str:
    parts = file.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, ast.Module]:
    return {name_of(file): ast.parse(file.read_text()) for file in ROOT.rglob("*.py")}


@cache
def imports(module: str, types: bool = False) -> frozenset[str]:
    """The package's modules that a module imports; with ``types``, also those that type checkers
    import."""
    return frozenset(_imports(modules()[module], types))


def _imports(node: ast.AST, types: bool) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test) and not types:
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names if alias.name in modules())
        elif isinstance(child, ast.ImportFrom) and child.module in modules():
            for alias in child.names:
                inner = f"{child.module}.{alias.name}"
                yield inner if inner in modules() else child.module
        if not isinstance(child, ast.expr):
            yield from _imports(child, types)


def layer(module: str) -> int:
    inner = module.partition(".")[2]
    return INTERFACES.get(inner, LAYER[inner.partition(".")[0]])


def test_no_circle_of_imports() -> None:
    """Neither by late imports nor by those for type checkers. What imports a module imports the
    packages around it first, unless it is in them itself."""
    arrows = {
        module: {
            package
            for other in imports(module, types=True)
            for package in (other, *accumulate(other.split(".")[:-1], "{}.{}".format))
            if not f"{module}.".startswith(f"{package}.")
        }
        for module in modules()
    }
    # What imports nothing that is left is in no circle.
    while free := {module for module, others in arrows.items() if not others & arrows.keys()}:
        for module in free:
            del arrows[module]
    assert not arrows


def test_rooms_import_only_downwards() -> None:
    upwards = [
        f"{module} imports {other}"
        for module in modules()
        for other in sorted(imports(module))
        if layer(other) < layer(module)
    ]
    assert len(upwards) <= UPWARDS, "\n".join(upwards)


def test_floors_of_storage_import_only_downwards() -> None:
    def floor(module: str) -> int | None:
        inner = module.removeprefix("shardstore.storage.").partition(".")[0]
        return FLOOR[inner] if module.startswith("shardstore.storage.") else None

    assert not [
        f"{module} imports {other}"
        for module in modules()
        for other in sorted(imports(module, types=True))
        if (above := floor(module)) is not None
        and (below := floor(other)) is not None
        and below < above
    ]


def test_folders_and_files_are_few() -> None:
    folders = Counter(file.parent for file in ROOT.rglob("*.py") if file.name != "__init__.py")
    top = folders.pop(ROOT)
    assert top <= TOP_MODULES
    assert {str(f): n for f, n in folders.items() if n > MODULES_IN_A_FOLDER} == {}
    assert len(modules()) <= FILES


@pytest.mark.parametrize(
    ("folder", "other"), [("tests", "scripts"), ("scripts", "tests"), ("testing", "scripts tests")]
)
def test_tests_and_scripts_share_only_testing(folder: str, other: str) -> None:
    forbidden = re.compile(rf"^\s*(?:from|import) (?:{'|'.join(other.split())})\b", re.MULTILINE)
    found = (ROOT.parent / folder).rglob("*")
    files = [file for file in found if file.is_file() and file.suffix != ".pyc"]
    assert not [str(f) for f in files if forbidden.search(f.read_text("utf-8", "replace"))]


def test_unit_tests_mirror_the_package() -> None:
    """``stores/folder.py`` has its tests in ``unit/.../stores/test_folder.py``, or in several files
    whose names go on after the module's; a file named after a room tests several of its modules."""
    unit = ROOT.parent / "tests" / "unit"
    strays = []
    for file in unit.rglob("test_*.py"):
        room, subject = ROOT / file.parent.relative_to(unit), file.stem.removeprefix("test_")
        names = {module.stem for module in room.glob("*.py")} | {room.name, "arrows"}
        if not any(subject == name or subject.startswith(f"{name}_") for name in names):
            strays.append(file.relative_to(unit).as_posix())
    assert not strays


def test_no_two_types_have_one_name() -> None:
    """A reader who has met one would take the other for it."""

    def names(node: ast.stmt) -> Iterator[str]:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and "TypeAlias" in ast.unparse(node.annotation):
            yield ast.unparse(node.target)

    found = Counter(
        name for tree in modules().values() for node in tree.body for name in names(node)
    )
    del found["CheckpointManager"]  # Megatron-Bridge names the class that it asks for
    assert [name for name, count in found.items() if count > 1] == []
