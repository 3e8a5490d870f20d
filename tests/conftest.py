"""Settings that must be there before any test module imports TensorStore."""

from __future__ import annotations

import shardstore

assert shardstore  # its import bounds the requests that TensorStore makes
