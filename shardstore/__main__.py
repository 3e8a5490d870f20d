"""``python -m shardstore``: the command line."""

from __future__ import annotations

from shardstore.cli.app import main

if __name__ == "__main__":
    main()
