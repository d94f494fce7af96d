"""What each `twine-lab` command does, in order."""

import contextlib
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from vm_lab.accel import find_accel
from vm_lab.cache import partial_folder
from vm_lab.control import LabControlPlane
from vm_lab.domains import Domains, restarting_panicked
from vm_lab.errors import LabError
from vm_lab.exclusive import exclusive
from vm_lab.guests import Guests, on_each
from vm_lab.image.build import Image, build_image
from vm_lab.leftovers import Check, check_leftovers, host_interfaces
from vm_lab.progress import PATIENCE_S, Progress
from vm_lab.proxy import Proxy
from vm_lab.sandbox import LabSandbox, remove_mount_points
from vm_lab.state import DAMAGED, LabPaths, LabRecord, end_process
from vm_lab.topology import LabMachine, read_topology
from vm_lab.vagrant import Vagrant


@dataclass(frozen=True, slots=True)
class UpOptions:
    """The options of `twine-lab up`; None means the topology's value."""

    count: int | None = None
    cpus: int | None = None
    memory_mib: int | None = None
    variant: str = "base"
    bare: bool = False
    project: bool = True


class Lab:
    """One lab, with a method for each command."""

    def __init__(self, paths: LabPaths, progress: Progress) -> None:
        self.paths = paths
        self.progress = progress
        self.topology = read_topology()
        self.sandbox = LabSandbox(self.paths)
        self.domains = Domains(self.sandbox)
        self.guests = Guests(self.sandbox)
        self.control = LabControlPlane(self.sandbox, self.topology)
        self.proxy = Proxy(self.control)

    def machines(self) -> tuple[LabMachine, ...]:
        """Return the machines this lab has."""
        return self.topology.first(self.paths.get_record().count)

    def machine(self, name: str) -> LabMachine:
        """Return one of the lab's machines."""
        machine = self.topology.get_machine(name)
        if machine not in self.machines():
            raise LabError(
                f"lab {self.paths.name!r} has {len(self.machines())} machines, no {name}"
            )
        return machine

    @exclusive
    def up(self, options: UpOptions) -> None:
        """Bring the lab up. Existing parts stay, so a call can be repeated."""
        record = self.paths.find_record()
        image = None
        if record is None or not Vagrant(self.sandbox, self.topology, record).has_box():
            image = build_image(options.variant, self.progress.say, project=options.project)
            record = self._create_record(options, image)
        elif options.count is not None and options.count != record.count:
            raise LabError(
                f"lab {self.paths.name!r} has {record.count} machines, not {options.count}",
                hint="take it down first, or give another --name",
            )
        machines = self.topology.first(record.count)
        with ThreadPoolExecutor(max_workers=1) as background:
            self._start_sandbox(record, image, machines)
            # Starts while the machines boot.
            served = None if options.bare else background.submit(self.control.start)
            self._boot(record, machines)
        if served is not None:
            served.result()
            self._join(machines)
            if record.bare:
                self.paths.save(self.paths.record, msgspec.structs.replace(record, bare=False))

    def _create_record(self, options: UpOptions, image: Image) -> LabRecord:
        """Store the record of the lab before its first part is created."""
        accel = find_accel(image.kernel)
        self.progress.say(f"accelerator: {accel.name.upper()} ({accel.reason})")
        record = LabRecord(
            name=self.paths.name,
            count=options.count or self.topology.vm.count,
            cpus=options.cpus or self.topology.vm.cpus,
            memory_mib=options.memory_mib or self.topology.vm.memory_mib,
            variant=options.variant,
            image=image.name,
            accel=accel.name,
            bare=options.bare,
        )
        self.topology.first(record.count)
        self.paths.make()
        if not self.paths.interfaces_before.exists():
            self.paths.interfaces_before.write_bytes(msgspec.json.encode(host_interfaces()))
        self.paths.save(self.paths.record, record)
        return record

    def _start_sandbox(
        self, record: LabRecord, image: Image | None, machines: Sequence[LabMachine]
    ) -> None:
        self.paths.make()
        if image is not None:  # before libvirt reads its storage pool
            Vagrant(self.sandbox, self.topology, record).install_box(image)
        with self.progress.step("network namespace, libvirtd and network"):
            self.sandbox.start(self.topology, machines)

    def _boot(self, record: LabRecord, machines: Sequence[LabMachine]) -> None:
        states = self.domains.power()
        with self._restarting_panicked(machines):
            if all(states.get(m.name) == "running" for m in machines):
                self.progress.say(f"{len(machines)} machines are running already")
            else:
                what = f"{len(machines)} x {record.cpus} CPU, {record.memory_mib} MiB"
                with self.progress.step(f"vagrant up: {what}, {record.accel.upper()}"):
                    vagrant = Vagrant(self.sandbox, self.topology, record)
                    vagrant.run("up", "--no-provision", timeout_s=3 * PATIENCE_S)
            on_each(machines, lambda m: self.guests.wait_reachable(m, PATIENCE_S))
        self.progress.say("ssh answers on every machine")

    def _restarting_panicked(
        self, machines: Sequence[LabMachine]
    ) -> contextlib.AbstractContextManager[None]:
        names = [m.name for m in machines]
        return restarting_panicked(self.domains, self.paths.consoles, names, self.progress.say)

    def _join(self, machines: Sequence[LabMachine]) -> None:
        """Join the machines that are not members yet, and return once all are ready."""
        ready = self.control.ready_machines()
        missing = [m for m in machines if m.name not in ready]
        if missing:
            with self.progress.step(f"joining {' '.join(m.name for m in missing)}"):
                on_each(missing, lambda m: self.control.join(m, self.guests))
        self.wait_ready(machines)
        self.progress.say(f"agent ready on {len(machines)} machines")

    def wait_ready(self, machines: Sequence[LabMachine], timeout_s: float = PATIENCE_S) -> None:
        """Return once the control plane reports all these machines as ready."""
        deadline = time.monotonic() + timeout_s
        wanted = {m.name for m in machines}
        while not wanted <= (ready := self.control.ready_machines()):
            if time.monotonic() > deadline:
                raise LabError(
                    f"not ready after {timeout_s:g} s: {' '.join(sorted(wanted - ready))}",
                    hint="look with `twine-lab ssh m1 -- journalctl -u twine-agent`",
                )
            time.sleep(0.5)

    @exclusive
    def push(self) -> None:
        """Install the working tree in every running VM, and restart agents that run."""
        record = self.paths.get_record()
        image = build_image(record.variant, self.progress.say, disk=False)
        if image.deps_layer is None or image.project_layer is None:
            raise LabError("the image was built without the project")
        deps, project = image.deps_layer, image.project_layer
        states = self.domains.power()
        running = [m for m in self.machines() if states.get(m.name) == "running"]

        def push(machine: LabMachine) -> None:
            result = self.guests.push(machine, deps, project)
            self.progress.say(f"{machine.name}: {result}")

        on_each(running, push)

    @exclusive
    def power_off(self, name: str) -> None:
        """Cut the power of a VM."""
        machine = self.machine(name)
        self.domains.power_off(name)
        self.guests.forget_connection(machine)

    @exclusive
    def power_on(self, name: str) -> None:
        """Start a VM from its disk, and return once ssh answers."""
        machine = self.machine(name)
        with self._restarting_panicked([machine]):
            self.domains.power_on(name)
            self.guests.wait_reachable(machine, PATIENCE_S)

    @exclusive
    def partition(self, name: str, *, heal: bool) -> None:
        """Unplug a VM from the network, or plug it in again."""
        machine = self.machine(name)
        if heal:
            self.domains.connect(name)
        else:
            self.domains.disconnect(name)
        self.guests.forget_connection(machine)

    @exclusive
    def snapshot(self, name: str) -> None:
        """Save all VMs and the control plane's state, at one moment."""
        saved = self.paths.snapshot(name)
        machines = self.machines()
        served = self._stop_control_plane()
        try:
            shutil.rmtree(saved, ignore_errors=True)  # an incomplete snapshot cannot be restored
            with self._all_suspended(machines):
                on_each(machines, lambda m: self._replace_snapshot(m.name, name))
            with partial_folder(saved) as partial:
                if self.paths.control_plane_state.exists():
                    self.control.save(partial / "control-plane")
        finally:
            if served:
                self.control.start()

    @exclusive
    def restore(self, name: str) -> None:
        """Bring all VMs and the control plane back to the snapshot, clocks set to now."""
        machines = self.machines()
        saved = self.paths.snapshot(name)
        if not saved.is_dir():
            known = sorted(p.name for p in self.paths.snapshots.glob("*"))
            raise LabError(f"no snapshot {name!r}", hint=f"there are: {' '.join(known) or 'none'}")
        self._stop_control_plane()
        with self.progress.step("machines"):
            on_each(machines, lambda m: self._restore_machine(m, name))
        with ThreadPoolExecutor(max_workers=1) as background:
            started = None
            if (saved / "control-plane").exists():
                self.control.load(saved / "control-plane")
                started = background.submit(self.control.start)
            with self.progress.step("clocks"):
                on_each(machines, self._set_clock)
        if started is not None:
            started.result()

    def _restore_machine(self, machine: LabMachine, snapshot: str) -> None:
        self.guests.forget_connection(machine)
        self.domains.restore(machine.name, snapshot)
        self.domains.connect(machine.name)

    def _set_clock(self, machine: LabMachine) -> None:
        self.guests.wait_reachable(machine, PATIENCE_S)
        self.guests.set_clock(machine)

    @exclusive
    def down(self) -> list[Check]:
        """Remove the lab; return what was checked and what is left of it."""
        record = None
        with contextlib.suppress(LabError):  # a damaged record: the processes end without Vagrant
            record = self.paths.find_record()
        inode = self.sandbox.namespace_inode()
        before = self._interfaces_before()
        if record is not None and self.sandbox.holder() is not None:
            with contextlib.suppress(LabError), self.progress.step("vagrant destroy"):
                vagrant = Vagrant(self.sandbox, self.topology, record)
                vagrant.run("destroy", "-f")
        with self.progress.step("ending the lab's processes"):
            end_process(self.paths.web_console)
            self.sandbox.stop()
        for folder in (self.paths.run, self.paths.state):
            shutil.rmtree(folder, ignore_errors=True)
        remove_mount_points(self.paths.state_root)
        for root in (self.paths.run_root, self.paths.state_root):
            with contextlib.suppress(OSError):
                root.rmdir()  # only if no other lab is there
        return check_leftovers(self.paths, inode, before)

    def _stop_control_plane(self) -> bool:
        """Stop the control plane; say whether it was running."""
        served = self.control.pid() is not None
        if served:
            self.control.stop()
        return served

    @contextlib.contextmanager
    def _all_suspended(self, machines: Sequence[LabMachine]) -> Iterator[None]:
        """Suspend all machines meanwhile; if one cannot be suspended, the others run on."""
        suspended: list[LabMachine] = []

        def suspend(machine: LabMachine) -> None:
            self.domains.suspend(machine.name)
            suspended.append(machine)

        try:
            on_each(machines, suspend)
            yield
        finally:
            on_each(suspended, lambda m: self.domains.resume(m.name))

    def _replace_snapshot(self, machine: str, snapshot: str) -> None:
        if self.domains.has_snapshot(machine, snapshot):
            self.domains.delete_snapshot(machine, snapshot)
        self.domains.snapshot(machine, snapshot)

    def _interfaces_before(self) -> list[str] | None:
        with contextlib.suppress(FileNotFoundError, *DAMAGED):
            return msgspec.json.decode(self.paths.interfaces_before.read_bytes(), type=list[str])
        return None
