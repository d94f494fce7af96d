"""Events of a simulated region, for those that watch it: the checker and the drawing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from agent import api
from control_plane.api.jobs import Endpoints
from control_plane.store.protocol import Operation

if TYPE_CHECKING:
    from vm_lab.region.machine import Copy, SimulatedMachine


class Observer:
    """Hears everything and cares for nothing."""

    # -- machines

    def copy_changed(self, machine: SimulatedMachine, copy: Copy, *, was_alive: bool) -> None:
        """Hear that the processes of a task began or ended, or what its agent says of it."""

    def put_accepted(self, machine: SimulatedMachine, task_id: str, spec: api.TaskSpec) -> None:
        """Hear that an agent took a specification."""

    def reach_changed(self, machine: SimulatedMachine) -> None:
        """Hear that it may be harder or easier now for a machine to answer."""

    # -- the control plane

    def put_sent(self, machine: SimulatedMachine, task_id: str, spec: api.TaskSpec) -> None:
        """Hear that the control plane sends a task to a machine."""

    def delete_sent(self, machine: SimulatedMachine, task_id: str) -> None:
        """Hear that the control plane sends for a task to be removed."""

    def stored(self, store: str, operations: Sequence[Operation]) -> None:
        """Hear of a transaction that is durable now."""

    def plane_changed(self, what: str) -> None:
        """Hear that the process of the control plane began, ended, froze or went on."""

    def plane_failed(self, reason: str) -> None:
        """Hear that the process ended by itself."""

    # -- people and clients

    def listed(self, endpoints: Endpoints) -> None:
        """Hear which tasks of a job a client may call now."""
