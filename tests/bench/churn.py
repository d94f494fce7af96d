"""Events of a region in a day: jobs are requested again, change and end, and machines fail."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Rates:
    """Mean number of events in a day; failures are of the published order of magnitude."""

    asks: float = 288.0
    """Unchanged requests per job: an idle job sends one at every tenth `resync_s` of 30 s."""
    resizes: float = 0.5
    """Resizes per job."""
    changes: float = 0.1
    """Releases per job that change what a task needs; most releases do not."""
    starts: float = 0.02
    """New jobs per job, and as many that end."""
    failures: float = 0.0005
    """Unplanned failures per machine."""
    maintenance: float = 0.01
    """Planned maintenances per machine."""
    away: float = 1 / 48
    """Days until a machine is back: half an hour."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a job (ask, resize, change, start, end) or of a machine."""

    at: float
    """Time in days."""
    kind: str
    """ask, resize, change, start, end, fail or back."""
    name: str
    factor: float = 1.0
    """Factor on the number of tasks for `resize`, on the demand for `change`."""


@dataclass(slots=True)
class Churn:
    """The events of a day in their order, drawn one by one from exponential waits."""

    jobs: list[str]
    machines: Sequence[str]
    rates: Rates = field(default_factory=Rates)
    seed: int = 1

    def per_day(self) -> dict[str, int]:
        """Return the number of events of each kind in a day."""
        jobs, rates = len(self.jobs), self.rates
        machines = len(self.machines) * (rates.failures + rates.maintenance)
        means = {
            "ask": jobs * rates.asks,
            "resize": jobs * rates.resizes,
            "change": jobs * rates.changes,
            "start": jobs * rates.starts,
            "end": jobs * rates.starts,
            "fail": machines,
        }
        return {kind: math.ceil(mean) for kind, mean in means.items()}

    def events(self, limit: int) -> Iterator[Event]:
        """Yield the first events of the day."""
        chance = random.Random(f"{self.seed} churn")
        means = self.per_day()
        kinds, weights = list(means), list(means.values())
        total, now, born = sum(weights), 0.0, 0
        away: list[tuple[float, str]] = []
        down: set[str] = set()
        alive = list(self.jobs)
        summed = list(accumulate(weights))
        for _ in range(limit):
            (kind,) = chance.choices(kinds, cum_weights=summed)
            now += chance.expovariate(total)
            while away and away[0][0] <= now:
                at, name = heapq.heappop(away)
                down.discard(name)
                yield Event(at, "back", name)
            if kind == "fail":
                name = chance.choice(self.machines)
                if name in down:
                    continue
                down.add(name)
                heapq.heappush(away, (now + chance.expovariate(1 / self.rates.away), name))
                yield Event(now, kind, name)
            elif kind == "start":
                born += 1
                alive.append(f"born-{born}")
                yield Event(now, kind, alive[-1])
            else:
                at = chance.randrange(len(alive))
                name = alive[at]
                if kind == "end":
                    alive[at] = alive[-1]
                    alive.pop()
                factor = {"resize": (0.8, 1.25), "change": (0.9, 1.1)}.get(kind, (1, 1))
                yield Event(now, kind, name, chance.choice(factor))
