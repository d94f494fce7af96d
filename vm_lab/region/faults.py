"""Injects the events of a story into a region: one function for each kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from agent.api import Health, TaskState
from control_plane.api.inventory import Drain, Undrain
from control_plane.roles import ControlPlane
from vm_lab.region import owners
from vm_lab.region.clients import ClientRequest
from vm_lab.region.machine import Copy, SimulatedMachine
from vm_lab.region.network import Condition
from vm_lab.region.operators import move_entitlement, power_cap, switch, upgrade
from vm_lab.region.role_faults import INJECTORS as ROLE_INJECTORS
from vm_lab.region.stores import CrashPoint, SimulatedDisk, StoreFault
from vm_lab.region.story import Fault
from vm_lab.region.topology import image
from vm_lab.region.writers import INJECTORS as WRITE_INJECTORS

if TYPE_CHECKING:
    from vm_lab.region.seed import SimulatedRegion

Injector = Callable[["SimulatedRegion", Fault, int], None]


def inject(region: SimulatedRegion, fault: Fault, number: int) -> None:
    """Inject one event now; `number` is its index in the story."""
    region.history.note(f"fault {fault}")
    _INJECTORS[fault.kind](region, fault, number)


def _target_machines(region: SimulatedRegion, fault: Fault) -> list[SimulatedMachine]:
    domain, _, name = fault.target.partition(":")
    if domain == "job":
        return _machine_of_first_task(region, name)
    return [region.machines[p.machine] for p in region.places if p.within(fault.target)]


def _machine_of_first_task(region: SimulatedRegion, job: str) -> list[SimulatedMachine]:
    """Return the machine of the running task with the lowest index of a job, if there is one."""
    tasks = [t for t, copies in region.checker.copies.items() if t.startswith(f"{job}-") and copies]
    if not tasks:
        return []
    first = min(tasks, key=lambda task: int(task.rpartition("-")[2]))
    return [region.machines[min(region.checker.copies[first])]]


def _for_duration(
    begin: Callable[[SimulatedMachine, Fault], None], end: Callable[[SimulatedMachine], None]
) -> Injector:
    """Return an injector that changes machines for the duration of the fault.

    Overlapping faults of one kind end with the last of them.
    """

    def begin_fault(region: SimulatedRegion, fault: Fault, _: int) -> None:
        for machine in _target_machines(region, fault):
            key = (machine.name, fault.kind)
            region.active_faults[key] = region.active_faults.get(key, 0) + 1
            begin(machine, fault)
            region.timeline.after(fault.seconds, end_fault, region, machine, key)

    def end_fault(region: SimulatedRegion, machine: SimulatedMachine, key: tuple[str, str]) -> None:
        region.active_faults[key] -= 1
        if not region.active_faults[key]:
            end(machine)

    return begin_fault


def _power_off(machine: SimulatedMachine, _: Fault) -> None:
    machine.power_off()


def _agent_down(machine: SimulatedMachine, _: Fault) -> None:
    machine.set_agent(up=False)


def _agent_back(machine: SimulatedMachine) -> None:
    if machine.on:
        machine.set_agent(up=True)


def _hang(region: SimulatedRegion, fault: Fault, _: int) -> None:
    for machine in _target_machines(region, fault):
        machine.hung_until = max(machine.hung_until, region.timeline.now + fault.seconds)
        machine.reach_changed()
        region.timeline.at(machine.hung_until, machine.reach_changed)


def _with_value(name: str, normal: float) -> Injector:
    """Return an injector that sets a flag of machines, or a number to the fault's value."""

    def begin(machine: SimulatedMachine, fault: Fault) -> None:
        setattr(machine, name, True if normal is False else fault.value)
        machine.reach_changed()

    def end(machine: SimulatedMachine) -> None:
        setattr(machine, name, normal)
        machine.reach_changed()

    return _for_duration(begin, end)


def _slow_pull(machine: SimulatedMachine, fault: Fault) -> None:
    machine.pace.pull = (1.0 * fault.value, 20.0 * fault.value)


def _normal_pull(machine: SimulatedMachine) -> None:
    machine.pace.pull = (1.0, 20.0)


def _on_machines(change: Callable[[SimulatedMachine, Fault], None]) -> Injector:
    """Return an injector that changes machines once."""

    def begin_fault(region: SimulatedRegion, fault: Fault, _: int) -> None:
        for machine in _target_machines(region, fault):
            change(machine, fault)

    return begin_fault


def _reboot(machine: SimulatedMachine, _: Fault) -> None:
    if machine.on:
        machine.reboot()


def _drift(machine: SimulatedMachine, _: Fault) -> None:
    machine.profile.drift()


def _host_clock(machine: SimulatedMachine, fault: Fault) -> None:
    machine.clock_offset_s += fault.value


def _first_running_task(
    region: SimulatedRegion, fault: Fault
) -> tuple[SimulatedMachine, Copy] | None:
    """Return the first running task of the machines of a fault, with its machine."""
    for machine in _target_machines(region, fault):
        running = [c for c in machine.copies.values() if c.state is TaskState.RUNNING]
        if machine.on and machine.agent_up and running:
            return machine, min(running, key=lambda copy: copy.task_id)
    return None


def _crash_task(region: SimulatedRegion, fault: Fault, _: int) -> None:
    if running := _first_running_task(region, fault):
        machine, copy = running
        machine.end(copy, "signal", "it crashed")


def _make_unhealthy(region: SimulatedRegion, fault: Fault, _: int) -> None:
    if running := _first_running_task(region, fault):
        machine, copy = running
        machine.set_state(copy, copy.state, Health.UNHEALTHY, "the probe fails")
        region.timeline.after(fault.seconds, _make_healthy, machine, copy, copy.invocation)


def _make_healthy(machine: SimulatedMachine, copy: Copy, invocation: int) -> None:
    is_same = machine.copies.get(copy.task_id) is copy and copy.invocation == invocation
    is_bad = copy.running_image in machine.context.bad_images
    if is_same and machine.on and copy.state is TaskState.RUNNING and not is_bad:
        machine.set_state(copy, copy.state, Health.HEALTHY)


def _lose_task(region: SimulatedRegion, fault: Fault, _: int) -> None:
    if running := _first_running_task(region, fault):
        machine, copy = running
        machine.forget(copy)
        del machine.tombstones[copy.task_id]


def _on_paths(condition: Callable[[Fault], Condition]) -> Injector:
    """Return an injector that imposes a condition on the paths to machines for its duration."""

    def begin_fault(region: SimulatedRegion, fault: Fault, number: int) -> None:
        for machine in _target_machines(region, fault):
            region.network.impose(number, machine, condition(fault))
            region.timeline.after(fault.seconds, region.network.lift, number, machine)

    return begin_fault


def _flap(region: SimulatedRegion, fault: Fault, number: int) -> None:
    step = max(0.5, fault.value)
    for turn in range(max(1, int(fault.seconds / step / 2))):
        cut = Fault(fault.at, "cut", fault.target, step)
        region.timeline.after(turn * 2 * step, _INJECTORS["cut"], region, cut, number)


def _on_store(store_fault: Callable[[Fault], StoreFault]) -> Injector:
    """Return an injector that gives a store a fault for its duration; the newest fault counts."""

    def begin_fault(region: SimulatedRegion, fault: Fault, number: int) -> None:
        disk = region.disks.get(fault.name, region.disks["main"])
        disk.fault = store_fault(fault)
        region.newest_store_fault[disk.name] = number
        region.timeline.after(fault.seconds, end_fault, region, disk, number)

    def end_fault(region: SimulatedRegion, disk: SimulatedDisk, number: int) -> None:
        disk.fault_ended_at = region.timeline.now
        if region.newest_store_fault[disk.name] == number:
            disk.fault = StoreFault()
            region.history.note(f"store {disk.name} is well again")

    return begin_fault


def _pause(region: SimulatedRegion, fault: Fault, _: int) -> None:
    life = region.plane.life
    if life is not None and life.alive:
        life.freeze(fault.seconds)


def _kill(region: SimulatedRegion, fault: Fault, _: int) -> None:
    region.plane.kill(fault.seconds)


def _kill_at_step(region: SimulatedRegion, fault: Fault, _: int) -> None:
    life = region.plane.life
    if life is not None and life.alive:
        life.loop.kill_at_step(int(fault.value))


def _kill_at_write(region: SimulatedRegion, fault: Fault, _: int) -> None:
    after = fault.kind == "plane-kill-after-write"
    region.disks["main"].crash = CrashPoint(max(1, int(fault.value)), after)


def _restart(region: SimulatedRegion, _fault: Fault, _: int) -> None:
    region.plane.restart()


def _plane_clock(region: SimulatedRegion, fault: Fault, _: int) -> None:
    region.plane.clock_offset_s += fault.value


def _resize(region: SimulatedRegion, fault: Fault, _: int) -> None:
    spec = region.clients.jobs[fault.name].requested
    if spec is not None:
        fewest, most = region.scenario.work.tasks
        tasks = round(fewest + fault.value * (most - fewest))
        region.clients.apply_job(replace(spec, tasks=tasks))


def _release(region: SimulatedRegion, fault: Fault, _: int) -> None:
    owned = region.clients.jobs[fault.name]
    if owned.requested is not None:
        number = int(fault.name.removeprefix("job"))
        region.release_counts[number] = region.release_counts.get(number, 0) + 1
        digest = image(number, region.release_counts[number])
        region.plane.images.add(digest)
        region.machine_context.known_images.add(digest)
        region.clients.apply_job(replace(owned.requested, image=digest))


def _stop_job(region: SimulatedRegion, fault: Fault, _: int) -> None:
    name = fault.name
    spec = region.clients.jobs[name].requested
    if spec is not None:
        region.clients.stop_job(name)
        region.timeline.after(fault.seconds, region.clients.apply_job, spec)


def _break_controller(region: SimulatedRegion, fault: Fault, _: int) -> None:
    """Inject a fault into the controller of a job for a while, if it has one."""
    application = region.applications.by_job.get(fault.name)
    if application is None:
        return
    kind, active_faults = fault.kind, application.active_faults
    active_faults[kind] = active_faults.get(kind, 0) + 1

    def end_fault() -> None:
        active_faults[kind] -= 1

    region.timeline.after(fault.seconds, end_fault)


def _repeat_request(region: SimulatedRegion, fault: Fault, _: int) -> None:
    spec = region.clients.jobs[fault.name].requested
    if spec is not None:
        region.clients.apply_job(spec)


def _drain(region: SimulatedRegion, fault: Fault, number: int) -> None:
    """Announce maintenance of machines with a deadline, and cancel it at the end."""
    names = [machine.name for machine in _target_machines(region, fault)]
    about = f"maintenance {number}"
    deadline = max(5.0, fault.value or fault.seconds / 2)
    asked_at = region.timeline.now

    async def announce(cp: ControlPlane) -> None:
        nonlocal asked_at
        asked_at = region.timeline.now
        request = Drain(machines=names, reason=f"work {number}", deadline_s=deadline)
        await cp.inventory.drain(request)

    async def end(cp: ControlPlane) -> None:
        await cp.inventory.undrain(Undrain(machines=names))

    def announced() -> None:
        # from the time of the request: the answer arrives later
        region.checker.budgets.maintenance_announced(names, asked_at + deadline)

    def ended() -> None:
        region.checker.budgets.maintenance_cancelled(names)

    region.clients.submit(ClientRequest(about, f"drain {' '.join(names)}", announce, announced))
    region.timeline.after(
        fault.seconds,
        region.clients.submit,
        ClientRequest(about, f"undrain {' '.join(names)}", end, ended),
    )


_INJECTORS: dict[str, Injector] = {
    "power-off": _for_duration(_power_off, SimulatedMachine.power_on),
    "reboot": _on_machines(_reboot),
    "agent-restart": _for_duration(_agent_down, _agent_back),
    "agent-hang": _hang,
    "slow-agent": _with_value("slow_s", 0.0),
    "garbled": _with_value("garbled", False),
    "start-fails": _with_value("start_fails", False),
    "pull-fails": _with_value("pull_fails", False),
    "slow-pull": _for_duration(_slow_pull, _normal_pull),
    "task-crash": _crash_task,
    "task-sick": _make_unhealthy,
    "task-lost": _lose_task,
    "drift": _on_machines(_drift),
    "host-clock": _on_machines(_host_clock),
    "cut": _on_paths(lambda _: Condition(cut_in=True, cut_out=True)),
    "cut-in": _on_paths(lambda _: Condition(cut_in=True)),
    "cut-out": _on_paths(lambda _: Condition(cut_out=True)),
    "delay": _on_paths(lambda f: Condition(delay_s=f.value)),
    "loss": _on_paths(lambda f: Condition(loss=f.value)),
    "duplicate": _on_paths(lambda f: Condition(duplicate=f.value)),
    "flap": _flap,
    "store-slow": _on_store(lambda f: StoreFault(slow_s=f.value)),
    "store-full": _on_store(lambda _: StoreFault(full=True)),
    "store-failing": _on_store(lambda _: StoreFault(failing=True)),
    "store-unknown": _on_store(lambda f: StoreFault(unknown=f.value)),
    "plane-pause": _pause,
    "plane-kill": _kill,
    "plane-kill-at-step": _kill_at_step,
    "plane-kill-at-write": _kill_at_write,
    "plane-kill-after-write": _kill_at_write,
    "plane-restart": _restart,
    "plane-clock": _plane_clock,
    "resize": _resize,
    "release": _release,
    "bad-release": owners.bad_release,
    "patience": owners.change_stop_times,
    "move-task": owners.move_task,
    "move-job": owners.move_job,
    "restart": owners.restart,
    "move-entitlement": move_entitlement,
    "propose-profile": owners.propose_profile,
    "stop-job": _stop_job,
    "controller-down": _break_controller,
    "controller-slow": _break_controller,
    "controller-garbage": _break_controller,
    "controller-lies": _break_controller,
    "drain": _drain,
    "upgrade": upgrade,
    "switch": switch,
    "power-cap": power_cap,
    "twice": _repeat_request,
    **WRITE_INJECTORS,
    **ROLE_INJECTORS,
}
