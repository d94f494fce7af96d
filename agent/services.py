"""The services of a running agent that its API calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from agent import api
from agent.credentials.credentials import CredentialHolder
from agent.host.gc import HostInspector
from agent.host.host_profile import HostProfile
from agent.host.logs import Logs
from agent.host.metrics import AgentMetrics
from agent.identity.clone_check import CloneCheck
from agent.images.images import HostImages
from agent.lease.contact import Contact
from agent.lease.fencing import FencingOwners, FencingTerm
from agent.network.networks import Networks
from agent.notices.notices import TaskNotices
from agent.runtime.events import HostEvents
from agent.runtime.offload import Lanes
from agent.tasks.exec import Sessions
from agent.tasks.shutdown import HostShutdown
from agent.tasks.tasks import HostTasks
from agent.tasks.unit_view import UnitView
from agent.usage import Usages
from agent.volumes.volume_service import VolumeService


@dataclass(slots=True)
class AgentServices:
    """The services that the API's handlers call."""

    lanes: Lanes
    tasks: HostTasks
    images: HostImages
    logs: Logs
    unit_view: UnitView
    metrics: AgentMetrics
    events: HostEvents
    contact: Contact
    credentials: CredentialHolder
    leaving: HostShutdown
    sessions: Sessions
    networks: Networks
    notices: TaskNotices
    profile: HostProfile
    facts: Callable[[], Awaitable[api.MachineFacts]]
    usage: Callable[[], Awaitable[Usages]]
    pull: Callable[[api.ImagePull], Awaitable[api.ImageInfo]]
    """Fetches an image from the control plane that this host has joined."""
    accounts: HostInspector
    volumes: VolumeService
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    """Runs a coroutine concurrently with the request, in the daemon's task group."""
    renew: Callable[[], Coroutine[Any, Any, None]]
    """Fetches this host's next certificate."""
    clones: CloneCheck
    """Checks whether another host has the same identity."""
    last_term: FencingTerm
    """The latest term of a control plane."""
    last_owners: FencingOwners
    """The latest owner of each entitlement."""
    domain: Callable[[], str]
    """Returns the trust domain of this host, empty if it has joined no control plane."""
    ready: bool = False
    """Whether the agent has adopted the tasks of the host."""
