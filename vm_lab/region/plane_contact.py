"""Contact of a modelled agent with its control plane; some tasks end if it is lost for too long.

The agent ends them. If it cannot, the fence ends them, which is a separate program (docs/adr/0024).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent import api
from agent.api import DisconnectPolicy, TaskState

if TYPE_CHECKING:
    from vm_lab.region.machine import Copy, SimulatedMachine

FENCE_S = 2.5
"""Seconds after which the fence kills a task that should have ended (docs/adr/0024)."""
_REASON = "the control plane was silent for as long as its job allows"


class PlaneContact:
    """Whether answers to the polls of a machine's agent arrive, and which tasks end if not."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine = machine
        self._has_contact = False
        self._lost_at = 0.0
        """When contact was lost, if there is none now."""
        self._changes = 0

    def changed(self, has_contact: bool, last_contact: float) -> None:
        """Record that answers to polls arrive again, or that none has since `last_contact`.

        Only answers count: an arriving request does not prove that answers arrive (docs/adr/0024).
        When contact returns, tasks whose time ran out meanwhile are ended.
        """
        if has_contact == self._has_contact:
            return
        overdue = [copy for copy in self._machine.copies.values() if self.has_run_out(copy.spec)]
        self._has_contact = has_contact
        self._changes += 1
        if has_contact:
            for copy in overdue:
                self._end_cut_off(copy)
        else:
            self._lost_at = last_contact
            for copy in self._machine.copies.values():
                self.watch(copy)

    def has_run_out(self, spec: api.TaskSpec) -> bool:
        """Return whether the control plane has been silent for longer than a task may run."""
        after_s = disconnect_limit_s(spec)
        silent_s = self._machine.context.timeline.now - self._lost_at
        return after_s is not None and not self._has_contact and silent_s >= after_s

    def watch(self, copy: Copy) -> None:
        """Schedule the end of a task, in case the control plane stays silent for too long."""
        after_s = disconnect_limit_s(copy.spec)
        if after_s is not None and copy.wanted and not self._has_contact:
            timeline, end_at = self._machine.context.timeline, self._lost_at + after_s
            fence_at = end_at + (copy.spec.stop_timeout_s + FENCE_S)
            timeline.at(end_at, self._end_by_agent, copy, self._changes)
            timeline.at(fence_at, self._kill_by_fence, copy, self._changes)

    def _end_by_agent(self, copy: Copy, contacts: int) -> None:
        machine = self._machine
        agent_works = machine.agent_up and machine.context.timeline.now >= machine.hung_until
        if contacts == self._changes and agent_works:
            self._end_cut_off(copy)

    def _end_cut_off(self, copy: Copy) -> None:
        is_current = self._machine.copies.get(copy.task_id) is copy
        if is_current and copy.wanted and copy.alive and self._machine.on and not copy.cut_off:
            copy.cut_off, copy.reason = True, _REASON
            self._machine.stop_processes(copy, self.end_as_cut_off)

    def _kill_by_fence(self, copy: Copy, contacts: int) -> None:
        """Kill the remaining processes; the fence is a separate program and needs no agent."""
        is_current = self._machine.copies.get(copy.task_id) is copy
        if contacts == self._changes and is_current and copy.alive and self._machine.on:
            copy.step_number += 1
            copy.cut_off, copy.reason = True, _REASON
            self.end_as_cut_off(copy)

    def end_as_cut_off(self, copy: Copy) -> None:
        """Record that a task was ended because the control plane was silent."""
        copy.last_exit = api.Exit(result="cut-off", at=self._machine.wall_time())
        self._machine.set_state(copy, TaskState.STOPPED, reason=copy.reason)


def disconnect_limit_s(spec: api.TaskSpec) -> float | None:
    """Return the seconds that a task may run without its control plane; None: no limit."""
    rule = spec.disconnect
    return rule.after_s if rule.policy is DisconnectPolicy.STOP else None
