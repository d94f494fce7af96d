"""Programs for ports on this kernel limit which ports a process of a gated cgroup may bind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.machine.port_gates import attach, attached, gates, make_gates, program
from agent.netplan import gate_of
from wire.errors import HostError

TRY = """
import json, socket, sys
open(sys.argv[1] + "/cgroup.procs", "w").write("0")
found = {}
for port in map(int, sys.argv[2:]):
    for family in (socket.AF_INET, socket.AF_INET6):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            with socket.socket(family, kind) as s:
                try:
                    s.bind(("", port))
                except OSError as e:
                    found.setdefault(port, set()).add(e.errno)
                else:
                    found.setdefault(port, set()).add(0)
print(json.dumps({port: sorted(errors) for port, errors in found.items()}))
"""
OK, EPERM = [0], [1]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for programs, in its own bpf file system."""
    there = tmp_path / "bpf"
    there.mkdir()
    subprocess.run(["mount", "-t", "bpf", "bpf", str(there)], check=True)
    try:
        yield there / "ports"
    finally:
        subprocess.run(["umount", str(there)], check=True)


@pytest.fixture
def cgroup(tmp_path: Path) -> Iterator[Path]:
    """A new empty cgroup."""
    top = tmp_path / "cgroup"
    top.mkdir()
    subprocess.run(["mount", "-t", "cgroup2", "none", str(top)], check=True)
    own = top / f"twine-test-{tmp_path.name}"
    own.mkdir()
    try:
        yield own
    finally:
        own.rmdir()
        subprocess.run(["umount", str(top)], check=True)


def bound(cgroup: Path, *ports: int) -> dict[str, list[int]]:
    """Return the result of binding each port from a cgroup, in all families and kinds."""
    argv = [sys.executable, "-I", "-c", TRY, str(cgroup), *map(str, ports)]
    done = subprocess.run(argv, check=True, capture_output=True)
    found: dict[str, list[int]] = json.loads(done.stdout)
    return found


@pytest.mark.behaviour("BUG-AG10")
def test_a_gated_task_binds_its_ports_and_ephemeral_ones(folder: Path, cgroup: Path) -> None:
    """The gate treats IPv4 and IPv6, TCP and UDP alike."""
    make_gates([[], [28080, 28081]], alone=True, folder=folder)
    assert bound(cgroup, 29999) == {"29999": OK}, "no connection is held yet"

    assert attach(cgroup, [28080, 28081], folder)

    expected = {"0": OK, "28080": OK, "28081": OK, "28082": EPERM, "29999": EPERM}
    assert bound(cgroup, 0, 28080, 28081, 28082, 29999) == expected


def test_a_task_without_a_port_binds_none(folder: Path, cgroup: Path) -> None:
    make_gates([[]], alone=True, folder=folder)
    assert attach(cgroup, [], folder)

    assert bound(cgroup, 0, 28080) == {"0": OK, "28080": EPERM}


def test_a_hold_outlasts_the_program_and_its_caller(folder: Path, cgroup: Path) -> None:
    make_gates([[28080]], alone=True, folder=folder)
    assert attach(cgroup, [28080], folder)
    make_gates([[]], alone=True, folder=folder)

    assert gates(folder) == {"none"}
    assert bound(cgroup, 28080, 28081) == {"28080": OK, "28081": EPERM}


def test_again_is_no_error_and_attaches_nothing_twice(folder: Path, cgroup: Path) -> None:
    make_gates([[28080]], alone=True, folder=folder)
    for _ in range(3):
        make_gates([[28080]], alone=False, folder=folder)
        assert attach(cgroup, [28080], folder)

    fd = os.open(cgroup, os.O_RDONLY)
    try:
        assert [len(attached(fd, kind)) for kind in ("bind4", "bind6")] == [1, 1]
    finally:
        os.close(fd)


def test_a_half_made_gate_is_made_whole(folder: Path, cgroup: Path) -> None:
    """The process that made the gate died between two of its programs."""
    make_gates([[28080]], alone=True, folder=folder)
    (folder / "28080" / "bind6-held").unlink()
    assert gates(folder) == set()

    make_gates([[28080]], alone=True, folder=folder)

    assert gates(folder) == {"28080"}
    assert attach(cgroup, [28080], folder)


def test_the_most_ports_that_a_task_can_have_fit(folder: Path, cgroup: Path) -> None:
    ports = list(range(20000, 20067))
    make_gates([ports], alone=True, folder=folder)
    assert gates(folder) == {gate_of(ports)}
    assert attach(cgroup, ports, folder)

    assert bound(cgroup, 20000, 20066, 20067) == {"20000": OK, "20066": OK, "20067": EPERM}
    assert len(program(ports)) == 8 * (len(ports) + 5)


def test_a_missing_cgroup_is_reported_and_a_missing_gate_is_an_error(
    folder: Path, cgroup: Path
) -> None:
    make_gates([[]], alone=True, folder=folder)

    assert not attach(cgroup / "gone", [], folder)
    with pytest.raises(HostError, match=r"cannot restrict .* to its ports: No such file"):
        attach(cgroup, [1], folder)


def test_without_a_file_system_for_programs_the_error_names_it(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="cannot store the port programs") as e:
        make_gates([[]], alone=True, folder=tmp_path / "ports")

    assert "bpffs" in e.value.hint
