"""The environment of the trainers, for the tests that run them."""

from tests.helpers.trainers import python

__all__ = ["python"]
