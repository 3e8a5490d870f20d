"""Limits that TensorStore reads once, when it is first imported: without them a silent server holds
a request for ever.

Imported with the package itself, and so before any module of it that imports TensorStore.
"""

from __future__ import annotations

import os
import sys

__all__ = ["BOUNDED", "LIMITS"]

LIMITS = {
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "15",
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
}
"""A request that moves less than a byte a second for this many seconds is given up."""


def _bound() -> bool:
    if "tensorstore" in sys.modules:
        return all(os.environ.get(name) for name in LIMITS)
    for name, value in LIMITS.items():
        os.environ.setdefault(name, value)
    return True


BOUNDED = _bound()
"""Whether requests of this process end; ``False`` where TensorStore was there before us."""
