"""Places on disk and in an object store, for tests that are to hold on both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from testing.s3_servers import S3Server


@pytest.fixture(params=["disk", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """A root and its storage options."""
    if request.param == "disk":
        return str(tmp_path / "run"), {}
    server: S3Server = request.getfixturevalue("s3_server")
    return f"s3://{server.new_bucket()}/run", server.storage_options
