"""One command at a time changes a lab."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from vm_lab.cli import main
from vm_lab.errors import LabError
from vm_lab.exclusive import lab_lock
from vm_lab.lab import Lab, UpOptions
from vm_lab.progress import Progress
from vm_lab.state import LabPaths

pytestmark = pytest.mark.behaviour("BUG-LB4")


def paths_of(tmp_path: Path, name: str = "lab") -> LabPaths:
    return LabPaths(name, tmp_path / "state", tmp_path / "run")


def test_a_second_command_is_refused_and_names_the_first(tmp_path: Path) -> None:
    """Formerly two `twine-lab up` at once made the namespaces and machines of one lab twice."""
    paths = paths_of(tmp_path)
    lab = Lab(paths, Progress())
    with lab_lock(paths, "up"):
        for command in (
            lambda: lab.up(UpOptions()), lab.down, lab.push,
            lambda: lab.snapshot("a"), lambda: lab.restore("a"), lambda: lab.power_off("m1"),
            lambda: lab.power_on("m1"), lambda: lab.partition("m1", heal=True),
        ):  # fmt: skip
            with pytest.raises(LabError, match=rf"`twine-lab up` in process {os.getpid()} "):
                command()
    assert not paths.state.exists()


@pytest.mark.behaviour("BUG-LB7")
@pytest.mark.parametrize(
    "words",
    [
        *(("control-plane", what) for what in ("start", "stop", "pause", "continue")),
        *(("power-off", "m1"), ("power-on", "m1"), ("partition", "m1")),
        *(("proxy", "start", "web:http"), ("proxy", "stop")),
    ],
)
def test_a_command_for_a_part_of_a_lab_is_refused_while_another_one_changes_the_lab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """Formerly they ran while `up`, `restore` or `down` changed the same lab."""
    paths = paths_of(tmp_path)
    monkeypatch.setattr("vm_lab.cli.LabPaths", lambda _: paths)
    monkeypatch.setattr("vm_lab.cli.require_root", lambda: None)
    with lab_lock(paths, "restore"):
        result = CliRunner().invoke(main, words)
    assert result.exit_code == 1
    assert f"`twine-lab restore` in process {os.getpid()} " in result.output


@pytest.mark.behaviour("BUG-LB7")
def test_the_lock_names_the_command_as_the_user_typed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(paths_of(tmp_path), Progress())
    held: list[str] = []
    monkeypatch.setattr(lab.domains, "power_off", lambda _: held.append(lab.paths.lock.read_text()))
    monkeypatch.setattr(lab, "machine", lambda _: lab.topology.machine[0])
    lab.power_off("m1")
    assert held == [f"{os.getpid()} power-off"]


def test_the_lock_leaves_no_file_and_is_free_afterwards(tmp_path: Path) -> None:
    paths = paths_of(tmp_path)
    for _ in range(2):
        with lab_lock(paths, "up"):
            assert paths.lock.exists()
        assert not paths.run_root.exists()


def test_labs_do_not_lock_each_other(tmp_path: Path) -> None:
    with lab_lock(paths_of(tmp_path), "up"), lab_lock(paths_of(tmp_path, "other"), "up"):
        pass


def test_a_command_that_opened_a_removed_lock_takes_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, opened = paths_of(tmp_path), Path.open

    def removed_after_open(path: Path, mode: str) -> object:
        file = opened(path, mode)
        monkeypatch.setattr(Path, "open", opened)
        path.unlink()
        return file

    monkeypatch.setattr(Path, "open", removed_after_open)
    with (
        lab_lock(paths, "up"),
        pytest.raises(LabError, match="twine-lab up"),
        lab_lock(paths, "down"),
    ):
        pass
