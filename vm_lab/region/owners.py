"""Requests of owners in a simulated region, except good releases and resizes.

Owners release versions that never become healthy, move tasks and jobs, and propose host profiles.
"""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING

from msgspec.structs import replace

from agent.api import Disconnect, DisconnectPolicy
from control_plane.api.jobs import JobRecord, JobSpec
from control_plane.api.operations import RestartRequest
from control_plane.api.profiles import ProfileProposal
from control_plane.api.updates import Canary, OnFailure, UpdatePolicy
from control_plane.roles import ControlPlane
from vm_lab.region.clients import ClientRequest, OwnedJob
from vm_lab.region.intent_checker import expected_spec_of_writers
from vm_lab.region.machine import STUBBORN
from vm_lab.region.scenario import Scenario
from vm_lab.region.simulated_profile import FAILS
from vm_lab.region.story import Fault
from wire.errors import Conflict, NotFound

if TYPE_CHECKING:
    from vm_lab.region.seed import SimulatedRegion

PROFILE_KEYS = ["sysctl.*"]


def with_update_policies(scenario: Scenario, seed: int, specs: list[JobSpec]) -> list[JobSpec]:
    """Return the jobs, some with an update policy of their own, or with tasks slow to stop."""
    chance = random.Random(f"{scenario.name} {seed} paces")
    updated = [
        replace(spec, update=_policy(spec.update, chance))
        if chance.random() < scenario.work.paced
        else spec
        for spec in specs
    ]
    slow = [chance.random() < scenario.work.slow_to_stop for _ in updated]
    return [
        with_other_stop_times(spec, 1.0) if is_slow else spec
        for spec, is_slow in zip(updated, slow, strict=True)
    ]


def _policy(update: UpdatePolicy, chance: random.Random) -> UpdatePolicy:
    hold_s = chance.choice([5.0, 30.0, 60.0])
    return replace(
        update,
        batch=chance.choice([None, 1, 2, 3]),
        health_gate_s=chance.choice([0.0, 5.0, 20.0]),
        healthy_within_s=60.0,
        canary=Canary(tasks=chance.choice([1, 2]), hold_s=hold_s)
        if chance.random() < 0.5
        else None,
        on_failure=OnFailure.ROLLBACK,
        failures=chance.choice([1, 1, 2]),
        surge=chance.choice([0, 1, 2]),
    )


def bad_release(region: SimulatedRegion, fault: Fault, number: int) -> None:
    """Release a version whose tasks never become healthy, for a job with automatic rollback."""
    name = fault.name
    spec = region.clients.jobs[name].requested
    if spec is None or spec.update.on_failure is not OnFailure.ROLLBACK:
        return
    digest = "sha256:" + hashlib.sha256(f"bad {name} {number}".encode()).hexdigest()
    region.plane.images.add(digest)
    region.machine_context.known_images.add(digest)
    region.machine_context.bad_images.add(digest)
    region.clients.apply_job(replace(spec, image=digest))


def change_stop_times(region: SimulatedRegion, fault: Fault, _: int) -> None:
    """Change how long the tasks of a job take to stop, and its `disconnect` policy."""
    name = fault.name
    spec = region.clients.jobs[name].requested
    if spec is not None:
        region.clients.apply_job(with_other_stop_times(spec, fault.value))


def with_other_stop_times(spec: JobSpec, value: float) -> JobSpec:
    """Return the job with fast stops if its tasks were slow to stop, else with slow ones.

    With a `value` below 0.2, a cut-off machine keeps the tasks, else it stops them.
    """
    stop, long = value >= 0.2, STUBBORN not in spec.environment
    disconnect = Disconnect(policy=DisconnectPolicy.STOP, after_s=30.0) if stop else Disconnect()
    return replace(
        spec,
        stop_timeout_s=120.0 if long else 1.0,
        environment={**spec.environment, STUBBORN: "yes"} if long else {},
        disconnect=disconnect,
    )


def move_task(region: SimulatedRegion, fault: Fault, number: int) -> None:
    """Move a task of a job, in half of the cases to a machine that the owner names."""
    name = fault.name
    spec = region.clients.jobs[name].requested
    if spec is None or not spec.tasks:
        return
    index, machines = number % spec.tasks, sorted(region.machines)
    to = machines[number % len(machines)] if number % 2 else ""

    async def send(cp: ControlPlane) -> None:
        try:
            await cp.move_task(name, index, to, f"move {number}")
        except (Conflict, NotFound):
            return  # the task cannot move now, or not to this machine

    region.clients.submit(
        ClientRequest(f"job {name}", f"move {name}-{index} {to}", send, lambda: None)
    )


def restart(region: SimulatedRegion, fault: Fault, number: int) -> None:
    """Restart every task of a job in place, each as an operation."""
    name = fault.name
    spec = region.clients.jobs[name].requested
    request = RestartRequest(reason=f"restart {number}")

    async def send(cp: ControlPlane) -> None:
        for index in range(spec.tasks if spec is not None else 0):
            try:
                await cp.restart_task(name, index, request)
            except (Conflict, NotFound):
                continue  # another operation on the task is pending

    region.clients.submit(ClientRequest(f"job {name}", f"restart {name}", send, lambda: None))


def move_job(region: SimulatedRegion, fault: Fault, number: int) -> None:
    """Move a job to the next entitlement, and disable its automatic rollback."""
    name = fault.name
    owned, names = region.clients.jobs[name], sorted(region.clients.entitlements)
    spec = owned.requested
    if spec is None or spec.entitlement not in names or len(names) < 2:
        return
    if spec.update.on_failure is not OnFailure.CONTINUE:
        spec = replace(spec, update=replace(spec.update, on_failure=OnFailure.CONTINUE))
        region.clients.apply_job(spec)
    to = names[(names.index(spec.entitlement) + 1) % len(names)]
    moved = owned.requested = replace(spec, entitlement=to)

    async def send(cp: ControlPlane) -> None:
        shard = cp.shards.number_of_job(name)
        if shard is not None and cp.shards.number_of_entitlement(to) != shard:
            await cp.shards.move(to, shard)  # a job lives in one shard
        try:
            await cp.move_job(name, to)
        except Conflict:
            if (await cp.get_job(name)).record.spec.entitlement != to:
                raise  # else it was granted, and the answer was lost

    def granted() -> None:
        owned.granted, owned.granted_at = moved, region.timeline.now

    region.clients.submit(
        ClientRequest(f"job {name}", f"move {name} to {to} {number}", send, granted)
    )


def propose_profile(region: SimulatedRegion, _: Fault, number: int) -> None:
    """Propose a profile for an entitlement's machines; one in three cannot be applied."""
    names = sorted(region.clients.entitlements)
    if not names:
        return
    name = names[number % len(names)]
    base = region.clients.entitlements[name].host_profile
    text = (
        f'description = "{number}"\nextends = "{base}"\n{FAILS if number % 3 == 0 else ""}\n'
        f'[sysctl]\n"kernel.panic" = {number}\n'
    )
    request = ProfileProposal(
        text=text, reason=f"profile {number}", at_once=1 + number % 2, gate_s=10.0
    )

    async def send(cp: ControlPlane) -> None:
        try:
            await cp.profiles.propose(name, request, "owner")
        except Conflict:
            return  # another proposal is under way

    region.clients.submit(
        ClientRequest(f"entitlement {name}", f"profile {name} {number}", send, lambda: None)
    )


def expected_spec(owned: OwnedJob, record: JobRecord) -> JobSpec | None:
    """Return the specification that an owner expects, which an automatic rollback may change.

    A rollback returns to one earlier request as a whole, never to the image of one request with the
    environment of another.
    """
    if owned.intents is not None:
        return expected_spec_of_writers(owned, record)
    spec, rollout = owned.granted, record.rollout
    owned.expected_image = spec.image if spec is not None else ""
    if spec is None or spec.update.on_failure is not OnFailure.ROLLBACK:
        return spec
    if rollout is None or not rollout.returns_from:
        return spec
    back = [_with_earlier_fields(spec, request) for request in owned.all_requested]
    if record.spec not in back:
        return spec
    owned.expected_image = record.spec.image
    return record.spec


def _with_earlier_fields(spec: JobSpec, request: JobSpec) -> JobSpec:
    """Return the current specification with the fields of an earlier request that owners change."""
    return replace(
        spec,
        image=request.image,
        environment=request.environment,
        stop_timeout_s=request.stop_timeout_s,
        disconnect=request.disconnect,
    )
