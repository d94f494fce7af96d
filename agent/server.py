"""The agent's API: which callers are allowed, which service answers. No decisions of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from agent import api
from agent.api.accounts import Accounts
from agent.api.credentials import CredentialInfo, Credentials
from agent.api.notices import HostNotices
from agent.api.oci import ArrivalName, Arrivals
from agent.api.presence import Presence
from agent.api.unit import UnitShown
from agent.credentials.credentials import MOST_BYTES, CredentialHolder
from agent.host.callers import authorize_with, check_given, check_raw
from agent.host.facts import agent_version
from agent.host.gc import HostInspector
from agent.host.host_profile import HostProfile
from agent.host.logs import EVERYWHERE, LoggedRun, Logs
from agent.host.metrics import AgentMetrics
from agent.identity.clone_check import CloneCheck
from agent.images.images import HostImages
from agent.lease.contact import Contact
from agent.lease.fencing import FencingOwners, FencingTerm
from agent.network.networks import Networks
from agent.notices.notices import TaskNotices
from agent.parameters import (
    credential_of,
    digest_of,
    format_of,
    label_of,
    task_id_of,
    version_of,
    volume_of,
)
from agent.routes import ROUTES
from agent.runtime.core.records import unit_of
from agent.runtime.events import HostEvents
from agent.tasks.core.unit_properties import journal_of
from agent.tasks.exec import Sessions, wish_of
from agent.tasks.shutdown import HostShutdown
from agent.tasks.tasks import HostTasks
from agent.tasks.unit_view import UnitView
from agent.usage import Usages
from agent.volumes.volume_service import VolumeService
from wire.duplex import Talk
from wire.errors import Busy, Forbidden, NotFound, TwineError, Unprocessable
from wire.server import Call, Handler, make_app

MAX_EVENT_WAIT_S = 60.0


@dataclass(slots=True)
class AgentServices:
    """What the handlers answer from; the daemon fills it in."""

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
    pull: Callable[[api.ImagePull], Any]
    """Fetches an image from the control plane this host has joined."""
    accounts: HostInspector
    volumes: VolumeService
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    """Runs a coroutine concurrently with the request, in the daemon's task group."""
    renew: Callable[[], Coroutine[Any, Any, None]]
    """Fetches this host's next certificate."""
    uniqueness: CloneCheck
    """Whether this host is the only one with its identity."""
    last_term: FencingTerm | None = None
    """Term of the last control plane; None: callers are not checked against it."""
    last_owners: FencingOwners | None = None
    """The latest owner of each entitlement; None: owners are not checked."""
    domain: Callable[[], str] = lambda: ""
    """Returns the trust domain of this host; empty: not known."""
    ready: bool = False


def application(services: AgentServices, socket_group: str) -> web.Application:
    """Return the agent's application, for the unix socket and for TLS alike."""
    return make_app(
        "Twine agent",
        ROUTES,
        handlers(services),
        authorize_with(socket_group, services.domain, services.last_term, services.last_owners),
        version=agent_version(),
        metrics=lambda: services.metrics.scrape(ready=services.ready),
    )


def handlers(s: AgentServices) -> dict[str, Handler]:
    """Return the handler of each route."""
    found = {**_image_handlers(s), **_task_handlers(s), **_host_handlers(s)}
    return {**found, **_credential_handlers(s)}


def _credential_handlers(s: AgentServices) -> dict[str, Handler]:
    async def list_credentials(_: Call) -> Credentials:
        return Credentials(credentials=s.credentials.all())

    async def put_credential(call: Call) -> CredentialInfo:
        _must_be_ready(s)
        assert call.stream is not None
        entitlement, name = credential_of(call)
        value = b""
        async for chunk in call.stream:
            value += chunk
            if len(value) > MOST_BYTES:
                break
        return s.credentials.put(entitlement, name, value)

    async def delete_credential(call: Call) -> api.Ack:
        _must_be_ready(s)
        s.credentials.remove(*credential_of(call))
        return api.Ack(detail="forgotten")

    return {
        "list_credentials": list_credentials,
        "put_credential": put_credential,
        "delete_credential": delete_credential,
    }


def _image_handlers(s: AgentServices) -> dict[str, Handler]:
    async def list_images(_: Call) -> api.Images:
        infos = [_with_users(s, i) for i in s.images.all()]
        return api.Images(images=infos)

    async def get_image(call: Call) -> api.ImageInfo:
        return _with_users(s, s.images.get(digest_of(call)))

    async def put_image(call: Call) -> api.ImageInfo:
        _must_be_ready(s)
        assert call.stream is not None
        return await s.images.receive(digest_of(call), format_of(call), call.stream)

    async def pull_image(call: Call) -> api.ImageInfo:
        _must_be_ready(s)
        info = await s.pull(call.body)
        assert isinstance(info, api.ImageInfo)
        return info

    async def fetch_oci_image(call: Call) -> api.ImageInfo:
        _must_be_ready(s)
        pull: api.OciPull = call.body
        return await s.images.pull(pull.reference)

    async def stage_image(call: Call) -> api.Ack:
        _must_be_ready(s)
        pull: api.OciPull = call.body
        s.spawn(_staged(s, pull.reference))
        return api.Ack(detail=f"{pull.reference} is being fetched")

    async def list_arrivals(_: Call) -> Arrivals:
        return Arrivals(images=s.images.arrivals.all())

    async def cancel_arrival(call: Call) -> api.Ack:
        asked: ArrivalName = call.body
        count = s.images.arrivals.cancel(asked.name)
        return api.Ack(detail=f"{count} cancelled")

    async def delete_image(call: Call) -> api.Ack:
        _must_be_ready(s)
        await s.images.delete(digest_of(call), s.tasks.using)
        return api.Ack(detail="deleted")

    return {
        "list_images": list_images,
        "get_image": get_image,
        "put_image": put_image,
        "pull_image": pull_image,
        "fetch_oci_image": fetch_oci_image,
        "stage_image": stage_image,
        "list_arrivals": list_arrivals,
        "cancel_arrival": cancel_arrival,
        "delete_image": delete_image,
    }


def _task_handlers(s: AgentServices) -> dict[str, Handler]:
    async def list_tasks(_: Call) -> api.Tasks:
        _must_be_ready(s)
        return api.Tasks(tasks=s.tasks.all())

    async def put_task(call: Call) -> api.TaskStatus:
        _must_be_ready(s)
        spec: api.TaskSpec = call.body
        check_raw(call.peer, task_id_of(call), spec)
        what = f"task {task_id_of(call)}"
        check_given(call.peer, what, spec.generation, spec.epoch, s.contact.term)
        s.contact.check_command(task_id_of(call), spec, *_heard(s, call, spec.epoch))
        return await s.tasks.put(task_id_of(call), spec)

    async def get_task(call: Call) -> api.TaskStatus:
        _must_be_ready(s)
        return s.tasks.get(task_id_of(call))

    async def delete_task(call: Call) -> api.TaskStatus:
        _must_be_ready(s)
        generation, epoch = version_of(call, s.contact.term)
        is_repair = call.peer.role == "local" and epoch is None
        said = s.contact.said if is_repair else None
        return await s.tasks.delete(task_id_of(call), generation, epoch, said=said)

    async def restart_task(call: Call) -> api.TaskStatus:
        _must_be_ready(s)
        generation, epoch = version_of(call, s.contact.term)
        task_id = task_id_of(call)
        spec = s.tasks.record(task_id).spec
        s.contact.check_command(task_id, spec, *_heard(s, call, epoch or 0))
        return await s.tasks.restart(task_id, generation, epoch)

    async def resize_task(call: Call) -> api.TaskStatus:
        _must_be_ready(s)
        what, told = f"task {task_id_of(call)}", call.body
        check_given(call.peer, what, told.generation, told.epoch, s.contact.term)
        return await s.tasks.resize(task_id_of(call), call.body)

    async def get_usage(_: Call) -> Usages:
        _must_be_ready(s)
        return await s.usage()

    async def task_logs(call: Call) -> AsyncIterator[bytes]:
        _must_be_ready(s)
        task_id = task_id_of(call)
        tail = call.number("tail")
        lines = s.logs.read(
            _run_of(s, task_id, previous=call.flag("previous")),
            follow=call.flag("follow") and s.tasks.knows(task_id),
            since=call.number("since"),
            tail=None if tail is None else int(tail),
        )
        return lines if s.tasks.knows(task_id) else await _some(lines, task_id)

    async def get_unit(call: Call) -> UnitShown:
        _must_be_ready(s)
        return await s.unit_view.show(s.tasks.record(task_id_of(call)))

    async def exec_task(call: Call) -> Talk:
        _must_be_ready(s)
        task_id, wish = task_id_of(call), wish_of(call)
        record = s.tasks.running(task_id)
        check_raw(call.peer, task_id, record.spec)
        return lambda duplex: s.sessions.talk(record, wish, duplex)

    return {
        "exec_task": exec_task,
        "get_unit": get_unit,
        "list_tasks": list_tasks,
        "put_task": put_task,
        "get_task": get_task,
        "delete_task": delete_task,
        "restart_task": restart_task,
        "resize_task": resize_task,
        "get_usage": get_usage,
        "task_logs": task_logs,
    }


def _host_handlers(s: AgentServices) -> dict[str, Handler]:
    async def get_machine(_: Call) -> api.MachineFacts:
        return await s.facts()

    async def put_profile(call: Call) -> api.ProfileStatus:
        told: api.ProfileSpec = call.body
        check_given(call.peer, "the profile", told.generation, told.epoch, s.contact.term)
        said = s.contact.said if call.peer.role == "local" else None
        if s.profile.ask(told, said):
            s.spawn(s.profile.apply())
        return s.profile.status()

    async def get_profile(_: Call) -> api.ProfileStatus:
        return s.profile.status()

    async def put_notices(call: Call) -> HostNotices:
        told: HostNotices = call.body
        check_given(call.peer, "notices", 1, told.epoch, s.contact.term)
        return await s.notices.put(told)

    async def get_events(call: Call) -> api.Events:
        after = int(call.number("after", 0) or 0)
        wait_s = min(call.number("wait_s", 0) or 0.0, MAX_EVENT_WAIT_S)
        _heard(s, call, int(call.number("epoch", 0) or 0))
        events = await s.events.after(after, s.contact.wait_s(wait_s))
        return msgspec.structs.replace(events, answered=s.contact.answer())

    async def get_accounts(_: Call) -> Accounts:
        _must_be_ready(s)
        return Accounts(accounts=await s.accounts.look())

    async def repair_accounts(_: Call) -> Accounts:
        _must_be_ready(s)
        return await s.accounts.repair()

    async def collect_garbage(_: Call) -> Accounts:
        _must_be_ready(s)
        return Accounts(accounts=[], done=await s.accounts.collect())

    async def list_volumes(_: Call) -> api.VolumeInfos:
        _must_be_ready(s)
        return await s.volumes.all()

    async def snapshot_volume(call: Call) -> api.VolumeInfo:
        _must_be_ready(s)
        return await s.volumes.snapshot(*volume_of(call), label_of(call))

    async def remove_volume(call: Call) -> api.Ack:
        _must_be_ready(s)
        await s.volumes.remove(*volume_of(call))
        return api.Ack(detail="removed")

    async def renew_identity(_: Call) -> api.Ack:
        if not s.domain():
            raise Unprocessable("this host has joined no control plane", hint="twine-agent join …")
        s.spawn(s.renew())
        return api.Ack()

    async def get_presence(_: Call) -> Presence:
        return s.uniqueness.presence()

    async def leave(call: Call) -> api.Running:
        if call.peer.role != "local":
            raise Forbidden("only the host itself may announce that it goes down")
        return api.Running(tasks=await s.leaving.begin())

    async def healthz(_: Call) -> api.Liveness:
        return api.Liveness(ok=True)

    async def readyz(_: Call) -> api.Liveness:
        _must_be_ready(s)
        return api.Liveness(ok=True, detail=f"{len(s.tasks.all())} tasks")

    return {
        "get_machine": get_machine,
        "put_profile": put_profile,
        "get_profile": get_profile,
        "put_notices": put_notices,
        "get_events": get_events,
        "get_accounts": get_accounts,
        "repair_accounts": repair_accounts,
        "collect_garbage": collect_garbage,
        "list_volumes": list_volumes,
        "snapshot_volume": snapshot_volume,
        "remove_volume": remove_volume,
        "renew_identity": renew_identity,
        "get_presence": get_presence,
        "leave": leave,
        "healthz": healthz,
        "readyz": readyz,
    }


def _must_be_ready(s: AgentServices) -> None:
    if not s.ready:
        raise Busy("the agent is still comparing its records with the host; try again")


def _heard(s: AgentServices, call: Call, epoch: int) -> tuple[str | None, int]:
    """Record contact with the control plane; return the answer it received last, and its term.

    A caller on the host itself is not the control plane: then the answer is None.
    """
    if call.peer.role != "component":
        return None, epoch
    name = call.query.get("heard", "")
    s.contact.heard(name, epoch)
    return name, epoch


def _run_of(s: AgentServices, task_id: str, *, previous: bool) -> LoggedRun:
    """Return where a task's words are: of all its runs, or of the one that ended last."""
    ended = s.tasks.ended_run(task_id) if previous else ""
    spec = s.tasks.find_spec(task_id)
    namespace = EVERYWHERE if spec is None else journal_of(spec.entitlement)
    return LoggedRun(unit_of(task_id), namespace, ended)


async def _some(lines: AsyncIterator[bytes], task_id: str) -> AsyncIterator[bytes]:
    """Return the output of a task that is gone; raise `NotFound` where the journal has none."""
    try:
        first = await anext(lines)
    except StopAsyncIteration:
        raise NotFound(
            f"there is no task {task_id} on this machine, and the journal has no output of it",
            hint="twine-agent ps",
        ) from None

    async def all_of_it() -> AsyncIterator[bytes]:
        yield first
        async for line in lines:
            yield line

    return all_of_it()


def _with_users(s: AgentServices, info: api.ImageInfo) -> api.ImageInfo:
    return msgspec.structs.replace(info, tasks=s.tasks.using(info.digest))


async def _staged(s: AgentServices, reference: str) -> None:
    """Fetch an image in the background; the events say what became of it."""
    try:
        await s.images.pull(reference)
    except TwineError as e:
        s.events.add("image", reference, f"not fetched: {e}")
