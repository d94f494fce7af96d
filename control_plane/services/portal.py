"""The capacity portal: entitlements, their quota and host profile."""

from __future__ import annotations

import logging

from msgspec.structs import replace

from agent.errors import Conflict
from control_plane.api.capacity import EntitlementRecord, EntitlementSpec
from control_plane.services.agents import Clock
from control_plane.services.table import Table
from control_plane.store import Store
from control_plane.store.records import ENTITLEMENTS

log = logging.getLogger(__name__)


class Portal:
    """Owner of all entitlement records."""

    def __init__(self, store: Store, clock: Clock) -> None:
        """Load nothing yet."""
        self.table: Table[EntitlementRecord] = Table(
            store, ENTITLEMENTS, EntitlementRecord, "entitlement"
        )
        self._clock = clock

    async def load(self) -> None:
        """Read all entitlements."""
        await self.table.load()

    async def put(self, name: str, spec: EntitlementSpec, *, jobs: list[str]) -> EntitlementRecord:
        """Create an entitlement or change it.

        The host profile stays while jobs run: all machines of an entitlement share one
        profile (MO11), and switching it under running tasks is not possible.
        """
        async with self.table.lock(name):
            record = self.table.find(name)
            if record is None:
                record = EntitlementRecord(name=name, spec=spec, created_at=self._clock())
            elif record.spec == spec:
                return record
            else:
                if jobs and record.spec.host_profile != spec.host_profile:
                    raise Conflict(
                        f"cannot change the host profile of entitlement {name!r} from"
                        f" {record.spec.host_profile!r} to {spec.host_profile!r}: jobs run on"
                        f" its machines: {', '.join(jobs)}",
                        hint="stop them first, or create another entitlement",
                    )
                record = replace(record, spec=spec, generation=record.generation + 1)
            await self.table.commit(name, record)
        log.info("entitlement changed", extra={"entitlement": name})
        return record

    async def delete(self, name: str, *, jobs: list[str], held: list[str]) -> None:
        """Remove an entitlement that nothing uses."""
        async with self.table.lock(name):
            self.table.get(name)
            if jobs or held:
                users = [f"job {job}" for job in jobs] + [f"machine {m}" for m in held]
                raise Conflict(
                    f"cannot delete entitlement {name!r}: it is used by {', '.join(users[:10])}",
                    hint="stop its jobs; machines that still hold tasks are freed after that",
                )
            await self.table.commit(name, None)
        log.info("entitlement deleted", extra={"entitlement": name})
