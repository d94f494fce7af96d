"""The state folder: torn journals, unknown schemas, the lock."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
from fake_host import FakeHost

from sidekick import history
from sidekick.disk import Disk
from sidekick.journal import Began, Undoing, Undone, Wrote
from sidekick.record import Record, Target
from sidekick.report import SettingChange
from sidekick.state import StateFolder
from wire.errors import Busy, HostError

CHANGE = SettingChange(setting="sysctl.vm.swappiness", before="60", after="1")
BEGAN = Began(
    command="apply", target=Target(name="web"), changes=(CHANGE,) * 3, boot_id="b", at=1.0
)


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    return StateFolder(tmp_path / "state")


def test_a_record_survives(state: StateFolder) -> None:
    record = Record(boot_id="b", applied=Target(name="web"), originals={"a": None, "b": "1"})
    state.save(record)
    assert state.load() == record


def test_a_journal_reports_the_progress_of_a_run(state: StateFolder) -> None:
    state.begin(BEGAN)
    for step in (Wrote(setting="a"), Wrote(setting="b")):
        state.step(step)
    run = state.unfinished()
    assert run
    assert run.describe(running=False) == "interrupted while applying web: 2 of 3 written"
    for step2 in (Undoing(reason="why"), Undone(setting="b")):
        state.step(step2)
    run = state.unfinished()
    assert run
    assert run.describe(running=True) == "undoing web (why): 1 of 2 undone"
    state.end()
    assert state.unfinished() is None


def test_a_torn_line_is_where_a_journal_ends(state: StateFolder) -> None:
    state.begin(BEGAN)
    state.step(Wrote(setting="a"))
    journal = state.folder / "journal.jsonl"
    whole = journal.read_bytes()
    for length in range(len(whole)):
        journal.write_bytes(whole[:length])
        run = state.unfinished()
        assert run is None or run.wrote <= 1
    journal.write_bytes(whole + b'{"type":"wro')
    run = state.unfinished()
    assert run
    assert run.wrote == 1


def test_a_record_of_a_newer_sidekick_is_not_guessed_at(state: StateFolder) -> None:
    state.save(Record(schema=99))
    with pytest.raises(HostError, match="schema 99"):
        state.load()


def test_a_record_with_a_line_of_an_earlier_sidekick_is_refused(state: StateFolder) -> None:
    state.save(Record(schema=1, originals={"sysctl.vm.swappiness": "60"}))
    assert state.load().originals == {"sysctl.vm.swappiness": "60"}
    state.save(Record(schema=1, originals={"kernel.staged": None}))
    with pytest.raises(HostError, match="which staged a command line"):
        state.load()


def test_a_setting_of_a_newer_sidekick_is_not_guessed_at(fake: FakeHost) -> None:
    fake.state.save(Record(boot_id="boot-1", originals={"novelty.x": "1"}))
    with pytest.raises(HostError, match="does not support settings of the kind 'novelty'"):
        fake.apply(Target())


def test_an_unreadable_record_is_an_error_with_a_hint(state: StateFolder) -> None:
    state.save(Record())
    (state.folder / "state.json").write_text("{")
    with pytest.raises(HostError) as caught:
        state.load()
    assert "move it to another folder" in caught.value.hint


@pytest.mark.behaviour("BUG-SK49")
@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("state.json", b'{"boot_id": "\xff"}'),
        ("status.json", b'{"detail": "\xff"}'),
        ("journal.jsonl", b'{"type": "undoing", "reason": "\xff"}\n'),
        ("history.jsonl", b'{"command": "\xff"}\n'),
    ],
)
def test_bytes_inside_a_text_that_are_no_text_are_a_damaged_file(
    state: StateFolder, name: str, data: bytes
) -> None:
    """The decoder raises another error for such bytes, and every command printed a traceback."""
    state.save(Record())
    (state.folder / name).write_bytes(data)
    assert state.unfinished() is None
    assert state.read_status() is None
    assert history.read_history(state) == []
    if name == "state.json":
        with pytest.raises(HostError, match=r"cannot read .*state\.json"):
            state.load()
    else:
        assert state.load() == Record()


def test_a_file_is_on_the_disk_before_its_name_and_that_before_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def fsync(fd: int) -> None:
        order.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))

    def replaced(self: Path, target: Path) -> None:
        order.append(f"rename to {target.name}")
        os.rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replaced)
    folder = tmp_path / "state"
    Disk().write(folder / "a", "1")
    assert order == ["a.new", "rename to a", "state"]
    order.clear()
    Disk().append(folder / "log", "1")
    Disk().append(folder / "log", "2")
    Disk().remove(folder / "log")
    assert order == ["log", "state", "log", "state"]


@pytest.mark.behaviour("F-71")
def test_a_second_sidekick_waits_and_then_gives_up(fake: FakeHost) -> None:
    host = fake.host()
    with fake.state.lock(0, host.monotonic, host.sleep):
        assert fake.state.is_locked()
        began = fake.time_s
        with (
            pytest.raises(Busy, match=f"process {os.getpid()}"),
            fake.state.lock(5, host.monotonic, host.sleep),
        ):
            pass
        assert 5 <= fake.time_s - began < 6
    assert not fake.state.is_locked()


def test_a_lock_ends_with_its_holder(fake: FakeHost) -> None:
    host = fake.host()
    with fake.state.lock(0, host.monotonic, host.sleep):
        pass
    fd = os.open(fake.state.folder / "lock", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert fake.state.is_locked()
    os.close(fd)
    assert not fake.state.is_locked()
