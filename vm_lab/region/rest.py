"""Waits until a simulated region is at rest, and reports why it does not come to rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vm_lab.region import quiescence
from vm_lab.region.plane import PlaneLife

if TYPE_CHECKING:
    from vm_lab.region.seed import SimulatedRegion

CHECK_EVERY_S = 5.0
STAY_S = 45.0
"""Seconds that a region must stay at rest after the story."""
SHOWN_REASONS = 6


class RestWatch:
    """Checks every few seconds whether a region is at rest."""

    def __init__(self, region: SimulatedRegion) -> None:
        self._region = region
        self.rested_at: float | None = None
        """Since when the region has been at rest after the story; None: it is not."""
        self._reasons: list[str] = []
        """Why the region was not at rest at the last check."""
        self._rested_since: float | None = None
        self._stay_s = 0.0
        self._failure = "it was never ready"

    def wait_ready(self, then: Callable[[], None], within_s: float) -> None:
        """Call `then` once all jobs run; end the run if they do not within `within_s`."""
        self._check_again(then, self._region.timeline.now + within_s)

    def wait_rested(self, then: Callable[[], None], within_s: float) -> None:
        """Call `then` once the region stays at rest; end the run if it does not in time."""
        self._stay_s, self._failure = STAY_S, "the region does not come to rest"
        self._rested_since = None
        self._check_again(then, self._region.timeline.now + within_s)

    def _check_again(self, then: Callable[[], None], deadline: float) -> None:
        life = self._region.plane.life
        if life is None or self._region.plane.serving is None:
            self._reasons = ["the control plane does not serve"]
            self._rested_since = None
        else:
            life.loop.create_task(self._check(life))
        self._region.timeline.after(CHECK_EVERY_S, self._end_or_check_again, then, deadline)

    async def _check(self, life: PlaneLife) -> None:
        region, serving = self._region, life.control_plane
        if serving is None:
            return
        reasons = [*await quiescence.unsettled(region, serving), *region.more_unsettled()]
        if not life.alive:
            return
        self._reasons = reasons
        if reasons:
            self._rested_since = None
        elif self._rested_since is None:
            self._rested_since = region.timeline.now

    def _end_or_check_again(self, then: Callable[[], None], deadline: float) -> None:
        now, since = self._region.timeline.now, self._rested_since
        if since is not None and now - since >= self._stay_s:
            self.rested_at = since if self._stay_s else None
            then()
        elif now >= deadline and (self._reasons or since is None):
            reasons = "; ".join(self._reasons[:SHOWN_REASONS]) or "no machine can be asked"
            self._region.checker.violate("rest", f"{self._failure}: {reasons}", "rest")
            self._region.plane.finish()
        else:
            self._check_again(then, deadline)
