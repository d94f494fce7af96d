"""Carries out the events of a story: one function for each kind."""

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
from vm_lab.region.role_faults import STRIKES as OF_ROLES
from vm_lab.region.stores import CrashPoint, SimulatedDisk, Trouble
from vm_lab.region.story import Fault
from vm_lab.region.topology import image
from vm_lab.region.writers import STRIKES as WRITES

if TYPE_CHECKING:
    from vm_lab.region.seed import SimulatedRegion

Strike = Callable[["SimulatedRegion", Fault, int], None]


def strike(region: SimulatedRegion, fault: Fault, number: int) -> None:
    """Carry out one event now; `number` is its index in the story."""
    region.history.note(f"fault {fault}")
    _STRIKES[fault.kind](region, fault, number)


def _machines(region: SimulatedRegion, fault: Fault) -> list[SimulatedMachine]:
    domain, _, name = fault.target.partition(":")
    if domain == "job":
        return _of_first_task(region, name)
    return [region.machines[p.machine] for p in region.places if p.within(fault.target)]


def _of_first_task(region: SimulatedRegion, job: str) -> list[SimulatedMachine]:
    """Return the machine of the running task with the lowest index of a job, if there is one."""
    tasks = [t for t, there in region.checker.copies.items() if t.startswith(f"{job}-") and there]
    if not tasks:
        return []
    first = min(tasks, key=lambda task: int(task.rpartition("-")[2]))
    return [region.machines[min(region.checker.copies[first])]]


def _for_a_while(
    begin: Callable[[SimulatedMachine, Fault], None], end: Callable[[SimulatedMachine], None]
) -> Strike:
    """Return a strike that changes machines for a while; overlapping faults end with the last."""

    def strikes(region: SimulatedRegion, fault: Fault, _: int) -> None:
        for machine in _machines(region, fault):
            key = (machine.name, fault.kind)
            region.acting[key] = region.acting.get(key, 0) + 1
            begin(machine, fault)
            region.timeline.after(fault.seconds, over, region, machine, key)

    def over(region: SimulatedRegion, machine: SimulatedMachine, key: tuple[str, str]) -> None:
        region.acting[key] -= 1
        if not region.acting[key]:
            end(machine)

    return strikes


def _power_off(machine: SimulatedMachine, _: Fault) -> None:
    machine.power_off()


def _agent_down(machine: SimulatedMachine, _: Fault) -> None:
    machine.agent_is(up=False)


def _agent_back(machine: SimulatedMachine) -> None:
    if machine.on:
        machine.agent_is(up=True)


def _hang(region: SimulatedRegion, fault: Fault, _: int) -> None:
    for machine in _machines(region, fault):
        machine.hung_until = max(machine.hung_until, region.timeline.now + fault.seconds)
        machine.reach_changed()
        region.timeline.at(machine.hung_until, machine.reach_changed)


def _sets(name: str, normal: float) -> Strike:
    """Return a strike that sets a flag of machines, or a number to the fault's value."""

    def begin(machine: SimulatedMachine, fault: Fault) -> None:
        setattr(machine, name, True if normal is False else fault.value)
        machine.reach_changed()

    def end(machine: SimulatedMachine) -> None:
        setattr(machine, name, normal)
        machine.reach_changed()

    return _for_a_while(begin, end)


def _slow_pull(machine: SimulatedMachine, fault: Fault) -> None:
    machine.pace.pull = (1.0 * fault.value, 20.0 * fault.value)


def _usual_pull(machine: SimulatedMachine) -> None:
    machine.pace.pull = (1.0, 20.0)


def _each(change: Callable[[SimulatedMachine, Fault], None]) -> Strike:
    """Return a strike that changes machines at once."""

    def strikes(region: SimulatedRegion, fault: Fault, _: int) -> None:
        for machine in _machines(region, fault):
            change(machine, fault)

    return strikes


def _reboot(machine: SimulatedMachine, _: Fault) -> None:
    if machine.on:
        machine.reboot()


def _drift(machine: SimulatedMachine, _: Fault) -> None:
    machine.profile.drift()


def _host_clock(machine: SimulatedMachine, fault: Fault) -> None:
    machine.clock_off_s += fault.value


def _victim(region: SimulatedRegion, fault: Fault) -> tuple[SimulatedMachine, Copy] | None:
    """Return the first running task of the struck machines."""
    for machine in _machines(region, fault):
        running = [c for c in machine.copies.values() if c.state is TaskState.RUNNING]
        if machine.on and machine.agent_up and running:
            return machine, min(running, key=lambda copy: copy.task_id)
    return None


def _crash(region: SimulatedRegion, fault: Fault, _: int) -> None:
    if found := _victim(region, fault):
        found[0].end(found[1], "signal", "it crashed")


def _sick(region: SimulatedRegion, fault: Fault, _: int) -> None:
    found = _victim(region, fault)
    if found is None:
        return
    machine, copy = found
    machine.become(copy, copy.state, Health.UNHEALTHY, "the probe fails")
    region.timeline.after(fault.seconds, _well, machine, copy, copy.invocation)


def _well(machine: SimulatedMachine, copy: Copy, invocation: int) -> None:
    same = machine.copies.get(copy.task_id) is copy and copy.invocation == invocation
    bad = copy.runs in machine.setting.bad_images
    if same and machine.on and copy.state is TaskState.RUNNING and not bad:
        machine.become(copy, copy.state, Health.HEALTHY)


def _lose(region: SimulatedRegion, fault: Fault, _: int) -> None:
    if found := _victim(region, fault):
        machine, copy = found
        machine.forget(copy)
        del machine.tombstones[copy.task_id]


def _on_the_way(condition: Callable[[Fault], Condition]) -> Strike:
    """Return a strike that imposes a condition on the paths to machines for a while."""

    def strikes(region: SimulatedRegion, fault: Fault, number: int) -> None:
        for machine in _machines(region, fault):
            region.network.impose(number, machine, condition(fault))
            region.timeline.after(fault.seconds, region.network.lift, number, machine)

    return strikes


def _flap(region: SimulatedRegion, fault: Fault, number: int) -> None:
    step = max(0.5, fault.value)
    for turn in range(max(1, int(fault.seconds / step / 2))):
        one = Fault(fault.at, "cut", fault.target, step)
        region.timeline.after(turn * 2 * step, _STRIKES["cut"], region, one, number)


def _store(trouble: Callable[[Fault], Trouble]) -> Strike:
    """Return a strike that gives a store a fault for a while; the newest fault counts."""

    def strikes(region: SimulatedRegion, fault: Fault, number: int) -> None:
        disk = region.disks.get(fault.name, region.disks["main"])
        disk.trouble = trouble(fault)
        region.store_faults[disk.name] = number
        region.timeline.after(fault.seconds, over, region, disk, number)

    def over(region: SimulatedRegion, disk: SimulatedDisk, number: int) -> None:
        disk.troubled_at = region.timeline.now
        if region.store_faults[disk.name] == number:
            disk.trouble = Trouble()
            region.history.note(f"store {disk.name} is well again")

    return strikes


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
    region.plane.clock_off_s += fault.value


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
        region.releases[number] = region.releases.get(number, 0) + 1
        digest = image(number, region.releases[number])
        region.plane.images.add(digest)
        region.setting.known_images.add(digest)
        region.clients.apply_job(replace(owned.requested, image=digest))


def _stop_job(region: SimulatedRegion, fault: Fault, _: int) -> None:
    name = fault.name
    spec = region.clients.jobs[name].requested
    if spec is not None:
        region.clients.stop_job(name)
        region.timeline.after(fault.seconds, region.clients.apply_job, spec)


def _controller(region: SimulatedRegion, fault: Fault, _: int) -> None:
    """Inject a fault into the controller of a job for a while, if it has one."""
    application = region.applications.of.get(fault.name)
    if application is None:
        return
    kind, troubles = fault.kind, application.troubles
    troubles[kind] = troubles.get(kind, 0) + 1

    def over() -> None:
        troubles[kind] -= 1

    region.timeline.after(fault.seconds, over)


def _twice(region: SimulatedRegion, fault: Fault, _: int) -> None:
    spec = region.clients.jobs[fault.name].requested
    if spec is not None:
        region.clients.apply_job(spec)


def _drain(region: SimulatedRegion, fault: Fault, number: int) -> None:
    """Announce maintenance of machines with a deadline, and cancel it at the end."""
    names = [machine.name for machine in _machines(region, fault)]
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


_STRIKES: dict[str, Strike] = {
    "power-off": _for_a_while(_power_off, SimulatedMachine.power_on),
    "reboot": _each(_reboot),
    "agent-restart": _for_a_while(_agent_down, _agent_back),
    "agent-hang": _hang,
    "slow-agent": _sets("slow_s", 0.0),
    "garbled": _sets("garbled", False),
    "start-fails": _sets("start_fails", False),
    "pull-fails": _sets("pull_fails", False),
    "slow-pull": _for_a_while(_slow_pull, _usual_pull),
    "task-crash": _crash,
    "task-sick": _sick,
    "task-lost": _lose,
    "drift": _each(_drift),
    "host-clock": _each(_host_clock),
    "cut": _on_the_way(lambda _: Condition(cut_in=True, cut_out=True)),
    "cut-in": _on_the_way(lambda _: Condition(cut_in=True)),
    "cut-out": _on_the_way(lambda _: Condition(cut_out=True)),
    "delay": _on_the_way(lambda f: Condition(delay_s=f.value)),
    "loss": _on_the_way(lambda f: Condition(loss=f.value)),
    "duplicate": _on_the_way(lambda f: Condition(duplicate=f.value)),
    "flap": _flap,
    "store-slow": _store(lambda f: Trouble(slow_s=f.value)),
    "store-full": _store(lambda _: Trouble(full=True)),
    "store-failing": _store(lambda _: Trouble(failing=True)),
    "store-unknown": _store(lambda f: Trouble(unknown=f.value)),
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
    "patience": owners.patience,
    "move-task": owners.move_task,
    "move-job": owners.move_job,
    "restart": owners.restart,
    "move-entitlement": move_entitlement,
    "propose-profile": owners.propose_profile,
    "stop-job": _stop_job,
    "controller-down": _controller,
    "controller-slow": _controller,
    "controller-garbage": _controller,
    "controller-lies": _controller,
    "drain": _drain,
    "upgrade": upgrade,
    "switch": switch,
    "power-cap": power_cap,
    "twice": _twice,
    **WRITES,
    **OF_ROLES,
}
