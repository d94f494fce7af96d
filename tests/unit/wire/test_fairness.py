"""How much of a server one caller may use, and what is left for the others."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from wire.errors import Busy
from wire.fairness import (
    ANYONE_BODY_BYTES,
    MAX_BODY_BYTES,
    MAX_PAUSE_S,
    USER_BODY_BYTES,
    USERS,
    AccountLocks,
    ComputeShares,
    OpenRequests,
    Peer,
    body_limit,
)
from wire.routes import Route

ANN, BOB = (Peer(f"spiffe://x/user/{name}", "user") for name in ("ann", "bob"))
OPERATOR = Peer("spiffe://x/user/root", "user", is_trusted=True)
HERE, THERE = (Peer("anyone", "anyone", f"10.0.0.{n}") for n in (1, 2))


def taken(stack: ExitStack, waiting: OpenRequests, peer: Peer) -> int:
    """Take every place that a caller gets, and return the number of places."""
    for count in range(10_000):
        try:
            stack.enter_context(waiting.counted(peer))
        except Busy:
            return count
    raise AssertionError("there is no bound")


@pytest.mark.behaviour("BUG-HT6", "BUG-HT22")
def test_long_poll_places_are_kept_for_callers_without_one() -> None:
    """Formerly three viewers and an anonymous client took all 512 places."""
    waiting = OpenRequests()
    with ExitStack() as stack:
        viewers = [Peer(f"spiffe://x/user/v{n}", "user") for n in range(20)]
        held = [taken(stack, waiting, peer) for peer in (*viewers, HERE, THERE)]
        assert all(held)
        assert held == sorted(held, reverse=True)
        assert taken(stack, waiting, BOB) >= 1
        assert taken(stack, waiting, OPERATOR) >= 64
    with waiting.counted(BOB):
        pass


@pytest.mark.behaviour("BUG-HT24")
def test_anonymous_callers_are_distinguished_by_address() -> None:
    """Formerly one address made discovery answer 503 to all clients without a certificate."""
    waiting = OpenRequests()
    with ExitStack() as stack:
        assert taken(stack, waiting, HERE) >= 32
        assert taken(stack, waiting, THERE) >= 32
        assert taken(stack, waiting, ANN) >= 32


@pytest.mark.behaviour("BUG-HT20")
async def test_an_account_in_debt_waits_and_the_others_do_not() -> None:
    """Computing time is shared as well."""
    now = 100.0
    computing = ComputeShares(lambda: now)
    computing.charge(ANN, USERS.burst_s + 0.5)
    assert computing.pause_s(ANN) == pytest.approx(0.5 / USERS.of_time)
    assert computing.pause_s(BOB) == computing.pause_s(OPERATOR) == 0
    await computing.wait_for_share(BOB)
    now += 0.5 / USERS.of_time + 0.01
    assert computing.pause_s(ANN) == 0
    computing.charge(ANN, 2 * MAX_PAUSE_S)
    with pytest.raises(Busy, match="more computing time than its share"):
        await computing.wait_for_share(ANN)


@pytest.mark.behaviour("BUG-HT24")
def test_one_anonymous_address_leaves_computing_time_to_the_others() -> None:
    """Each address has its own share, and all addresses together have one."""
    computing = ComputeShares(lambda: 100.0)
    computing.charge(HERE, 0.3)
    assert computing.pause_s(HERE) > 0
    assert computing.pause_s(THERE) == 0
    computing.charge(HERE, 1.0)
    assert computing.pause_s(THERE) > 0
    assert computing.pause_s(ANN) == 0


@pytest.mark.behaviour("BUG-HT20")
async def test_a_request_is_charged_for_computing_time_and_not_for_waiting() -> None:
    """Each step on the event loop counts, whether it succeeds or fails."""
    computing = ComputeShares()

    async def work(fails: bool) -> int:
        await asyncio.sleep(0.01)
        total = sum(range(3_000_000))
        try:
            await asyncio.wait_for(asyncio.Event().wait(), 0.01)
        except TimeoutError:
            if fails:
                raise
        return total

    assert await computing.charged(BOB, work(fails=False)) == sum(range(3_000_000))
    once = computing._debts[BOB.account][0]
    assert once > 0.001
    with pytest.raises(TimeoutError):
        await computing.charged(ANN, work(fails=True))
    assert computing._debts[ANN.account][0] > 0.001


@pytest.mark.behaviour("BUG-HT20")
def test_a_body_is_bounded_by_the_class_of_its_sender() -> None:
    """The bound applies before any of the body is decoded."""
    route, large = Route("a", "PUT", "/a"), Route("b", "PUT", "/b", body_bytes=7)
    limits = [body_limit(route, peer) for peer in (HERE, ANN, OPERATOR)]
    assert limits == [ANYONE_BODY_BYTES, USER_BODY_BYTES, MAX_BODY_BYTES]
    assert body_limit(large, HERE) == body_limit(large, ANN) == 7


@pytest.mark.behaviour("BUG-HT27")
async def test_costly_requests_of_one_caller_are_answered_in_turn() -> None:
    """Formerly eight plans of one user ran at once."""
    turns = AccountLocks()
    async with turns.of(ANN):
        assert turns.of(ANN).locked()
        assert not turns.of(BOB).locked()
    assert not turns.of(ANN).locked()
    assert not turns._locks
