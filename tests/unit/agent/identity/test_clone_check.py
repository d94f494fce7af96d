"""A host asks the control plane whether it has a clone, and obeys the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import FakeHost, a_spec, running

from agent.api import TaskState
from agent.api.presence import Presence, PresenceAnswer, Verdict
from agent.identity import clone_check as uniqueness
from agent.identity.clone_check import CloneCheck
from agent.identity.identity import HostIdentity
from agent.runtime.events import HostEvents
from wire.errors import Conflict, TwineError, Unreachable

pytestmark = pytest.mark.behaviour("F-89")

AGAIN, SECOND, ALONE = (
    PresenceAnswer(verdict=Verdict.AGAIN),
    PresenceAnswer(verdict=Verdict.SECOND, detail="vm1 is elsewhere"),
    PresenceAnswer(verdict=Verdict.ALONE),
)


class ControlPlane:
    """Gives the answers of a test; blocks when none is left."""

    def __init__(self, folder: Path, *answers: PresenceAnswer | TwineError) -> None:
        self.answers, self.shown = list(answers), list[Presence]()
        self.identity = HostIdentity(folder)
        self.joined = True

    def has_joined(self) -> bool:
        return self.joined

    def read_clone_reason(self) -> str:
        return self.identity.read_clone_reason()

    def store_clone_reason(self, why: str) -> None:
        self.identity.store_clone_reason(why)

    async def show_presence(self, presence: Presence) -> PresenceAnswer:
        self.shown.append(presence)
        if not self.answers:
            await asyncio.Event().wait()
        answer = self.answers.pop(0)
        if isinstance(answer, TwineError):
            raise answer
        return answer


async def holds(condition: Callable[[], bool]) -> None:
    """Return once a condition holds."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def a_host(plane: ControlPlane) -> CloneCheck:
    host = CloneCheck(plane, "boot", HostEvents("boot"))
    host.served.set()
    return host


@pytest.mark.behaviour("F-89")
async def test_the_mark_is_the_same_within_a_check_and_new_for_each_check(
    tmp_path: Path,
) -> None:
    """The mark is kept within a round, and never used in another round."""
    plane = ControlPlane(tmp_path, AGAIN, ALONE, AGAIN, AGAIN, AGAIN)
    host = a_host(plane)
    assert (await host.ask()).verdict is Verdict.ALONE
    assert (await host.ask()).verdict is Verdict.AGAIN, "it gives up until the next round"
    first, clone_reason = {p.mark for p in plane.shown[:2]}, {p.mark for p in plane.shown[2:]}
    assert (len(first), len(clone_reason), len(first & clone_reason)) == (1, 1, 0)
    assert host.presence() == plane.shown[-1]
    assert {p.boot_id for p in plane.shown} == {"boot"}


@pytest.mark.behaviour("F-89")
async def test_starts_wait_for_the_first_verdict_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host without a control plane starts the tasks that it may start without one."""
    monkeypatch.setattr(uniqueness, "FIRST_S", 0.01)
    host = a_host(ControlPlane(tmp_path))
    woken = asyncio.Event()
    host.wake = woken.set
    assert host.start_refusal() == uniqueness.WAITS
    watching = asyncio.ensure_future(host.watch())
    await woken.wait()
    assert host.start_refusal() == ""
    watching.cancel()


@pytest.mark.behaviour("F-89")
async def test_a_host_that_has_not_joined_waits_for_no_verdict(tmp_path: Path) -> None:
    """It has no identity that another host could share."""
    plane = ControlPlane(tmp_path)
    plane.joined = False
    assert a_host(plane).start_refusal() == ""


@pytest.mark.behaviour("F-89")
async def test_the_verdict_survives_a_restart_and_can_be_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict is on disk, for a boot without a control plane; a new answer withdraws it."""
    monkeypatch.setattr(uniqueness, "CLONE_EVERY_S", 0.001)
    plane = ControlPlane(tmp_path, SECOND)
    host = a_host(plane)
    watching = asyncio.ensure_future(host.watch())
    await holds(lambda: len(plane.shown) == 2)
    assert host.start_refusal() == "vm1 is elsewhere"
    watching.cancel()

    plane.answers = [Unreachable("away"), ALONE]
    monkeypatch.setattr(uniqueness, "RETRY_S", 0.001)
    again = a_host(plane)
    assert again.start_refusal() == "vm1 is elsewhere"
    with pytest.raises(Conflict, match="vm1 is elsewhere"):
        again.check("task web is not changed")
    watching = asyncio.ensure_future(again.watch())
    await holds(lambda: again.start_refusal() == "")
    watching.cancel()
    assert a_host(plane).clone_reason == ""


@pytest.mark.behaviour("F-89")
async def test_a_full_disk_hinders_no_verdict(tmp_path: Path) -> None:
    """The verdict applies as long as this agent runs."""
    plane = ControlPlane(tmp_path, SECOND)
    (tmp_path / "second-host").mkdir()
    with pytest.raises(TwineError):
        plane.read_clone_reason()
    host = a_host(plane)
    watching = asyncio.ensure_future(host.watch())
    await holds(lambda: host.start_refusal() == "vm1 is elsewhere")
    watching.cancel()


@pytest.mark.behaviour("F-89")
async def test_a_second_host_takes_no_task_and_keeps_what_runs(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent cannot know which of the two hosts is meant, so it ends no task."""
    plane = ControlPlane(host.state / "identity")
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        before = await running(client, "web")
    monkeypatch.setattr(HostIdentity, "has_joined", lambda _: True)
    monkeypatch.setattr(HostIdentity, "show_presence", lambda _, shown: plane.show_presence(shown))
    plane.store_clone_reason("vm1 is elsewhere")
    async with host.agent() as client:
        with pytest.raises(Conflict, match="task other is not changed: vm1 is elsewhere"):
            await client.put_task("other", a_spec())
        with pytest.raises(Conflict, match="task web is not restarted: vm1 is elsewhere"):
            await client.restart_task("web")
        after = await client.get_task("web")
        assert (after.state, after.invocation_id) == (TaskState.RUNNING, before.invocation_id)
        host.fake.systemd.stop("twine-task-web.service")

        async def held() -> bool:
            found = await client.get_task("web")
            return found.state is TaskState.ACCEPTED and found.reason == "vm1 is elsewhere"

        while not await held():
            await asyncio.sleep(0.01)
        await client.delete_task("web")


@pytest.mark.behaviour("F-89")
async def test_a_verdict_that_cannot_be_stored_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict still applies."""

    def fails(_self: HostIdentity, _why: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(HostIdentity, "store_clone_reason", fails)
    host = a_host(ControlPlane(tmp_path, SECOND))
    host._apply_verdict(SECOND)
    assert host.start_refusal() == "vm1 is elsewhere"
