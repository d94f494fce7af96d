"""The users of a simulated region: they send requests, and repeat them if the answer is lost.

At most one request for each object is under way at a time. Acknowledged requests are kept, so that
the checker can compare them with the control plane's records.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from agent.api.joining import JoinRequest
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobSpec
from control_plane.roles import ControlPlane
from vm_lab.region.history import History
from vm_lab.region.intent_checker import GrantedIntents
from vm_lab.region.loop import Timeline
from vm_lab.region.observer import Observer
from vm_lab.region.plane import PlaneLife
from wire.errors import NotFound, TwineError

RETRY_S = 2.0
"""Seconds until a client repeats a request that got no answer, or a retryable error."""
ANSWER_TIMEOUT_S = 120.0
"""Seconds; an answer that takes longer, without a fault, is a violation."""
ENDPOINTS_WAIT_S = 60.0


@dataclass(slots=True)
class ClientRequest:
    """One request of a client."""

    subject: str
    """The object; requests for the same object are sent one after the other."""
    text: str
    call: Callable[[ControlPlane], Awaitable[object]]
    granted: Callable[[], None]
    attempts: int = 0
    life: int = 0
    """Number of the process life that handles it; 0: none does."""
    sent_at: float = 0.0


@dataclass(slots=True)
class OwnedJob:
    """A job as its owner requested it."""

    requested: JobSpec | None
    """The specification requested last; None: a stop was requested."""
    granted: JobSpec | None = None
    """The specification acknowledged last."""
    granted_at: float = 0.0
    stopped: bool = False
    """Whether a stop was acknowledged."""
    expected_image: str = ""
    """The image that its tasks must run in the end; a rollback may have changed it."""
    largest_size: int = 0
    """Largest number of tasks ever requested."""
    all_requested: tuple[JobSpec, ...] = ()
    """Every specification ever requested, oldest first."""
    intents: GrantedIntents | None = None
    """The intents granted to other writers, if the job has some (`writers.py`)."""

    @property
    def images(self) -> frozenset[str]:
        """Return every image ever requested."""
        return frozenset(spec.image for spec in self.all_requested)

    @property
    def smallest_size(self) -> int:
        """Return the smallest size of the last acknowledged request and of all later ones.

        Queued requests count, too: the control plane may be carrying out any of them.
        """
        last = [spec for spec in (self.requested, self.granted) if spec is not None]
        numbers = [n for n, spec in enumerate(self.all_requested) if spec is self.granted]
        since = self.all_requested[numbers[-1] :] if numbers else ()
        return min(spec.tasks for spec in (*last, *since))

    @property
    def is_acknowledged(self) -> bool:
        """Return whether the last request was acknowledged."""
        return self.stopped if self.requested is None else self.requested == self.granted


class Clients:
    """Owners, operators, and clients of discovery."""

    def __init__(self, timeline: Timeline, history: History) -> None:
        self._timeline, self._history = timeline, history
        self.observer = Observer()
        self.jobs: dict[str, OwnedJob] = {}
        self.entitlements: dict[str, EntitlementSpec] = {}
        self.refused: list[str] = []
        """Requests that were refused with a final error, and the error."""
        self.report_late: Callable[[ClientRequest], None] = lambda _: None
        """Called with a request that got no answer within `ANSWER_TIMEOUT_S`."""
        self._life: PlaneLife | None = None
        self._queues: dict[str, deque[ClientRequest]] = {}
        self._followed: set[str] = set()

    # -- requests

    def apply_job(self, spec: JobSpec) -> None:
        """Create or change a job."""
        owned = self.jobs.get(spec.name)
        if owned is None or (owned.stopped and owned.requested is None):
            owned = self.jobs[spec.name] = OwnedJob(spec)
        owned.requested, owned.largest_size = spec, max(owned.largest_size, spec.tasks)
        owned.all_requested = (*owned.all_requested, spec)

        def granted() -> None:
            owned.granted, owned.granted_at = spec, self._timeline.now
            self._start_following(spec.name)

        text = f"apply {spec.name} tasks={spec.tasks} image={spec.image[7:11]}"
        request = ClientRequest(f"job {spec.name}", text, lambda cp: cp.apply_job(spec), granted)
        self.submit(request)

    def stop_job(self, name: str) -> None:
        """Stop a job."""
        owned = self.jobs[name]
        owned.requested = None

        def granted() -> None:
            owned.stopped = True
            owned.granted_at = self._timeline.now

        async def send(cp: ControlPlane) -> None:
            try:
                await cp.stop_job(name)
            except NotFound:
                if owned.granted is None:
                    raise

        self.submit(ClientRequest(f"job {name}", f"stop {name}", send, granted))

    def join(self, request: JoinRequest) -> None:
        """Join a host to the region."""

        async def send(cp: ControlPlane) -> None:
            await cp.joined(request)

        subject = f"machine {request.machine}"
        self.submit(ClientRequest(subject, f"join {request.machine}", send, lambda: None))

    def put_entitlement(self, name: str, spec: EntitlementSpec) -> None:
        """Create or change an entitlement."""

        def granted() -> None:
            self.entitlements[name] = spec

        async def send(cp: ControlPlane) -> None:
            await cp.capacity.put_entitlement(name, spec)

        self.submit(ClientRequest(f"entitlement {name}", f"entitlement {name}", send, granted))

    def submit(self, request: ClientRequest) -> None:
        """Queue a request; it is sent until it is granted, or refused with a final error."""
        queue = self._queues.setdefault(request.subject, deque())
        queue.append(request)
        if len(queue) == 1:
            self._send(request)

    def is_acknowledged(self, job: str) -> bool:
        """Return whether the last request for a job was acknowledged, and none is under way.

        `OwnedJob.is_acknowledged` is not enough: a stop may be under way for a job that is then
        created again with the specification granted before.
        """
        return self.jobs[job].is_acknowledged and not self._queues.get(f"job {job}")

    def is_idle(self) -> bool:
        """Return whether every request got its answer."""
        return not any(self._queues.values())

    def has_pending(self, subject: str) -> bool:
        """Return whether a request is under way for an object whose name begins with `subject`."""
        return any(queue for name, queue in self._queues.items() if name.startswith(subject))

    # -- a life of the control plane

    def serve(self, life: PlaneLife) -> None:
        """Send all requests to a process that has just begun to serve."""
        self._life = life
        self._followed.clear()
        for queue in list(self._queues.values()):
            if queue:
                self._send(queue[0])
        for name, owned in self.jobs.items():
            if owned.granted is not None:
                self._start_following(name)

    def _send(self, request: ClientRequest) -> None:
        life = self._life
        if life is None or life.control_plane is None or request.life == life.number:
            return  # it is sent as soon as a control plane serves
        queue = self._queues[request.subject]
        if not queue or queue[0] is not request:
            return
        request.life, request.sent_at = life.number, self._timeline.now
        request.attempts += 1
        self._history.note(f"client asks: {request.text}")
        life.loop.create_task(self._attempt(request, life, life.control_plane))
        self._timeline.after(ANSWER_TIMEOUT_S, self._report_late, request, request.attempts)

    async def _attempt(
        self, request: ClientRequest, life: PlaneLife, control_plane: ControlPlane
    ) -> None:
        try:
            await request.call(control_plane)
            life.require_leader()
        except TwineError as e:
            if life.alive and life is self._life:
                self._handle_error(request, e)
        else:
            if life.alive and life is self._life:
                self._history.note(f"client is granted: {request.text}")
                request.granted()
                self._send_next(request)

    def _handle_error(self, request: ClientRequest, error: TwineError) -> None:
        self._history.note(f"client is refused: {request.text}: {error.code}")
        request.life = 0
        if error.retryable or error.code == "conflict":
            self._timeline.after(RETRY_S, self._send, request)
            return
        self.refused.append(f"{request.text}: {error}")
        self._send_next(request)

    def _send_next(self, request: ClientRequest) -> None:
        queue = self._queues[request.subject]
        queue.popleft()
        if queue:
            self._send(queue[0])

    def _report_late(self, request: ClientRequest, attempts: int) -> None:
        queue = self._queues[request.subject]
        if queue and queue[0] is request and request.attempts == attempts and request.life:
            self.report_late(request)

    # -- endpoints

    def _start_following(self, job: str) -> None:
        life = self._life
        if life is not None and life.control_plane is not None and job not in self._followed:
            self._followed.add(job)
            life.loop.create_task(self._follow(job, life, life.control_plane))

    async def _follow(self, job: str, life: PlaneLife, control_plane: ControlPlane) -> None:
        """Report each change of a job's endpoints to the observer."""
        after = 0
        while life.alive and life is self._life:
            try:
                endpoints = await control_plane.endpoints(job, after, ENDPOINTS_WAIT_S)
                life.require_leader()
            except NotFound:
                break
            except TwineError:
                await asyncio.sleep(RETRY_S)
                continue
            if endpoints.revision > after and life.alive and life is self._life:
                after = endpoints.revision
                self.observer.endpoints_changed(endpoints)
        if life.alive and life is self._life:
            self._followed.discard(job)
