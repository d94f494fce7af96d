"""When a control plane takes the word of hosts that its store is an old copy (F-88)."""

from __future__ import annotations

import asyncio

import pytest

from agent.errors import ConfigError
from control_plane.health.core.put_back import is_put_back
from control_plane.health.put_back import PutBack
from control_plane.store.memory import MemoryStore
from control_plane.store.protocol import Put
from control_plane.store.term import OwnTerm


@pytest.mark.parametrize(
    ("refusing", "followed", "expected"),
    [(0, 0, False), (1, 1, True), (1, 2, False), (2, 3, True), (50, 100, False), (51, 100, True)],
)
def test_more_than_half_of_the_hosts_are_believed(
    refusing: int, followed: int, expected: bool
) -> None:
    """F-88: a few hosts in other hands must not end a control plane."""
    assert is_put_back(refusing, followed) is expected


async def test_the_first_hosts_that_answer_are_no_majority() -> None:
    """F-88: hosts are followed one after the other; all of them count."""
    followed: set[str] = {"a"}
    found = PutBack(followed)
    waiting = asyncio.ensure_future(found.wait())
    found.refused("a", "told more")
    followed |= {"b", "c"}
    found.all_are_asked = True
    found.look()
    await asyncio.sleep(0)
    assert not waiting.done()
    assert "1 of 3 hosts were told (a: told more)" in found.words()
    found.refused("b", "told more")
    with pytest.raises(ConfigError, match="2 of 3 hosts were told"):
        await waiting
    for name in "ab":
        found.taken(name)
    assert found.words() == ""


async def test_a_term_says_where_it_began_and_how_far_it_is() -> None:
    """F-88: each life of a control plane has a name of its own."""
    store, said = MemoryStore(), []
    for _ in range(2):
        async with store:
            term = OwnTerm(store)
            await store.txn({}, [Put("a", b"1")])
            (text,) = term.headers().values()
            said.append(text.split("/"))
    assert [(began, now) for _, began, now in said] == [("0", "1"), ("1", "2")]
    assert said[0][0] != said[1][0]
