"""How requests to a store run side by side."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from shardstore.storage.stores.object_io import ObjectIO, Request, run_requests


class TwoAtATime(ObjectIO):
    requests = small_requests = 2


@dataclass
class Noted(Request):
    """Raises ``fails`` at its start, or adds its number to a list at its end."""

    number: int
    ended: list[int]
    fails: type[Exception] | None = None

    def start(self, *, may_wait: bool) -> bool:
        if self.fails is not None:
            raise self.fails(self.number)
        return True

    def finish(self) -> None:
        self.ended.append(self.number)


@pytest.mark.parametrize("kind", [IndexError, KeyError, OSError])
def test_an_error_of_any_kind_at_the_start_of_a_request_is_raised(kind: type[Exception]) -> None:
    with pytest.raises(kind, match="7"):
        run_requests(TwoAtATime(), [Noted(7, [], kind)])


def test_every_request_is_finished_once() -> None:
    ended: list[int] = []
    run_requests(TwoAtATime(), (Noted(number, ended) for number in range(50)))
    assert sorted(ended) == list(range(50))
