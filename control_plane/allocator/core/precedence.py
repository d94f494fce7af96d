"""Which moves for the sake of the spread the preferences before it speak against.

The first preference in which two machines differ decides. So a move that makes a job more even is
none to make if a preference that stands before `even` likes the new machine less: the next plan
would put the task back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile

from control_plane.allocator.core.claims import Claim
from control_plane.allocator.core.preferences import Ranking
from control_plane.allocator.core.request import Plan
from control_plane.api.policy import Preference, Strategy


def in_order(preferences: Sequence[Preference], claims: Iterable[Claim], made: Plan) -> Plan:
    """Return a plan without the moves that go against preferences before the first `even`."""
    before = list(takewhile(lambda p: p.strategy is not Strategy.EVEN, preferences))
    if not before:
        return made
    ranking, was = Ranking(before), {claim.task: claim.machine for claim in claims}
    kept = [
        claim
        for claim in made.change.claims
        if claim.task not in was
        or ranking.score(ranking.bins(claim.machine))
        <= ranking.score(ranking.bins(was[claim.task]))
    ]
    return replace(made, change=replace(made.change, claims=kept))
