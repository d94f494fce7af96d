"""A host refuses a control plane whose store is older than the state that the host knows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from agent.api.term import Term, read_term
from agent.lease.core.term import is_older, newest
from agent.lease.fencing import FencingOwners, FencingTerm
from wire.errors import Conflict, HostError, InvalidInput, OlderStore

pytestmark = pytest.mark.behaviour("F-88")

ONE, TWO = "0" * 15 + "1", "0" * 15 + "2"


def term_text(name: str, began: int, now: int) -> str:
    return Term(name, began, now).text()


def test_a_term_is_read_as_it_was_written_and_nothing_else_is_one() -> None:
    term = Term(ONE, 3, 1 << 52)
    assert read_term(term.text()) == term
    for bad in ("", "x", ONE, f"{ONE}/1", f"{ONE}/1/2/3", f"{ONE}/-1/2", f"{ONE}/1/{'9' * 19}"):
        assert read_term(bad) is None, bad


@pytest.mark.behaviour("F-88")
def test_lives_of_one_store_follow_each_other_and_an_older_one_does_not() -> None:
    """A life may also begin with the same term (epoch) as the life that it replaces."""
    lives = [Term(ONE, 0, 5), Term(TWO, 5, 5), Term(ONE[::-1], 5, 9)]
    for before, after in pairwise(lives):
        assert not is_older(after, before)
    assert not is_older(lives[0], None)
    assert is_older(Term(TWO, 4, 400), lives[0]), "however much it wrote since"
    assert not is_older(Term(ONE, 0, 3), lives[0]), "an earlier request of the same life"
    assert newest(Term(ONE, 0, 3), lives[0]) == lives[0]
    assert newest(lives[1], lives[0]) == lives[1]


@pytest.mark.behaviour("F-88")
def test_an_older_store_is_refused_and_known_state_stays(tmp_path: Path) -> None:
    """A second request of the older store is refused as well."""
    last = FencingTerm(tmp_path / "t")
    last.check(None, commands=True)  # from an earlier release
    last.check(term_text(ONE, 0, 9), commands=True)
    for _ in range(2):
        with pytest.raises(OlderStore, match=r"at revision 9 .* began with revision 8"):
            last.check(term_text(TWO, 8, 100), commands=False)
    last.check(term_text(ONE, 0, 10), commands=False)
    last.check(term_text(TWO, 10, 10), commands=False)
    with pytest.raises(InvalidInput, match="is not the term"):
        last.check("nonsense", commands=True)


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0)


@pytest.mark.behaviour("F-88")
async def test_a_commands_result_outlives_the_agent(tmp_path: Path) -> None:
    """The result also survives a killed agent and a reboot of the host."""
    path, last = tmp_path / "t", FencingTerm(tmp_path / "t")
    failing = True

    async def write(where: Path, data: bytes) -> None:
        if failing:
            raise HostError("the disk fails")
        where.write_bytes(data)

    watch = asyncio.create_task(last.watch(write))
    last.check(term_text(ONE, 0, 7), commands=True)
    await asyncio.sleep(0.01)
    assert not watch.done(), "a disk that fails ends nothing"
    failing = False
    last.check(term_text(ONE, 0, 8), commands=True)
    await _until(path.exists)
    watch.cancel()
    with suppress(asyncio.CancelledError):
        await watch
    after = FencingTerm(path)
    with pytest.raises(OlderStore):
        after.check(term_text(TWO, 7, 7), commands=False)
    path.unlink()  # it joined again
    after.check(term_text(TWO, 0, 0), commands=False)


@pytest.mark.behaviour("SH3")
async def test_the_owners_of_a_host_outlive_the_agent(tmp_path: Path) -> None:
    """An earlier owner is refused after a reboot; a host that joins again forgets both owners."""
    path, owners = tmp_path / "o", FencingOwners(tmp_path / "o")

    async def write(where: Path, data: bytes) -> None:
        where.write_bytes(data)

    watch = asyncio.create_task(owners.watch(write))
    owners.check(None, commands=True)  # from an earlier release
    owners.check("ads/3", commands=True)
    owners.check("web/7", commands=True)
    await _until(lambda: path.exists() and "web/7" in path.read_text())
    watch.cancel()
    with suppress(asyncio.CancelledError):
        await watch
    after = FencingOwners(path)
    for earlier in ("web/6", "ads/2"):
        with pytest.raises(Conflict, match="the term of its present owner"):
            after.check(earlier, commands=True)
    with pytest.raises(InvalidInput, match="is not an owner"):
        after.check("nonsense", commands=False)
    path.unlink()  # it joined again
    after.check("web/1", commands=True)
