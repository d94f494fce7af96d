"""Wall-clock time for decisions: a step of the clock counts only after it has lasted a while.

Deadlines that people gave are dates, and a wall clock may step by hours at any moment: nothing
that was announced for tomorrow begins because of that (BUG-CP9). So the date goes on with the
clock that counts since the host's boot, and follows the wall clock as long as that does not step.
"""

from __future__ import annotations

from collections.abc import Callable

STEP_S = 2.0
"""A difference below this is no step: clocks that are set right go by milliseconds, and both are
not read in the same moment."""
BELIEVED_AFTER_S = 3600.0
"""For so long a step must last. Until then an operator can undo it; from then on
the dates that people name are taken for those of the new clock."""
_SAME_S = 60.0
"""A doubted step that changes by more is another one."""


class Date:
    """Seconds since 1970, as far as they are believed."""

    def __init__(self, wall: Callable[[], float], boot: Callable[[], float]) -> None:
        """Take the clock that may step and the one that does not."""
        self._wall, self._boot = wall, boot
        self._offset: float | None = None
        self._doubted: tuple[float, float] | None = None
        """Another offset, and since when (boot) the wall clock shows it."""

    def now(self) -> float:
        """Return the date."""
        offset = self._offset
        return self._boot() + (self.offset if offset is None else offset)

    @property
    def offset(self) -> float:
        """Return the date at which the host booted, as far as that is believed."""
        if self._offset is None:
            self._offset = self._wall() - self._boot()
        return self._offset

    @property
    def doubted_s(self) -> float:
        """Return by how much the wall clock differs, if that is not believed yet."""
        return 0.0 if self._doubted is None else self._doubted[0] - self.offset

    def go_on(self, offset: float) -> None:
        """Go on from what an earlier process on this boot of the host believed."""
        self._offset, self._doubted = offset, None
        self.look()

    def look(self) -> None:
        """Look at the clocks: follow what is no step, and believe one that has lasted."""
        boot = self._boot()
        shown = self._wall() - boot
        if abs(shown - self.offset) < STEP_S:
            self._offset, self._doubted = shown, None
        elif self._doubted is None or abs(shown - self._doubted[0]) > _SAME_S:
            self._doubted = (shown, boot)
        elif boot - self._doubted[1] >= BELIEVED_AFTER_S:
            self._offset, self._doubted = shown, None
