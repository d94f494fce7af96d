"""Decisions about loans: lender, borrower, callbacks, and sizes of buffers."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.api.elastic import Promise, UseHistory
from control_plane.elastic.core.buffers import OwnerUse, buffers
from control_plane.elastic.core.expecting import DAY, SLOT_S, SLOTS, expected, peak, with_use
from control_plane.elastic.core.matching import (
    MARGIN_S,
    Borrower,
    Idle,
    Need,
    Offer,
    OpenLoan,
    loans_to_call_back,
    match_loans,
)

pytestmark = pytest.mark.behaviour("EL1", "EL2", "EL3", "EL10")

NOW = 1_800_000_000.0


def idle(number: int, donor: str = "", **changes) -> Idle:
    values = {
        "machine": f"m{number:03}",
        "donor": donor,
        "machine_type": "web",
        "datacenter": "dc1",
        "msb": f"msb{number % 3}",
        "idle_s": 1000.0,
    }
    return Idle(**(values | changes))


def borrower(pool: str = "batch", wants: int = 10, **changes) -> Borrower:
    values = {"has": 0, "notice_s": 120.0, "loan_s": 3600.0}
    return Borrower(pool, wants, **(values | changes))


def loan(number: int, donor: str = "", **changes) -> OpenLoan:
    values = {
        "machine": f"m{number:03}",
        "donor": donor,
        "borrower": "batch",
        "machine_type": "web",
        "datacenter": "dc1",
        "promise_s": 300.0,
        "until": NOW + 3600,
        "revoked": False,
        "tasks": 2,
    }
    return OpenLoan(**(values | changes))


def back(loans: list[OpenLoan], needs: list[Need], most: int = 100) -> dict[str, str]:
    calls = loans_to_call_back(loans, needs, NOW, idle_after_s=120, most=most)
    return {call.machine: call.why for call in calls}


def test_machines_that_are_not_expected_to_be_needed_are_lent_from_the_fullest_msb() -> None:
    machines = [idle(n, msb="msb0" if n < 8 else "msb1") for n in range(10)]
    loans = match_loans(machines, {"": Offer(300, 300, keep=4)}, [borrower()])
    assert len(loans) == 6
    assert all(loan.promise_s == 300 for loan in loans)
    left = {m.machine for m in machines} - {loan.machine for loan in loans}
    assert Counter(m.msb for m in machines if m.machine in left) == {"msb0": 2, "msb1": 2}


def test_a_machine_idle_for_less_than_its_owners_limit_is_not_lent() -> None:
    machines = [idle(0, idle_s=299), idle(1, idle_s=301)]
    assert [m.machine for m in match_loans(machines, {"": Offer(300, 300, 0)}, [borrower()])] == [
        "m001"
    ]


def test_a_promise_that_is_shorter_than_the_notice_makes_no_loan() -> None:
    offers = {"": Offer(120, 0, 0), "web": Offer(900, 0, 0)}
    machines = [idle(0), idle(1, "web")]
    loans = match_loans(machines, offers, [borrower(notice_s=300.0)])
    assert [(loan.machine, loan.donor) for loan in loans] == [("m001", "web")]


def test_a_pool_borrows_only_machines_of_others_of_its_kind_and_place() -> None:
    machines = [idle(0, "batch"), idle(1, machine_type="gpu"), idle(2, datacenter="dc2")]
    offers = {"": Offer(300, 0, 0), "batch": Offer(300, 0, 0)}
    wants = borrower(types=frozenset({"web"}), datacenter="dc1")
    assert match_loans(machines, offers, [wants]) == []


@pytest.mark.behaviour("SH13")
def test_a_pool_that_is_pinned_to_a_region_borrows_and_calls_back_there() -> None:
    machines = [idle(0, region="east"), idle(1, region="west")]
    loans = match_loans(machines, {"": Offer(300, 0, 0)}, [borrower(region="west")])
    assert [new.machine for new in loans] == ["m001"]
    lent = [loan(0, region="east"), loan(1, region="west")]
    assert [*back(lent, [Need("web", 2, from_free=2, region="west")])] == ["m001"]


def test_borrowers_get_machines_by_their_shares_those_that_they_have_included() -> None:
    machines = [idle(n) for n in range(30)]
    borrowers = [
        borrower("a", 100, share=100),
        borrower("b", 100, share=200),
        borrower("c", 3, share=500),
    ]
    loans = match_loans(machines, {"": Offer(300, 0, 0)}, borrowers)
    assert Counter(loan.borrower for loan in loans) == {"a": 9, "b": 18, "c": 3}
    borrowers = [borrower("a", 100, has=20), borrower("b", 100)]
    loans = match_loans(machines, {"": Offer(300, 0, 0)}, borrowers)
    assert Counter(loan.borrower for loan in loans) == {"a": 5, "b": 25}


@given(
    st.lists(st.tuples(st.sampled_from(["", "x", "y"]), st.integers(0, 2)), max_size=40),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), max_size=4),
    st.integers(0, 10),
)
def test_no_machine_is_lent_twice_and_kept_machines_stay(
    stock: list[tuple[str, int]], demands: list[tuple[int, int]], keep: int
) -> None:
    machines = [idle(n, donor, msb=f"msb{msb}") for n, (donor, msb) in enumerate(stock)]
    offers = {"": Offer(300, 0, keep), "x": Offer(300, 0, 0)}  # y lends nothing
    borrowers = [borrower(f"t{n}", wants, has=has) for n, (wants, has) in enumerate(demands)]
    loans = match_loans(machines, offers, borrowers)
    names = [loan.machine for loan in loans]
    assert len(names) == len(set(names))
    by_donor, there = Counter(loan.donor for loan in loans), Counter(d for d, _ in stock)
    assert by_donor[""] <= max(0, there[""] - keep)
    assert not by_donor["y"]
    got = Counter(loan.borrower for loan in loans)
    assert all(got[t.pool] <= t.wants for t in borrowers)
    lendable = max(0, there[""] - keep) + there["x"]
    assert len(loans) == min(lendable, sum(t.wants for t in borrowers))


def test_an_owner_gets_its_own_machines_first_then_free_ones_with_the_fewest_tasks() -> None:
    loans = [loan(0, tasks=1), loan(1, tasks=5), loan(2, "web", tasks=9), loan(3, "other")]
    need = Need("web", 2, from_free=2, why="web needs it")
    assert back(loans, [need]) == {"m002": "web needs it", "m000": "web needs it"}


def test_of_the_free_pool_an_owner_gets_back_what_its_quota_allows() -> None:
    assert list(back([loan(0), loan(1), loan(2)], [Need("web", 3, from_free=1)])) == ["m000"]


def test_higher_priority_is_served_first_and_no_machine_twice() -> None:
    needs = [
        Need("low", 1, priority=100, from_free=1, why="low"),
        Need("high", 1, priority=900, from_free=1, why="high"),
    ]
    calls = loans_to_call_back([loan(0)], needs, NOW, idle_after_s=120, most=9)
    assert [(call.machine, call.why) for call in calls] == [("m000", "high")]


def test_a_deadline_comes_before_the_end_of_the_promise() -> None:
    (call,) = loans_to_call_back(
        [loan(0)], [Need("web", 1, from_free=1)], NOW, idle_after_s=1, most=9
    )
    assert call.within_s == 300 - MARGIN_S


def test_loans_end_at_their_time_with_their_notice_and_idle_ones_at_once() -> None:
    loans = [
        loan(0, until=NOW + 299),
        loan(1, until=NOW + 301),
        loan(2, tasks=0, idle_s=121.0),
        loan(3, promise_s=0.0, until=None),  # made by an operator
        loan(4, until=NOW, revoked=True),
    ]
    assert back(loans, []) == {
        "m000": "its time has expired",
        "m002": "its borrower does not use it",
    }


def test_a_machine_that_is_down_or_does_not_suit_is_no_help() -> None:
    loans = [loan(0, usable=False), loan(1, machine_type="gpu"), loan(2, datacenter="dc2")]
    need = Need("web", 3, types=frozenset({"web"}), datacenter="dc1", from_free=3)
    assert back(loans, [need]) == {}


@pytest.mark.parametrize(("promise", "seconds"), [("2m", 120), ("5m", 300), ("15m", 900)])
def test_a_promise_is_two_five_or_fifteen_minutes(promise: str, seconds: float) -> None:
    assert Promise(promise).seconds == seconds


def test_usage_of_yesterday_and_a_week_ago_is_expected_again() -> None:
    history = UseHistory(pool="web")
    for number in range(8 * DAY):
        at = NOW + number * SLOT_S
        history = with_use(history, 50 if number == DAY + 2 else 10, at)
    now = NOW + (8 * DAY - 1) * SLOT_S  # a week and two slots later; 50 were used 3 slots later
    assert expected(history, 10, now, ahead_s=300) == 10
    assert expected(history, 10, now, ahead_s=900) == 50
    assert expected(history, 70, now, ahead_s=900) == 70
    assert len(history.used) == SLOTS


def test_missed_slots_repeat_the_last_value_and_a_clock_set_back_begins_again() -> None:
    history = with_use(with_use(UseHistory(pool="web"), 7, NOW), 9, NOW + 4 * SLOT_S)
    assert history.used == [7, 7, 7, 7, 9]
    assert with_use(history, 3, NOW - SLOT_S).used == [3]
    assert peak(with_use(history, 3, NOW + 4 * SLOT_S)) == 9  # the maximum of the slot


@pytest.mark.behaviour("EL10", "EX16")
def test_central_buffers_are_smaller_than_those_of_every_owner_and_say_why() -> None:
    """The report states the gain: the largest case of all against the sum of the largest cases."""

    def history(pool: str, hour: int) -> UseHistory:
        used = [30 if hour * 12 <= n % DAY < hour * 12 + 12 else 10 for n in range(2 * DAY)]
        return UseHistory(pool=pool, last=2 * DAY - 1, used=used)

    owners = [
        OwnerUse(
            {"dc1/msb0": 10 + 30 * (n == 0), "dc1/msb1": 10 + 30 * (n == 1)},
            [0.5, 2.0],
            history(f"p{n}", 3 * n),
        )
        for n in range(4)
    ]
    found = buffers(owners)
    by_kind = {b.kind: (b.central, b.siloed) for b in found.buffers}
    assert by_kind["fault"] == (70, 40 + 40 + 10 + 10)
    assert by_kind["growth"] == (20, 80)  # no owner grows while another one does
    assert by_kind["maintenance"] == (3, 4)
    assert by_kind["release"] == (8, 8)  # all of so few owners may update at once
    assert found.used == 140
    assert found.central == sum(b.central for b in found.buffers)
    assert found.gain == round(140 / (140 + found.central) - 140 / (140 + found.siloed), 4) > 0
    assert all(any(char.isdigit() for char in b.why) for b in found.buffers)
    assert buffers([]).gain == 0.0
