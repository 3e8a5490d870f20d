"""How requests to a store run side by side."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardstore.storage.stores.object_io import ObjectIO, run_requests


class TwoAtATime(ObjectIO):
    requests = small_requests = 2


@pytest.mark.parametrize("kind", [IndexError, KeyError, OSError])
def test_an_error_of_any_kind_at_the_start_of_a_request_is_raised(kind: type[Exception]) -> None:
    def begin(item: int, may_wait: bool) -> Callable[[], None]:
        raise kind(item)

    with pytest.raises(kind, match="7"):
        run_requests(TwoAtATime(), [7], begin)


def test_every_request_is_finished_once() -> None:
    ended: list[int] = []
    run_requests(TwoAtATime(), range(50), lambda item, _: lambda: ended.append(item))
    assert sorted(ended) == list(range(50))
