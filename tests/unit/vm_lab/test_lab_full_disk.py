"""Commands of the lab on a full disk: one error, and no half-written file."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from vm_lab import cli, lab
from vm_lab.cache import partial_file, partial_folder
from vm_lab.errors import LabError, disk_error, reporting
from vm_lab.image.recipe import hint_of
from vm_lab.progress import Progress
from vm_lab.state import LabPaths, ProcessRef

pytestmark = pytest.mark.behaviour("BUG-LB5")


def full(path: str | None = None) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


@pytest.mark.parametrize(
    "error",
    [
        full(),
        full("/x/y"),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        shutil.Error([("/a", "/b", str(full("/b")))]),
    ],
)
def test_a_full_disk_is_one_error(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formerly it was a traceback."""

    def up(*_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "require_root", lambda: None)
    monkeypatch.setattr(lab.Lab, "up", up)
    found = CliRunner().invoke(cli.main, ["up"])
    assert found.exit_code == 1
    assert isinstance(found.exception, SystemExit)
    lines = found.output.splitlines()
    assert lines[0].startswith("twine-lab: cannot write a file")
    assert "MiB at /var/lib/twine-lab" in lines[0]
    assert lines[1].startswith("hint: free space there")


def test_other_errors_of_the_system_are_not_taken_for_a_full_disk() -> None:
    assert disk_error(PermissionError(errno.EACCES, "Permission denied", "/x")) is None
    with pytest.raises(PermissionError), reporting("twine-lab"):
        raise PermissionError(errno.EACCES, "Permission denied", "/x")


def test_a_demo_reports_an_error_without_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), reporting("demo"):
        raise LabError("app.sh failed", hint="try again")
    assert capsys.readouterr().err == "demo: app.sh failed\nhint: try again\n"


def test_a_partial_folder_or_file_is_removed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")

    def fill_folder() -> None:
        with partial_folder(tmp_path / "folder") as partial:
            (partial / "half").touch()
            raise full()

    def fill_file() -> None:
        with partial_file(tmp_path / "file") as partial:
            partial.write_text("half")
            raise full()

    for fill in (fill_folder, fill_file):
        with pytest.raises(OSError, match="No space"):
            fill()
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"


def test_a_record_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = LabPaths("lab", tmp_path / "state", tmp_path / "run")
    paths.make()
    paths.save(paths.holder, ProcessRef(pid=1, start_ticks=2))
    before = paths.holder.read_bytes()

    def write(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[:3])
        raise full()

    monkeypatch.setattr(Path, "write_bytes", write)
    with pytest.raises(OSError, match="No space"):
        paths.save(paths.holder, ProcessRef(pid=3, start_ticks=4))
    assert paths.holder.read_bytes() == before
    assert not list(paths.state.glob("*.partial"))


def test_a_snapshot_that_fails_leaves_the_control_plane_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formerly the control plane stayed stopped, and half a snapshot remained."""
    paths = LabPaths("lab", tmp_path / "state", tmp_path / "run")
    paths.control_plane_state.mkdir(parents=True)
    found, started = lab.Lab(paths, Progress()), []

    def save(into: Path) -> None:
        into.mkdir()
        raise full()

    monkeypatch.setattr(lab.Lab, "machines", lambda _: ())
    monkeypatch.setattr(lab.Lab, "_stop_control_plane", lambda _: True)
    monkeypatch.setattr(lab, "on_each", lambda *_: None)
    monkeypatch.setattr(found.control, "save", save)
    monkeypatch.setattr(found.control, "start", lambda: started.append(1))
    with pytest.raises(OSError, match="No space"):
        found.snapshot("a")
    assert started == [1]
    assert list(paths.snapshots.iterdir()) == []


@pytest.mark.behaviour("BUG-LB10")
def test_a_snapshot_with_one_machine_off_leaves_the_others_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formerly they stayed suspended."""
    paths = LabPaths("lab", tmp_path / "state", tmp_path / "run")
    a_lab = lab.Lab(paths, Progress())
    running = {"m1", "m3"}

    def suspend(name: str) -> None:
        if name == "m2":
            raise LabError("domain is not running")
        running.remove(name)

    monkeypatch.setattr(lab.Lab, "machines", lambda lab: lab.topology.first(3))
    monkeypatch.setattr(a_lab.domains, "suspend", suspend)
    monkeypatch.setattr(a_lab.domains, "resume", running.add)
    with pytest.raises(LabError, match="not running"):
        a_lab.snapshot("a")
    assert running == {"m1", "m3"}


def test_a_recipe_on_a_full_disk_does_not_blame_the_mirror() -> None:
    assert hint_of("tar: /x: Cannot write: No space left on device\n").startswith("free space")
    assert "Debian mirror" in hint_of("curl: (6) Could not resolve host\n")
