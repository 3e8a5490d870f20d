"""The page of guarantees names a test for each sentence, and each of these tests exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/concepts/guarantees.md").read_text("utf-8")


def test_each_sentence_names_tests_that_exist() -> None:
    rows = re.findall(r"^\| (.+) \| (.+) \|$", PAGE, re.MULTILINE)
    rows = [row for row in rows if row != ("guarantee", "tests")]
    assert len(rows) > 25
    for sentence, tests in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", tests)
        assert len(named) == tests.count("`") // 2 > 0, sentence
        for file, name in named:
            tree = ast.parse((ROOT / file).read_text("utf-8"))
            found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert name in found, (sentence, file, name)
