"""Matches idle machines with borrowers, and chooses the loans to call back: pure functions.

Machines are lent whole (EL3). A loan is made only if its promised time suits both sides: the owner
gets the machine back within it, and it is enough notice for the borrower's tasks.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from control_plane.broker.core.assignment import FREE

MARGIN_S = 30.0
"""Time before the end of the promise at which tasks must have ended. They drain and stop (10 s by
default), and the empty machine returns. A promise is at least 120 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suitable:
    """The machines that a pool can use."""

    types: frozenset[str] = frozenset()
    """Types on which its tasks can run; empty: any."""
    datacenter: str | None = None
    region: str | None = None

    def suits(self, machine_type: str, datacenter: str, region: str) -> bool:
        """Return whether the pool can use a machine of this type at this place."""
        return (
            (not self.types or machine_type in self.types)
            and self.datacenter in (None, datacenter)
            and self.region in (None, region)
        )


@dataclass(frozen=True, slots=True)
class Idle:
    """A usable machine without tasks."""

    machine: str
    donor: str
    """The pool that holds it; empty: the free pool."""
    machine_type: str
    datacenter: str
    msb: str
    idle_s: float
    region: str = ""


@dataclass(frozen=True, slots=True)
class Offer:
    """The terms on which a pool lends its machines."""

    promise_s: float
    after_s: float
    """Seconds for which a machine must have been idle."""
    keep: int
    """Idle machines that are not lent, because the pool is expected to need them."""


@dataclass(frozen=True, slots=True)
class Borrower(Suitable):
    """A pool that wants to borrow machines."""

    pool: str
    wants: int
    """Machines in addition to its present ones."""
    has: int
    notice_s: float
    loan_s: float
    share: int = 100


@dataclass(frozen=True, slots=True)
class NewLoan:
    """A loan that is to be made."""

    machine: str
    donor: str
    borrower: str
    promise_s: float
    loan_s: float


@dataclass(frozen=True, slots=True)
class OpenLoan:
    """A machine that is on loan."""

    machine: str
    donor: str
    borrower: str
    machine_type: str
    datacenter: str
    promise_s: float
    until: float | None
    revoked: bool
    tasks: int
    usable: bool = True
    """The machine is up, and its owner could use it."""
    idle_s: float = 0.0
    region: str = ""


@dataclass(frozen=True, slots=True)
class Need(Suitable):
    """Machines that an owner waits for, or is expected to need."""

    pool: str
    """Empty: the free pool, for owners that will need its machines."""
    machines: int
    """In addition to its own machines, free ones, and ones that are being returned."""
    priority: int = 500
    from_free: int = 0
    """How many of `machines` its quota allows it to take from the free pool."""
    why: str = "its owner needs it"

    def is_met_by(self, loan: OpenLoan) -> bool:
        """Return whether a lent machine would help."""
        return self.suits(loan.machine_type, loan.datacenter, loan.region)


@dataclass(frozen=True, slots=True)
class CallBack:
    """A loan that is to be called back."""

    machine: str
    within_s: float
    why: str


# -- lending


class _Stock:
    """Machines that may be lent, by donor, type and MSB; the largest group lends first.

    A heap entry is one integer that combines size and number of a group, because a large region has
    a hundred thousand groups.
    """

    def __init__(self, idle: Iterable[Idle], offers: Mapping[str, Offer]) -> None:
        self._heaps: dict[object, list[int]] = {}
        idle_of, ripe = Counter[str](), list[Idle]()
        for machine in idle:
            offer = offers.get(machine.donor)
            if offer is not None:
                idle_of[machine.donor] += 1
                if machine.idle_s >= offer.after_s:
                    ripe.append(machine)
        self._left = {donor: max(0, n - offers[donor].keep) for donor, n in idle_of.items()}
        """Donor → how many of its machines may still be lent."""
        ripe.sort(key=lambda machine: machine.idle_s)  # `take` pops the one that was idle longest
        by_key = defaultdict[tuple[str, str, str, str, str], list[Idle]](list)
        for machine in ripe:
            place = (machine.datacenter, machine.region, machine.msb)
            by_key[machine.donor, machine.machine_type, *place].append(machine)
        self._groups = list(by_key.values())
        self._donors = [donor for donor, *_ in by_key]
        self._count = len(self._groups) or 1
        self._kinds = defaultdict[tuple[str, str, str, float], list[int]](list)
        """Machine type, data center, region and promise → the groups."""
        for number, (donor, machine_type, datacenter, region, _) in enumerate(by_key):
            key = (machine_type, datacenter, region, offers[donor].promise_s)
            self._kinds[key].append(self._entry(number))

    def _entry(self, number: int) -> int:
        """Return the heap entry of a group; it is smaller for a larger group."""
        return number - len(self._groups[number]) * self._count

    def take(self, borrower: Borrower) -> Idle | None:
        """Return a machine that suits a borrower; None if none is left."""
        pool = borrower.pool
        signature = (borrower.types, borrower.datacenter, borrower.region, borrower.notice_s)
        heap = self._heaps.get(signature)
        if heap is None:
            heap = self._heaps[signature] = self._suiting(borrower)
        own, found = list[int](), None
        while heap and found is None:
            number = heap[0] % self._count
            group, donor = self._groups[number], self._donors[number]
            if donor == pool:
                own.append(heapq.heappop(heap))
            elif not group or not self._left[donor]:
                heapq.heappop(heap)
            elif heap[0] != self._entry(number):  # the group shrank since the entry was made
                heapq.heapreplace(heap, self._entry(number))
            else:
                found = group.pop()
                self._left[donor] -= 1
                heapq.heapreplace(heap, self._entry(number))
        for entry in own:
            heapq.heappush(heap, entry)
        return found

    def _suiting(self, borrower: Borrower) -> list[int]:
        """Return a heap of all groups that suit a borrower."""
        heap = list[int]()
        for (machine_type, datacenter, region, promise_s), groups in self._kinds.items():
            if promise_s >= borrower.notice_s and borrower.suits(machine_type, datacenter, region):
                heap += groups
        heapq.heapify(heap)
        return heap


def match_loans(
    idle: Iterable[Idle], offers: Mapping[str, Offer], borrowers: Sequence[Borrower]
) -> list[NewLoan]:
    """Return the loans to make; `offers` by pool, and pools without one lend nothing.

    Machines are taken from the MSB with the most idle ones, so that the rest stays spread, and the
    longest idle ones first. Borrowers get machines in proportion to their shares, with the machines
    that they already have. Machines that one borrower does not want go to the others.
    """
    stock, found = _Stock(idle, offers), list[NewLoan]()
    queue = [
        (borrower.has / borrower.share, n, 0)
        for n, borrower in enumerate(borrowers)
        if borrower.wants > 0
    ]
    heapq.heapify(queue)
    while queue:
        _, number, got = heapq.heappop(queue)
        borrower = borrowers[number]
        machine = stock.take(borrower)
        if machine is None:
            continue  # no machine suits it any longer
        donor, promise_s = machine.donor, offers[machine.donor].promise_s
        found.append(NewLoan(machine.machine, donor, borrower.pool, promise_s, borrower.loan_s))
        if got + 1 < borrower.wants:
            heapq.heappush(queue, ((borrower.has + got + 1) / borrower.share, number, got + 1))
    return found


# -- calling back


def loans_to_call_back(
    loans: Sequence[OpenLoan],
    needs: Sequence[Need],
    now: float,
    *,
    idle_after_s: float,
    most: int,
) -> list[CallBack]:
    """Return at most `most` loans to call back now, the most urgent first.

    An owner gets its own machines first, then those of the free pool. Machines with the fewest
    tasks come first, which interrupts the least work. A loan whose time is over ends with the
    promised notice. A loan that was idle for `idle_after_s` ends at once. A loan that an operator
    made without a promise stays until the operator ends it.
    """
    open_ = [loan for loan in loans if not loan.revoked and loan.promise_s > 0]
    calls = dict[str, CallBack]()
    by_donor = defaultdict[str, list[OpenLoan]](list)
    for loan in sorted(open_, key=_least_work) if needs else ():
        by_donor[loan.donor].append(loan)
    for need in sorted(needs, key=lambda need: (-need.priority, need.pool)):
        own = by_donor[need.pool] if need.pool != FREE else []
        rest = need.machines
        for group, limit in ((own, rest), (by_donor[FREE], need.from_free)):
            suiting = (
                loan
                for loan in group
                if loan.usable and loan.machine not in calls and need.is_met_by(loan)
            )
            for loan in islice(suiting, max(0, min(rest, limit))):
                calls[loan.machine] = _call(loan, need.why)
                rest -= 1
    for loan in open_:
        if loan.machine in calls:
            continue
        if loan.until is not None and loan.until - loan.promise_s <= now:
            calls[loan.machine] = _call(loan, "its time has expired")
        elif not loan.tasks and loan.idle_s >= idle_after_s:
            calls[loan.machine] = _call(loan, "its borrower does not use it")
    return list(calls.values())[:most]


def _call(loan: OpenLoan, why: str) -> CallBack:
    return CallBack(loan.machine, loan.promise_s - MARGIN_S, why)


def _least_work(loan: OpenLoan) -> tuple[int, str]:
    return loan.tasks, loan.machine
