"""Whether TensorStore's requests end: it reads their limits once, when it is first imported.

The package imports this first of all, which is in time unless the program imported TensorStore
before. Imports nothing of weight.
"""

from __future__ import annotations

import os
import sys

__all__ = ["BOUNDED", "LIMITS"]

LIMITS = {
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "15",
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
}
"""Without them a silent server holds a request of TensorStore for ever: one that moves less than a
byte a second for so many seconds is given up."""

if "tensorstore" not in sys.modules:
    for _name, _value in LIMITS.items():
        os.environ.setdefault(_name, _value)

BOUNDED = all(os.environ.get(name) for name in LIMITS)
"""``False`` where TensorStore was there before us, and nobody else had set them."""
