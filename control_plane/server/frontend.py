"""The front end: the public API of the control plane, made from the route table.

Handlers translate; they decide nothing. Who may call what is in `access`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from aiohttp import web

from agent.api import (
    Authority,
    Certificate,
    ImageFormat,
    ImageInfo,
    Images,
    Liveness,
)
from agent.errors import Busy, InvalidInput
from agent.wire.peers import principal
from agent.wire.server import Authorize, Call, Handler, make_app
from control_plane.api.jobs import Endpoints, Jobs, JobStatus
from control_plane.api.machines import Token
from control_plane.api.plans import JobExplanation, JobPlan
from control_plane.api.routes import ROUTES
from control_plane.server.capacity_handlers import CapacityHandlers
from control_plane.server.machine_handlers import MachineHandlers
from control_plane.server.metrics import Metrics
from control_plane.services.control_plane import ControlPlane
from control_plane.services.identity import Registrar
from control_plane.services.image_store import ImageStore

MAX_WAIT_S = 60.0
MAX_TAIL_LINES = 100_000


class FrontEnd(CapacityHandlers, MachineHandlers):
    """A handler for each row of the table."""

    def __init__(
        self, control_plane: ControlPlane, registrar: Registrar, images: ImageStore, ca_pem: str
    ) -> None:
        """Take what the handlers call."""
        CapacityHandlers.__init__(self, control_plane.capacity)
        MachineHandlers.__init__(self, control_plane.inventory)
        self._control_plane = control_plane
        self._registrar = registrar
        self._images = images
        self._ca_pem = ca_pem
        self._metrics = Metrics(ROUTES, control_plane.allocations, control_plane.census)

    def app(self, authorize: Authorize, version: str) -> web.Application:
        """Return the application; the routes that it has are exactly those of the table."""
        handlers: dict[str, Handler] = {r.name: getattr(self, r.name) for r in ROUTES}
        app = make_app(
            "Twine control plane",
            ROUTES,
            handlers,
            authorize,
            version=version,
            metrics=self._scrape,
        )
        app.middlewares.insert(0, self._metrics.count)
        return app

    async def _scrape(self) -> bytes:
        return self._metrics.text()

    async def get_authority(self, _: Call) -> Authority:
        """Answer with the authority's certificate, which is no secret."""
        return Authority(ca_pem=self._ca_pem)

    async def join(self, call: Call) -> Certificate:
        """Let a host with a good token in."""
        return await self._registrar.join(call.body, call.peer.address)

    async def renew(self, call: Call) -> Certificate:
        """Give a host its next certificate: for the name in its present one, no other."""
        return await self._registrar.renew(principal(call.peer), call.body.csr_pem)

    async def create_token(self, call: Call) -> Token:
        """Make a join token."""
        return await self._registrar.create_token(call.body)

    async def fetch_image(self, call: Call) -> AsyncIterator[bytes]:
        """Stream an image out."""
        return await self._images.stream(call.path["digest"])

    async def push_image(self, call: Call) -> ImageInfo:
        """Stream an image in."""
        assert call.stream is not None
        text = call.query.get("format", ImageFormat.TAR.value)
        try:
            format_ = ImageFormat(text)
        except ValueError:
            raise InvalidInput(f"parameter format must be tar or btrfs, not {text!r}") from None
        return await self._images.put(call.path["digest"], format_, call.stream)

    async def list_store_images(self, _: Call) -> Images:
        """List the image store."""
        return await self._images.list_images()

    async def list_jobs(self, _: Call) -> Jobs:
        """List the jobs."""
        return await self._control_plane.list_jobs()

    async def apply_job(self, call: Call) -> JobStatus:
        """Create or change a job."""
        if call.body.name != call.path["job"]:
            raise InvalidInput(f"job {call.body.name} cannot be put at {call.path['job']!r}")
        return await self._control_plane.apply_job(call.body, dry_run=call.flag("dry_run"))

    async def plan_job(self, call: Call) -> JobPlan:
        """Say what applying a job would do."""
        if call.body.name != call.path["job"]:
            raise InvalidInput(f"job {call.body.name} cannot be planned at {call.path['job']!r}")
        return await self._control_plane.job_planner.plan(call.body)

    async def explain_job(self, call: Call) -> JobExplanation:
        """Say why tasks wait."""
        return await self._control_plane.job_planner.explain(call.path["job"])

    async def get_job(self, call: Call) -> JobStatus:
        """Show a job."""
        return await self._control_plane.get_job(call.path["job"])

    async def stop_job(self, call: Call) -> JobStatus:
        """Stop a job."""
        return await self._control_plane.stop_job(call.path["job"])

    async def job_logs(self, call: Call) -> AsyncIterator[bytes]:
        """Stream what a task wrote."""
        text = call.path["index"]
        if not (text.isascii() and text.isdigit() and len(text) < 7):
            raise InvalidInput(f"{text!r} is no index of a task", hint="0, 1, 2, …")
        tail, since = call.number("tail"), call.number("since")
        return self._control_plane.job_logs(
            call.path["job"],
            int(text),
            follow=call.flag("follow"),
            since=None if since is None else f"{since:.6f}",
            tail=None if tail is None else int(min(tail, MAX_TAIL_LINES)),
        )

    async def get_endpoints(self, call: Call) -> Endpoints:
        """Show where a job answers; waits for news if asked to."""
        after, wait_s = call.number("after", 0.0), call.number("wait_s", 0.0)
        return await self._control_plane.endpoints(
            call.path["job"], int(after or 0), min(wait_s or 0.0, MAX_WAIT_S)
        )

    async def healthz(self, _: Call) -> Liveness:
        """Answer at all."""
        return Liveness(ok=True)

    async def readyz(self, _: Call) -> Liveness:
        """Answer whether everything is loaded and runs."""
        state = await self._control_plane.ready()
        if not state.ok:
            raise Busy(f"the control plane is not ready: {state.detail}")
        return state
