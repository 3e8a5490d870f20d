"""File systems of fsspec that keep their listings, whoever else may write there in the meantime."""

from __future__ import annotations

from typing import Any, ClassVar

from fsspec.implementations.asyn_wrapper import (  # type: ignore[import-untyped]
    AsyncFileSystemWrapper,
)
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

__all__ = ["KeepingMemory", "ListingMemory"]


class ListingMemory(AsyncFileSystemWrapper):  # type: ignore[misc]
    """fsspec's memory, asynchronous, with the habits of adlfs: it keeps its listings, whoever else
    may write there, and gives a list where `find` meets a document."""

    protocol = "listing-memory"
    cachable = True

    def __init__(self, **options: Any) -> None:
        super().__init__(MemoryFileSystem(), **options)
        strip, ls, find = self._strip_protocol, self._ls, self._find
        self._strip_protocol = lambda path: strip(path.replace("listing-memory://", "memory://"))

        async def kept_ls(path: str, detail: bool = True, **_: Any) -> Any:
            path = self._strip_protocol(path)
            if path not in self.dircache:
                self.dircache[path] = found = await ls(path, detail=True)
            else:
                found = self.dircache[path]
            return found if detail else [about["name"] for about in found]

        async def listing_find(path: str, detail: bool = False, **options: Any) -> Any:
            path = self._strip_protocol(path)
            if self.sync_fs.isfile(path):
                return [path]
            return await find(path, detail=detail, **options)

        self._ls, self._find = kept_ls, listing_find


class KeepingMemory(MemoryFileSystem):  # type: ignore[misc]
    """fsspec's memory, which keeps its listings until it is told to forget them."""

    protocol = "keeping-memory"
    root_marker = "/"
    _kept: ClassVar[dict[str, Any]] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> Any:
        return MemoryFileSystem._strip_protocol(path.replace("keeping-memory://", "memory://"))

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        path = self._strip_protocol(path)
        if path not in self._kept:
            self._kept[path] = super().ls(path, detail=True, **options)
        found = self._kept[path]
        return found if detail else [about["name"] for about in found]

    def rmdir(self, path: str) -> None:
        self._kept.clear()  # whether a folder is empty it does look up
        super().rmdir(path)

    def invalidate_cache(self, path: str | None = None) -> None:
        self._kept.clear()
