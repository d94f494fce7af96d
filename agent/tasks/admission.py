"""Admits tasks: compares a task's needs with what this host has and has promised to others."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from agent.api import TaskSpec
from agent.api.credentials import contradictions as configuration_contradictions
from agent.api.network import contradiction as network_contradiction
from agent.api.own_init import contradictions as own_init_contradictions
from agent.api.resources import contradiction as resources_contradiction
from agent.api.signing import SIGN_HINT, distrust
from agent.api.volumes import contradiction as volumes_contradiction
from agent.images.core.image_run import as_run
from agent.images.published import IMAGE_FILES
from agent.images.roots import INITS, ImageFacts
from agent.machine import HostHardware
from agent.resources.core.limits import (
    hardware_refusal,
    memory_protection_refusal,
    resources_refusal,
)
from agent.runtime.core.records import has_own_init
from agent.tasks.context import HostCapacity
from agent.tasks.core.admission import limits_refusal
from agent.volumes.core.volumes import volumes_refusal
from wire.errors import Conflict, Unprocessable

_REQUEST_LESS_HINT = "stop a task, or request less"


class TaskAdmission:
    """Checks whether one more task fits on this host. `read_host` must be called before `check`."""

    def __init__(
        self,
        capacity: HostCapacity,
        hardware: HostHardware,
        reserve_bytes: int,
        others: Callable[[str], dict[str, TaskSpec]],
        is_over: Callable[[str], bool],
    ) -> None:
        """Keep `reserve_bytes` of memory for the host.

        `others` returns the specifications of all wanted tasks but one, `is_over` whether one of
        them has ended for good.
        """
        self._capacity = capacity
        self._others, self._is_over = others, is_over
        self._memory_bytes = hardware.memory_bytes - reserve_bytes
        self._cpus, self._nodes = hardware.cpu.online, hardware.cpu.numa_nodes
        self._cpuset = "cpuset" in hardware.cgroup_controllers
        self._taken_bytes = 0
        """Memory in huge pages at the last `read_host`, in bytes; it changes with the profile."""
        self._disk_bytes = 0
        """Size of the disk at the last `read_host`, in bytes."""
        self._disks: dict[str, str] = {}
        """Block device → the kernel's name for it, at the last `read_host`."""

    async def read_host(self, spec: TaskSpec) -> None:
        """Read how much this host has of the resources that a task requests."""
        capacity = self._capacity
        self._taken_bytes = capacity.pages.refresh()
        if spec.resources.io:
            self._disks = await capacity.lanes.run("usage", capacity.cgroups.disks)
        if spec.volumes:
            self._disk_bytes = await capacity.lanes.run("btrfs", capacity.volumes.disk_bytes)

    async def read_image(self, spec: TaskSpec) -> ImageFacts:
        """Read the image of a task."""
        capacity = self._capacity
        return await capacity.lanes.run(IMAGE_FILES, capacity.roots.facts, spec.image)

    def check(
        self, task_id: str, spec: TaskSpec, image: ImageFacts, attempt: str = "cannot run"
    ) -> None:
        """Raise `Unprocessable` with the first reason against a task; `attempt` begins the text."""
        if image.digest != spec.image:
            raise Conflict(
                f"task {task_id} {attempt}: another request has changed its image",
                hint="read the task, then try again",
            )
        for why, hint in self._objections(task_id, spec, image):
            if why:
                raise Unprocessable(f"task {task_id} {attempt}: {why}", hint=hint)

    def capacity_refusal(self, task_id: str, spec: TaskSpec) -> str:
        """Return why a task does not fit next to the tasks that are not over; empty if it fits.

        A task that is over holds no memory and no huge pages; its restart needs them again. It
        keeps its volumes and its own CPUs until it is removed (`is_over`), so they are not checked.
        """
        admitted = {o: other for o, other in self._others(task_id).items() if not self._is_over(o)}
        taken = sum(other.limits.memory_max_bytes for other in admitted.values())
        return (
            memory_protection_refusal(spec, admitted.values(), self._usable_bytes)
            or self._capacity.pages.refusal(spec, admitted)
            or limits_refusal(spec, self._usable_bytes, self._cpus, taken)
        )

    @property
    def _usable_bytes(self) -> int:
        return self._memory_bytes - self._taken_bytes

    def _objections(
        self, task_id: str, spec: TaskSpec, image: ImageFacts
    ) -> Iterator[tuple[str, str]]:
        """Yield for each check a reason against the task, empty if there is none, and a hint.

        A later check may rely on the earlier ones.
        """
        capacity = self._capacity
        yield distrust(spec.image, spec.image_trust), SIGN_HINT
        if not image.is_complete:
            yield f"image {spec.image} is not on this machine", "pull or put the image first"
        contradictions = own_init_contradictions(
            spec.relaxations, spec.command, spec.network, spec.resources
        )
        yield "; ".join(f"{field}: {reason}" for field, reason in contradictions), ""
        contradictions = configuration_contradictions(spec.configuration, spec.credentials)
        yield "; ".join(f"{field}: {reason}" for field, reason in contradictions), ""
        if has_own_init(spec):
            yield capacity.no_containers(), "docs/agent.md lists the requirements of own-init"
            if not image.has_init:
                why = f"no /{' and no /'.join(INITS)}"
                yield (
                    f"image {spec.image} has no init that own-init could start: {why}",
                    "install systemd in the image, or leave out own-init",
                )
        elif not as_run(spec, image.config).command:
            yield (
                f"neither the task nor image {spec.image} has a command",
                "give the program to run",
            )
        yield network_contradiction(spec.network), ""
        yield ": ".join(volumes_contradiction(spec.volumes, spec.limits.memory_max_bytes) or ()), ""
        yield (
            ": ".join(resources_contradiction(spec.resources, spec.limits.cpu_max_cores) or ()),
            "",
        )
        specs = self._others(task_id)
        if spec.volumes:
            yield volumes_refusal(task_id, spec, specs, self._disk_bytes), ""
        yield hardware_refusal(spec, self._nodes, self._disks), ""
        yield resources_refusal(spec, self._cpus, specs.values()), ""
        yield capacity.cpus.refusal(task_id, spec, specs, self._cpuset), ""
        yield self.capacity_refusal(task_id, spec), _REQUEST_LESS_HINT
