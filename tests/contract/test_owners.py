"""The agent and the modelled machine agree on which owner may command a machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent import api
from agent.api.term import OwnerTerm, read_owner
from agent.lease.core import term
from agent.lease.fencing import FencingOwners
from vm_lab.region import agent as modelled
from vm_lab.region.history import History
from vm_lab.region.loop import Timeline
from vm_lab.region.machine import MachineContext, SimulatedMachine
from wire.errors import Conflict

pytestmark = pytest.mark.behaviour("SH3")

Ask = Callable[[str, int, bool], bool]
"""Returns whether a request is accepted: (entitlement, term number, whether it is a change)."""


def real(folder: Path) -> Ask:
    owners = FencingOwners(folder / "last-owners")

    def ask(entitlement: str, number: int, commands: bool) -> bool:
        try:
            owners.check(OwnerTerm(entitlement, number).text(), commands=commands)
        except Conflict:
            return False
        return True

    return ask


def model(_: Path) -> Ask:
    timeline = Timeline()
    machine = SimulatedMachine(
        MachineContext(timeline, History(timeline)), "m1", api.Location(), "seed"
    )

    def ask(entitlement: str, number: int, commands: bool) -> bool:
        owner = OwnerTerm(entitlement, number)
        request = modelled.AgentCall(modelled.list_tasks, (), owner, commands)
        return not isinstance(modelled.answer(machine, request), Conflict)

    return ask


KINDS = (real, model)


@pytest.fixture(params=KINDS)
def ask(request: pytest.FixtureRequest, tmp_path: Path) -> Ask:
    made: Ask = request.param(tmp_path)
    return made


def test_a_command_of_an_earlier_owner_is_refused(ask: Ask) -> None:
    assert ask("web", 7, True)
    assert not ask("web", 6, True)
    assert ask("web", 7, True), "what was refused changed nothing"


def test_a_poll_of_a_new_owner_is_enough(ask: Ask) -> None:
    """A machine refuses the earlier owner even if the new owner has sent it only a poll."""
    assert ask("web", 6, True)
    assert ask("web", 7, False)
    assert not ask("web", 6, True)


def test_an_earlier_owner_may_read(ask: Ask) -> None:
    assert ask("web", 7, True)
    assert ask("web", 6, False)
    assert not ask("web", 6, True)


def test_a_machine_that_passes_on_keeps_both_fences(ask: Ask) -> None:
    """Terms of different entitlements are not compared, and the machine remembers both."""
    assert ask("web", 9, True)
    assert ask("ads", 2, True), "it belongs to ads now, whose term is lower"
    assert not ask("web", 8, True)
    assert not ask("ads", 1, True)
    assert ask("web", 9, True), "it came back to the owner that it had"


REQUESTS = st.lists(
    st.tuples(st.sampled_from(["web", "ads", "db"]), st.integers(0, 6), st.booleans()), max_size=40
)


@given(REQUESTS)
def test_agent_and_model_take_the_same_requests(requests: list[tuple[str, int, bool]]) -> None:
    owners_of_kind, highest = [kind(Path("/nowhere")) for kind in KINDS], dict[str, int]()
    for entitlement, number, commands in requests:
        taken = {ask(entitlement, number, commands) for ask in owners_of_kind}
        assert taken == {not commands or number >= highest.get(entitlement, 0)}
        highest[entitlement] = max(number, highest.get(entitlement, 0))


def test_the_number_of_remembered_owners_is_bounded() -> None:
    known = dict[str, int]()
    for number in range(term.OWNERS_MAX + 10):
        known = dict(term.with_owner(OwnerTerm(f"e{number}", 1), known))
    assert len(known) == term.OWNERS_MAX
    assert f"e{term.OWNERS_MAX + 9}" in known
    assert "e9" not in known


def test_an_owner_is_read_as_it_was_written_and_nothing_else_is_one() -> None:
    owner = OwnerTerm("web-1", 1 << 52)
    assert read_owner(owner.text()) == owner
    for bad in ("", "web", "web/", "/1", "web/-1", "web/1/2", "a b/1", "Web/1", f"web/{'9' * 17}"):
        assert read_owner(bad) is None, bad
