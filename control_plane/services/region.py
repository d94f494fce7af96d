"""What all services of a region share: its records, what its agents said, and the knobs."""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.api.jobs import JobRecord
from control_plane.api.settings import SchedulerSettings
from control_plane.services.agents import Clock
from control_plane.services.brokers import Brokers
from control_plane.services.fleet import Fleet
from control_plane.services.portal import Portal
from control_plane.services.table import Table


@dataclass(frozen=True, slots=True)
class Region:
    """One region, as one process serves it."""

    broker: Brokers
    portal: Portal
    jobs: Table[JobRecord]
    fleet: Fleet
    settings: SchedulerSettings
    clock: Clock
