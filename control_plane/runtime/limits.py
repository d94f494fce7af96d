"""Limits on destructive actions: a burst, and a rate per second in the long run.

A component that by mistake stops, moves or takes everything is stopped by its limit (AV5). The
limit reports the actions that it holds back, with the reason. Operators can lift a limit for a
time; a restart does not.
"""

from __future__ import annotations

from control_plane.api.limits import LimitName, LimitView, LimitViews
from wire.errors import NotFound

_DESCRIPTIONS = {
    LimitName.STOPS: "stops of tasks on machines",
    LimitName.CAPPED_MOVES: "moves of tasks off machines whose power is capped",
    LimitName.CAPACITY: "voluntary operations where much capacity is already lost",
    LimitName.TAKE_AWAY: "machines taken from entitlements",
    LimitName.MARK_DOWN: "machines declared down",
    LimitName.PROFILES: "switches of host profiles",
    LimitName.REBALANCE: "moves of tasks for a better use of machines",
    LimitName.DELETES: "deletions by one person",
}


class TokenBucket:
    """Admits at most `burst` actions at once and `per_s` in the long run."""

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s, self._burst = per_s, burst
        self._tokens, self._at = float(burst), 0.0

    def take(self, now: float) -> float:
        """Take one token and return 0; else return the seconds until one is available."""
        self.ready(now)
        if self._tokens >= 1 - 1e-9:
            self._tokens -= 1
            return 0.0
        return (1 - self._tokens) / self._per_s

    def ready(self, now: float) -> int:
        """Return the number of tokens that are available now, and take none."""
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_s)
        self._at = now
        return int(self._tokens + 1e-9)


class Limit:
    """One limit, with its counts and its state."""

    def __init__(self, name: LimitName, per_s: float, burst: int) -> None:
        self.name, self.per_s, self.burst = name, per_s, burst
        self.passed = self.refused = self.held = 0
        self._reason = ""
        self._bucket = TokenBucket(per_s, burst)
        self._held_until = float("-inf")
        self.lifted_until = float("-inf")
        self._lifted_by = self._lifted_why = ""

    def take(self, now: float) -> float:
        """Count one more action and return 0; else return the seconds until it is allowed."""
        if self.is_lifted(now):
            self.passed += 1
            return 0.0
        wait_s = self._bucket.take(now)
        if wait_s > 0:
            self.hold_back(
                now, f"the limit is {self.per_s:g} per second after {self.burst} at once"
            )
        else:
            self.passed += 1
        return wait_s

    def ready(self, now: float) -> int | None:
        """Return how many may happen now; None: any number, it is lifted."""
        return None if self.is_lifted(now) else self._bucket.ready(now)

    def hold_back(self, now: float, why: str, for_s: float = 10.0) -> None:
        """Note that an action is held back, and why; the note lapses after `for_s` seconds."""
        self.refused += 1
        self._reason, self._held_until = why, now + for_s

    def reason(self, now: float) -> str:
        """Return why something is held back now; empty: nothing is."""
        return self._reason if (now < self._held_until or self.held) else ""

    def is_lifted(self, now: float) -> bool:
        """Return whether the limit is lifted now."""
        return now < self.lifted_until

    def lift(self, now: float, for_s: float, by: str, why: str) -> None:
        """Admit every action for `for_s` seconds."""
        self.lifted_until, self._lifted_by, self._lifted_why = now + for_s, by, why

    def view(self, now: float) -> LimitView:
        """Return the limit as shown to operators."""
        lifted = self.is_lifted(now)
        return LimitView(
            name=self.name,
            what=_DESCRIPTIONS[self.name],
            per_s=self.per_s,
            burst=self.burst,
            passed=self.passed,
            held=self.held,
            refused=self.refused,
            reason=self.reason(now),
            lifted_for_s=self.lifted_until - now if lifted else None,
            lifted_by=self._lifted_by if lifted else "",
            lifted_why=self._lifted_why if lifted else "",
        )


class LimitRegistry:
    """All limits of this process by name; the limited component creates its limit."""

    def __init__(self) -> None:
        self._limits: dict[LimitName, Limit] = {}

    def of(self, name: LimitName, per_s: float, burst: int) -> Limit:
        """Return a limit; the first call creates it with these numbers."""
        known = self._limits.get(name)
        if known is None:
            known = self._limits[name] = Limit(name, per_s, burst)
        return known

    def views(self, now: float) -> LimitViews:
        """Return all limits by name."""
        return LimitViews(limits=[self._limits[name].view(now) for name in sorted(self._limits)])

    def find(self, name: str) -> Limit:
        """Return a limit, or raise `NotFound`."""
        for known, limit in self._limits.items():
            if known.value == name:
                return limit
        raise NotFound(f"there is no limit {name!r}", hint="twinectl limit list")
