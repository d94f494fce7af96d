"""The machines without a verdict yet, and the parts that seem cut off and hold verdicts back."""

from __future__ import annotations

import logging

from control_plane.api.health import HeldBack
from control_plane.api.machines import MachineState
from control_plane.health.core.verdict import Held
from control_plane.health.watch import Watch

log = logging.getLogger(__name__)


class HeldMachines:
    """Records why machines have no verdict, and logs when a brake begins or ends."""

    def __init__(self) -> None:
        self._held: dict[str, Watch] = {}
        self._by_part: dict[str, int] = {}
        """Part that seems cut off → number of its machines that are held back."""

    def __len__(self) -> int:
        """Return the number of machines without a verdict yet."""
        return len(self._held)

    @property
    def brake(self) -> str:
        """Return why silent machines are not declared down; empty if no brake is on."""
        count = sum(self._by_part.values())
        if not count:
            return ""
        first = next(w.held for w in self._held.values() if w.held is not None and w.held.part)
        return f"{count} silent machine(s) held back: {first.reason}"

    def views(self, now: float, counted_from: float) -> list[HeldBack]:
        """Return all machines without a verdict yet, by name, and why."""
        return [
            HeldBack(
                machine=name,
                state=MachineState.UP if watch.down_at is None else MachineState.DOWN,
                silent_s=watch.silent_s(now, counted_from),
                part=watch.held.part,
                reason=watch.held.reason,
                left_s=max(0.0, watch.held.left_s),
            )
            for name, watch in sorted(self._held.items())
            if watch.held is not None
        ]

    def put(self, watch: Watch, held: Held | None) -> None:
        """Record why a machine has no verdict; None if it has one."""
        before, watch.held = watch.held, held
        if before is None and held is None:
            return
        part_before = "" if before is None else before.part
        part = "" if held is None else held.part
        if part != part_before:
            self._count(part_before, -1, "")
            self._count(part, 1, "" if held is None else held.reason)
        if held is None:
            self._held.pop(watch.machine, None)
        else:
            self._held[watch.machine] = watch

    def _count(self, part: str, more: int, reason: str) -> None:
        if not part:
            return
        before = self._by_part.get(part, 0)
        self._by_part[part] = before + more
        if not before:
            log.warning("brake on: many machines are silent at once", extra={"reason": reason})
        elif not self._by_part[part]:
            del self._by_part[part]
            log.info("brake off", extra={"part": part})
