"""The composed scenario distributes every pair of kinds of events over its seeds."""

from itertools import combinations_with_replacement

import pytest

from vm_lab.region.composed import pairs_of, seeds_per_cycle

pytestmark = pytest.mark.behaviour("BUG-CP32")


@pytest.mark.behaviour("BUG-CP32")
def test_a_turn_of_seeds_composes_every_pair_of_kinds_once():
    kinds = ["cut", "drain", "move-job", "propose-profile", "release"]
    dealt = [
        tuple(sorted(pair))
        for seed in range(1, seeds_per_cycle(kinds, 4) + 1)
        for pair in pairs_of(kinds, seed, 4)
    ]
    assert sorted(dealt) == list(combinations_with_replacement(kinds, 2))
