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
from vm_lab.region.intent_checker import GrantedIntents, update_expected_size
from vm_lab.region.story import Fault
from vm_lab.region.topology import image
from wire.errors import Conflict

if TYPE_CHECKING:
    from vm_lab.region.seed import SimulatedRegion

_CANARY_IMAGES = 0x8000
"""Number of the first version of an image for canaries."""
_WITHDRAWN = 0.3
"""An event with a smaller value ends the current canary or hold."""


def _request_write(
    region: SimulatedRegion,
    fault: Fault,
    dimension: str,
    write: Callable[[ControlPlane, JobRecord], Awaitable[object]],
    granted: Callable[[GrantedIntents], None],
) -> None:
    """Request a write of a dimension; it is repeated after a lost answer, not after `Conflict`."""
    name = fault.name
    owned, was_granted = region.clients.jobs[name], True
    if owned.requested is None or owned.granted is None:
        return
    if owned.intents is None:
        owned.intents = GrantedIntents(owned.granted.tasks, owned.granted.image, frozenset())
        owned.intents.earlier_images = frozenset({owned.granted.image})

    async def attempt(cp: ControlPlane) -> None:
        nonlocal was_granted
        was_granted = True
        try:
            await write(cp, (await cp.get_job(name)).record)
        except Conflict:
            was_granted = False

    def done() -> None:
        if was_granted and owned.intents is not None:
            granted(owned.intents)
            owned.intents.written_dimensions.add(dimension)
        update_expected_size(owned, region.timeline.now)

    about = f"job {name} {dimension}"
    region.clients.submit(
        ClientRequest(about, f"{fault.kind} {name} {fault.value:.3f}", attempt, done)
    )


def push(region: SimulatedRegion, fault: Fault, number: int) -> None:
    """Push a new image to the share `value` of the tasks."""
    name = fault.name
    digest = _new_image(region, name, 0x1000 + number)

    async def write(cp: ControlPlane, record: JobRecord) -> None:
        change = PushChange(
            image=digest, share=_share(fault), expect=_intent_version(record, "push")
        )
        await cp.intents.push(name, change, "user:conveyor")

    def granted(intents: GrantedIntents) -> None:
        intents.earlier_images |= {intents.image}
        intents.image, intents.share = digest, _share(fault)

    _request_write(region, fault, "push", write, granted)


def stage(region: SimulatedRegion, fault: Fault, _: int) -> None:
    """Change the share of the tasks that run the pushed image."""
    name = fault.name

    async def write(cp: ControlPlane, record: JobRecord) -> None:
        change = PushChange(share=_share(fault), expect=_intent_version(record, "push"))
        await cp.intents.push(name, change, "user:conveyor")

    def granted(intents: GrantedIntents) -> None:
        intents.share = _share(fault)

    _request_write(region, fault, "push", write, granted)


def size(region: SimulatedRegion, fault: Fault, _: int) -> None:
    """Write another size, as the autoscaler does."""
    name = fault.name
    fewest, most = region.scenario.work.tasks
    tasks = round(fewest + fault.value * (most - fewest))
    owned = region.clients.jobs[name]

    async def write(cp: ControlPlane, _: JobRecord) -> None:
        if owned.requested is not None:
            owned.requested = replace(owned.requested, tasks=min(owned.requested.tasks, tasks))
        owned.largest_size = max(owned.largest_size, tasks)
        await cp.intents.size(name, SizeChange(tasks=tasks), "user:scaler")

    def granted(intents: GrantedIntents) -> None:
        intents.size = tasks

    _request_write(region, fault, "size", write, granted)


def stale_size(region: SimulatedRegion, fault: Fault, _: int) -> None:
    """Write a size that expects a replaced version; the control plane must refuse it."""
    name = fault.name
    tasks = region.scenario.work.tasks[1] + 1

    async def write(cp: ControlPlane, record: JobRecord) -> None:
        known = _intent_version(record, "size")
        if known:
            change = SizeChange(tasks=tasks, expect=known - 1)
            await cp.intents.size(name, change, "user:scaler")
            region.checker.violate("last-write", f"{name}: a stale size was granted", name)

    _request_write(region, fault, "stale", write, lambda _: None)


def canary(region: SimulatedRegion, fault: Fault, number: int) -> None:
    """Start a canary of a few tasks, or end the current one."""
    name = fault.name
    tasks, digest = 1 + number % 3, _new_image(region, name, _CANARY_IMAGES + number)
    ends = fault.value < _WITHDRAWN

    async def write(cp: ControlPlane, record: JobRecord) -> None:
        if not ends:
            change = CanaryChange(tasks=tasks, image=digest, lasts_s=fault.seconds)
            await cp.intents.canary(name, change, "user:tester")
        elif _intent_version(record, "canary"):
            await cp.intents.withdraw(name, "canary", IntentChange(), "user:tester")

    def granted(intents: GrantedIntents) -> None:
        intents.canaries = 0 if ends else tasks
        intents.canaries_end = 0.0 if ends else region.timeline.now + fault.seconds

    _request_write(region, fault, "canary", write, granted)


def hold(region: SimulatedRegion, fault: Fault, _: int) -> None:
    """Hold the job for a while, or end the current hold."""
    name = fault.name
    ends = fault.value < _WITHDRAWN

    async def write(cp: ControlPlane, record: JobRecord) -> None:
        if not ends:
            await cp.intents.hold(name, HoldChange(lasts_s=fault.seconds), "user:sre")
        elif _intent_version(record, "hold"):
            await cp.intents.withdraw(name, "hold", IntentChange(), "user:sre")

    def granted(intents: GrantedIntents) -> None:
        intents.held_until = 0.0 if ends else region.timeline.now + fault.seconds
        intents.held_versions = {}

    _request_write(region, fault, "hold", write, granted)


def runtime(region: SimulatedRegion, fault: Fault, number: int) -> None:
    """Write the runtime for the next push."""
    name = fault.name
    change = InfrastructureChange(runtime=f"r{number}")

    async def write(cp: ControlPlane, _: JobRecord) -> None:
        await cp.intents.infrastructure(name, change, "user:sre")

    _request_write(region, fault, "infrastructure", write, lambda _: None)


def old_file(region: SimulatedRegion, fault: Fault, _: int) -> None:
    """Apply the owner's first job file, once other writers own push and size."""
    name = fault.name
    owned = region.clients.jobs[name]

    async def write(cp: ControlPlane, _: JobRecord) -> None:
        intents = owned.intents
        if intents is not None and {"push", "size"} <= intents.written_dimensions:
            await cp.apply_job(owned.all_requested[0], writer="user:owner")

    _request_write(region, fault, "file", write, lambda _: None)


INJECTORS: dict[str, Callable[[SimulatedRegion, Fault, int], None]] = {
    "push": push,
    "stage": stage,
    "size": size,
    "stale-size": stale_size,
    "canary": canary,
    "hold": hold,
    "runtime": runtime,
    "old-file": old_file,
}


def _share(fault: Fault) -> float:
    return min(1.0, max(0.0, fault.value))


def _intent_version(record: JobRecord, dimension: str) -> int:
    intent = record.intents.get(dimension)
    return 0 if intent is None else intent.version


def _new_image(region: SimulatedRegion, name: str, number: int) -> str:
    """Return a new image that a job may come to run."""
    digest = image(int(name.removeprefix("job")), number)
    region.plane.images.add(digest)
    region.machine_context.known_images.add(digest)
    owned = region.clients.jobs[name]
    owned.all_requested = (*owned.all_requested, replace(owned.all_requested[0], image=digest))
    return digest
