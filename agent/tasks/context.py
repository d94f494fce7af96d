"""What the loops of all tasks share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agent.credentials.credentials import CredentialHolder
from agent.identity.clone_check import CloneCheck
from agent.identity.task_identities import TaskIdentities
from agent.images.roots import Roots
from agent.lease.contact import Contact
from agent.machine import Cgroups
from agent.network.name_files import NameFiles
from agent.network.networks import Networks
from agent.resources.exclusive_cpus import ExclusiveCpus
from agent.resources.huge_pages import HugePages
from agent.resources.memory_protection import MemoryProtection
from agent.runtime.events import EventLog
from agent.runtime.journal import Journal
from agent.runtime.offload import Lanes
from agent.runtime.units import Units
from agent.tasks.inside import Inside, Whole
from agent.tasks.oomd import Oomd
from agent.tasks.prober import Prober
from agent.tasks.shutdown import HostShutdown
from agent.tasks.starts import Starts
from agent.volumes.volumes import Volumes


@dataclass(frozen=True, slots=True)
class Host:
    """What the loops of all tasks share."""

    units: Units
    roots: Roots
    journal: Journal
    events: EventLog
    lanes: Lanes
    prober: Prober
    contact: Contact
    networks: Networks
    name_files: NameFiles
    cgroups: Cgroups
    volumes: Volumes
    starts: Starts
    boot_id: str
    inside: Inside
    credentials: CredentialHolder
    identities: TaskIdentities
    leaving: HostShutdown
    uniqueness: CloneCheck
    own_cpus: ExclusiveCpus
    huge_pages: HugePages
    kept_memory: MemoryProtection
    oomd: Oomd
    no_machines: Callable[[], str]
    """Returns why no task can have an init of its own here; empty: they can."""
    whole: Whole
    """Returns all properties of a task's unit."""
