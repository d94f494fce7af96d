"""The users of a simulated region: they send requests, and repeat them if the answer is lost.

At most one wish for each object is under way at a time. Acknowledged wishes are kept, so that the
checker can compare them with the control plane's records.
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

AGAIN_S = 2.0
"""Seconds until a client repeats a request that got no answer, or a retryable error."""
PATIENCE_S = 120.0
"""Seconds; an answer that takes longer, without a fault, is a violation."""
LISTEN_S = 60.0


@dataclass(slots=True)
class ClientWish:
    """One request of a client."""

    about: str
    """The object; wishes for the same object are sent one after the other."""
    text: str
    ask: Callable[[ControlPlane], Awaitable[object]]
    granted: Callable[[], None]
    tries: int = 0
    life: int = 0
    """Number of the process life that handles it; 0: none does."""
    asked_at: float = 0.0


@dataclass(slots=True)
class Owned:
    """A job as its owner requested it."""

    asked: JobSpec | None
    """The specification requested last; None: a stop was requested."""
    granted: JobSpec | None = None
    """The specification acknowledged last."""
    granted_at: float = 0.0
    stopped: bool = False
    """Whether a stop was acknowledged."""
    runs: str = ""
    """The image that its tasks must run in the end; a rollback may have changed it."""
    most: int = 0
    """Largest number of tasks ever requested."""
    wishes: tuple[JobSpec, ...] = ()
    """Every specification ever requested, oldest first."""
    intents: GrantedIntents | None = None
    """The intents granted to other writers, if the job has some (`writers.py`)."""

    @property
    def images(self) -> frozenset[str]:
        """Return every image ever requested."""
        return frozenset(spec.image for spec in self.wishes)

    @property
    def fewest(self) -> int:
        """Return the smallest size of the last acknowledged wish and of all later ones.

        Queued wishes count, too: the control plane may be carrying out any of them.
        """
        last = [spec for spec in (self.asked, self.granted) if spec is not None]
        numbers = [n for n, spec in enumerate(self.wishes) if spec is self.granted]
        since = self.wishes[numbers[-1] :] if numbers else ()
        return min(spec.tasks for spec in (*last, *since))

    @property
    def settled(self) -> bool:
        """Return whether the last wish was acknowledged."""
        return self.stopped if self.asked is None else self.asked == self.granted


class Clients:
    """Owners, operators, and clients of discovery."""

    def __init__(self, timeline: Timeline, history: History) -> None:
        self._timeline, self._history = timeline, history
        self.observer = Observer()
        self.jobs: dict[str, Owned] = {}
        self.entitlements: dict[str, EntitlementSpec] = {}
        self.refused: list[str] = []
        """Wishes that were refused with a final error, and the error."""
        self.late: Callable[[ClientWish], None] = lambda _: None
        """Called with a wish that got no answer within `PATIENCE_S`."""
        self._life: PlaneLife | None = None
        self._queues: dict[str, deque[ClientWish]] = {}
        self._watched: set[str] = set()

    # -- wishes

    def apply_job(self, spec: JobSpec) -> None:
        """Create or change a job."""
        owned = self.jobs.get(spec.name)
        if owned is None or (owned.stopped and owned.asked is None):
            owned = self.jobs[spec.name] = Owned(spec)
        owned.asked, owned.most = spec, max(owned.most, spec.tasks)
        owned.wishes = (*owned.wishes, spec)

        def granted() -> None:
            owned.granted, owned.granted_at = spec, self._timeline.now
            self._watch(spec.name)

        text = f"apply {spec.name} tasks={spec.tasks} image={spec.image[7:11]}"
        wish = ClientWish(f"job {spec.name}", text, lambda cp: cp.apply_job(spec), granted)
        self.want(wish)

    def stop_job(self, name: str) -> None:
        """Stop a job."""
        owned = self.jobs[name]
        owned.asked = None

        def granted() -> None:
            owned.stopped = True
            owned.granted_at = self._timeline.now

        async def ask(cp: ControlPlane) -> None:
            try:
                await cp.stop_job(name)
            except NotFound:
                if owned.granted is None:
                    raise

        self.want(ClientWish(f"job {name}", f"stop {name}", ask, granted))

    def join(self, request: JoinRequest) -> None:
        """Join a host to the region."""

        async def ask(cp: ControlPlane) -> None:
            await cp.joined(request)

        about = f"machine {request.machine}"
        self.want(ClientWish(about, f"join {request.machine}", ask, lambda: None))

    def put_entitlement(self, name: str, spec: EntitlementSpec) -> None:
        """Create or change an entitlement."""

        def granted() -> None:
            self.entitlements[name] = spec

        async def ask(cp: ControlPlane) -> None:
            await cp.put_entitlement(name, spec)

        self.want(ClientWish(f"entitlement {name}", f"entitlement {name}", ask, granted))

    def want(self, wish: ClientWish) -> None:
        """Queue a wish; it is sent until it is granted, or refused with a final error."""
        queue = self._queues.setdefault(wish.about, deque())
        queue.append(wish)
        if len(queue) == 1:
            self._ask(wish)

    def has_settled(self, job: str) -> bool:
        """Return whether the last wish for a job was acknowledged, and none is under way.

        `Owned.settled` is not enough: a stop may be under way for a job that is then created again
        with the specification granted before.
        """
        return self.jobs[job].settled and not self._queues.get(f"job {job}")

    def idle(self) -> bool:
        """Return whether every wish got its answer."""
        return not any(self._queues.values())

    def waits(self, about: str) -> bool:
        """Return whether a wish is under way for an object whose name begins with `about`."""
        return any(queue for name, queue in self._queues.items() if name.startswith(about))

    # -- a life of the control plane

    def serve(self, life: PlaneLife) -> None:
        """Send all requests to a process that has just begun to serve."""
        self._life = life
        self._watched.clear()
        for queue in list(self._queues.values()):
            if queue:
                self._ask(queue[0])
        for name, owned in self.jobs.items():
            if owned.granted is not None:
                self._watch(name)

    def _ask(self, wish: ClientWish) -> None:
        life = self._life
        if life is None or life.control_plane is None or wish.life == life.number:
            return  # it is sent as soon as a control plane serves
        queue = self._queues[wish.about]
        if not queue or queue[0] is not wish:
            return
        wish.life, wish.asked_at = life.number, self._timeline.now
        wish.tries += 1
        self._history.note(f"client asks: {wish.text}")
        life.loop.create_task(self._attempt(wish, life, life.control_plane))
        self._timeline.after(PATIENCE_S, self._still_waiting, wish, wish.tries)

    async def _attempt(
        self, wish: ClientWish, life: PlaneLife, control_plane: ControlPlane
    ) -> None:
        try:
            await wish.ask(control_plane)
            life.check_leads()
        except TwineError as e:
            if life.alive and life is self._life:
                self._failed(wish, e)
        else:
            if life.alive and life is self._life:
                self._history.note(f"client is granted: {wish.text}")
                wish.granted()
                self._done(wish)

    def _failed(self, wish: ClientWish, error: TwineError) -> None:
        self._history.note(f"client is refused: {wish.text}: {error.code}")
        wish.life = 0
        if error.retryable or error.code == "conflict":
            self._timeline.after(AGAIN_S, self._ask, wish)
            return
        self.refused.append(f"{wish.text}: {error}")
        self._done(wish)

    def _done(self, wish: ClientWish) -> None:
        queue = self._queues[wish.about]
        queue.popleft()
        if queue:
            self._ask(queue[0])

    def _still_waiting(self, wish: ClientWish, tries: int) -> None:
        queue = self._queues[wish.about]
        if queue and queue[0] is wish and wish.tries == tries and wish.life:
            self.late(wish)

    # -- endpoints

    def _watch(self, job: str) -> None:
        life = self._life
        if life is not None and life.control_plane is not None and job not in self._watched:
            self._watched.add(job)
            life.loop.create_task(self._follow(job, life, life.control_plane))

    async def _follow(self, job: str, life: PlaneLife, control_plane: ControlPlane) -> None:
        """Report each change of a job's endpoints to the observer."""
        after = 0
        while life.alive and life is self._life:
            try:
                found = await control_plane.endpoints(job, after, LISTEN_S)
                life.check_leads()
            except NotFound:
                break
            except TwineError:
                await asyncio.sleep(AGAIN_S)
                continue
            if found.revision > after and life.alive and life is self._life:
                after = found.revision
                self.observer.listed(found)
        if life.alive and life is self._life:
            self._watched.discard(job)
