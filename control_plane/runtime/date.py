"""Wall-clock time for decisions: a step of the clock counts only after it has lasted a while.

Deadlines that users gave are dates, and a wall clock may step by hours at any moment. Nothing
that was announced for tomorrow may begin because of that (BUG-CP9). So the date advances with the
clock that counts since the host's boot, and follows the wall clock as long as that does not step.
"""

from __future__ import annotations

from collections.abc import Callable

STEP_S = 2.0
"""A smaller difference is no step: time synchronisation moves a clock by milliseconds, and the two
clocks are not read at the same instant."""
BELIEVED_AFTER_S = 3600.0
"""How long a step must last. Until then an operator can undo it. After that, dates from users are
dates of the stepped clock."""
_SAME_S = 60.0
"""A doubted step that changes by more counts as a new step."""


class Date:
    """Seconds since 1970, as far as they are believed."""

    def __init__(self, wall: Callable[[], float], boot: Callable[[], float]) -> None:
        """`wall` may step; `boot` counts since the host's boot, and does not."""
        self._wall, self._boot = wall, boot
        self._offset: float | None = None
        self._doubted: tuple[float, float] | None = None
        """An offset that is not believed yet, and the time (boot clock) since which it lasts."""

    def now(self) -> float:
        """Return the date."""
        offset = self._offset
        return self._boot() + (self.offset if offset is None else offset)

    @property
    def offset(self) -> float:
        """Return the believed date of the host's boot."""
        if self._offset is None:
            self._offset = self._wall() - self._boot()
        return self._offset

    @property
    def doubted_s(self) -> float:
        """Return the seconds of a step of the wall clock that is not believed yet; 0: none."""
        return 0.0 if self._doubted is None else self._doubted[0] - self.offset

    def resume(self, offset: float) -> None:
        """Continue from the offset that an earlier process on this boot believed."""
        self._offset, self._doubted = offset, None
        self.update()

    def update(self) -> None:
        """Read the clocks: follow small changes, and believe a step that has lasted."""
        boot = self._boot()
        shown = self._wall() - boot
        if abs(shown - self.offset) < STEP_S:
            self._offset, self._doubted = shown, None
        elif self._doubted is None or abs(shown - self._doubted[0]) > _SAME_S:
            self._doubted = (shown, boot)
        elif boot - self._doubted[1] >= BELIEVED_AFTER_S:
            self._offset, self._doubted = shown, None
