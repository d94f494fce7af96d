"""Composes the real host from the modules that access its kernel."""

from __future__ import annotations

from agent.machine import HostAccess
from agent.machine.btrfs import HostBtrfs
from agent.machine.census import observe
from agent.machine.cgroups import HostCgroups
from agent.machine.hardware import read_cores, read_hardware, read_hugepages
from agent.machine.kernelfs import KernelFs
from agent.machine.patient_systemd import PatientSystemd
from agent.machine.private_network import HostNetwork
from agent.machine.process import HostProcesses, has_program


def real_machine() -> HostAccess:
    """Return the host this process runs on."""
    return HostAccess(
        systemd=PatientSystemd(),
        btrfs=HostBtrfs(),
        processes=HostProcesses(),
        hardware=lambda: read_hardware(KernelFs()),
        cgroups=HostCgroups(KernelFs()),
        network=HostNetwork(),
        hugepages=lambda: read_hugepages(KernelFs()),
        cores=lambda: read_cores(KernelFs()),
        has_program=has_program,
        host_text=lambda path: KernelFs().find(path) or "",
        observe=lambda state, run: observe(KernelFs(), state, run),
    )
