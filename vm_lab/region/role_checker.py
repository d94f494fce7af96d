"""The checker of roles in a simulated region: it records leaders and owners, and finds violations.

It observes etcd and the agents from outside. No write of a process that does not lead takes effect.
No agent obeys an earlier owner after a later one. No process takes machines that were promised to
others. In the end each entitlement has one owner, in a shard of its region.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from control_plane.store import etcd_pb2 as pb
from control_plane.store.protocol import Delete, Operation, Put
from control_plane.store.records import OWNERSHIPS, PROCESSES
from vm_lab.region.etcd import DATA, LEADERS
from vm_lab.region.machine import SimulatedMachine
from vm_lab.region.processes import RegionProcesses, role_of
from vm_lab.region.promise_checker import PromiseChecker
from vm_lab.region.stores import history_text

if TYPE_CHECKING:
    from vm_lab.region.seed import SimulatedRegion


class _Ownership(msgspec.Struct):
    """The fields read of the owner of an entitlement."""

    entitlement: str
    shard: int = 0


class RoleChecker:
    """Checks every change of etcd and every command that an agent obeyed."""

    def __init__(self, region: SimulatedRegion, plane: RegionProcesses) -> None:
        """Subscribe to etcd and to the agents."""
        self._region, self._plane = region, plane
        self._promises = PromiseChecker(region.checker.violate)
        self._shards: dict[str, int] = {}
        self._scopes = plane.settings.shard_regions
        self._tenures: dict[str, list[int]] = {}
        """Entitlement → the lives that owned it, in the order of time."""
        self._obeyed: dict[tuple[str, str], int] = {}
        """Machine and entitlement → the latest tenure whose command was obeyed."""
        region.figures |= {"take-overs": 0, "moves": 0}
        plane.etcd.on_commit = self.check_commit
        region.machine_context.on_command = self.check_command
        region.more_unsettled = self.unsettled

    def check_commit(self, sender: int, events: Sequence[pb.Event]) -> None:
        """Record a transaction that etcd has carried out; `sender` 0: a lease expired."""
        operations = list[Operation]()
        for event in events:
            key, gone = event.kv.key, event.type == pb.Event.DELETE
            if LEADERS in key:
                self._plane.leader_changed(key, None if gone else sender)
                self._region.figures["take-overs"] += not gone and self._region.story_at > 0.0
            elif DATA in key:
                name = key.partition(DATA)[2].decode()
                operations.append(Delete(name) if gone else Put(name, event.kv.value))
        if operations:
            self._check_writes(sender, operations)
        self._count_tenures()

    def _check_writes(self, sender: int, operations: Sequence[Operation]) -> None:
        life = self._plane.by_number[sender]
        if self._plane.leader(life.host.role) is not life:
            self._region.checker.violate(
                "stale-write",
                f"{life.name} wrote {operations[0].key} after it had ceased to lead",
                life.name,
            )
        shown_writes = (
            o.key if o.key.startswith(PROCESSES) else history_text(o) for o in operations
        )
        self._region.history.note(f"etcd {self._plane.etcd.revision} {' '.join(shown_writes)}")
        for operation in operations:
            if isinstance(operation, Put) and operation.key.startswith(OWNERSHIPS):
                owned = msgspec.json.decode(operation.value, type=_Ownership)
                before = self._shards.get(owned.entitlement, 0)
                self._shards[owned.entitlement] = owned.shard
                self._check_scopes()
                self._region.figures["moves"] += before != owned.shard
        self._plane.writer = life
        self._promises.check_commit(operations)
        self._region.checker.stored("main", operations)

    def _check_scopes(self) -> None:
        """Check that a shard for one region has only entitlements that are pinned to it."""
        for name, granted in self._region.clients.entitlements.items():
            shard = self._shards.get(name, 0)
            scope = self._scopes.get(str(shard))
            if scope is not None and granted.region != scope:
                pin = granted.region or "any region"
                text = f"shard {shard} is for {scope}, and has {name}, which is for {pin}"
                self._region.checker.violate("scope", text, f"{name} {shard}")

    def _count_tenures(self) -> None:
        """Record the current owner of each entitlement, if there is one."""
        for name in {*self._region.clients.entitlements, *self._shards}:
            owner = self._plane.leader(role_of(self._shards.get(name, 0)))
            tenures = self._tenures.setdefault(name, [])
            if owner is not None and tenures[-1:] != [owner.number]:
                tenures.append(owner.number)

    def check_command(self, machine: SimulatedMachine, sender: int) -> None:
        """Check that the sender's tenure is not older than the one obeyed before."""
        entitlement = self._region.checker.machines[machine.name].entitlement
        if not entitlement:
            return
        tenures = self._tenures.get(entitlement, [])
        at = max((n for n, life in enumerate(tenures) if life == sender), default=-1)
        before = self._obeyed.get((machine.name, entitlement), -1)
        if at < before:
            late, newer = self._plane.by_number[sender], self._plane.by_number[tenures[before]]
            self._region.checker.violate(
                "stale-command",
                f"{machine.name} obeys {late.name} (life {late.number}) in {entitlement} after"
                f" {newer.name} (life {newer.number})",
                f"{machine.name} {entitlement} {sender}",
            )
        else:
            self._obeyed[machine.name, entitlement] = at

    def unsettled(self) -> list[str]:
        """Return the roles without a serving leader, and the entitlements without an owner."""
        plane, reasons = self._plane, list[str]()
        self._check_scopes()
        for role in plane.role_names():
            life = plane.leader(role)
            if life is None or not life.alive or life.plane is None:
                reasons.append(f"{role} has no leader that serves")
        for name in sorted(self._region.clients.entitlements):
            self._region.checker.check_one_owner(name)
            if not plane.owners(name):
                reasons.append(f"{name} is owned by no process")
        return reasons
