"""The agent's API: authorizes callers, and passes each request to a service."""

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
from agent.credentials.credentials import CREDENTIAL_MAX_BYTES
from agent.host.callers import authorize_with, check_local_version, check_raw
from agent.host.facts import agent_version
from agent.host.logs import EVERYWHERE, LoggedRun
from agent.images.published import IMAGE_FILES
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
from wire.errors import Busy, Forbidden, NotFound, TwineError, Unprocessable
from wire.server import Call, make_app

MAX_EVENT_WAIT_S = 60.0


def application(services: AgentServices, socket_group: str) -> web.Application:
    """Return the agent's web application, for both the unix socket and TLS."""
    handlers = AgentHandlers(services)
    return make_app(
        "Twine agent",
        ROUTES,
        {route.name: getattr(handlers, route.name) for route in ROUTES},
        authorize_with(socket_group, services.domain, services.last_term, services.last_owners),
        version=agent_version(),
        metrics=lambda: services.metrics.scrape(ready=services.ready),
    )


class _Handlers:
    """Base of the handlers: the services that they call."""

    def __init__(self, services: AgentServices) -> None:
        self._services = services

    @property
    def _ready(self) -> AgentServices:
        """Return the services; raise `Busy` until the agent has adopted the tasks of the host."""
        if not self._services.ready:
            raise Busy("the agent is still comparing its records with the host; try again")
        return self._services


class ImageHandlers(_Handlers):
    """Images on the host."""

    async def list_images(self, _: Call) -> api.Images:
        """List the images, each with the tasks that use it."""
        found = await self._services.lanes.run(IMAGE_FILES, self._services.images.all)
        return api.Images(images=[_with_users(self._services, info) for info in found])

    async def get_image(self, call: Call) -> api.ImageInfo:
        """Show an image."""
        digest = digest_of(call)
        found = await self._services.lanes.run(IMAGE_FILES, self._services.images.get, digest)
        return _with_users(self._services, found)

    async def put_image(self, call: Call) -> api.ImageInfo:
        """Import an image from the body of the request."""
        assert call.stream is not None
        return await self._ready.images.receive(digest_of(call), format_of(call), call.stream)

    async def pull_image(self, call: Call) -> api.ImageInfo:
        """Import an image from another place."""
        return await self._ready.pull(call.body)

    async def fetch_oci_image(self, call: Call) -> api.ImageInfo:
        """Import an image from a registry."""
        pull: api.OciPull = call.body
        return await self._ready.images.pull(pull.reference)

    async def stage_image(self, call: Call) -> api.Ack:
        """Begin to import an image from a registry."""
        services, pull = self._ready, call.body
        services.spawn(_fetch_in_background(services, pull.reference))
        return api.Ack(detail=f"{pull.reference} is being fetched")

    async def list_imports(self, _: Call) -> ImageImports:
        """List the imports that run."""
        return ImageImports(images=self._services.images.imports.all())

    async def cancel_import(self, call: Call) -> api.Ack:
        """Cancel imports of an image."""
        asked: ImportName = call.body
        count = self._services.images.imports.cancel(asked.name)
        return api.Ack(detail=f"{count} cancelled")

    async def delete_image(self, call: Call) -> api.Ack:
        """Remove an image that no task uses."""
        services = self._ready
        await services.images.delete(digest_of(call), services.tasks.tasks_using)
        return api.Ack(detail="deleted")


class AgentTaskHandlers(_Handlers):
    """Tasks of the host."""

    async def list_tasks(self, _: Call) -> api.Tasks:
        """List the tasks."""
        return api.Tasks(tasks=self._ready.tasks.all())

    async def put_task(self, call: Call) -> api.TaskStatus:
        """Create a task, or update it to a newer generation."""
        services, task_id = self._ready, task_id_of(call)
        spec: api.TaskSpec = call.body
        check_raw(call.peer, task_id, spec)
        term = services.contact.term
        check_local_version(call.peer, f"task {task_id}", spec.generation, spec.epoch, term)
        services.contact.check_command(task_id, spec, *_record_contact(services, call, spec.epoch))
        return await services.tasks.put(task_id, spec)

    async def get_task(self, call: Call) -> api.TaskStatus:
        """Show a task."""
        return self._ready.tasks.get(task_id_of(call))

    async def delete_task(self, call: Call) -> api.TaskStatus:
        """Stop and remove a task."""
        services = self._ready
        generation, epoch = version_of(call, services.contact.term)
        is_repair = call.peer.role == "local" and epoch is None
        latest = services.contact.request_epoch if is_repair else None
        return await services.tasks.delete(
            task_id_of(call), generation, epoch, control_plane_epoch=latest
        )

    async def restart_task(self, call: Call) -> api.TaskStatus:
        """Restart a task."""
        services = self._ready
        generation, epoch = version_of(call, services.contact.term)
        task_id = task_id_of(call)
        spec = services.tasks.record(task_id).spec
        services.contact.check_command(task_id, spec, *_record_contact(services, call, epoch or 0))
        return await services.tasks.restart(task_id, generation, epoch)

    async def resize_task(self, call: Call) -> api.TaskStatus:
        """Change the resources of a task while it runs."""
        services, task_id, resize = self._ready, task_id_of(call), call.body
        term = services.contact.term
        check_local_version(call.peer, f"task {task_id}", resize.generation, resize.epoch, term)
        return await services.tasks.resize(task_id, resize)

    async def get_usage(self, _: Call) -> Usages:
        """Show what each task uses."""
        return await self._ready.usage()

    async def task_logs(self, call: Call) -> AsyncIterator[bytes]:
        """Stream the output of a task, or of its latest ended run."""
        services, task_id = self._ready, task_id_of(call)
        lines = services.logs.read(
            _run_of(services, task_id, previous=call.flag("previous")),
            follow=call.flag("follow") and services.tasks.knows(task_id),
            since=call.number("since"),
            tail=call.whole("tail"),
        )
        return lines if services.tasks.knows(task_id) else await _or_not_found(lines, task_id)

    async def get_unit(self, call: Call) -> UnitShown:
        """Show the systemd unit of a task."""
        services = self._ready
        return await services.unit_view.show(services.tasks.record(task_id_of(call)))

    async def exec_task(self, call: Call) -> Talk:
        """Run a command in a task's sandbox."""
        services, task_id, request = self._ready, task_id_of(call), request_of(call)
        record = services.tasks.running(task_id)
        check_raw(call.peer, task_id, record.spec)
        return lambda duplex: services.sessions.talk(record, request, duplex)


class HostHandlers(_Handlers):
    """Facts, profile, events, volumes and state of the host."""

    async def get_machine(self, _: Call) -> api.MachineFacts:
        """Show the facts of the machine."""
        return await self._services.facts()

    async def put_profile(self, call: Call) -> api.ProfileStatus:
        """Record a host profile and begin to apply it."""
        spec: api.ProfileSpec = call.body
        check_local_version(
            call.peer, "the profile", spec.generation, spec.epoch, self._services.contact.term
        )
        latest = self._services.contact.request_epoch if call.peer.role == "local" else None
        if await self._services.profile.ask(spec, latest):
            self._services.spawn(self._services.profile.apply())
        return await self._services.profile.status()

    async def get_profile(self, _: Call) -> api.ProfileStatus:
        """Show the state of the host profile."""
        return await self._services.profile.status()

    async def put_notices(self, call: Call) -> HostNotices:
        """Replace the notices of the host."""
        notices: HostNotices = call.body
        check_local_version(call.peer, "notices", 1, notices.epoch, self._services.contact.term)
        return await self._services.notices.put(notices)

    async def get_events(self, call: Call) -> api.Events:
        """Return the events after a number; can wait for one."""
        after = call.whole("after") or 0
        wait_s = min(call.number("wait_s", 0) or 0.0, MAX_EVENT_WAIT_S)
        _record_contact(self._services, call, call.whole("epoch") or 0)
        events = await self._services.events.after(after, self._services.contact.wait_s(wait_s))
        return msgspec.structs.replace(events, answered=self._services.contact.answer())

    async def get_accounts(self, _: Call) -> Accounts:
        """Compare the objects on the host with the records."""
        return Accounts(accounts=await self._ready.accounts.inspect())

    async def repair_accounts(self, _: Call) -> Accounts:
        """Repair what differs between objects and records."""
        return await self._ready.accounts.repair()

    async def collect_garbage(self, _: Call) -> Accounts:
        """Remove objects that nothing uses."""
        return Accounts(accounts=[], done=await self._ready.accounts.collect())

    async def list_volumes(self, _: Call) -> api.VolumeInfos:
        """List the volumes."""
        return await self._ready.volumes.all()

    async def snapshot_volume(self, call: Call) -> api.VolumeInfo:
        """Take a snapshot of a volume."""
        return await self._ready.volumes.snapshot(*volume_of(call), label_of(call))

    async def remove_volume(self, call: Call) -> api.Ack:
        """Remove a volume that no task uses."""
        await self._ready.volumes.remove(*volume_of(call))
        return api.Ack(detail="removed")

    async def renew_identity(self, _: Call) -> api.Ack:
        """Begin to renew the certificate of the host."""
        if not self._services.domain():
            raise Unprocessable("this host has joined no control plane", hint="twine-agent join …")
        self._services.spawn(self._services.renew())
        return api.Ack()

    async def get_presence(self, _: Call) -> Presence:
        """Show the boot and the clone check of the host."""
        return self._services.clones.presence()

    async def leave(self, call: Call) -> api.Running:
        """Stop the tasks, because the host shuts down."""
        if call.peer.role != "local":
            raise Forbidden("only the host itself may announce that it goes down")
        return api.Running(tasks=await self._services.leaving.begin())

    async def healthz(self, _: Call) -> api.Liveness:
        """Answer that this process is alive."""
        return api.Liveness(ok=True)

    async def readyz(self, _: Call) -> api.Liveness:
        """Answer whether the tasks are loaded."""
        return api.Liveness(ok=True, detail=f"{len(self._ready.tasks.all())} tasks")


class CredentialHandlers(_Handlers):
    """Credentials of entitlements that the host keeps in memory."""

    async def list_credentials(self, _: Call) -> Credentials:
        """List the credentials, without their values."""
        return Credentials(credentials=self._services.credentials.all())

    async def put_credential(self, call: Call) -> CredentialInfo:
        """Keep a credential in memory."""
        credentials = self._ready.credentials
        assert call.stream is not None
        entitlement, name = credential_of(call)
        value = b""
        async for chunk in call.stream:
            value += chunk
            if len(value) > CREDENTIAL_MAX_BYTES:
                break
        return credentials.put(entitlement, name, value)

    async def delete_credential(self, call: Call) -> api.Ack:
        """Remove a credential."""
        self._ready.credentials.remove(*credential_of(call))
        return api.Ack(detail="forgotten")


class AgentHandlers(ImageHandlers, AgentTaskHandlers, HostHandlers, CredentialHandlers):
    """A handler for each route of the agent, with the route's name."""


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


async def _or_not_found(lines: AsyncIterator[bytes], task_id: str) -> AsyncIterator[bytes]:
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
    return msgspec.structs.replace(info, tasks=s.tasks.tasks_using(info.digest))


async def _fetch_in_background(s: AgentServices, reference: str) -> None:
    """Fetch an image in the background; events report the outcome."""
    try:
        await s.images.pull(reference)
    except TwineError as e:
        s.events.add("image", reference, f"not fetched: {e}")
