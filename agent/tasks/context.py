"""What the loops of all tasks share, and what a host has to give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agent.identity.clone_check import CloneCheck
from agent.images.roots import TaskRoots
from agent.lease.contact import Contact
from agent.machine import Cgroups
from agent.resources.exclusive_cpus import ExclusiveCpus
from agent.resources.huge_pages import HugePages
from agent.resources.memory_protection import MemoryProtection
from agent.runtime.core.records import TaskRecord
from agent.runtime.events import HostEvents
from agent.runtime.journal import Journal
from agent.runtime.offload import Lanes
from agent.runtime.stage import TaskStage
from agent.runtime.units import Units
from agent.tasks.inside import Inside
from agent.tasks.oomd import Oomd
from agent.tasks.prober import Prober
from agent.tasks.shutdown import HostShutdown
from agent.tasks.starts import Starts
from agent.tasks.unit import UnitOfTask
from agent.volumes.volumes import Volumes


@dataclass(frozen=True, slots=True)
class TaskContext:
    """What the loops of all tasks share."""

    boot_id: str
    units: Units
    journal: Journal
    events: HostEvents
    lanes: Lanes
    roots: TaskRoots
    stages: tuple[TaskStage, ...]
    """What tasks get from their host, in the order in which it is made before a start."""
    unit: UnitOfTask
    inside: Inside
    prober: Prober
    oomd: Oomd
    contact: Contact
    starts: Starts
    leaving: HostShutdown
    uniqueness: CloneCheck
    told: Callable[[TaskRecord], None]
    """Called with each task whose state has changed."""


@dataclass(frozen=True, slots=True)
class HostCapacity:
    """What a host has for tasks, as their admission asks for it."""

    roots: TaskRoots
    cpus: ExclusiveCpus
    pages: HugePages
    memory: MemoryProtection
    volumes: Volumes
    cgroups: Cgroups
    lanes: Lanes
    no_containers: Callable[[], str]
    """Returns why no task can have an init of its own here; empty: they can."""
