"""Whether TensorStore's requests end: it reads their limits once, when it is first imported.

The package sets them when it is imported (:data:`shardstore.TENSORSTORE_LIMITS`), which is in time
unless the program imported TensorStore before.
"""

from __future__ import annotations

import os

from shardstore import TENSORSTORE_LIMITS as LIMITS

__all__ = ["BOUNDED", "LIMITS"]

BOUNDED = all(os.environ.get(name) for name in LIMITS)
"""``False`` where TensorStore was there before us, and nobody else had set them."""
