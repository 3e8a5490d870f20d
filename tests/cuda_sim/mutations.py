"""Takes each synchronisation out of the package in turn, and expects a case to fail."""
from __future__ import annotations
from pathlib import Path
from typing import NamedTuple
class Mutation(NamedTuple):
    name: str
    file: str
    def applied(self, root): return ""
MUTATIONS: list[Mutation] = []
def without_mutation(root: Path) -> list[str]:
    return []
