"""Fixtures of the verification's tests, which also run the command."""

from tests.helpers.cli_fixtures import cli, place, pristine

__all__ = ["cli", "place", "pristine"]
