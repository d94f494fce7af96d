"""Features of the fake machine beyond the contract: scripting, unpacking, reboots."""

from __future__ import annotations

import io
import itertools
import tarfile
from pathlib import Path

import pytest

from agent.machine import Completed
from agent.machine.fake import FakeMachine
from agent.machine.fake_programs import ends_with
from wire.errors import ProgramError

UNIT = "t.service"


def a_machine(root: Path) -> FakeMachine:
    """Return a machine whose clock advances with each read."""
    return FakeMachine(root, clock=itertools.count(100).__next__)


def a_service(*argv: str, **changes: object) -> dict[str, object]:
    """Return properties as the agent passes them."""
    return {"ExecStart": [argv or ("server",)], "RemainAfterExit": True, **changes}


def a_tar(path: Path, *names: str, device: bool = False) -> Path:
    """Write an archive with these files."""
    with tarfile.open(path, "w") as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 1
            tar.addfile(info, io.BytesIO(b"x"))
        if device:
            info = tarfile.TarInfo("dev/null")
            info.type = tarfile.CHRTYPE
            tar.addfile(info)
    return path


def test_a_program_ends_at_the_request_of_a_test(tmp_path: Path) -> None:
    machine = a_machine(tmp_path)
    machine.systemd.start_transient(UNIT, a_service())

    machine.systemd.exit(UNIT, 3)

    state = machine.systemd.find(UNIT)
    assert state
    assert (state.result, state.exit_code) == ("exit-code", 3)
    assert state.started_at
    assert state.exited_at
    assert state.exited_at > state.started_at


def test_listeners_are_called_on_an_oom_kill(tmp_path: Path) -> None:
    machine = a_machine(tmp_path)
    machine.systemd.start_transient(UNIT, a_service())
    signals: list[str] = []
    machine.systemd.listen(signals.append)

    machine.systemd.oom(UNIT)
    machine.systemd.lose_bus()

    state = machine.systemd.find(UNIT)
    assert state
    assert (state.result, state.exit_signal) == ("oom-kill", "SIGKILL")
    assert signals == [UNIT, ""]


def test_a_program_can_be_scripted_by_name(tmp_path: Path) -> None:
    machine = a_machine(tmp_path)
    machine.systemd.programs["server"] = ends_with(signal="SIGSEGV")

    machine.systemd.start_transient(UNIT, a_service("/usr/bin/server"))

    state = machine.systemd.find(UNIT)
    assert state
    assert (state.result, state.exit_signal) == ("signal", "SIGSEGV")


def test_a_reboot_loses_units_and_keeps_files(tmp_path: Path) -> None:
    machine = a_machine(tmp_path)
    machine.btrfs.create(tmp_path / "image")
    machine.systemd.start_transient(UNIT, a_service())
    before = machine.machine.hardware().boot_id

    machine.reboot()

    assert machine.systemd.units("*") == []
    assert machine.btrfs.find(tmp_path / "image")
    assert machine.machine.hardware().boot_id != before


def test_a_second_agent_finds_what_the_first_one_left(tmp_path: Path) -> None:
    machine = a_machine(tmp_path)
    machine.machine.systemd.start_transient(UNIT, a_service())

    state = machine.machine.systemd.find(UNIT)

    assert state
    assert state.sub == "running"


def test_tar_unpacks_below_a_folder_without_excluded_files(tmp_path: Path) -> None:
    machine = a_machine(tmp_path)
    archive = a_tar(tmp_path / "a.tar", "etc/hosts", "dev/x")
    argv = ("tar", "-x", "-f", str(archive), "-C", str(tmp_path), "--exclude=dev/*")

    machine.systemd.start_transient(UNIT, a_service(*argv, Type="oneshot"))

    state = machine.systemd.find(UNIT)
    assert state
    assert (state.sub, state.exit_code) == ("exited", 0)
    assert (tmp_path / "etc" / "hosts").read_text() == "x"
    assert not (tmp_path / "dev").exists()


def test_tar_sees_the_paths_of_its_sandbox(tmp_path: Path) -> None:
    machine = a_machine(tmp_path)
    archive = a_tar(tmp_path / "a.tar", "file")
    (tmp_path / "out").mkdir()
    sandbox = {
        "RootDirectory": "/nowhere",
        "StandardInputFile": str(archive),
        "BindPaths": [f"{tmp_path}/out:/target"],
    }

    machine.systemd.start_transient(
        UNIT, a_service("tar", "-xf", "-", "-C", "/target", Type="oneshot", **sandbox)
    )

    assert (tmp_path / "out" / "file").read_text() == "x"


@pytest.mark.parametrize("kind", ["device", "outside", "missing", "noise"])
def test_tar_fails_on_impossible_and_forbidden_entries(tmp_path: Path, kind: str) -> None:
    machine = a_machine(tmp_path)
    archive = tmp_path / "a.tar"
    if kind == "noise":
        archive.write_bytes(b"noise" * 200)
    elif kind != "missing":
        a_tar(archive, "../../x" if kind == "outside" else "x", device=kind == "device")

    machine.systemd.start_transient(
        UNIT, a_service("tar", "-xf", str(archive), "-C", str(tmp_path), Type="oneshot")
    )

    state = machine.systemd.find(UNIT)
    assert state
    assert (state.active, state.exit_code) == ("failed", 2)


def test_btrfs_receives_an_archive_as_a_finished_subvolume(tmp_path: Path) -> None:
    machine = a_machine(tmp_path)
    stream = a_tar(tmp_path / "stream", "file")

    machine.systemd.start_transient(
        UNIT, a_service("btrfs", "receive", "-f", str(stream), str(tmp_path), Type="oneshot")
    )

    found = machine.btrfs.find(tmp_path / "received")
    assert found
    assert found.read_only
    assert found.received_uuid
    assert (tmp_path / "received" / "file").exists()


def test_btrfs_leaves_an_unfinished_subvolume_behind_a_broken_stream(tmp_path: Path) -> None:
    machine = a_machine(tmp_path)
    (tmp_path / "stream").write_bytes(b"noise")

    machine.systemd.start_transient(
        UNIT,
        a_service("btrfs", "receive", "-f", f"{tmp_path}/stream", str(tmp_path), Type="oneshot"),
    )

    state, found = machine.systemd.find(UNIT), machine.btrfs.find(tmp_path / "received")
    assert state
    assert state.active == "failed"
    assert found
    assert (found.read_only, found.received_uuid) == (False, "")


def test_a_host_program_answers_by_the_longest_match(tmp_path: Path) -> None:
    processes = a_machine(tmp_path).processes
    processes.answers[("btrfs",)] = Completed(1, "", "usage")
    processes.answers["btrfs", "version"] = Completed(0, "v6.14\n", "")
    processes.answers[("journalctl",)] = [b"one\n", b"two\n"]
    processes.answers[("crash",)] = ProgramError("crash did not end within 1 s")

    assert processes.run(["btrfs", "version", "-v"]).stdout == "v6.14\n"
    assert processes.run(["btrfs", "no"], check=False).code == 1
    assert list(processes.lines(["journalctl", "-f"])) == [b"one\n", b"two\n"]
    assert processes.calls[0] == ("btrfs", "version", "-v")
    for argv in (["btrfs", "no"], ["crash"], ["missing"]):
        with pytest.raises(ProgramError, match=argv[0]):
            processes.run(argv)


def test_closed_lines_end(tmp_path: Path) -> None:
    processes = a_machine(tmp_path).processes
    processes.answers[("journalctl",)] = Completed(0, "one\ntwo\n", "")
    lines = processes.lines(["journalctl"])

    seen = iter(lines)
    first = next(seen)
    lines.close()

    assert (first, list(seen)) == (b"one\n", [])
