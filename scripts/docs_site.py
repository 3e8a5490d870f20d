"""Hooks of the documentation site: pages from elsewhere in the repository, and docstring roles.

README.md, CONTRIBUTING.md, CHANGELOG.md, docker/README.md, FORMAT.md and PROTOCOL.md are pages of
the site without a copy below docs/. Their links, and links of other pages to them, are valid in the
repository and are rewritten for the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "docker/README.md": "guides/containers.md",
    "shardstore/storage/FORMAT.md": "reference/format.md",
    "shardstore/storage/PROTOCOL.md": "reference/protocol.md",
}
STATIC = ("LICENSE",)
_LINK = re.compile(r"(\]\()((?!\w+:|#)[^)#\s]+)([^)]*\))")
_ROLE = re.compile(r":(?:py:)?(?:class|func|meth|mod|data|attr|exc|obj):`(~?)([^`]+)`")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and files that lie outside of docs/."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        text = _rewrite(text, source, page)
        files.append(File.generated(config, page, content=text))
    for name in STATIC:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Point links of pages below docs/ to files outside of it at their pages of the site."""
    path = page.file.src_uri
    return markdown if path in PAGES.values() else _rewrite(markdown, f"docs/{path}", path)


def _rewrite(text: str, source: str, page: str) -> str:
    """Turn links that are relative to `source` in the repository into links relative to `page`."""

    def link(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        found = PAGES.get(path, path.removeprefix("docs/"))
        return before + posixpath.relpath(found, posixpath.dirname(page) or ".") + after

    return _LINK.sub(link, text)


class Roles(griffe.Extension):
    """Show the Sphinx roles and literal blocks of docstrings as Markdown."""

    def on_instance(self, *, obj: griffe.Object | griffe.Alias, **_: Any) -> None:
        """Rewrite one docstring."""
        if not obj.is_alias and obj.docstring:
            text = _ROLE.sub(_shown, obj.docstring.value)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)


def _shown(role: re.Match[str]) -> str:
    return f"`{role[2].rpartition('.')[2] if role[1] else role[2]}`"
