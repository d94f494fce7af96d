"""Tasks through the agent's own API, on a whole machine in memory."""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from builders import (
    OTHER_IMAGE,
    FakeHost,
    a_spec,
    gone,
    running,
    unit,
    until,
)
from msgspec.structs import replace

import agent as agent_package
from agent import api
from agent.api import Health, Limits, RestartPolicy, RestartWhen, TaskState
from agent.client import AgentClient
from agent.machine.fake_programs import ends_with
from agent.runtime.core.records import TOMBSTONE_S
from agent.runtime.journal import Journal
from wire.errors import (
    Busy,
    ConfigError,
    Conflict,
    HostError,
    NotFound,
    SystemdError,
    Unprocessable,
)

NEVER = RestartPolicy(when=RestartWhen.NEVER)


def _left(host: FakeHost) -> tuple[list[str], list[str]]:
    return host.units(), host.roots()


def _copies(host: FakeHost) -> Path:
    return Path(host.config.run_dir) / "records"


def _journal(host: FakeHost) -> Path:
    return host.state / "journal"


@pytest.mark.behaviour("AG1", "AG2", "AG3")
async def test_a_task_that_is_put_runs_in_a_snapshot_of_its_image(host: FakeHost) -> None:
    async with host.agent() as client:
        accepted = await client.put_task("web", a_spec())
        status = await running(client, "web")

    properties = host.fake.systemd.properties(unit("web"))
    assert accepted.state is TaskState.ACCEPTED
    assert (status.health, status.invocation_id) == (Health.HEALTHY, host.invocation("web"))
    assert properties["RootDirectory"] == str(host.state / "tasks" / "web")
    assert _left(host) == ([unit("web")], ["web"])


async def test_the_same_specification_again_changes_nothing(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.put_task("web", a_spec(generation=2))
        first = await running(client, "web")
        again = await client.put_task("web", a_spec(generation=2))

    assert again == first
    assert len(host.fake.systemd.started) == 1


@pytest.mark.behaviour("BUG-AG13")
async def test_the_same_generation_with_another_content_is_a_conflict(host: FakeHost) -> None:
    """The request was answered with success and ignored."""
    async with host.agent() as client:
        await client.put_task("web", a_spec(generation=2))
        first = await running(client, "web")
        with pytest.raises(
            Conflict, match=r"generation 2 is in force with another content \(command"
        ):
            await client.put_task("web", a_spec(generation=2, command=["/other"]))
        after = await client.get_task("web")

    assert after == first
    assert len(host.fake.systemd.started) == 1


async def test_an_older_generation_or_epoch_is_a_conflict(host: FakeHost) -> None:
    async with host.serving() as (services, client):
        services.contact.record_contact("", 2)  # a control plane has sent a request in this term
        await client.put_task("web", a_spec(generation=5, epoch=2))
        for stale in (a_spec(generation=4, epoch=2), a_spec(generation=9, epoch=1)):
            with pytest.raises(Conflict, match="older"):
                await client.put_task("web", stale)
        with pytest.raises(Conflict):
            await client.delete_task("web", generation=4, epoch=2)
        with pytest.raises(Conflict):
            await client.restart_task("web", generation=5, epoch=1)


async def test_of_many_senders_at_once_the_newest_generation_wins(host: FakeHost) -> None:
    async with host.agent() as client:
        puts = [
            client.put_task("web", a_spec(generation=n, command=[f"/v{n}"]))
            for n in (3, 1, 7, 5, 2, 6, 4)
        ]
        await asyncio.gather(*puts, return_exceptions=True)
        status = await until(
            client, "web", lambda s: s.generation == 7 and s.state is TaskState.RUNNING
        )

    assert status.generation == 7
    assert host.fake.systemd.properties(unit("web"))["ExecStart"] == [["/v7"]]


async def test_a_deleted_task_leaves_nothing_and_is_not_found(host: FakeHost) -> None:  # P9
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        leaving = await client.delete_task("web")
        await gone(client, "web")
        tasks = (await client.list_tasks()).tasks

    assert leaving.state is TaskState.STOPPING
    assert (tasks, _left(host)) == ([], ([], []))


@pytest.mark.behaviour("F-81")
async def test_a_late_put_of_a_removed_generation_does_not_bring_it_back(
    host: FakeHost,
) -> None:
    async with host.agent() as client:
        await client.put_task("web", a_spec(generation=3))
        await client.delete_task("web")
        with pytest.raises(Conflict, match="already removed"):
            await client.put_task("web", a_spec(generation=3))
        await gone(client, "web")
    async with host.agent() as client:
        with pytest.raises(Conflict, match="already removed"):
            await client.put_task("web", a_spec(generation=3))
        await client.put_task("web", a_spec(generation=4))
        await running(client, "web")


@pytest.mark.behaviour("BUG-AG46")
async def test_tombstones_are_forgotten_after_a_day_while_the_agent_runs(host: FakeHost) -> None:
    """A host with short tasks kept one record of each until its agent restarted."""
    later_s, clock = 0.0, host.fake.boottime_s
    host.fake.boottime_s = lambda: clock() + later_s
    async with host.agent() as client, asyncio.timeout(60):
        for task_id in ("old", "new"):
            await client.put_task(task_id, a_spec(generation=3))
            await client.delete_task(task_id)
            await gone(client, task_id)
            later_s += TOMBSTONE_S
        folders = (_journal(host), _copies(host))
        while any({p.stem for p in folder.glob("*.json")} != {"new"} for folder in folders):
            await asyncio.sleep(0)
        with pytest.raises(Conflict, match="already removed"):
            await client.put_task("new", a_spec(generation=3))
        await client.put_task("old", a_spec(generation=3))
        await running(client, "old")


@pytest.mark.behaviour("BUG-AG93")
async def test_a_step_of_the_clock_does_not_forget_a_removed_task(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a step of a day the next removal forgot it, and a late request started it again."""
    clock = time.time
    async with host.agent() as client:
        await client.put_task("web", a_spec(generation=3))
        await client.delete_task("web", generation=3)
        await gone(client, "web")
        monkeypatch.setattr(time, "time", lambda: clock() + 2 * TOMBSTONE_S)
        await client.put_task("other", a_spec())
        await client.delete_task("other")
        await gone(client, "other")
    async with host.agent() as client:
        with pytest.raises(Conflict, match="already removed"):
            await client.put_task("web", a_spec(generation=3))


@pytest.mark.behaviour("F-48")
async def test_a_delete_that_overtook_its_put_wins(host: FakeHost) -> None:
    async with host.agent() as client:
        with pytest.raises(NotFound):
            await client.delete_task("web", generation=3)
        with pytest.raises(Conflict):
            await client.put_task("web", a_spec(generation=3))
        with pytest.raises(NotFound):
            await client.get_task("web")


@pytest.mark.behaviour("BUG-AG101")
async def test_a_delete_during_the_creation_of_a_task_removes_it(host: FakeHost) -> None:
    """The answer was "no such task", and the task ran although its removal was newer."""
    async with host.serving() as (services, client):
        async with (lock := services.tasks._creating):
            putting = asyncio.create_task(services.tasks.put("web", a_spec()))
            await _waiting(lock, 1)
            deleting = asyncio.create_task(services.tasks.delete("web", 2, None))
            await _waiting(lock, 2)
        await putting
        assert (await deleting).generation == 2
        await gone(client, "web")
    assert _left(host) == ([], [])


async def _waiting(lock: asyncio.Lock, number: int) -> None:
    """Return once this many wait for the lock."""
    while len(lock._waiters or ()) < number:
        await asyncio.sleep(0)


async def test_a_task_put_while_it_is_removed_is_never_lost(host: FakeHost) -> None:
    async with host.agent() as client:
        for generation in range(1, 40):
            await client.put_task("web", a_spec(generation=generation))
            if generation % 2:
                await client.delete_task("web")
            else:
                await running(client, "web")
        await client.put_task("web", a_spec(generation=50))
        await until(client, "web", lambda s: s.generation == 50 and s.state is TaskState.RUNNING)

    assert _left(host) == ([unit("web")], ["web"])


async def test_a_restart_changes_the_invocation_once(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        before = await running(client, "web")
        await client.restart_task("web")
        after = await until(
            client,
            "web",
            lambda s: s.state is TaskState.RUNNING and s.invocation_id != before.invocation_id,
        )

    assert after.restarts == 0
    assert len(host.fake.systemd.started) == 2


async def test_a_new_command_replaces_the_unit_and_new_limits_do_not(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        first = await running(client, "web")
        await client.put_task("web", a_spec(generation=2, limits=Limits(tasks_max=9)))
        while host.fake.systemd.properties(unit("web"))["TasksMax"] != 9:
            await asyncio.sleep(0)
        assert host.invocation("web") == first.invocation_id
        await client.put_task("web", a_spec(generation=3, command=["/new"]))
        third = await until(
            client,
            "web",
            lambda s: s.state is TaskState.RUNNING and s.invocation_id != first.invocation_id,
        )

    assert len(host.fake.systemd.started) == 2
    assert (third.generation, third.restarts) == (3, 0)


async def test_a_unit_that_still_runs_is_not_shown_as_the_new_generation(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        changed = await client.put_task("web", a_spec(generation=2, command=["/new"]))
        await running(client, "web")
        again = await client.restart_task("web")
        await running(client, "web")
        leaving = await client.delete_task("web")

    for status in (changed, again, leaving):
        assert (status.state, status.health) == (TaskState.STOPPING, Health.UNKNOWN)


async def test_another_image_gives_another_root(host: FakeHost) -> None:
    host.give_image(OTHER_IMAGE)
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        before = host.fake.btrfs.find(host.state / "tasks" / "web")
        await client.put_task("web", a_spec(generation=2, image=OTHER_IMAGE))
        await until(client, "web", lambda s: s.image == OTHER_IMAGE and s.state == "running")
        await until(client, "web", lambda _: host.invocation("web") != "")

    image = host.fake.btrfs.find(host.state / "images" / ("2" * 64))
    after = host.fake.btrfs.find(host.state / "tasks" / "web")
    assert image
    assert after
    assert after != before
    assert after.parent_uuid == image.uuid


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (a_spec(image=OTHER_IMAGE), "is not on this machine"),
        (a_spec(limits=Limits(memory_max_bytes=3 << 30)), "does not fit"),
        (a_spec(limits=Limits(cpu_max_cores=64)), "exceeds the .* CPUs of the machine"),
    ],
)
async def test_a_task_that_cannot_run_here_is_refused_and_changes_nothing(
    host: FakeHost, spec: api.TaskSpec, why: str
) -> None:
    async with host.agent() as client:
        with pytest.raises(Unprocessable, match=why):
            await client.put_task("web", spec)
        assert (await client.list_tasks()).tasks == []


@pytest.mark.behaviour("BUG-AG4")
async def test_memory_taken_as_huge_pages_is_promised_to_no_task(host: FakeHost) -> None:
    # memory that a profile takes while the agent runs counts from then on
    large = a_spec(limits=Limits(memory_max_bytes=1 << 30))
    async with host.agent() as client:
        host.fake.hardware = replace(host.fake.hardware, hugepages_bytes=1 << 30)
        with pytest.raises(Unprocessable, match="does not fit"):
            await client.put_task("large", large)
        assert (await client.get_machine()).hugepages_bytes == 1 << 30
        host.fake.hardware = replace(host.fake.hardware, hugepages_bytes=0)
        await client.put_task("large", large)


async def test_memory_of_a_task_that_is_over_is_there_for_others(host: FakeHost) -> None:
    """The memory was kept for the ended task until its removal."""
    host.fake.systemd.programs["/bin/once"] = ends_with(0)
    large = a_spec(limits=Limits(memory_max_bytes=1 << 30))
    once = replace(large, command=["/bin/once"], restart=RestartPolicy(when=RestartWhen.NEVER))
    async with host.agent() as client:
        await client.put_task("once", once)
        await until(client, "once", lambda s: s.state is TaskState.STOPPED)
        await client.put_task("web", large)
        await running(client, "web")
        with pytest.raises(Unprocessable, match=r"once is not restarted: .* does not fit"):
            await client.restart_task("once")
        await client.delete_task("web")
        await gone(client, "web")
        await client.restart_task("once")
        again = await until(client, "once", lambda s: s.state is TaskState.STOPPED)

    assert again.last_exit is not None


async def test_tasks_requested_at_once_get_at_most_what_the_host_has(host: FakeHost) -> None:
    large = a_spec(limits=Limits(memory_max_bytes=1 << 30))
    async with host.agent() as client:
        answers = await asyncio.gather(
            *(client.put_task(f"t{n}", large) for n in range(5)), return_exceptions=True
        )

    assert sum(isinstance(a, Unprocessable) for a in answers) == 4


async def test_a_task_that_ends_is_started_again_after_a_pause(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        first = await running(client, "web")
        host.fake.systemd.exit(unit("web"), 3)
        again = await until(
            client, "web", lambda s: s.restarts == 1 and s.state is TaskState.RUNNING
        )

    assert again.invocation_id != first.invocation_id
    assert again.last_exit is not None
    assert (again.last_exit.result, again.last_exit.code) == ("exit-code", 3)


@pytest.mark.behaviour("F-12")
async def test_a_task_killed_for_lack_of_memory_reports_it(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.put_task("web", a_spec(restart=NEVER))
        await running(client, "web")
        host.fake.systemd.oom(unit("web"))
        status = await until(client, "web", lambda s: s.state is TaskState.STOPPED)

    assert status.last_exit is not None
    assert status.last_exit.result == "oom-kill"
    assert "more memory than its limit" in status.reason


@pytest.mark.behaviour("F-12")
async def test_a_killed_probe_does_not_block_the_next_start(
    host: FakeHost,
) -> None:
    """It stays as a failed unit after the task's unit, which systemd then keeps loaded."""
    systemd = host.fake.systemd
    systemd.programs["killed"] = ends_with(1)
    probe = {"ExecStart": [["killed"]], "CollectMode": "inactive"}
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        for name in ("twine-in-web.ready.service", "twine-in-web.other.ready.service"):
            systemd.start_transient(name, probe)
        await client.get_machine()
        assert len(systemd.units("twine-in-*")) == 2
        systemd.oom(unit("web"))
        await until(client, "web", lambda s: s.restarts == 1 and s.state is TaskState.RUNNING)
        left = [one.unit for one in systemd.units("twine-in-*")]
    assert left == ["twine-in-web.other.ready.service"]


@pytest.mark.behaviour("F-12")
async def test_a_killed_probe_of_a_deleted_task_is_removed_with_it(
    host: FakeHost,
) -> None:
    """Otherwise both units stay loaded for as long as the host runs."""
    systemd = host.fake.systemd
    systemd.programs["killed"] = ends_with(1)
    probe = {"ExecStart": [["killed"]], "CollectMode": "inactive"}
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        for name in ("twine-in-web.ready.service", "twine-in-web.other.ready.service"):
            systemd.start_transient(name, probe)
        await client.get_machine()
        assert len(systemd.units("twine-in-*")) == 2
        await client.delete_task("web")
        await gone(client, "web")
        left = [one.unit for one in systemd.units("twine-in-*")]
    assert left == ["twine-in-web.other.ready.service"]


@pytest.mark.behaviour("F-12")
async def test_a_probe_that_an_earlier_task_of_the_name_left_does_not_keep_it_from_starting(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent has no record of that task, and systemd reports only that the name is in use."""
    systemd = host.fake.systemd
    systemd.programs["killed"] = ends_with(1)
    start = systemd.start_transient

    def start_transient(name: str, properties: Any) -> None:
        if name == unit("web") and systemd.units("twine-in-web.*"):
            raise Conflict(f"cannot start {name}: Unit {name} was already loaded")
        start(name, properties)

    monkeypatch.setattr(systemd, "start_transient", start_transient)
    probe = {"ExecStart": [["killed"]], "CollectMode": "inactive"}
    systemd.start_transient("twine-in-web.ready.service", probe)
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
    assert systemd.units("twine-in-*") == []


@pytest.mark.behaviour("F-17")
async def test_a_missing_command_is_explained(host: FakeHost) -> None:
    host.fake.systemd.programs["/bin/server"] = ends_with(203)
    async with host.agent() as client:
        await client.put_task("web", a_spec(restart=NEVER))
        status = await until(client, "web", lambda s: s.state is TaskState.STOPPED)

    assert "could not be executed" in status.reason


@pytest.mark.behaviour("F-16")
async def test_a_crash_loop_waits_longer_each_time_and_shows_until_when(host: FakeHost) -> None:
    host.fake.systemd.programs["/bin/server"] = ends_with(1)
    slow = RestartPolicy(backoff_s=100.0)
    async with host.agent() as client:
        await client.put_task("web", a_spec(restart=slow))
        status = await until(client, "web", lambda s: s.state is TaskState.BACKOFF)

    assert status.next_start_at is not None
    assert status.last_exit is not None
    assert 74 < status.next_start_at - status.last_exit.at < 101
    assert len(host.fake.systemd.started) == 1


@pytest.mark.behaviour("F-21")
async def test_a_unit_stopped_by_another_program_is_started_again(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        host.fake.systemd.stop(unit("web"))
        status = await until(
            client, "web", lambda s: s.restarts == 1 and s.state is TaskState.RUNNING
        )

    assert status.last_exit is not None
    assert status.last_exit.result == "external-stop"


@pytest.mark.behaviour("AG5", "F-02")
async def test_six_restarts_of_the_agent_restart_no_task(host: FakeHost) -> None:  # P1
    async with host.agent() as client:
        for n in range(5):
            await client.put_task(f"t{n}", a_spec(limits=Limits(memory_max_bytes=8 << 20)))
        before = [await running(client, f"t{n}") for n in range(5)]
    for _ in range(6):
        async with host.agent() as client:
            after = (await client.list_tasks()).tasks

    assert [t.invocation_id for t in after] == [t.invocation_id for t in before]
    assert len(host.fake.systemd.started) == 5


@pytest.mark.behaviour("AG5", "F-03")
async def test_how_a_task_ended_while_the_agent_was_down_is_reported(host: FakeHost) -> None:
    async with host.agent() as client:
        for name in ("code", "oom", "fine"):
            await client.put_task(name, a_spec(restart=NEVER))
            await running(client, name)
    host.fake.systemd.exit(unit("code"), 7)
    host.fake.systemd.oom(unit("oom"))
    host.fake.systemd.exit(unit("fine"), 0)
    async with host.agent() as client:
        ends = {n: (await client.get_task(n)).last_exit for n in ("code", "oom", "fine")}

    assert {n: (e.result, e.code) for n, e in ends.items() if e} == {
        "code": ("exit-code", 7),
        "oom": ("oom-kill", None),
        "fine": ("success", 0),
    }


async def test_after_a_reboot_tasks_wait_for_their_owner_unless_they_may_start(  # P8
    host: FakeHost,
) -> None:
    async with host.agent() as client:
        for name, alone in (("waits", False), ("starts", True)):
            await client.put_task(name, a_spec(offline_restart=alone))
            await running(client, name)
    host.fake.reboot()
    async with host.agent() as client:
        await running(client, "starts")
        waits = await client.get_task("waits")
        assert (waits.state, host.units()) == (TaskState.STOPPED, [unit("starts")])
        assert "rebooted" in waits.reason
        await client.restart_task("waits")
        await running(client, "waits")


async def test_units_and_roots_that_belong_to_no_task_are_removed(host: FakeHost) -> None:  # P9
    async with host.agent() as client:
        for name in ("kept", "lost"):
            await client.put_task(name, a_spec())
            await running(client, name)
    (_journal(host) / "lost.json").unlink()
    (_copies(host) / "lost.json").unlink()
    async with host.agent() as client:
        await gone(client, "lost")
        assert _left(host) == ([unit("kept")], ["kept"])
        await client.put_task("lost", a_spec())
        await running(client, "lost")


GARBAGE: list[bytes] = [
    b"",
    b"garbage",
    b"[" * 100_000,
    b"\xff\xfe\x00",
    b'{"schema": 1, "kind": "task", "crc": 1}\n{}\n',
    b"null\n",
]


@pytest.mark.behaviour("F-06")
@pytest.mark.parametrize("content", GARBAGE)
async def test_a_record_that_cannot_be_read_leaves_its_task_running(
    host: FakeHost, content: bytes
) -> None:
    async with host.agent() as client:
        for name in ("web", "other"):
            await client.put_task(name, a_spec(generation=3))
            await running(client, name)
    before = host.invocation("web")
    (_journal(host) / "web.json").write_bytes(content)
    (_copies(host) / "web.json").unlink()
    for _ in range(2):
        async with host.agent() as client:
            status = await client.get_task("web")
            assert "cannot be read" in status.reason
            assert (await client.get_task("other")).state is TaskState.RUNNING
    assert host.invocation("web") == before

    async with host.agent() as client:
        await client.put_task("web", a_spec(generation=4))
        await running(client, "web")
    assert host.invocation("web") == before
    assert len(list(_journal(host).glob("web.unreadable-*"))) == 1


@pytest.mark.behaviour("F-06")
async def test_a_record_torn_at_any_length_is_never_taken_for_an_empty_one(
    host: FakeHost,
) -> None:
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
    path = _journal(host) / "web.json"
    whole = path.read_bytes()
    journal = Journal(_journal(host))
    for length in range(0, len(whole) - 1, 7):
        path.write_bytes(whole[:length])
        assert list(journal.replay().unreadable) == ["web"]
    for index in range(0, len(whole) - 1, 11):
        flipped = bytearray(whole)
        flipped[index] ^= 0x01
        path.write_bytes(bytes(flipped))
        replay = journal.replay()
        assert list(replay.unreadable) == ["web"] or index < whole.index(b"\n")


async def test_a_task_with_an_unreadable_record_can_be_removed(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
    (_journal(host) / "web.json").write_bytes(b"")
    (_copies(host) / "web.json").unlink()
    async with host.agent() as client:
        await asyncio.gather(client.delete_task("web"), client.delete_task("web"))
        await gone(client, "web")
    assert _left(host) == ([], [])


@pytest.mark.behaviour("F-07")
async def test_records_of_a_newer_agent_stop_this_one_and_nothing_else(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
    body = b"{}"
    head = json.dumps({"schema": 2, "kind": "task", "crc": zlib.crc32(body)}).encode()
    (_journal(host) / "web.json").write_bytes(head + b"\n" + body + b"\n")

    with pytest.raises(ExceptionGroup) as refused:
        async with host.agent():
            pass
    (error,) = refused.value.exceptions
    assert isinstance(error, ConfigError)
    assert error.exit_code == 78
    assert host.units() == [unit("web")]


@pytest.mark.behaviour("F-38", "BUG-AG15")
async def test_on_another_file_system_the_agent_reports_it_and_does_not_start(
    host: FakeHost,
) -> None:
    """The agent sent READY, and every image was refused with a 503."""
    host.fake.btrfs.root = host.folder / "elsewhere"
    with pytest.raises(ConfigError, match="is not on a btrfs file system") as refused:
        async with host.agent():
            pass
    assert "mkfs.btrfs" in refused.value.hint
    assert refused.value.exit_code == 78


@pytest.mark.behaviour("F-07", "F-38", "BUG-AG15")
def test_systemd_does_not_restart_a_unit_that_a_restart_cannot_fix() -> None:
    """systemd restarted the unit every second forever."""
    unit = (Path(agent_package.__file__).parent / "units" / "twine-agent.service").read_text()
    assert f"\nRestartPreventExitStatus={ConfigError.exit_code}\n" in unit


@pytest.mark.behaviour("F-07")
async def test_only_starts_that_fail_in_a_row_make_systemd_wait_longer(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that cannot start takes processor time from the dpkg that would replace it."""
    text = (Path(agent_package.__file__).parent / "units" / "twine-agent.service").read_text()
    assert "\nRestartSec=1\nRestartSteps=5\nRestartMaxDelaySec=30\n" in text
    loop, units = asyncio.get_running_loop(), asyncio.Queue[str]()

    def refused(unit: str) -> None:
        loop.call_soon_threadsafe(units.put_nowait, unit)
        raise SystemdError(f"cannot reset {unit}: not now")

    monkeypatch.setattr(host.fake.systemd, "reset_failed", refused)
    async with asyncio.timeout(60), host.agent() as client:
        assert await units.get() == "twine-agent.service"
        assert (await client.readyz()).ok


@pytest.mark.behaviour("F-08")
async def test_a_second_agent_on_the_same_host_gives_way(host: FakeHost) -> None:
    async with host.agent() as client:
        with pytest.raises(Busy) as refused:
            async with host.agent():
                pass
        assert refused.value.exit_code == 75
        assert (await client.readyz()).ok


@pytest.mark.behaviour("F-33")
async def test_a_full_disk_refuses_the_request_and_keeps_the_state_in_force(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(Journal, "_replace", full)
            with pytest.raises(HostError, match="No space left"):
                await client.put_task("web", a_spec(generation=2))
            with pytest.raises(HostError):
                await client.put_task("new", a_spec())
            with pytest.raises(NotFound):
                await client.get_task("new")
            host.fake.systemd.exit(unit("web"), 1)
        await until(client, "web", lambda s: s.restarts == 1 and s.state is TaskState.RUNNING)
        assert (await client.get_task("web")).generation == 1


async def test_a_bug_in_one_task_takes_neither_the_agent_nor_the_others_down(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = 3
    really = host.fake.btrfs.snapshot

    def breaks(source: Path, target: Path, *, read_only: bool = False) -> None:
        nonlocal failures
        if target.name == "web" and failures:
            failures -= 1
            raise RuntimeError("a bug")
        really(source, target, read_only=read_only)

    monkeypatch.setattr(host.fake.btrfs, "snapshot", breaks)
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await client.put_task("other", a_spec())
        await running(client, "other")
        await running(client, "web")

    assert caplog.text.count("this is a bug") == 3


@pytest.mark.behaviour("F-19")
async def test_a_bus_that_fails_for_a_while_is_waited_for(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = 5
    really = host.fake.systemd.find

    def flaky(name: str) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            raise SystemdError("the bus is gone")
        return really(name)

    async with host.agent() as client:
        await client.put_task("web", a_spec())
        before = await running(client, "web")
        monkeypatch.setattr(host.fake.systemd, "find", flaky)
        host.fake.systemd.lose_bus()
        await client.put_task("web", a_spec(generation=2, command=["/new"]))
        await until(
            client,
            "web",
            lambda s: s.state is TaskState.RUNNING and s.invocation_id != before.invocation_id,
        )
    assert failures == 0


async def test_a_start_that_systemd_refuses_is_tried_again(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = 2
    really = host.fake.systemd.start_transient

    def flaky(name: str, properties: Any) -> None:
        nonlocal failures
        if failures:
            failures -= 1
            raise SystemdError("cannot start: no memory")
        really(name, properties)

    monkeypatch.setattr(host.fake.systemd, "start_transient", flaky)
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        status = await running(client, "web")

    assert (status.restarts, status.reason) == (0, "")


async def test_a_step_that_fails_at_once_after_a_restart_of_the_agent_is_no_hot_loop(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        before = len((await client.get_events(0)).events)
        assert before == 0
    calls = 0

    def refuses(*_: Any, **__: Any) -> None:
        nonlocal calls
        calls += 1
        raise NotFound("the image is not here")

    monkeypatch.setattr(host.fake.btrfs, "snapshot", refuses)
    host.fake.systemd.stop(unit("web"))
    host.fake.btrfs.delete(host.state / "tasks" / "web")
    async with host.agent() as client:
        await until(client, "web", lambda s: s.state is TaskState.FAILED)
        await client.get_events(0)

    assert calls == 1


async def _five_readers(client: AgentClient, after: int) -> list[api.Events]:
    return await asyncio.gather(*(client.get_events(after, wait_s=5) for _ in range(5)))


async def test_events_wake_waiting_readers_and_can_be_resumed(host: FakeHost) -> None:
    async with host.agent() as client:
        start = (await client.get_events(0)).latest
        waiting = asyncio.create_task(_five_readers(client, start))
        await client.put_task("web", a_spec())
        answers = await waiting
        await running(client, "web")
        whole = await client.get_events(start)
        middle = whole.events[1].sequence
        rest = await client.get_events(middle)

    assert all(a.events and not a.lost for a in answers)
    assert [e.sequence for e in whole.events] == list(range(start + 1, whole.latest + 1))
    assert rest.events == whole.events[2:]


async def test_a_reader_from_before_an_agent_restart_learns_of_lost_events(
    host: FakeHost,
) -> None:
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        old = (await client.get_events(0)).latest
    async with host.agent() as client:
        answer = await client.get_events(old, wait_s=5)

    assert (answer.lost, answer.events) == (True, [])


@pytest.mark.behaviour("BUG-AG7")
async def test_processes_that_survive_sigkill_are_reported_and_waited_for(host: FakeHost) -> None:
    """The task was treated as gone: its root was removed, and a second copy could start."""
    systemd = host.fake.systemd
    async with host.agent() as client:
        await client.put_task("web", a_spec(generation=1))
        await running(client, "web")
        systemd.unkillable.add(unit("web"))
        await client.put_task("web", a_spec(generation=2, command=["/v2"]))
        waits = await until(client, "web", lambda s: "SIGKILL" in s.reason)
        await client.delete_task("web")
        leaving = await until(client, "web", lambda s: "SIGKILL" in s.reason)
        kept = host.roots()
        systemd.end_unkillable(unit("web"))
        await gone(client, "web")

    assert (waits.state, leaving.state) == (TaskState.STOPPING, TaskState.STOPPING)
    assert (len(systemd.started), kept) == (1, ["web"])
    assert _left(host) == ([], [])


@pytest.mark.behaviour("BUG-AG7")
async def test_a_new_start_waits_for_the_last_process_of_the_old_one(host: FakeHost) -> None:
    """The start was retried every 0.2 s forever, without an error to the user."""
    systemd = host.fake.systemd
    async with host.agent() as client:
        await client.put_task("web", a_spec(generation=1))
        await running(client, "web")
        systemd.unkillable.add(unit("web"))
        await client.put_task("web", a_spec(generation=2, command=["/v2"]))
        await until(client, "web", lambda s: "SIGKILL" in s.reason)
        systemd.end_unkillable(unit("web"))
        status = await until(client, "web", lambda s: s.state is TaskState.RUNNING)

    assert (status.generation, status.reason) == (2, "")
    assert systemd.properties(unit("web"))["ExecStart"] == [["/v2"]]


@pytest.mark.behaviour("BUG-AG110")
async def test_of_two_deletes_before_a_put_the_newer_one_counts(host: FakeHost) -> None:
    """The second of two deletes that waited for another task replaced the first."""
    async with host.serving() as (services, client):
        async with services.tasks._creating:
            deletes = [asyncio.create_task(client.delete_task("late", n)) for n in (5, 3)]
            while (
                not services.tasks._creating._waiters or len(services.tasks._creating._waiters) < 2
            ):
                await asyncio.sleep(0.01)
        found = await asyncio.gather(*deletes, return_exceptions=True)
        assert [type(e) for e in found] == [NotFound, NotFound]
        for generation in (4, 5):
            with pytest.raises(Conflict, match=f"generation {generation} "):
                await client.put_task("late", a_spec(generation=generation))
        await client.put_task("late", a_spec(generation=6))
