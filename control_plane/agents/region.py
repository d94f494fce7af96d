"""The region as one process serves it: brokers, observations, settings and the runtime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from control_plane.agents.observations import Observations
from control_plane.agents.ports import KnownMachines
from control_plane.api.machines import MachineRecord
from control_plane.api.settings import SchedulerSettings
from control_plane.runtime.limits import LimitRegistry
from control_plane.runtime.runtime import Runtime


@dataclass(frozen=True, slots=True)
class Region:
    """One region, as one process serves it."""

    broker: KnownMachines
    observations: Observations
    settings: SchedulerSettings
    runtime: Runtime
    limits: LimitRegistry = field(default_factory=LimitRegistry)
    is_second: Callable[[str, str], bool] = lambda _machine, _boot_id: False
    """Whether the host of this boot is a clone, which has this machine's identity (ADR 0107)."""
    owns: Callable[[str], bool] = lambda _pool: True
    """Whether this process is the shard that decides about a pool (docs/adr/0152)."""
    follows: Callable[[str], bool] = lambda _pool: True
    """Whether this process follows the machines of a pool, `FREE` included: one process does."""
    calls: Callable[[MachineRecord], bool] = lambda _record: True
    """Whether this process calls the agent of a machine: follows it, or has tasks left there."""
    shared: dict[str, object] = field(default_factory=dict)
    """Kind → the state that several actors of that kind in this process share."""
