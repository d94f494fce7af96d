"""Rules about tasks that are taken down on purpose: budgets, acknowledgements, maintenance.

A voluntary operation never brings a job below its availability budget, and never begins without
an acknowledgement of its controller. Controllers get a notice before the deadline of announced
maintenance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from agent.api import TaskState
from control_plane.api.endpoints import Endpoints
from vm_lab.region.applications import NOTICE_S
from vm_lab.region.checked_machine import DETECTION_S

if TYPE_CHECKING:
    from vm_lab.region.checker import Checker


class BudgetChecker:
    """Follows the endpoints of each job, and reports tasks that were wrongly taken down."""

    def __init__(self, checker: Checker) -> None:
        self._checker, self._region = checker, checker.region
        self._machines, self._copies = checker.machines, checker.copies
        self._failed_at = checker.failed_at
        self.endpoints: dict[str, dict[str, str]] = {}
        """Job → task → machine, as clients received it."""

    @property
    def _now(self) -> float:
        return self._region.timeline.now

    def maintenance_announced(self, names: Sequence[str], deadline: float) -> None:
        """Record that maintenance was announced."""
        for name in names:
            self._machines[name].in_maintenance = True
            self._machines[name].deadline_at = deadline
        self._region.timeline.at(deadline, self._check_notices, names, deadline, self._now)

    def check_waves(self, plan: str, announced: int, work: str) -> None:
        """Check that a plan has at most one announced wave at a time."""
        if announced > 1:
            self._checker.violate("waves", f"{announced} waves of {plan} ({work}) at once", plan)

    def _check_notices(self, names: Sequence[str], deadline: float, announced_at: float) -> None:
        """Check that controllers with tasks there got a notice before the deadline."""
        is_undisturbed = self._checker.undisturbed_since <= announced_at - NOTICE_S
        if not is_undisturbed or not self._region.stores_faultless(
            deadline - announced_at + NOTICE_S
        ):
            return
        for name in names:
            if self._machines[name].deadline_at == deadline and deadline - announced_at > NOTICE_S:
                copies = self._region.machines[name].copies.values()
                jobs = {
                    copy.task_id.rpartition("-")[0]
                    for copy in copies
                    if copy.alive
                    and copy.healthy_since is not None
                    and copy.healthy_since < deadline - NOTICE_S
                }
                self._region.applications.check_notice(name, jobs, announced_at)

    def maintenance_cancelled(self, names: Sequence[str]) -> None:
        """Record that maintenance was cancelled."""
        for name in names:
            checked = self._machines[name]
            if self._now >= checked.deadline_at:
                checked.cancelled_late_at = self._now
            checked.in_maintenance, checked.deadline_at = False, float("inf")

    def endpoints_changed(self, endpoints: Endpoints) -> None:
        """Record a job's endpoints, and check the tasks that are no longer listed."""
        before = self.endpoints.get(endpoints.job)
        now = {e.task: e.machine for e in endpoints.endpoints}
        self.endpoints[endpoints.job] = now
        if before is None:
            return
        gone = {task: name for task, name in before.items() if task not in now}
        if gone:
            self._check_budget(endpoints.job, gone, now)
            self._check_acknowledged(endpoints.job, gone, now)
        self._region.applications.record_listed(endpoints.job, now)

    def _check_budget(self, job: str, gone: dict[str, str], left: dict[str, str]) -> None:
        owned = self._region.clients.jobs.get(job)
        if owned is None or owned.requested is None or owned.granted is None or owned.stopped:
            return
        wanted = owned.smallest_size
        voluntary = [task for task, name in gone.items() if self._is_voluntary(task, name)]
        if not voluntary:
            return
        serving = sum(1 for task, name in left.items() if self._could_serve(task, name))
        most = max(owned.requested.update.max_unavailable, owned.granted.update.max_unavailable)
        if serving < wanted - most:
            self._checker.violate(
                "budget",
                f"{job}: {', '.join(voluntary)} taken down with {serving} of {wanted} left to"
                f" serve, at most {most} may be away",
                f"{job} {voluntary[0]}",
            )

    def _check_acknowledged(self, job: str, gone: dict[str, str], left: dict[str, str]) -> None:
        """Check that the controller acknowledged each task that was taken down on purpose."""
        owned = self._region.clients.jobs.get(job)
        if owned is None or owned.requested is None or owned.granted is None or owned.stopped:
            return
        forced = {t: n for t, n in gone.items() if self._machines[n].may_be_forced_out(self._now)}
        chosen = {t: n for t, n in gone.items() if t not in forced and self._is_voluntary(t, n)}
        self._region.applications.check_taken_down(job, chosen, left)

    def _is_voluntary(self, task: str, name: str) -> bool:
        """Return whether an unlisted task was healthy, and its machine fit for it."""
        checked, copy = self._machines[name], self._copies.get(task, {}).get(name)
        is_healthy = (
            copy is not None
            and copy.state is TaskState.RUNNING
            and copy.healthy_since is not None
            and self._now - copy.healthy_since > DETECTION_S
        )
        is_usable = (
            checked.state == "up"
            and checked.responsive
            and self._now - checked.responsive_since > DETECTION_S
        )
        return is_healthy and is_usable and not checked.may_be_forced_out(self._now)

    def _could_serve(self, task: str, name: str) -> bool:
        """Return whether the control plane may still list a task as serving."""
        checked, copy = self._machines[name], self._copies.get(task, {}).get(name)
        if (
            checked.unreachable_since is not None
            and self._now - checked.unreachable_since > DETECTION_S
        ):
            return False
        is_healthy = copy is not None and copy.healthy_since is not None
        return (
            is_healthy or self._now - self._failed_at.get((task, name), float("-inf")) < DETECTION_S
        )
