"""Fixtures of the command line's tests."""

from tests.helpers.cli_fixtures import cli, place, pristine

__all__ = ["cli", "place", "pristine"]
