"""The same hardware queries on this machine and on a fake one."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from agent.machine import HostHardware
from agent.machine.fake import FakeMachine
from agent.machine.hardware import read_cores, read_hardware
from agent.machine.kernelfs import KernelFs
from wire.cpus import Core


def real_cores() -> tuple[Core, ...]:
    """Return the cores of this machine."""
    return read_cores(KernelFs())


@pytest.fixture(params=["fake", "real"])
def cores(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Core, ...]:
    """Return the cores of the fake or the real machine."""
    return FakeMachine(tmp_path).machine.cores() if request.param == "fake" else real_cores()


def test_each_cpu_that_is_online_belongs_to_one_core(cores: tuple[Core, ...]) -> None:
    cpus = [cpu for core in cores for cpu in (*core.cpus, *core.others)]
    assert cpus
    assert len(cpus) == len(set(cpus))
    assert all(core.node >= 0 for core in cores)


@pytest.fixture(params=["fake", "real"])
def hardware(request: pytest.FixtureRequest, tmp_path: Path) -> HostHardware:
    """The real variant works on any Linux machine, because reading needs no privileges."""
    if request.param == "fake":
        return FakeMachine(tmp_path).machine.hardware()
    return read_hardware(KernelFs())


def test_a_machine_has_cpus_sockets_and_memory(hardware: HostHardware) -> None:
    assert 1 <= hardware.cpu.sockets <= hardware.cpu.online
    assert hardware.cpu.numa_nodes >= 1
    assert hardware.cpu.model
    assert hardware.memory_bytes > 64 << 20
    assert hardware.page_bytes in (4096, 16384, 65536)


def test_a_machine_reports_its_boot(hardware: HostHardware) -> None:
    assert re.fullmatch(r"[0-9a-f-]{36}", hardware.boot_id)
    assert re.match(r"\d+\.\d+", hardware.kernel)
    assert hardware.hostname


def test_the_loopback_interface_is_no_nic(hardware: HostHardware) -> None:
    assert "lo" not in hardware.nics


def test_the_real_reading_agrees_with_the_c_library() -> None:
    real = read_hardware(KernelFs())

    assert real.cpu.online == os.sysconf("SC_NPROCESSORS_ONLN")
    assert sum(len(c.cpus) + len(c.others) for c in real_cores()) == real.cpu.online
    assert real.memory_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert real.kernel == os.uname().release
    assert real.hostname == socket.gethostname()
    assert set(real.nics) | {"lo"} == {name for _, name in socket.if_nameindex()} | {"lo"}
