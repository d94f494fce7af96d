"""The same change of many machines, a part in each transaction, with turns for others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from control_plane.api.machines import MachineRecord
from control_plane.broker.brokers import Brokers
from control_plane.runtime.table import PART


async def change_each(
    brokers: Brokers,
    machines: Collection[str],
    change: Callable[[MachineRecord], MachineRecord],
) -> list[MachineRecord]:
    """Change each machine, and return them all by name; where a part fails, those before stay."""
    changed: list[MachineRecord] = []
    for broker, names in brokers.split(sorted(set(machines))).items():
        for first in range(0, len(names), PART):
            changed += await broker.change_many(names[first : first + PART], change)
            await asyncio.sleep(0)
    return sorted(changed, key=lambda record: record.machine)
