"""When a control plane believes hosts that its store is an old copy."""

from __future__ import annotations

import asyncio

import pytest

from control_plane.health import restored
from control_plane.health.core.verdict import is_restored
from control_plane.health.restored import RestoredHosts
from control_plane.store.memory import MemoryStore
from control_plane.store.opening import OwnTerm
from control_plane.store.protocol import Put
from wire.errors import ConfigError

pytestmark = pytest.mark.behaviour("F-88")


@pytest.mark.behaviour("F-88")
@pytest.mark.parametrize(
    ("refusing", "answered", "followed", "at_first", "settled"),
    [
        (0, 0, 0, False, False),
        (1, 0, 1, True, True),
        (1, 1, 2, False, False),
        (2, 1, 3, True, True),
        (50, 50, 100, False, False),
        (51, 49, 100, True, True),
        (1, 0, 3, False, True),  # the other two are dead
        (1, 9, 100, False, False),
    ],
)
def test_more_than_half_of_the_hosts_are_believed(
    refusing: int, answered: int, followed: int, at_first: bool, settled: bool
) -> None:
    """A few compromised hosts must not end a control plane, and dead hosts must not keep it
    running."""
    assert is_restored(refusing, answered, followed, settled=False) is at_first
    assert is_restored(refusing, answered, followed, settled=True) is settled


@pytest.mark.behaviour("F-88")
async def test_the_first_hosts_that_answer_are_no_majority() -> None:
    """The control plane follows hosts one after the other, and counts all of them."""
    followed: set[str] = {"a"}
    found = RestoredHosts(followed)
    waiting = asyncio.ensure_future(found.wait())
    found.record_refusal("a", "newer term")
    followed |= {"b", "c"}
    found.all_are_called = True
    found.check()
    await asyncio.sleep(0)
    assert not waiting.done()
    assert "1 of 3 hosts know (a: newer term)" in found.describe()
    found.record_refusal("b", "newer term")
    with pytest.raises(ConfigError, match="2 of 3 hosts know"):
        await waiting
    found.record_answer("a")
    found.forget("b")
    assert found.describe() == ""


@pytest.mark.behaviour("F-88")
async def test_hosts_that_stay_silent_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restored store is also noticed in a region whose machines are mostly down."""
    monkeypatch.setattr(restored, "SETTLES_S", 0.01)
    found = RestoredHosts({"a", "b", "c"})
    found.all_are_called = True
    found.record_answer("a")
    found.record_refusal("b", "newer term")
    waiting = asyncio.ensure_future(found.wait())
    await asyncio.sleep(0.05)
    assert not waiting.done(), "one of two"
    found.record_refusal("a", "newer term")
    with pytest.raises(ConfigError, match="2 of 3 hosts know"):
        await waiting


@pytest.mark.behaviour("F-88")
async def test_a_term_has_its_first_and_its_current_revision() -> None:
    """Each run of a control plane has its own name."""
    store, terms = MemoryStore(), []
    for _ in range(2):
        async with store:
            term = OwnTerm(store)
            await store.txn({}, [Put("a", b"1")])
            (text,) = term.headers().values()
            terms.append(text.split("/"))
    assert [(began, now) for _, began, now in terms] == [("0", "1"), ("1", "2")]
    assert terms[0][0] != terms[1][0]
