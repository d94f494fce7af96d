"""The agent's API: authorizes callers and passes each request to a service."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
from aiohttp import web

from agent import api
from agent.api.accounts import Accounts
from agent.api.credentials import CredentialInfo, Credentials
from agent.api.notices import HostNotices
from agent.api.oci import ImageImports, ImportName
from agent.api.presence import Presence
from agent.api.unit import UnitShown
from agent.credentials.credentials import MOST_BYTES
from agent.host.callers import authorize_with, check_given, check_raw
from agent.host.facts import agent_version
from agent.host.logs import EVERYWHERE, LoggedRun
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
from agent.services import AgentServices
from agent.tasks.core.unit_properties import journal_of
from agent.tasks.exec import request_of
from agent.usage import Usages
from wire.duplex import Talk
from wire.errors import Forbidden, NotFound, TwineError, Unprocessable
from wire.server import Call, Handler, make_app

MAX_EVENT_WAIT_S = 60.0


def application(services: AgentServices, socket_group: str) -> web.Application:
    """Return the agent's web application, for both the unix socket and TLS."""
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
        s.require_ready()
        assert call.stream is not None
        entitlement, name = credential_of(call)
        value = b""
        async for chunk in call.stream:
            value += chunk
            if len(value) > MOST_BYTES:
                break
        return s.credentials.put(entitlement, name, value)

    async def delete_credential(call: Call) -> api.Ack:
        s.require_ready()
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
        s.require_ready()
        assert call.stream is not None
        return await s.images.receive(digest_of(call), format_of(call), call.stream)

    async def pull_image(call: Call) -> api.ImageInfo:
        s.require_ready()
        info = await s.pull(call.body)
        assert isinstance(info, api.ImageInfo)
        return info

    async def fetch_oci_image(call: Call) -> api.ImageInfo:
        s.require_ready()
        pull: api.OciPull = call.body
        return await s.images.pull(pull.reference)

    async def stage_image(call: Call) -> api.Ack:
        s.require_ready()
        pull: api.OciPull = call.body
        s.spawn(_staged(s, pull.reference))
        return api.Ack(detail=f"{pull.reference} is being fetched")

    async def list_imports(_: Call) -> ImageImports:
        return ImageImports(images=s.images.imports.all())

    async def cancel_import(call: Call) -> api.Ack:
        asked: ImportName = call.body
        count = s.images.imports.cancel(asked.name)
        return api.Ack(detail=f"{count} cancelled")

    async def delete_image(call: Call) -> api.Ack:
        s.require_ready()
        await s.images.delete(digest_of(call), s.tasks.using)
        return api.Ack(detail="deleted")

    return {
        "list_images": list_images,
        "get_image": get_image,
        "put_image": put_image,
        "pull_image": pull_image,
        "fetch_oci_image": fetch_oci_image,
        "stage_image": stage_image,
        "list_imports": list_imports,
        "cancel_import": cancel_import,
        "delete_image": delete_image,
    }


def _task_handlers(s: AgentServices) -> dict[str, Handler]:
    async def list_tasks(_: Call) -> api.Tasks:
        s.require_ready()
        return api.Tasks(tasks=s.tasks.all())

    async def put_task(call: Call) -> api.TaskStatus:
        s.require_ready()
        spec: api.TaskSpec = call.body
        check_raw(call.peer, task_id_of(call), spec)
        what = f"task {task_id_of(call)}"
        check_given(call.peer, what, spec.generation, spec.epoch, s.contact.term)
        s.contact.check_command(task_id_of(call), spec, *_record_contact(s, call, spec.epoch))
        return await s.tasks.put(task_id_of(call), spec)

    async def get_task(call: Call) -> api.TaskStatus:
        s.require_ready()
        return s.tasks.get(task_id_of(call))

    async def delete_task(call: Call) -> api.TaskStatus:
        s.require_ready()
        generation, epoch = version_of(call, s.contact.term)
        is_repair = call.peer.role == "local" and epoch is None
        latest = s.contact.request_epoch if is_repair else None
        return await s.tasks.delete(task_id_of(call), generation, epoch, control_plane_epoch=latest)

    async def restart_task(call: Call) -> api.TaskStatus:
        s.require_ready()
        generation, epoch = version_of(call, s.contact.term)
        task_id = task_id_of(call)
        spec = s.tasks.record(task_id).spec
        s.contact.check_command(task_id, spec, *_record_contact(s, call, epoch or 0))
        return await s.tasks.restart(task_id, generation, epoch)

    async def resize_task(call: Call) -> api.TaskStatus:
        s.require_ready()
        what, resize = f"task {task_id_of(call)}", call.body
        check_given(call.peer, what, resize.generation, resize.epoch, s.contact.term)
        return await s.tasks.resize(task_id_of(call), resize)

    async def get_usage(_: Call) -> Usages:
        s.require_ready()
        return await s.usage()

    async def task_logs(call: Call) -> AsyncIterator[bytes]:
        s.require_ready()
        task_id = task_id_of(call)
        lines = s.logs.read(
            _run_of(s, task_id, previous=call.flag("previous")),
            follow=call.flag("follow") and s.tasks.knows(task_id),
            since=call.number("since"),
            tail=call.whole("tail"),
        )
        return lines if s.tasks.knows(task_id) else await _some(lines, task_id)

    async def get_unit(call: Call) -> UnitShown:
        s.require_ready()
        return await s.unit_view.show(s.tasks.record(task_id_of(call)))

    async def exec_task(call: Call) -> Talk:
        s.require_ready()
        task_id, request = task_id_of(call), request_of(call)
        record = s.tasks.running(task_id)
        check_raw(call.peer, task_id, record.spec)
        return lambda duplex: s.sessions.talk(record, request, duplex)

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
        spec: api.ProfileSpec = call.body
        check_given(call.peer, "the profile", spec.generation, spec.epoch, s.contact.term)
        latest = s.contact.request_epoch if call.peer.role == "local" else None
        if s.profile.ask(spec, latest):
            s.spawn(s.profile.apply())
        return s.profile.status()

    async def get_profile(_: Call) -> api.ProfileStatus:
        return s.profile.status()

    async def put_notices(call: Call) -> HostNotices:
        notices: HostNotices = call.body
        check_given(call.peer, "notices", 1, notices.epoch, s.contact.term)
        return await s.notices.put(notices)

    async def get_events(call: Call) -> api.Events:
        after = call.whole("after") or 0
        wait_s = min(call.number("wait_s", 0) or 0.0, MAX_EVENT_WAIT_S)
        _record_contact(s, call, call.whole("epoch") or 0)
        events = await s.events.after(after, s.contact.wait_s(wait_s))
        return msgspec.structs.replace(events, answered=s.contact.answer())

    async def get_accounts(_: Call) -> Accounts:
        s.require_ready()
        return Accounts(accounts=await s.accounts.look())

    async def repair_accounts(_: Call) -> Accounts:
        s.require_ready()
        return await s.accounts.repair()

    async def collect_garbage(_: Call) -> Accounts:
        s.require_ready()
        return Accounts(accounts=[], done=await s.accounts.collect())

    async def list_volumes(_: Call) -> api.VolumeInfos:
        s.require_ready()
        return await s.volumes.all()

    async def snapshot_volume(call: Call) -> api.VolumeInfo:
        s.require_ready()
        return await s.volumes.snapshot(*volume_of(call), label_of(call))

    async def remove_volume(call: Call) -> api.Ack:
        s.require_ready()
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
        s.require_ready()
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


def _record_contact(s: AgentServices, call: Call, epoch: int) -> tuple[str | None, int]:
    """Record contact with the control plane; return the name of the answer it received last, and
    its term. The name is None if the caller is a user on the host.
    """
    if call.peer.role != "component":
        return None, epoch
    name = call.query.get("heard", "")
    s.contact.record_contact(name, epoch)
    return name, epoch


def _run_of(s: AgentServices, task_id: str, *, previous: bool) -> LoggedRun:
    """Return where the output of a task is: of all its runs, or of the latest ended run."""
    ended = s.tasks.ended_run(task_id) if previous else ""
    spec = s.tasks.find_spec(task_id)
    namespace = EVERYWHERE if spec is None else journal_of(spec.entitlement)
    return LoggedRun(unit_of(task_id), namespace, ended)


async def _some(lines: AsyncIterator[bytes], task_id: str) -> AsyncIterator[bytes]:
    """Return the output of a removed task; raise `NotFound` if the journal has none."""
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
    """Fetch an image in the background; events report the outcome."""
    try:
        await s.images.pull(reference)
    except TwineError as e:
        s.events.add("image", reference, f"not fetched: {e}")
