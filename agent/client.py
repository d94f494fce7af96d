"""Client of the agent's API: one typed method per row of the route table."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import msgspec

from agent import api
from agent.api.accounts import Accounts
from agent.api.credentials import CredentialInfo, Credentials
from agent.api.notices import HostNotices
from agent.api.oci import ImageImports, ImportName
from agent.api.presence import Presence
from agent.api.unit import UnitShown
from agent.routes import ROUTES
from agent.usage import Usages
from wire.client import WireClient, answer_as
from wire.duplex import Duplex
from wire.routes import Route

T = TypeVar("T")
_ROUTE: dict[str, Route] = {r.name: r for r in ROUTES}


class AgentClient(WireClient):
    """Client of one agent, over mutual TLS or its unix socket.

    Every method raises the error that the agent raised (`wire.errors`), or `Unreachable`. Requests
    that concern the lease carry the name of the agent's answer that arrived last.
    """

    max_answer_bytes = 16 << 20
    """Largest answer of an agent: thousands of tasks or all events, at most 2 KiB each."""

    def __init__(
        self, endpoint: str, tls: ssl.SSLContext | None = None, *, timeout_s: float = 30.0
    ) -> None:
        """Connect at the first call."""
        super().__init__(endpoint, tls, timeout_s=timeout_s)
        self.epoch: Callable[[], int] = lambda: 0
        """Returns the term of the calling control plane; 0 for a local operator."""
        self._answered: str | None = None

    async def _ask(self, kind: type[T], name: str, body: Any = None, /, **given: Any) -> T:
        """Call a route, whose response has this type."""
        return answer_as(kind, await self.call(_ROUTE[name], body, **given))

    async def get_machine(self) -> api.MachineFacts:
        """Return the facts of the machine."""
        return await self._ask(api.MachineFacts, "get_machine")

    async def list_images(self) -> api.Images:
        """Return all complete images."""
        return await self._ask(api.Images, "list_images")

    async def pull_image(self, pull: api.ImagePull) -> api.ImageInfo:
        """Have the agent fetch an image; returns when it is published, at once if it already is."""
        return await self._ask(api.ImageInfo, "pull_image", pull, timeout_s=900.0)

    async def fetch_oci_image(self, reference: str) -> api.ImageInfo:
        """Have the agent fetch an image from a registry; returns when it is published."""
        pull = api.OciPull(reference=reference)
        return await self._ask(api.ImageInfo, "fetch_oci_image", pull, timeout_s=3600.0)

    async def stage_image(self, reference: str) -> api.Ack:
        """Have the agent fetch an image in advance; returns at once."""
        return await self._ask(api.Ack, "stage_image", api.OciPull(reference=reference))

    async def list_imports(self) -> ImageImports:
        """Return the images that are being fetched or received."""
        return await self._ask(ImageImports, "list_imports")

    async def cancel_import(self, name: str) -> api.Ack:
        """Cancel the fetch of an image, by its name in `list_imports`."""
        return await self._ask(api.Ack, "cancel_import", ImportName(name=name))

    async def put_image(
        self, digest: str, format_: api.ImageFormat, stream: AsyncIterator[bytes]
    ) -> api.ImageInfo:
        """Send an image as a stream; the agent publishes it only if it has this digest."""
        given = {"digest": digest, "format": format_.value}
        return await self._ask(api.ImageInfo, "put_image", stream=stream, timeout_s=900.0, **given)

    async def get_image(self, digest: str) -> api.ImageInfo:
        """Return one image, or raise `NotFound`."""
        return await self._ask(api.ImageInfo, "get_image", digest=digest)

    async def delete_image(self, digest: str) -> None:
        """Remove an image that no task uses."""
        await self.call(_ROUTE["delete_image"], digest=digest)

    async def list_tasks(self) -> api.Tasks:
        """Return all tasks of the machine."""
        return await self._ask(api.Tasks, "list_tasks")

    async def put_task(self, task_id: str, spec: api.TaskSpec) -> api.TaskStatus:
        """Set the desired state of a task; returns before it runs."""
        given = {"task_id": task_id, "heard": self._answered}
        return await self._ask(api.TaskStatus, "put_task", spec, **given)

    async def get_task(self, task_id: str) -> api.TaskStatus:
        """Return the observed state of a task, or raise `NotFound`."""
        return await self._ask(api.TaskStatus, "get_task", task_id=task_id)

    async def delete_task(
        self, task_id: str, generation: int | None = None, epoch: int | None = None
    ) -> api.TaskStatus:
        """Stop a task and remove it; `get_task` raises `NotFound` once it is removed."""
        version = {"generation": generation, "epoch": epoch}
        return await self._ask(api.TaskStatus, "delete_task", task_id=task_id, **version)

    async def restart_task(
        self, task_id: str, generation: int | None = None, epoch: int | None = None
    ) -> api.TaskStatus:
        """Stop a task and start it again, now."""
        given = {"generation": generation, "epoch": epoch, "heard": self._answered}
        return await self._ask(api.TaskStatus, "restart_task", task_id=task_id, **given)

    async def list_volumes(self) -> api.VolumeInfos:
        """Return the volumes of the machine, and snapshots of them."""
        return await self._ask(api.VolumeInfos, "list_volumes")

    async def snapshot_volume(self, entitlement: str, volume: str, label: str) -> api.VolumeInfo:
        """Make a read-only snapshot of a persistent volume (TASK.VOLUME) and return it."""
        given = {"entitlement": entitlement, "volume": volume, "label": label}
        return await self._ask(api.VolumeInfo, "snapshot_volume", **given)

    async def remove_volume(self, entitlement: str, volume: str) -> None:
        """Remove a persistent volume or a snapshot that no task uses."""
        await self.call(_ROUTE["remove_volume"], entitlement=entitlement, volume=volume)

    async def resize_task(self, task_id: str, resize: api.Resize) -> api.TaskStatus:
        """Change the limits and resources of a running task without a restart."""
        return await self._ask(api.TaskStatus, "resize_task", resize, task_id=task_id)

    def task_logs(
        self,
        task_id: str,
        *,
        follow: bool = False,
        since: str | None = None,
        tail: int | None = None,
        previous: bool = False,
    ) -> AsyncIterator[bytes]:
        """Yield the output of a task; with `follow`, also its future output.

        `previous`: only the output of the latest ended run.
        """
        return self.stream(
            _ROUTE["task_logs"],
            task_id=task_id,
            follow="true" if follow else None,
            since=since,
            tail=tail,
            previous="true" if previous else None,
        )

    async def get_unit(self, task_id: str) -> UnitShown:
        """Return the exact properties of a task's unit."""
        return await self._ask(UnitShown, "get_unit", task_id=task_id)

    def exec_task(
        self, task_id: str, command: list[str], *, tty: bool, rows: int = 24, columns: int = 80
    ) -> AbstractAsyncContextManager[Duplex]:
        """Run a command inside a running task; the last message is an `ExecEnd`."""
        asked = {"command": msgspec.json.encode(command).decode()}
        asked |= {"rows": str(rows), "columns": str(columns)} | ({"tty": "true"} if tty else {})
        return self.open_exec(task_id, asked)

    def open_exec(self, task_id: str, asked: dict[str, str]) -> AbstractAsyncContextManager[Duplex]:
        """Run a command inside a task; `asked` are the parameters of the route."""
        return self.open_duplex(_ROUTE["exec_task"], task_id=task_id, **asked)

    async def renew_identity(self) -> None:
        """Have the host fetch its next certificate; returns before it has the certificate."""
        await self.call(_ROUTE["renew_identity"])

    async def get_presence(self) -> Presence:
        """Return the identity of the agent's process, and its boot."""
        return await self._ask(Presence, "get_presence")

    async def get_usage(self) -> Usages:
        """Return the resource usage of each task."""
        return await self._ask(Usages, "get_usage")

    async def put_profile(self, spec: api.ProfileSpec) -> api.ProfileStatus:
        """Request a host profile; returns before it is applied."""
        return await self._ask(api.ProfileStatus, "put_profile", spec)

    async def put_notices(self, notices: HostNotices) -> HostNotices:
        """Replace all notices for the tasks of the machine; omitted ones are withdrawn."""
        return await self._ask(HostNotices, "put_notices", notices)

    async def get_profile(self) -> api.ProfileStatus:
        """Return the profile that the machine runs, with the state of each setting."""
        return await self._ask(api.ProfileStatus, "get_profile")

    async def get_events(self, after: int, wait_s: float = 0.0) -> api.Events:
        """Return events after a sequence number, waiting up to `wait_s` for the first.

        An agent of an earlier release sends no name of its answer, and rejects unknown parameters.
        """
        knows = self._answered is not None
        events = await self._ask(
            api.Events,
            "get_events",
            timeout_s=wait_s + 10.0,
            after=after,
            wait_s=wait_s,
            heard=self._answered,
            epoch=self.epoch() if knows else None,
        )
        self._answered = events.answered or None
        return events

    async def list_credentials(self) -> Credentials:
        """Return which credentials the host holds."""
        return await self._ask(Credentials, "list_credentials")

    async def put_credential(self, entitlement: str, name: str, value: bytes) -> CredentialInfo:
        """Store a credential in the memory of the host."""

        async def chunks() -> AsyncIterator[bytes]:
            yield value

        given = {"entitlement": entitlement, "name": name}
        return await self._ask(CredentialInfo, "put_credential", stream=chunks(), **given)

    async def delete_credential(self, entitlement: str, name: str) -> None:
        """Delete a credential from the memory of the host."""
        await self.call(_ROUTE["delete_credential"], entitlement=entitlement, name=name)

    async def leave(self) -> list[str]:
        """Announce that the host goes down; return the ids of tasks that still run."""
        return (await self._ask(api.Running, "leave")).tasks

    async def get_accounts(self) -> Accounts:
        """Return an account of all objects on the host."""
        return await self._ask(Accounts, "get_accounts", timeout_s=120.0)

    async def repair_accounts(self) -> Accounts:
        """Have the agent remove objects without an owner; returns the remaining faults."""
        return await self._ask(Accounts, "repair_accounts", timeout_s=300.0)

    async def collect_garbage(self) -> Accounts:
        """Have the agent remove unused images and layers."""
        return await self._ask(Accounts, "collect_garbage", timeout_s=300.0)

    async def readyz(self) -> api.Liveness:
        """Return whether the agent has reconciled its state, or raise `Busy`."""
        return await self._ask(api.Liveness, "readyz")
