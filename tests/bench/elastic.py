"""How long does it take to match idle machines with borrowers, and to choose machines to recall?

    python -m tests.bench.elastic [--machines 100000] [--json]

Machines are of 6 types in 60 MSBs. They are free or belong to 200 donors; 40 borrowers want all of
them. The target is 1 s for 100,000 machines on one core.
"""

from __future__ import annotations

import argparse
import json
import random
import time

from control_plane.elastic.core.matching import (
    Borrower,
    Idle,
    Need,
    Offer,
    OpenLoan,
    loans_to_call_back,
    match_loans,
)

TYPES = [f"type{n}" for n in range(6)]


def stock(machines: int, chance: random.Random) -> tuple[list[Idle], dict[str, Offer]]:
    """Return idle machines and the terms of lending them."""
    donors = ["", *(f"pool{n}" for n in range(200))]
    offers = {donor: Offer(chance.choice([120.0, 300.0, 900.0]), 300.0, 5) for donor in donors}
    weights = [400, *[1] * 200]
    chosen = chance.choices(donors, weights, k=machines)
    idle = [
        Idle(
            f"m{n:06}",
            donor,
            chance.choice(TYPES),
            f"dc{n % 5}",
            f"msb{n % 60}",
            chance.uniform(0, 7200),
        )
        for n, donor in enumerate(chosen)
    ]
    return idle, offers


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--machines", type=int, default=100_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    count = options.machines
    chance = random.Random(1)
    idle, offers = stock(count, chance)
    borrowers = [
        Borrower(
            f"batch{n}",
            count // 20,
            chance.randrange(100),
            chance.choice([120.0, 300.0]),
            14_400.0,
            chance.choice([100, 200, 500]),
            types=frozenset(chance.sample(TYPES, 3)) if n % 2 else frozenset(),
        )
        for n in range(40)
    ]
    began = time.process_time()
    loans = match_loans(idle, offers, borrowers)
    lending_s = time.process_time() - began
    donors = {machine.machine: machine for machine in idle}
    open_ = [
        OpenLoan(
            loan.machine,
            loan.donor,
            loan.borrower,
            donors[loan.machine].machine_type,
            donors[loan.machine].datacenter,
            loan.promise_s,
            None,
            revoked=False,
            tasks=chance.randrange(30),
        )
        for loan in loans
    ]
    needs = [Need(f"pool{n}", 500, types=frozenset(TYPES[:3]), from_free=500) for n in range(10)]
    began = time.process_time()
    calls = loans_to_call_back(open_, needs, 0.0, idle_after_s=120.0, most=10_000)
    calling_s = time.process_time() - began
    figures = {
        "idle machines": count,
        "lent": len(loans),
        "matching, s": round(lending_s, 3),
        "called back": len(calls),
        "calling back, s": round(calling_s, 3),
    }
    for name, value in figures.items():
        print(f"{name:20} {value:g}")
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
