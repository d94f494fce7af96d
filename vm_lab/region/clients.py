"""The people of a simulated region: they ask, wait for the answer, ask again when it is lost.

One wish per object is under way at a time, as one owner would do it. What was acknowledged
is remembered here, so that the checker can ask whether it still holds.
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
"""Until a client asks again that got no answer, or "try again"."""
PATIENCE_S = 120.0
"""An answer that takes longer, while nothing is wrong, is a fault of its own."""
LISTEN_S = 60.0


@dataclass(slots=True)
class ClientWish:
    """Something that a client wants of the control plane."""

    about: str
    """The object; wishes about one are carried out one after the other."""
    text: str
    ask: Callable[[ControlPlane], Awaitable[object]]
    granted: Callable[[], None]
    tries: int = 0
    life: int = 0
    """The life of the process that has it in hand, 0: none has."""
    asked_at: float = 0.0


@dataclass(slots=True)
class Owned:
    """A job from its owner's view."""

    asked: JobSpec | None
    """What was asked for last; None: that it stops."""
    granted: JobSpec | None = None
    """What was acknowledged last."""
    granted_at: float = 0.0
    stopped: bool = False
    """A stop was acknowledged."""
    runs: str = ""
    """The image that its tasks are to run in the end: it may have gone back by itself."""
    most: int = 0
    """The most tasks that it was ever to have."""
    wishes: tuple[JobSpec, ...] = ()
    """Every specification that was ever asked for, oldest first."""
    intents: GrantedIntents | None = None
    """What other writers were granted, if it has some (`writers.py`)."""

    @property
    def images(self) -> frozenset[str]:
        """Return every image that was ever asked for."""
        return frozenset(spec.image for spec in self.wishes)

    @property
    def fewest(self) -> int:
        """Return the fewest tasks of what was acknowledged last and of all that was asked since.

        What waits behind another wish is asked for, too: one between may be carried out now.
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
        """Wishes that were refused for good, with the reason."""
        self.late: Callable[[ClientWish], None] = lambda _: None
        """Called with a wish that got no answer for too long."""
        self._life: PlaneLife | None = None
        self._queues: dict[str, deque[ClientWish]] = {}
        self._watched: set[str] = set()

    # -- wishes

    def apply_job(self, spec: JobSpec) -> None:
        """Want a job to be so."""
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
        """Want a job to end."""
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
        """Want a host to become a machine of the region."""

        async def ask(cp: ControlPlane) -> None:
            await cp.joined(request)

        about = f"machine {request.machine}"
        self.want(ClientWish(about, f"join {request.machine}", ask, lambda: None))

    def put_entitlement(self, name: str, spec: EntitlementSpec) -> None:
        """Want an entitlement to be so."""

        def granted() -> None:
            self.entitlements[name] = spec

        async def ask(cp: ControlPlane) -> None:
            await cp.put_entitlement(name, spec)

        self.want(ClientWish(f"entitlement {name}", f"entitlement {name}", ask, granted))

    def want(self, wish: ClientWish) -> None:
        """Queue a wish; it is requested until it is granted, or refused for good."""
        queue = self._queues.setdefault(wish.about, deque())
        queue.append(wish)
        if len(queue) == 1:
            self._ask(wish)

    def has_settled(self, job: str) -> bool:
        """Return whether the last wish about a job was acknowledged, and none is under way.

        A job that is to stop and then to be as it was is wanted as it was granted, while the stop
        may have been carried out already.
        """
        return self.jobs[job].settled and not self._queues.get(f"job {job}")

    def idle(self) -> bool:
        """Return whether every wish got its answer."""
        return not any(self._queues.values())

    def waits(self, about: str) -> bool:
        """Return whether a wish is under way about objects whose names begin so."""
        return any(queue for name, queue in self._queues.items() if name.startswith(about))

    # -- a life of the control plane

    def serve(self, life: PlaneLife) -> None:
        """Turn to a process that has just begun to serve."""
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
            return  # it is asked as soon as a control plane serves
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
        """Tell the observer about each change of a job's endpoints."""
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
