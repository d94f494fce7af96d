import json
import os
import subprocess

import pytest

from vm_lab.control import LabControlPlane, machine_states
from vm_lab.domains import parse_iflist, parse_list
from vm_lab.errors import LabError
from vm_lab.guests import Guests
from vm_lab.leftovers import mounts_below
from vm_lab.sandbox import LabSandbox, network_xml
from vm_lab.state import LabPaths, process_ref
from vm_lab.topology import read_topology

VIRSH_LIST = """\
 Id   Name   State
-----------------------
 3    m1     running
 -    m2     shut off

"""
VIRSH_IFLIST = """\
 Interface   Type      Source      Model    MAC
---------------------------------------------------------------
 vnet4       network   twine-lab   virtio   52:54:00:4d:00:0b

"""


def a_sandbox(tmp_path) -> LabSandbox:
    paths = LabPaths("lab", tmp_path / "state", tmp_path / "run")
    paths.make()
    paths.save(paths.holder, process_ref(os.getpid()))
    return LabSandbox(paths)


def test_a_command_enters_the_network_and_only_on_request_the_mounts(tmp_path):
    sandbox = a_sandbox(tmp_path)
    holder = str(os.getpid())
    assert sandbox.command(["curl", "x"]) == ["nsenter", "-t", holder, "-n", "--", "curl", "x"]
    assert "-m" in sandbox.command(["virsh"], mounts=True)


def test_a_command_for_a_stopped_lab_reports_how_to_start_it(tmp_path):
    sandbox = a_sandbox(tmp_path)
    sandbox.paths.holder.unlink()
    with pytest.raises(LabError) as caught:
        sandbox.command(["true"])
    assert "twine-lab up" in caught.value.hint


def test_ssh_shares_one_connection_per_machine_and_leaves_the_home_alone(tmp_path):
    guests = Guests(a_sandbox(tmp_path))
    argv = guests.command(read_topology().get_machine("m2"), "uptime")
    assert argv[-2:] == ["root@10.77.0.12", "uptime"]
    assert f"ControlPath={tmp_path}/run/lab/ssh/m2" in argv
    assert "UserKnownHostsFile=/dev/null" in argv
    assert argv[argv.index("ssh") + 1 :][:2] == ["-F", "/dev/null"]


@pytest.mark.behaviour("BUG-LB12")
def test_programs_that_hang_are_no_traceback(tmp_path, mocker):
    """Formerly `power-off` ended with one if the process of the ssh connection hung."""
    sandbox = a_sandbox(tmp_path)
    mocker.patch("subprocess.run", side_effect=subprocess.TimeoutExpired("x", 1))
    machine = read_topology().get_machine("m2")
    connection = tmp_path / "run/lab/ssh/m2"
    connection.touch()
    Guests(sandbox).forget_connection(machine)
    assert not connection.exists()
    with pytest.raises(LabError, match="`twinectl machine list` did not end within"):
        LabControlPlane(sandbox, read_topology()).machine_states()


def test_the_network_gives_each_machine_its_own_address():
    topology = read_topology()
    xml = network_xml(topology, topology.first(2))
    assert "<host mac='52:54:00:4d:00:0b' name='m1' ip='10.77.0.11'/>" in xml
    assert "10.77.0.13" not in xml
    assert "<forward" not in xml  # the network is isolated


def test_virsh_tables_are_read():
    assert parse_list(VIRSH_LIST) == {"m1": "running", "m2": "shut off"}
    assert parse_iflist(VIRSH_IFLIST) == ["vnet4"]
    assert parse_iflist("Interface\n----\n -   network   twine-lab   virtio   52:54\n") == []


def test_a_machine_is_ready_when_the_control_plane_reports_it():
    rows = [
        {"record": {"machine": "m1", "state": "up"}, "ready": True, "tasks": []},
        {"record": {"machine": "m2", "state": "down"}, "ready": False, "tasks": []},
    ]
    assert machine_states(json.dumps({"machines": rows})) == {"m1": "ready", "m2": "down"}
    with pytest.raises(LabError, match="machine list"):
        machine_states("[]")


def test_mounts_are_found_at_and_below_a_folder_but_not_next_to_it(tmp_path):
    mountinfo = tmp_path / "mountinfo"
    points = ["/", "/var/lib/twine-lab/lab", "/var/lib/twine-lab/lab/x", "/var/lib/twine-lab/lab2"]
    mountinfo.write_text("".join(f"1 2 0:3 / {p} rw - ext4 /dev/vda rw\n" for p in points))
    found = mounts_below(["/var/lib/twine-lab/lab"], mountinfo)
    assert found == ("/var/lib/twine-lab/lab", "/var/lib/twine-lab/lab/x")
