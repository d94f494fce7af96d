"""Init steps, hooks, further probes and the health gate, through the API on a machine in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from builders import OTHER_IMAGE, FakeHost, a_spec, gone, running, unit, until
from msgspec.structs import replace

from agent.api import (
    Health,
    Hook,
    Life,
    Probe,
    ProbeKind,
    RestartPolicy,
    RestartWhen,
    Step,
    TaskState,
)
from agent.machine import Property, boottime_s
from agent.machine.fake_programs import ends_with
from agent.machine.fake_systemd import Ended
from agent.runtime.core.records import user_of
from agent.tasks import shutdown as leaving
from agent.tasks.core.inside import inside_unit, step_unit
from wire.errors import Conflict

MIGRATE = Step(name="migrate", command=["/bin/migrate"])
WARM = Step(name="warm", command=["/bin/warm"], timeout_s=7)


def asks(name: str, **fields: Any) -> Probe:
    """Return a probe by a command with a short interval."""
    quick = {"interval_s": 0.005, "failures": 2, "start_period_s": 0, **fields}
    return Probe(kind=ProbeKind.EXEC, command=[f"/bin/{name}"], **quick)


class Program:
    """A program of the machine in memory: exits with `code`, and records its units."""

    def __init__(self, code: int | None = 0) -> None:
        self.code = code
        self.seen: list[Mapping[str, Property]] = []

    def __call__(self, argv: list[str], properties: Mapping[str, Property]) -> Ended | None:
        self.seen.append(properties)
        return None if self.code is None else Ended(code=self.code)


def given(host: FakeHost, name: str, code: int | None = 0) -> Program:
    program = Program(code)
    host.fake.systemd.programs[f"/bin/{name}"] = program
    return program


@pytest.mark.behaviour("AG10")
async def test_init_steps_run_in_order_with_the_rights_of_the_task(host: FakeHost) -> None:
    migrate, warm = given(host, "migrate"), given(host, "warm")
    async with host.agent() as client:
        await client.put_task("web", a_spec(life=Life(init=[MIGRATE, WARM])))
        await running(client, "web")

    started = host.fake.systemd.started
    assert started == [step_unit("web"), step_unit("web"), unit("web")]
    main = host.fake.systemd.properties(unit("web"))
    for step in (migrate.seen[0], warm.seen[0]):
        own = {"Description", "ExecStart", "RuntimeMaxUSec"}
        assert {k: v for k, v in step.items() if k not in own} == {
            k: v for k, v in main.items() if k not in own
        }
    assert warm.seen[0]["RuntimeMaxUSec"] == 7_000_000
    assert main["User"] == user_of("web")


async def test_a_step_that_fails_is_a_failed_start_that_names_the_step(host: FakeHost) -> None:
    given(host, "migrate", 3)
    async with host.agent() as client:
        slow = RestartPolicy(backoff_s=100.0)
        await client.put_task("web", a_spec(life=Life(init=[MIGRATE]), restart=slow))
        status = await until(client, "web", lambda s: s.state is TaskState.BACKOFF)
        never = RestartPolicy(when=RestartWhen.NEVER)
        spec = a_spec(generation=2, life=Life(init=[MIGRATE]), restart=never)
        await client.put_task("web", spec)
        failed = await until(client, "web", lambda s: s.state is TaskState.FAILED)

    assert status.reason == "init step migrate (1 of 1) failed: it ended with exit code 3"
    assert "migrate" in failed.reason
    assert unit("web") not in host.fake.systemd.started


async def test_a_task_that_is_removed_during_a_step_leaves_no_step(host: FakeHost) -> None:  # P9
    migrate = given(host, "migrate", None)
    async with host.agent() as client:
        await client.put_task("web", a_spec(life=Life(init=[MIGRATE])))
        async with asyncio.timeout(10):
            while not migrate.seen:
                await asyncio.sleep(0)
        await client.delete_task("web")
        await gone(client, "web")

    assert host.fake.systemd.find(step_unit("web")) is None
    assert host.fake.systemd.started == [step_unit("web")]


async def test_the_agent_waits_for_a_step_that_ran_when_it_died(host: FakeHost) -> None:
    migrate = given(host, "migrate", None)
    async with host.agent() as client:
        await client.put_task("web", a_spec(life=Life(init=[MIGRATE])))
        async with asyncio.timeout(10):
            while not migrate.seen:
                await asyncio.sleep(0)
    migrate.code = 0
    host.fake.systemd.exit(step_unit("web"))
    async with host.agent() as client:
        await running(client, "web")

    assert host.fake.systemd.started == [step_unit("web"), step_unit("web"), unit("web")]


async def test_the_pre_stop_hook_runs_inside_the_task_before_its_end(host: FakeHost) -> None:
    alive: list[bool] = []

    def drain(argv: list[str], properties: Mapping[str, Property]) -> Ended:
        state = host.fake.systemd.find(unit("web"))
        alive.append(state is not None and state.sub == "running")
        assert properties["JoinsNamespaceOf"] == properties["Requisite"] == [unit("web")]
        return Ended(code=1)

    host.fake.systemd.programs["/bin/drain"] = drain
    life = Life(pre_stop=Hook(command=["/bin/drain"]))
    async with host.agent() as client:
        before = (await client.get_events(0)).latest
        await client.put_task("web", a_spec(life=life))
        await running(client, "web")
        await client.put_task("web", a_spec(generation=2, command=["/bin/other"], life=life))
        await until(client, "web", lambda s: s.generation == 2 and s.state is TaskState.RUNNING)
        events = (await client.get_events(before)).events
        await client.delete_task("web")
        await gone(client, "web")

    assert alive == [True, True]
    assert any("pre-stop hook failed: it ended with exit code 1" in e.message for e in events)


@pytest.mark.behaviour("AG10")
async def test_the_pre_stop_hook_runs_once_however_late_the_stop_begins(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy systemd reports a unit as active after its stop was queued."""
    drain, systemd = given(host, "drain", 0), host.fake.systemd
    queued, begin = [], systemd.stop

    def stop(name: str) -> None:
        queued.append(name)
        if name != unit("web") or queued.count(name) > 2:
            begin(name)

    monkeypatch.setattr(systemd, "stop", stop)
    async with host.agent() as client:
        await client.put_task("web", a_spec(life=Life(pre_stop=Hook(command=["/bin/drain"]))))
        await running(client, "web")
        await client.delete_task("web")
        await gone(client, "web")

    assert queued.count(unit("web")) == 3
    assert len(drain.seen) == 1


async def test_a_task_that_exited_gets_no_pre_stop_hook(host: FakeHost) -> None:
    drain = given(host, "drain")
    never = RestartPolicy(when=RestartWhen.NEVER)
    life = Life(pre_stop=Hook(command=["/bin/drain"]))
    async with host.agent() as client:
        await client.put_task("web", a_spec(life=life, restart=never))
        await running(client, "web")
        host.fake.systemd.exit(unit("web"))
        await until(client, "web", lambda s: s.state is TaskState.STOPPED)
        await client.delete_task("web")
        await gone(client, "web")

    assert not drain.seen


async def test_a_liveness_probe_that_fails_for_good_restarts_the_task(host: FakeHost) -> None:
    alive = given(host, "alive", 1)
    async with host.agent() as client:
        await client.put_task("web", a_spec(life=Life(liveness=asks("alive"))))
        status = await until(client, "web", lambda s: s.restarts >= 1)
        alive.code = 0
        again = await until(
            client, "web", lambda s: s.state is TaskState.RUNNING and s.health is Health.HEALTHY
        )

    assert status.last_exit is not None
    assert status.last_exit.result == "liveness"
    assert "liveness probe exceeded its failure limit: probe command /bin/alive" in status.reason
    assert again.invocation_id == host.invocation("web")
    assert len(alive.seen) >= 2


async def test_a_task_that_may_not_restart_stays_down_after_its_liveness_failed(
    host: FakeHost,
) -> None:
    given(host, "alive", 1)
    never = RestartPolicy(when=RestartWhen.NEVER)
    async with host.agent() as client:
        await client.put_task("web", a_spec(life=Life(liveness=asks("alive")), restart=never))
        await until(client, "web", lambda s: s.state is TaskState.STOPPED)
        async with asyncio.timeout(10):
            while host.units():
                await asyncio.sleep(0)
    async with host.agent() as client:
        status = await client.get_task("web")

    assert (status.state, status.restarts) == (TaskState.STOPPED, 0)


async def test_no_other_probe_runs_before_the_startup_probe_succeeded(host: FakeHost) -> None:
    up, alive = given(host, "up", 1), given(host, "alive", 1)
    life = Life(startup=asks("up", start_period_s=3600), liveness=asks("alive"))
    async with host.agent() as client:
        await client.put_task("web", a_spec(life=life))
        status = await running(client, "web")
        async with asyncio.timeout(10):
            while len(up.seen) < 5:
                await asyncio.sleep(0)
        assert (status.health, alive.seen) == (Health.UNKNOWN, [])
        alive.code = up.code = 0
        await until(client, "web", lambda s: s.health is Health.HEALTHY)
    probes = len(up.seen)
    # the task has passed its startup probe, also for a new agent
    async with host.agent() as client:
        assert (await client.get_task("web")).health is Health.HEALTHY
        seen = len(alive.seen)
        async with asyncio.timeout(10):
            while len(alive.seen) < seen + 3:
                await asyncio.sleep(0)

    assert len(up.seen) == probes
    assert len(host.units()) == 1


async def test_a_startup_probe_that_fails_for_good_restarts_the_task(host: FakeHost) -> None:
    given(host, "up", 1)
    async with host.agent() as client:
        await client.put_task("web", a_spec(life=Life(startup=asks("up"))))
        status = await until(client, "web", lambda s: s.restarts >= 2)

    assert status.last_exit is not None
    assert status.last_exit.result == "startup"


async def test_an_end_by_a_probe_is_counted_once_by_two_agents(host: FakeHost) -> None:
    given(host, "alive", 1)
    host.fake.systemd.unkillable.add(unit("web"))
    slow = RestartPolicy(backoff_s=100.0)
    async with host.agent() as client:
        await client.put_task("web", a_spec(life=Life(liveness=asks("alive")), restart=slow))
        await until(client, "web", lambda s: s.restarts == 1)
    async with host.agent() as client:
        status = await client.get_task("web")

    assert (status.state, status.restarts) == (TaskState.BACKOFF, 1)


GATED = Life(health_gate_s=60)


async def _healthy(host: FakeHost, client: Any) -> None:
    await client.put_task("web", a_spec(generation=5, command=["/bin/good"]))
    await until(client, "web", lambda s: s.health is Health.HEALTHY)


async def test_a_new_version_that_ends_is_replaced_by_the_old_one(host: FakeHost) -> None:
    host.fake.systemd.programs["/bin/bad"] = ends_with(2)
    async with host.agent() as client:
        await _healthy(host, client)
        host.give_image(OTHER_IMAGE)
        bad = a_spec(generation=6, command=["/bin/bad"], image=OTHER_IMAGE, life=GATED)
        await client.put_task("web", bad)
        status = await until(
            client, "web", lambda s: s.generation == 5 and s.state is TaskState.RUNNING
        )
        assert "generation 6 did not pass its health gate" in status.reason
        assert "exit code 2" in status.reason
        assert host.fake.systemd.properties(unit("web"))["ExecStart"] == [["/bin/good"]]
        await client.put_task("web", a_spec(generation=7, command=["/bin/good"], life=GATED))
        assert (await until(client, "web", lambda s: s.generation == 7)).reason == ""


async def test_a_new_version_that_never_gets_healthy_is_replaced_by_whichever_agent(
    host: FakeHost,
) -> None:
    given(host, "up", 1)
    life = Life(health_gate_s=60, startup=asks("up", start_period_s=3600))
    async with host.agent() as client:
        await _healthy(host, client)
        await client.put_task("web", a_spec(generation=6, command=["/bin/slow"], life=life))
        await running(client, "web")
    later = replace(host.fake.machine, boottime_s=lambda: boottime_s() + 61.0)
    async with host.agent(later) as client:
        status = await until(
            client, "web", lambda s: s.generation == 5 and s.state is TaskState.RUNNING
        )

    assert "generation 5 was restored" in status.reason


async def test_a_new_version_that_is_healthy_stays_and_the_old_image_is_free(
    host: FakeHost,
) -> None:
    given(host, "up", 1)
    host.give_image(OTHER_IMAGE)
    life = Life(health_gate_s=3600, startup=asks("up", start_period_s=3600))
    async with host.agent() as client:
        await _healthy(host, client)
        old = (await client.get_task("web")).image
        new = a_spec(generation=6, image=OTHER_IMAGE, life=life)
        await client.put_task("web", new)
        await running(client, "web")
        with pytest.raises(Conflict):
            await client.delete_image(old)
        given(host, "up", 0)
        await until(client, "web", lambda s: s.health is Health.HEALTHY)
        async with asyncio.timeout(10):
            while (await client.get_image(old)).tasks:
                await asyncio.sleep(0)
        status = await client.get_task("web")

    assert (status.generation, status.reason) == (6, "")


async def test_a_new_version_without_requests_runs_through_its_whole_gate(
    host: FakeHost,
) -> None:
    """The task was healthy as soon as it ran, so the gate was passed at once."""
    host.give_image(OTHER_IMAGE)
    async with host.agent() as client:
        await _healthy(host, client)
        old = (await client.get_task("web")).image
        await client.put_task("web", a_spec(generation=6, image=OTHER_IMAGE, life=GATED))
        await until(client, "web", lambda s: s.generation == 6 and s.health is Health.HEALTHY)
        with pytest.raises(Conflict):
            await client.delete_image(old)
        host.fake.systemd.exit(unit("web"), 2)
        back = await until(
            client, "web", lambda s: s.generation == 5 and s.state is TaskState.RUNNING
        )
        await client.put_task("web", a_spec(generation=7, image=OTHER_IMAGE, life=GATED))
        await until(client, "web", lambda s: s.generation == 7 and s.health is Health.HEALTHY)
    later = replace(host.fake.machine, boottime_s=lambda: boottime_s() + 61.0)
    async with host.agent(later) as client:
        async with asyncio.timeout(10):
            while (await client.get_image(old)).tasks:
                await asyncio.sleep(0)
        stays = await client.get_task("web")

    assert "generation 6 did not pass its health gate" in back.reason
    assert (stays.generation, stays.state, stays.reason) == (7, TaskState.RUNNING, "")


async def test_the_longest_run_is_a_matter_of_systemd(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.put_task("web", a_spec(life=Life(max_run_s=90)))
        await running(client, "web")

    assert host.fake.systemd.properties(unit("web"))["RuntimeMaxUSec"] == 90_000_000


@pytest.mark.behaviour("AG8")
async def test_a_command_inside_is_never_more_than_its_task(host: FakeHost) -> None:
    alive = given(host, "alive", 0)
    async with host.agent() as client:
        await client.put_task("web", a_spec(life=Life(liveness=asks("alive"))))
        await running(client, "web")
        async with asyncio.timeout(10):
            while not alive.seen:
                await asyncio.sleep(0)

    main, inside = host.fake.systemd.properties(unit("web")), alive.seen[0]
    own = {
        *("Description", "ExecStart", "RootDirectoryStartOnly", "MemoryMax", "OOMScoreAdjust"),
        *("RuntimeMaxUSec", "TimeoutStopUSec", "JoinsNamespaceOf", "Requisite", "PartOf"),
        *("After", "StandardOutput", "StandardError"),
    }
    assert {k: v for k, v in inside.items() if k not in own} == {
        k: v for k, v in main.items() if k not in own
    }
    assert inside_unit("web", "liveness") in host.fake.systemd.started
    assert inside["MemoryMax"] < main["MemoryMax"]  # type: ignore[operator]


@pytest.mark.behaviour("AG4")
async def test_a_start_that_its_host_was_too_slow_for_reports_it(host: FakeHost) -> None:
    """The task never ran, so the reason is not that it ran for too long."""
    host.fake.systemd.never_up.add(unit("web"))
    restart = RestartPolicy(backoff_s=0.05, backoff_max_s=0.05)
    async with host.agent() as client:
        await client.put_task("web", a_spec(restart=restart))
        waiting = await until(client, "web", lambda s: s.last_exit is not None)
        host.fake.systemd.never_up.clear()
        up = await running(client, "web")

    assert waiting.last_exit is not None
    assert waiting.last_exit.result == "start-timeout"
    assert waiting.reason == ("its host did not start it within 10 minutes and cancelled the start")
    assert up.restarts >= 1
    properties = host.fake.systemd.properties(unit("web"))
    assert properties["TimeoutStartUSec"] == 600_000_000


@pytest.mark.behaviour("AG4", "AG10")
async def test_tasks_end_in_order_before_their_host_goes_down(host: FakeHost) -> None:
    """Their hooks run.

    No task starts again before the boot; after the boot all start without a request.
    """
    hook = given(host, "hook", 0)
    life = Life(pre_stop=Hook(command=["/bin/hook"]))
    async with host.agent() as client:
        await client.put_task("web", a_spec(life=life, offline_restart=True))
        await running(client, "web")
        before = (await client.get_events(0)).latest
        while await client.leave():
            await asyncio.sleep(0.01)
        await client.put_task("late", a_spec())
        late = await until(client, "late", lambda s: "going down" in s.reason)
        web = await client.get_task("web")
        facts = await client.get_machine()
        kinds = [event.kind for event in (await client.get_events(before)).events]
        still = host.units()
    host.fake.reboot()
    async with host.agent() as client:
        back = await running(client, "web")
        stays = await client.get_machine()

    assert len(hook.seen) == 1
    assert (web.state, web.restarts, web.last_exit) == (TaskState.STOPPING, 0, None)
    assert "going down" in web.reason
    assert late.started_at is None
    assert (facts.leaving, stays.leaving) == (True, False)
    assert kinds.count("leaving") == 1
    assert still == []
    assert (back.restarts, back.last_exit) == (0, None)


async def test_a_host_that_does_not_go_down_starts_its_tasks_again(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving, "EXPIRES_S", 0.3)
    monkeypatch.setattr(leaving, "_CHECK_S", 0.01)
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        first = await running(client, "web")
        while await client.leave():
            await asyncio.sleep(0.01)
        again = await until(
            client,
            "web",
            lambda s: s.state is TaskState.RUNNING and s.started_at != first.started_at,
        )

    assert again.restarts == 0
