"""Services that the loops of all tasks share, and the resources of the host."""

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
from agent.runtime.events import HostEvents
from agent.runtime.offload import Lanes
from agent.runtime.units import Units
from agent.tasks.inside import Inside
from agent.tasks.observer import TaskObserver
from agent.tasks.prober import Prober
from agent.tasks.starts import Starts
from agent.tasks.storage import TaskStorage
from agent.tasks.unit import UnitOfTask
from agent.volumes.volumes import Volumes


@dataclass(frozen=True, slots=True)
class TaskContext:
    """Services that the loops of all tasks share."""

    units: Units
    observer: TaskObserver
    storage: TaskStorage
    events: HostEvents
    unit: UnitOfTask
    inside: Inside
    prober: Prober
    contact: Contact
    starts: Starts


@dataclass(frozen=True, slots=True)
class HostCapacity:
    """Resources of the host, as the admission of tasks needs them."""

    roots: TaskRoots
    cpus: ExclusiveCpus
    pages: HugePages
    memory: MemoryProtection
    volumes: Volumes
    cgroups: Cgroups
    lanes: Lanes
    clones: CloneCheck
    no_containers: Callable[[], str]
    """Returns why no task of this host can have an init of its own; empty if it can."""
