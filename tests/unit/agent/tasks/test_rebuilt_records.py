"""An unreadable or missing record is rebuilt from its copy and from the running unit."""

from __future__ import annotations

import errno
import shutil
import tempfile
from pathlib import Path

import pytest
from builders import FakeHost, a_record, a_spec, gone, running
from hypothesis import given
from hypothesis import strategies as st

from agent.cli.host import _oldest
from agent.runtime.core.records import TaskRecord, Tombstone, Wanted, key_of
from agent.runtime.journal import Journal
from agent.tasks.core.reconcile import rebuilt
from wire.errors import HostError


def record_file(host: FakeHost, task_id: str = "web") -> Path:
    return host.state / "journal" / f"{task_id}.json"


def copy_file(host: FakeHost, task_id: str = "web") -> Path:
    return Path(host.config.run_dir) / "records" / f"{task_id}.json"


@pytest.mark.behaviour("F-06")
@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff\xfe\x00", None])
async def test_a_task_whose_record_is_torn_or_gone_stays_known_whole_and_is_managed(
    host: FakeHost, content: bytes | None
) -> None:
    """Generation, probe and policy are unchanged; nothing is restarted or removed (P9)."""
    spec = a_spec(generation=7, epoch=3, stop_timeout_s=4.0)
    async with host.serving() as (services, client):
        services.contact.record_contact("", 3)  # a control plane has sent a request in this term
        await client.put_task("web", spec)
        await running(client, "web")
    before = host.invocation("web")
    record_file(host).unlink()
    if content is not None:
        record_file(host).write_bytes(content)

    async with host.agent() as client:
        status = await running(client, "web")
        assert (status.generation, status.epoch, status.reason) == (7, 3, "")
        assert status.invocation_id == before
        events = (await client.get_events(await _oldest(client))).events
        assert any("rebuilt from its copy" in e.message for e in events if e.object == "web")
        accounts = (await client.get_accounts()).accounts
        assert [a.name for a in accounts if a.wrong] == []
        kept = [a for a in accounts if a.kind == "record" and "unreadable" in a.name]
        assert ["has a record again" in a.why for a in kept] == [True] * (content is not None)
        await client.put_task("web", spec)  # the same request again is no change
        assert (await client.get_task("web")).invocation_id == before
    assert Journal(host.state / "journal").replay().tasks["web"].spec == spec


@pytest.mark.behaviour("F-06")
async def test_a_copy_of_something_else_than_what_runs_is_not_believed(host: FakeHost) -> None:
    """The unit names the specification that it was started from.

    The task keeps running and reports this.
    """
    async with host.agent() as client:
        await client.put_task("web", a_spec(generation=7))
        await running(client, "web")
    other = a_record(spec=a_spec(generation=8, command=["/bin/other"]))
    before = host.invocation("web")
    Journal(host.state / "elsewhere", None, copy_file(host).parent).save(other)
    record_file(host).write_bytes(b"")

    async with host.agent() as client:
        assert "cannot be read" in (await client.get_task("web")).reason
    assert host.invocation("web") == before


async def test_a_removed_task_is_not_restored_from_its_copy(host: FakeHost) -> None:
    """If the record is missing, only a running unit proves that the task exists (P9)."""
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        copy = copy_file(host).read_bytes()
        await client.delete_task("web")
        await gone(client, "web")
    record_file(host).unlink()
    # as an agent without copies, of an earlier release, leaves it
    copy_file(host).write_bytes(copy)

    async with host.agent() as client:
        assert (await client.list_tasks()).tasks == []


@pytest.mark.behaviour("F-05")
def test_records_of_an_agent_without_copies_get_one_and_removed_ones_say_so(tmp_path: Path) -> None:
    """An upgrade protects existing records."""
    folder, copies = tmp_path / "journal", tmp_path / "copies"
    Journal(folder).save(a_record())
    Journal(folder).save(Tombstone(task_id="old", generation=1, epoch=0, at=9e9))
    Journal(folder, None, copies).replay()

    for name in ("web", "old"):
        assert (copies / f"{name}.json").read_bytes() == (folder / f"{name}.json").read_bytes()
    assert copies.stat().st_mode & 0o777 == 0o700


@pytest.mark.behaviour("F-06")
def test_a_copy_that_cannot_be_written_is_removed(tmp_path: Path) -> None:
    """An old copy would restore values that an owner has changed since."""
    folder, copies = tmp_path / "journal", tmp_path / "copies"
    journal = Journal(folder, None, copies)
    journal.save(a_record())
    (copies / ".web.new").mkdir()  # writing the copy fails, as on a full disk
    journal.save(a_record(spec=a_spec(generation=2)))

    assert list(copies.glob("*.json")) == []
    assert journal.replay().tasks["web"].spec.generation == 2


@pytest.mark.behaviour("F-37")
async def test_a_value_that_cannot_be_written_is_in_force(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a read-only disk the agent starts, and the task is known."""
    async with host.agent() as client:
        await client.put_task("web", a_spec(generation=7))
        await running(client, "web")
    record_file(host).write_bytes(b"")

    def refused(*_: object, **__: object) -> None:
        raise HostError("cannot save: Read-only file system")

    monkeypatch.setattr(Journal, "save", refused)
    async with host.agent() as client:
        assert (await client.get_task("web")).generation == 7


@pytest.mark.behaviour("F-06")
@given(data=st.data())
def test_a_restored_copy_shows_each_record_as_it_was(data: st.DataObject) -> None:
    """This holds for any bytes; copies that equal the record are not needed."""
    record = a_record(spec=a_spec(generation=data.draw(st.integers(1, 99))))
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "journal", None, Path(folder) / "copies")
        journal.save(record, durable=False)
        path = Path(folder) / "journal" / "web.json"
        whole = path.read_bytes()
        cut = data.draw(st.integers(0, len(whole) - 2))
        path.write_bytes(data.draw(st.binary(max_size=40)) + whole[cut + 1 :])
        found = journal.replay()
    assert {**found.copies, **found.tasks} == {"web": record}


RECORDS = st.builds(
    a_record,
    spec=st.builds(a_spec, generation=st.integers(1, 5), command=st.just(["/bin/a"])),
    wanted=st.sampled_from(Wanted),
)
KEYS = st.sampled_from([key_of(a_spec(command=["/bin/a"])), "another", ""])


@given(
    copies=st.dictionaries(st.sampled_from("abcd"), RECORDS),
    keys=st.dictionaries(st.sampled_from("abcd"), KEYS),
    unreadable=st.sets(st.sampled_from("abcd")),
)
def test_a_rebuilt_record_never_contradicts_the_running_unit(
    copies: dict[str, TaskRecord], keys: dict[str, str], unreadable: set[str]
) -> None:
    found = rebuilt(copies, keys, unreadable)
    for task_id, record in found.items():
        assert record == copies[task_id]
        agrees = keys.get(task_id) == key_of(record.spec)
        assert agrees or (record.wanted is Wanted.GONE) or task_id not in keys
        assert agrees or task_id in unreadable


@pytest.mark.behaviour("BUG-AG43")
async def test_an_agent_whose_journal_is_another_than_its_boots_does_not_begin_as_new(
    host: FakeHost,
) -> None:
    """Without its file system the state folder is empty, although tasks run or are requested."""
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
    kept = host.state / "kept"
    (host.state / "journal").rename(kept)
    (host.state / "journal").mkdir()
    with pytest.raises(ExceptionGroup) as raised:
        async with host.agent():
            pass
    (error,) = raised.value.exceptions
    assert isinstance(error, HostError)
    assert "is not the journal of this host's tasks" in str(error)
    assert "file system mounted?" in error.hint
    assert copy_file(host).exists(), "the copies are kept for the journal to come"

    (host.state / "journal" / ".name").unlink(missing_ok=True)
    (host.state / "journal").rmdir()
    kept.rename(host.state / "journal")
    async with host.agent() as client:
        assert (await running(client, "web")).generation == 1


@pytest.mark.behaviour("BUG-AG43")
def test_a_new_boot_takes_the_journal_that_there_is(tmp_path: Path) -> None:
    """/run is lost at a boot, and with it the identity of the earlier journal."""
    Journal(tmp_path / "journal", None, tmp_path / "run-1").replay()
    name = (tmp_path / "journal" / ".name").read_text()
    Journal(tmp_path / "journal", None, tmp_path / "run-2").replay()
    assert (tmp_path / "journal" / ".name").read_text() == name
    with pytest.raises(HostError, match="is not the journal"):
        Journal(tmp_path / "other", None, tmp_path / "run-2").replay()


@pytest.mark.behaviour("BUG-AG94")
def test_a_start_writes_the_names_of_a_known_journal_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full /run the name was truncated, and an unmounted journal was no longer noticed."""
    folder, copies = tmp_path / "journal", tmp_path / "copies"
    Journal(folder, None, copies).replay()

    with monkeypatch.context() as full:

        def truncate(path: Path, _: str) -> None:
            open(path, "w").close()
            raise OSError(errno.ENOSPC, "No space left on device")

        full.setattr(Path, "write_text", truncate)
        Journal(folder, None, copies).replay()
    shutil.rmtree(folder)

    with pytest.raises(HostError, match="is not the journal of this host's tasks"):
        Journal(folder, None, copies).replay()
