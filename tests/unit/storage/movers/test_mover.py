"""The choice of a mover and of a store, while another thread imports their packages."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys, threading
from importlib.abc import MetaPathFinder

begun, go_on = threading.Event(), threading.Event()

class Held(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {last!r}:
            begun.set()
            go_on.wait(60)

sys.meta_path.insert(0, Held())
importing = threading.Thread(target=__import__, args=({package!r},))
importing.start()
begun.wait(60)
found = []
module, kind = {chosen!r}
choosing = threading.Thread(
    target=lambda: found.append(getattr(sys.modules[module], kind).of({argument}))
)
choosing.start()
choosing.join(0.3)  # it fails, or waits for the import
go_on.set()
choosing.join(60)
importing.join(60)
print(type(found[0]).__name__)
"""


@pytest.mark.parametrize(
    ("package", "last", "chosen", "argument", "expected"),
    [
        ("movers", "movers.object_mover", ("movers.mover", "Mover"), "LOCATION", "FolderMover"),
        ("stores", "stores.prefix", ("stores.location", "Location"), "'/tmp'", "LocalFolder"),
    ],
)
def test_a_class_is_chosen_while_another_thread_imports_the_package(
    package: str, last: str, chosen: tuple[str, str], argument: str, expected: str
) -> None:
    """As the threads of a command do that read two checkpoints."""
    room = "shardstore.storage."
    place = "sys.modules['shardstore.storage.stores.location'].Location.of('/tmp')"
    program = PROGRAM.format(
        package=room + package,
        last=room + last,
        chosen=(room + chosen[0], chosen[1]),
        argument=argument.replace("LOCATION", place),
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == expected, done.stderr
