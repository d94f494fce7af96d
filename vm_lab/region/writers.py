"""Writers of intents in a simulated region: five of them, each with its own dimension.

A conveyor pushes images, an autoscaler writes sizes, a tester starts canaries, operators hold jobs
and write runtimes, and an owner applies an old job file. Events of the story trigger the writes;
each writer sends one at a time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from control_plane.api.intent_changes import (
    CanaryChange,
    HoldChange,
    InfrastructureChange,
    IntentChange,
    PushChange,
    SizeChange,
)
from control_plane.api.jobs import JobRecord
from control_plane.roles import ControlPlane
from vm_lab.region.clients import ClientRequest
from vm_lab.region.intent_checker import GrantedIntents, in_force
from vm_lab.region.story import Fault
from vm_lab.region.topology import image
from wire.errors import Conflict

if TYPE_CHECKING:
    from vm_lab.region.seed import SimulatedRegion

_CANARY_IMAGES = 0x8000
"""Number of the first version of an image for canaries."""
_WITHDRAWN = 0.3
"""An event with a smaller value ends the current canary or hold."""


def _writes(
    region: SimulatedRegion,
    fault: Fault,
    dimension: str,
    ask: Callable[[ControlPlane, JobRecord], Awaitable[object]],
    granted: Callable[[GrantedIntents], None],
) -> None:
    """Request a write of a dimension; it is repeated after a lost answer, not after `Conflict`."""
    name = fault.name
    owned, was_granted = region.clients.jobs[name], True
    if owned.asked is None or owned.granted is None:
        return
    if owned.intents is None:
        owned.intents = GrantedIntents(owned.granted.tasks, owned.granted.image, frozenset())
        owned.intents.stable = frozenset({owned.granted.image})

    async def attempt(cp: ControlPlane) -> None:
        nonlocal was_granted
        was_granted = True
        try:
            await ask(cp, (await cp.get_job(name)).record)
        except Conflict:
            was_granted = False

    def done() -> None:
        if was_granted and owned.intents is not None:
            granted(owned.intents)
            owned.intents.owned.add(dimension)
        in_force(owned, region.timeline.now)

    about = f"job {name} {dimension}"
    region.clients.want(
        ClientRequest(about, f"{fault.kind} {name} {fault.value:.3f}", attempt, done)
    )


def push(region: SimulatedRegion, fault: Fault, number: int) -> None:
    """Push a new image to the share `value` of the tasks."""
    name = fault.name
    digest = _image(region, name, 0x1000 + number)

    async def ask(cp: ControlPlane, record: JobRecord) -> None:
        change = PushChange(image=digest, share=_part(fault), expect=_version(record, "push"))
        await cp.intents.push(name, change, "user:conveyor")

    def granted(now: GrantedIntents) -> None:
        now.stable |= {now.image}
        now.image, now.share = digest, _part(fault)

    _writes(region, fault, "push", ask, granted)


def stage(region: SimulatedRegion, fault: Fault, _: int) -> None:
    """Change the share of the tasks that run the pushed image."""
    name = fault.name

    async def ask(cp: ControlPlane, record: JobRecord) -> None:
        change = PushChange(share=_part(fault), expect=_version(record, "push"))
        await cp.intents.push(name, change, "user:conveyor")

    def granted(now: GrantedIntents) -> None:
        now.share = _part(fault)

    _writes(region, fault, "push", ask, granted)


def size(region: SimulatedRegion, fault: Fault, _: int) -> None:
    """Write another size, as the autoscaler does."""
    name = fault.name
    fewest, most = region.scenario.work.tasks
    tasks = round(fewest + fault.value * (most - fewest))
    owned = region.clients.jobs[name]

    async def ask(cp: ControlPlane, _: JobRecord) -> None:
        if owned.asked is not None:
            owned.asked = replace(owned.asked, tasks=min(owned.asked.tasks, tasks))
        owned.most = max(owned.most, tasks)
        await cp.intents.size(name, SizeChange(tasks=tasks), "user:scaler")

    def granted(now: GrantedIntents) -> None:
        now.size = tasks

    _writes(region, fault, "size", ask, granted)


def stale_size(region: SimulatedRegion, fault: Fault, _: int) -> None:
    """Write a size that expects a replaced version; the control plane must refuse it."""
    name = fault.name
    tasks = region.scenario.work.tasks[1] + 1

    async def ask(cp: ControlPlane, record: JobRecord) -> None:
        known = _version(record, "size")
        if known:
            change = SizeChange(tasks=tasks, expect=known - 1)
            await cp.intents.size(name, change, "user:scaler")
            region.checker.violate("last-write", f"{name}: a stale size was granted", name)

    _writes(region, fault, "stale", ask, lambda _: None)


def canary(region: SimulatedRegion, fault: Fault, number: int) -> None:
    """Start a canary of a few tasks, or end the current one."""
    name = fault.name
    tasks, digest = 1 + number % 3, _image(region, name, _CANARY_IMAGES + number)
    ends = fault.value < _WITHDRAWN

    async def ask(cp: ControlPlane, record: JobRecord) -> None:
        if not ends:
            change = CanaryChange(tasks=tasks, image=digest, lasts_s=fault.seconds)
            await cp.intents.canary(name, change, "user:tester")
        elif _version(record, "canary"):
            await cp.intents.withdraw(name, "canary", IntentChange(), "user:tester")

    def granted(now: GrantedIntents) -> None:
        now.canaries = 0 if ends else tasks
        now.canaries_end = 0.0 if ends else region.timeline.now + fault.seconds

    _writes(region, fault, "canary", ask, granted)


def hold(region: SimulatedRegion, fault: Fault, _: int) -> None:
    """Hold the job for a while, or end the current hold."""
    name = fault.name
    ends = fault.value < _WITHDRAWN

    async def ask(cp: ControlPlane, record: JobRecord) -> None:
        if not ends:
            await cp.intents.hold(name, HoldChange(lasts_s=fault.seconds), "user:sre")
        elif _version(record, "hold"):
            await cp.intents.withdraw(name, "hold", IntentChange(), "user:sre")

    def granted(now: GrantedIntents) -> None:
        now.held_until = 0.0 if ends else region.timeline.now + fault.seconds
        now.versions = {}

    _writes(region, fault, "hold", ask, granted)


def runtime(region: SimulatedRegion, fault: Fault, number: int) -> None:
    """Write the runtime for the next push."""
    name = fault.name
    change = InfrastructureChange(runtime=f"r{number}")

    async def ask(cp: ControlPlane, _: JobRecord) -> None:
        await cp.intents.infrastructure(name, change, "user:sre")

    _writes(region, fault, "infrastructure", ask, lambda _: None)


def old_file(region: SimulatedRegion, fault: Fault, _: int) -> None:
    """Apply the owner's first job file, once other writers own push and size."""
    name = fault.name
    owned = region.clients.jobs[name]

    async def ask(cp: ControlPlane, _: JobRecord) -> None:
        intents = owned.intents
        if intents is not None and {"push", "size"} <= intents.owned:
            await cp.apply_job(owned.requests[0], writer="user:owner")

    _writes(region, fault, "file", ask, lambda _: None)


STRIKES: dict[str, Callable[[SimulatedRegion, Fault, int], None]] = {
    "push": push,
    "stage": stage,
    "size": size,
    "stale-size": stale_size,
    "canary": canary,
    "hold": hold,
    "runtime": runtime,
    "old-file": old_file,
}


def _part(fault: Fault) -> float:
    return min(1.0, max(0.0, fault.value))


def _version(record: JobRecord, dimension: str) -> int:
    intent = record.intents.get(dimension)
    return 0 if intent is None else intent.version


def _image(region: SimulatedRegion, name: str, number: int) -> str:
    """Return a new image that a job may come to run."""
    digest = image(int(name.removeprefix("job")), number)
    region.plane.images.add(digest)
    region.setting.known_images.add(digest)
    owned = region.clients.jobs[name]
    owned.requests = (*owned.requests, replace(owned.requests[0], image=digest))
    return digest
