"""Protocols of the brokers' services that the actors above the machines call.

`roles.py` passes the brokers in. Their substitutes, in this process or another, have these methods.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from control_plane.api.machine_commands import MachineCommand
from control_plane.api.machines import MachineRecord
from control_plane.broker.holds import Take
from control_plane.runtime.table import Loaded, OnChange, Table


class MachineTable(Protocol):
    """The records of all machines of a region."""

    def find(self, name: str) -> MachineRecord | None:
        """Return the record, if there is one."""

    def get(self, name: str) -> MachineRecord:
        """Return the record, or raise `NotFound`."""

    def revision(self, name: str) -> int:
        """Return the store revision of a machine, 0 if there is none."""

    def __iter__(self) -> Iterator[str]:
        """Yield all names, in order."""

    def __len__(self) -> int:
        """Return how many machines there are."""


class DatacenterBroker(Protocol):
    """The broker of one data center."""

    @property
    def table(self) -> Table[MachineRecord]:
        """Return the records of its machines."""


class KnownMachines(Protocol):
    """Which entitlement each machine belongs to: the resource brokers."""

    @property
    def table(self) -> MachineTable:
        """Return the records of all machines."""

    @property
    def by_datacenter(self) -> Mapping[str, DatacenterBroker]:
        """Return the brokers, by data center."""

    def listen(
        self, changed: OnChange[MachineRecord], loaded: Loaded[MachineRecord] | None = None
    ) -> None:
        """Call `changed(machine, before, after)` after each change; see `Table.listen`."""

    def count(self, entitlement: str) -> int:
        """Return how many machines an entitlement has in the region."""

    def held(self, entitlement: str) -> list[MachineRecord]:
        """Return the machines of an entitlement; of the free pool for `FREE`."""

    def unreachable(self) -> dict[str, str]:
        """Return the data centers whose brokers do not answer at present, and why."""

    async def release(self, machine: str, *, revision: int) -> MachineRecord:
        """Give a machine back to the free pool, unless anything changed since `revision`."""

    async def resolve_outcome(self, machine: str) -> None:
        """Read a machine again if it is not known whether its last write was made."""

    async def prepare(self, transaction: str, takes: Mapping[str, Take]) -> None:
        """Hold all these machines, or none and raise `Conflict`."""

    async def commit(self, transaction: str) -> list[MachineRecord]:
        """Assign what a transaction holds; again changes nothing."""

    async def abort(self, transaction: str) -> None:
        """Release what a transaction holds; again changes nothing."""

    def in_doubt(self) -> Mapping[str, list[str]]:
        """Return each transaction that holds machines, and which."""

    async def carry_out(self, machine: str, command: MachineCommand) -> MachineRecord:
        """Carry out a command for a machine; `NotFound` if there is no such machine."""
