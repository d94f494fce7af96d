"""Answers of a modelled agent: the rules of the agent's API, one function for each call.

The newer epoch wins, then the higher generation. A removed task stays removed for requests with an
old one. Functions raise the `TwineError` that the real agent would send.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from agent import api
from agent.api import ProfileState, TaskState
from agent.api.notices import HostNotices
from agent.api.term import OwnerTerm
from agent.lease.core.term import has_later_owner, with_owner
from vm_lab.region.machine import RESERVE_BYTES, Copy, SimulatedMachine
from wire.errors import Busy, Conflict, NotFound, TwineError, Unprocessable

Reply = Callable[[object], None]
"""Receives the answer, or the error."""


def get_machine(machine: SimulatedMachine) -> api.MachineFacts:
    """Return the facts about the host."""
    return machine.facts()


def list_images(machine: SimulatedMachine) -> api.Images:
    """Return all images that are completely fetched."""
    return api.Images(images=[_image(digest) for digest in sorted(machine.images)])


def list_tasks(machine: SimulatedMachine) -> api.Tasks:
    """Return all tasks."""
    return api.Tasks(tasks=[machine.status(copy) for copy in machine.copies.values()])


def get_profile(machine: SimulatedMachine) -> api.ProfileStatus:
    """Return the state of the host profile."""
    return machine.profile.status


def pull_image(machine: SimulatedMachine, pull: api.ImagePull, reply: Reply) -> None:
    """Fetch an image once for all callers that wait for it, then answer them all."""
    digest = pull.digest
    if digest in machine.images:
        reply(_image(digest))
        return

    def pulled(failure: str) -> None:
        reply(Unprocessable(failure) if failure else _image(digest))

    waiting = machine.pulls.setdefault(digest, [])
    waiting.append(pulled)
    if len(waiting) == 1:
        took = machine.draw(machine.pace.pull)
        machine.context.timeline.after(took, _pulled, machine, digest, waiting)


def _pulled(machine: SimulatedMachine, digest: str, waiting: list[Callable[[str], None]]) -> None:
    if machine.pulls.get(digest) is not waiting:
        return  # the agent has restarted since
    del machine.pulls[digest]
    failure = ""
    if machine.pull_fails:
        failure = f"cannot fetch image {digest[:15]}: the disk is full"
    elif digest not in machine.context.known_images:
        failure = f"cannot fetch image {digest[:15]}: the image store does not have it"
    else:
        machine.images.add(digest)
        machine.add_event("image", digest)
    for answer in waiting:
        answer(failure)


def put_task(machine: SimulatedMachine, task_id: str, spec: api.TaskSpec) -> api.TaskStatus:
    """Store the desired state of a task."""
    known = machine.copies.get(task_id)
    _check_not_stale(machine, task_id, spec.epoch, spec.generation, known)
    if known is not None and known.wanted and known.spec.generation == spec.generation:
        if replace(spec, epoch=known.spec.epoch) != known.spec:
            raise Conflict(f"task {task_id} is not changed: its generation has another content")
        known.spec = replace(known.spec, epoch=spec.epoch)
        return machine.status(known)
    if machine.contact.has_run_out(spec):
        raise Busy(f"task {task_id} is not changed: no answer of this host was acknowledged")
    _admit(machine, task_id, spec)
    machine.context.history.note(
        f"{machine.name} put {task_id} generation {spec.generation} epoch {spec.epoch}"
        f" image {spec.image[7:11]}"
    )
    machine.context.observer.put_accepted(machine, task_id, spec)
    if known is None:
        copy = machine.copies[task_id] = Copy(task_id, spec)
        machine.start(copy)
        machine.contact.watch(copy)
        return machine.status(copy)
    return _changed(machine, known, spec)


def _changed(machine: SimulatedMachine, copy: Copy, spec: api.TaskSpec) -> api.TaskStatus:
    """Change the specification of an existing task."""
    same = copy.wanted and _restart_key(copy.spec) == _restart_key(spec)
    copy.spec, copy.wanted = spec, True
    if copy.alive and same:
        copy.step_number += copy.state is TaskState.STOPPING
        machine.set_state(copy, copy.state, copy.health)
        if copy.state is TaskState.STOPPING:
            machine.stop_processes(copy, machine.start)
    elif copy.alive:
        machine.stop_processes(copy, machine.start)
    else:
        machine.start(copy)
    machine.contact.watch(copy)
    return machine.status(copy)


def delete_task(
    machine: SimulatedMachine, task_id: str, generation: int | None, epoch: int | None
) -> api.TaskStatus:
    """Stop a task and remove it."""
    copy = machine.copies.get(task_id)
    new_epoch, new_generation = epoch or 0, generation or 0
    if copy is None:
        tombstone = machine.tombstones.get(task_id, (0, 0))
        machine.tombstones[task_id] = max(tombstone, (new_epoch, new_generation))
        raise NotFound(f"there is no task {task_id} on this machine")
    current = (copy.spec.epoch, copy.spec.generation)
    if (new_epoch, new_generation) < current:
        raise Conflict(
            f"task {task_id} is not changed: it is at {current}, asked at {new_generation}"
        )
    copy.spec = replace(copy.spec, epoch=new_epoch, generation=new_generation)
    if copy.wanted:
        copy.wanted = False
        copy.reason = "stop was asked for"
        machine.context.history.note(
            f"{machine.name} delete {task_id} generation {new_generation} epoch {new_epoch}"
        )
        machine.stop_processes(copy, machine.forget)
    return machine.status(copy)


def put_notices(machine: SimulatedMachine, notices: HostNotices) -> HostNotices:
    """Store the notices for the machine's tasks; modelled work reads them there."""
    machine.notices = notices
    return notices


def put_profile(machine: SimulatedMachine, spec: api.ProfileSpec) -> api.ProfileStatus:
    """Set the desired host profile."""
    current = machine.profile.status
    if (spec.epoch, spec.generation) < (current.epoch, current.generation):
        raise Conflict(f"profile {spec.name} is not applied: generation {spec.generation} is old")
    same = (spec.name, spec.generation) == (current.name, current.generation)
    if same and current.state in (ProfileState.VERIFIED, ProfileState.APPLYING):
        return current
    machine.profile.switch(spec)
    return machine.profile.status


def _check_not_stale(
    machine: SimulatedMachine, task_id: str, epoch: int, generation: int, copy: Copy | None
) -> None:
    """Raise `Conflict` if the request is older than the state in force."""
    if copy is not None:
        current = (copy.spec.epoch, copy.spec.generation)
        gone = not copy.wanted
    else:
        tombstone = machine.tombstones.get(task_id)
        if tombstone is None:
            return
        current, gone = tombstone, True
    if (epoch, generation) < current or (gone and (epoch, generation) == current):
        raise Conflict(
            f"task {task_id} is not changed: epoch {epoch} generation {generation} is older than"
            f" epoch {current[0]} generation {current[1]}, in force"
        )


def _admit(machine: SimulatedMachine, task_id: str, spec: api.TaskSpec) -> None:
    if spec.image not in machine.images:
        raise Unprocessable(f"task {task_id} cannot run: image {spec.image[:15]} is not here")
    others, need = machine.committed_bytes(task_id), spec.limits.memory_max_bytes
    if others + need > machine.memory_bytes - RESERVE_BYTES:
        raise Unprocessable(f"task {task_id} cannot run: memory_max_bytes {need} does not fit")


def _restart_key(spec: api.TaskSpec) -> tuple[object, ...]:
    """Return the parts of a specification that cannot change without a restart."""
    return (spec.image, tuple(spec.command), tuple(sorted(spec.environment.items())))


def _record_owner(machine: SimulatedMachine, request: AgentCall) -> None:
    """Record the owner of the machine's entitlement; refuse a write of an earlier owner."""
    owner = request.owner
    if owner is None:
        return
    if request.mutates and has_later_owner(owner, machine.owners):
        raise Conflict(f"nothing is changed on {machine.name}: {owner.text()} is an earlier owner")
    machine.owners = with_owner(owner, machine.owners)


def _image(digest: str) -> api.ImageInfo:
    return api.ImageInfo(digest=digest, format=api.ImageFormat.TAR, stream_bytes=1, created_at=0.0)


@dataclass(frozen=True, slots=True)
class AgentCall:
    """One request to an agent, and its sender."""

    handle: Callable[..., object]
    args: tuple[object, ...]
    owner: OwnerTerm | None = None
    """The sender's term as owner of the machine's entitlement; None: no shard owns it."""
    mutates: bool = False
    sender: int = 0
    """Number of the process life that sends the request."""


def answer(machine: SimulatedMachine, request: AgentCall) -> object:
    """Return the agent's answer; errors are returned, not raised."""
    try:
        _record_owner(machine, request)
        answered = request.handle(machine, *request.args)
        if request.mutates:
            machine.context.on_command(machine, request.sender)
        return answered
    except TwineError as e:
        return e
