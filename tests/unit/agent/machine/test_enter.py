"""Which process is the init of a machine, and its privileges (more tests in tests/lab)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent.machine import enter

STATUS = "Name:\tsystemd\nUmask:\t0000\nNSpid:\t{}\nCapBnd:\t00000000fdecabff\nSeccomp:\t2\n"


@pytest.mark.parametrize(
    ("numbers", "is_one"),
    [("812\t1", True), ("812", False), ("1", False), ("812\t31", False), ("812\t7\t1", False)],
)
def test_the_init_of_a_machine_is_the_first_of_the_first_namespace(
    numbers: str, is_one: bool
) -> None:
    """An init in a nested namespace belongs to a container inside of the machine."""
    assert enter.is_leader(STATUS.format(numbers)) is is_one


def test_a_process_status_without_pid_namespaces_is_no_leader() -> None:
    assert not enter.is_leader("Name:\tsystemd\n")
    assert not enter.is_leader("")


def test_rights_are_those_that_the_init_can_have_at_most() -> None:
    rights = enter.rights_of(STATUS.format("812\t1"))
    assert rights == 0xFDECABFF
    assert not rights >> 12 & 1, "CAP_NET_ADMIN"


def test_a_cgroup_without_an_init_has_none(tmp_path: Path) -> None:
    assert enter.find_leader(tmp_path) == 0
    (tmp_path / "payload").mkdir()
    (tmp_path / "payload/cgroup.procs").write_text(f"{os.getpid()}\n4194304\n")
    assert enter.find_leader(tmp_path) == 0


def test_without_an_init_nothing_is_run_and_the_reason_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert enter.run(tmp_path, "x", (), ("id",)) == enter.NOT_ENTERED
    assert capsys.readouterr().err == "the init of the task does not run\n"
    assert [*tmp_path.iterdir()] == []
