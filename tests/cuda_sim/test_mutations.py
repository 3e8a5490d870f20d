"""Each synchronisation of the package is needed: without it, a case of this folder fails."""

from __future__ import annotations

import pytest

from tests.cuda_sim.mutations import MUTATIONS, Mutation, without_mutation
from tests.cuda_sim.simulation import IS_MADE, MISSING, ROOT


def test_every_mutation_changes_the_package() -> None:
    for mutation in MUTATIONS:
        assert mutation.applied(ROOT) != (ROOT / mutation.file).read_text(), mutation.name


def test_every_synchronisation_has_a_mutation() -> None:
    left = without_mutation(ROOT)
    assert not left, f"add a mutation to tests/cuda_sim/mutations.py for {left}"


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not IS_MADE, reason=MISSING)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_missing_synchronisation_is_noticed(mutation: Mutation) -> None:
    assert mutation.is_noticed(), mutation.case
