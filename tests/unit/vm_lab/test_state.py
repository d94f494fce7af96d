import os
import signal
from pathlib import Path

import msgspec
import pytest

from vm_lab.errors import LabError
from vm_lab.lab import Lab
from vm_lab.progress import Progress
from vm_lab.sandbox import _make_mount_point, remove_mount_points
from vm_lab.state import LabPaths, LabRecord, ProcessRef, end_process, find_process, process_ref


def a_lab(tmp_path) -> LabPaths:
    paths = LabPaths("lab", tmp_path / "state", tmp_path / "run")
    paths.make()
    return paths


@pytest.mark.parametrize("name", ["", "Lab", "../etc", "a b", "1lab", "x" * 17])
def test_an_unsafe_name_is_refused(name):
    with pytest.raises(LabError):
        LabPaths(name)


def test_the_record_of_a_lab_comes_back_as_it_was_saved(tmp_path):
    paths = a_lab(tmp_path)
    record = LabRecord(
        name="lab", count=3, cpus=1, memory_mib=1024, variant="base", image="twine-base-1",
        accel="tcg", bare=True,
    )  # fmt: skip
    assert paths.find_record() is None
    paths.save(paths.record, record)
    assert paths.get_record() == record


def test_a_missing_lab_is_named_in_the_error(tmp_path):
    with pytest.raises(LabError, match="'lab'"):
        a_lab(tmp_path).get_record()


def test_a_recorded_process_is_found_while_it_runs(tmp_path):
    paths = a_lab(tmp_path)
    paths.save(paths.holder, process_ref(os.getpid()))
    assert find_process(paths.holder) == os.getpid()


def test_another_process_with_the_same_number_is_not_mistaken_for_it(tmp_path):
    paths = a_lab(tmp_path)
    ref = process_ref(os.getpid())
    paths.save(paths.holder, ProcessRef(pid=ref.pid, start_ticks=ref.start_ticks - 1))
    assert find_process(paths.holder) is None


def test_no_file_means_no_process(tmp_path):
    assert find_process(a_lab(tmp_path).holder) is None


@pytest.mark.parametrize("name", ["", "..", "a/b", "-x"])
def test_a_snapshot_cannot_be_named_out_of_its_folder(tmp_path, name):
    with pytest.raises(LabError):
        a_lab(tmp_path).snapshot(name)


def test_a_recorded_process_is_ended_and_forgotten(tmp_path, mocker):
    """The process is the console that the demo leaves. Formerly `down` only reported it as left
    over."""
    paths = a_lab(tmp_path)
    ref = process_ref(os.getpid())
    paths.save(paths.web_console, ref)
    gone = ProcessRef(pid=ref.pid, start_ticks=ref.start_ticks - 1)
    kill = mocker.patch("os.kill", side_effect=lambda *_: paths.save(paths.web_console, gone))
    end_process(paths.web_console)
    kill.assert_called_once_with(os.getpid(), signal.SIGTERM)
    assert not paths.web_console.exists()
    end_process(paths.web_console)


@pytest.mark.behaviour("BUG-LB1")
@pytest.mark.parametrize("text", ["", '{"name": "lab"}', '{"name": "\xff"}'])
def test_a_lab_with_a_damaged_record_can_be_removed(tmp_path, text, monkeypatch):
    """Formerly each command, also `twine-lab down`, ended with a traceback after a power cut."""
    paths = a_lab(tmp_path)
    for file in (paths.record, paths.holder, paths.namespace, paths.interfaces_before):
        file.write_bytes(text.encode("latin-1"))
    with pytest.raises(LabError, match=r"cannot use .*lab\.json") as error:
        paths.get_record()
    assert error.value.hint == "remove the lab with `twine-lab down --name lab`"
    monkeypatch.setattr("vm_lab.lab.check_leftovers", lambda *found: found)
    assert Lab(paths, Progress()).down() == (paths, None, None)
    assert not paths.state.exists()


@pytest.mark.behaviour("BUG-LB12")
@pytest.mark.parametrize("text", [b"", b"[1]", b'["\xff"]'])
def test_a_damaged_list_of_mount_points_stops_neither_up_nor_down(tmp_path, text):
    """Formerly both ended with a traceback after a power cut."""
    record = tmp_path / "labs" / "made-folders.json"
    record.parent.mkdir()
    record.write_bytes(text)
    _make_mount_point(tmp_path / "place", record.parent)
    assert msgspec.json.decode(record.read_bytes()) == [str(tmp_path / "place")]
    record.write_bytes(text)
    remove_mount_points(record.parent)
    assert not record.exists()


@pytest.mark.behaviour("BUG-LB12")
def test_another_lab_may_make_a_mount_point_first(tmp_path, mocker):
    """Formerly the slower `twine-lab up` ended with a traceback."""
    place = tmp_path / "place"
    mocker.patch.object(Path, "write_bytes", side_effect=lambda _: place.mkdir())
    _make_mount_point(place, tmp_path)
    assert place.is_dir()


@pytest.mark.behaviour("BUG-LB12")
def test_a_process_may_have_a_name_that_is_not_text(tmp_path):
    """Formerly each command ended with a traceback if it had the number of a lab's process."""
    paths, own = a_lab(tmp_path), Path("/proc/self/comm")
    before = own.read_bytes().rstrip()
    own.write_bytes(b"\xff) S")
    try:
        paths.save(paths.holder, process_ref(os.getpid()))
        assert find_process(paths.holder) == os.getpid()
    finally:
        own.write_bytes(before)


@pytest.mark.behaviour("BUG-LB2")
def test_mount_points_may_be_removed_by_another_lab_meanwhile(tmp_path, mocker):
    """Two `twine-lab down` at once: the slower one ended with a traceback."""
    labs, places = tmp_path / "labs", [tmp_path / "one", tmp_path / "two"]
    for folder in (labs, *places):
        folder.mkdir()
    (labs / "made-folders.json").write_bytes(msgspec.json.encode(list(map(str, places))))
    removed, remove = [], Path.rmdir

    def both(place: Path) -> None:
        removed.append(place)
        remove(place)
        remove(place)

    mocker.patch.object(Path, "rmdir", both)
    remove_mount_points(labs)
    assert removed == places
    assert not any(folder.exists() for folder in (labs / "made-folders.json", *places))
