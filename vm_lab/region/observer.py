"""The interface by which a checker observes a simulated region."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from agent import api
from control_plane.api.endpoints import Endpoints
from control_plane.store.protocol import Operation

if TYPE_CHECKING:
    from vm_lab.region.machine import Copy, SimulatedMachine


class Observer:
    """Interface of an observer of a region; this one does nothing."""

    # -- machines

    def copy_changed(self, machine: SimulatedMachine, copy: Copy, *, was_alive: bool) -> None:
        """Called after the processes of a task began or ended, or its agent's report changed."""

    def put_accepted(self, machine: SimulatedMachine, task_id: str, spec: api.TaskSpec) -> None:
        """Called after an agent accepted a specification."""

    def reach_changed(self, machine: SimulatedMachine) -> None:
        """Called after the reachability of a machine may have changed."""

    # -- the control plane

    def put_sent(self, machine: SimulatedMachine, task_id: str, spec: api.TaskSpec) -> None:
        """Called when the control plane sends a task to a machine."""

    def delete_sent(self, machine: SimulatedMachine, task_id: str) -> None:
        """Called when the control plane asks an agent to remove a task."""

    def stored(self, store: str, operations: Sequence[Operation]) -> None:
        """Called with a committed transaction."""

    def plane_changed(self, what: str) -> None:
        """Called when the process of the control plane began, ended, was paused or resumed."""

    def plane_failed(self, reason: str) -> None:
        """Called when the process ended although no fault ended it."""

    # -- clients

    def endpoints_changed(self, endpoints: Endpoints) -> None:
        """Called with the current endpoints of a job."""
