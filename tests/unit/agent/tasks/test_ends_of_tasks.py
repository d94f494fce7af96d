"""Every way in which systemd reports the end of a unit: what follows, and which reason is shown.

Sources: systemd.service(5), SuccessExitStatus=; org.freedesktop.systemd1(5), `Result` and
`ExecMainCode` of services.
"""

from __future__ import annotations

import pytest
from builders import FakeHost, a_record, a_spec, unit, until

from agent.api import Health, Life, Probe, ProbeKind, RestartPolicy, RestartWhen, Step, TaskState
from agent.lease.core.lease import LeaseMoment
from agent.machine import UnitState
from agent.machine.fake_programs import Ended, ends_with
from agent.tasks.core.lifecycle import ObservedTask, decide
from agent.tasks.core.unit_properties import describe_unit
from agent.tasks.unit import observed_unit

CLEAN = ("SIGHUP", "SIGINT", "SIGTERM", "SIGPIPE")
"""Signals that systemd counts as success."""
BEFORE = ("it never started: a step before its command failed",)
ON_FAILURE = RestartPolicy(when=RestartWhen.ON_FAILURE, backoff_s=100.0)
NOW = LeaseMoment(1000.0, 100.0, None)


def _reported(result: str, code: int | None, signal: str | None) -> UnitState:
    """Return a unit that ended; systemd keeps a unit without a failure as active (exited)."""
    active, sub = ("active", "exited") if result == "success" else ("failed", "failed")
    return UnitState(
        unit("web"),
        active,
        sub,
        result=result,
        invocation_id="run",
        description=describe_unit("web", a_spec(restart=ON_FAILURE)),
        exit_code=code,
        exit_signal=signal,
        exited_at=990.0,
        started_at=980.0,
    )


@pytest.mark.behaviour("BUG-AG102")
@pytest.mark.parametrize(
    ("result", "code", "signal", "reason"),
    [
        ("exit-code", 1, None, "it ended with exit code 1"),
        ("exit-code", 255, None, "it ended with exit code 255"),
        ("exit-code", 203, None, "it never started: its command could not be executed"),
        pytest.param("exit-code", None, None, *BEFORE, marks=pytest.mark.behaviour("BUG-AG103")),
        pytest.param("signal", None, None, *BEFORE, marks=pytest.mark.behaviour("BUG-AG103")),
        *(("success", None, name, f"it was ended by signal {name}") for name in CLEAN),
        ("signal", None, "SIGKILL", "it was ended by signal SIGKILL"),
        ("signal", None, "SIGRTMIN+3", "it was ended by signal SIGRTMIN+3"),
        ("core-dump", None, "SIGSEGV", "it was ended by signal SIGSEGV"),
        ("core-dump", None, "SIGABRT", "it was ended by signal SIGABRT"),
        ("oom-kill", None, "SIGKILL", "it used more memory than its limit"),
        ("timeout", None, "SIGTERM", "it did not end in time after its stop"),
        ("timeout", 0, None, "it did not end in time after its stop"),
        ("start-timeout", None, None, "its host did not start it within 10 minutes"),
        ("resources", None, None, "systemd lacked a resource to start it"),
        ("watchdog", None, "SIGABRT", "its watchdog expired"),
        ("start-limit-hit", None, None, "it was started too often in a row"),
        ("protocol", None, None, "it ended: protocol"),
    ],
)
def test_every_end_but_exit_code_0_is_a_failure(
    result: str, code: int | None, signal: str | None, reason: str
) -> None:
    task = a_record(spec=a_spec(restart=ON_FAILURE), state=TaskState.STARTING)
    seen = ObservedTask(observed_unit(_reported(result, code, signal)), root=True)
    after = decide(task, seen, NOW).task

    assert after.state is TaskState.BACKOFF
    assert after.reason.startswith(reason)
    assert after.last_exit is not None
    assert (after.last_exit.code, after.last_exit.signal) == (code, signal)
    assert after.last_exit.result == ("signal" if result == "success" else result)


@pytest.mark.parametrize(
    ("when", "state"),
    [
        (RestartWhen.ALWAYS, TaskState.BACKOFF),
        (RestartWhen.ON_FAILURE, TaskState.STOPPED),
        (RestartWhen.NEVER, TaskState.STOPPED),
    ],
)
def test_a_main_process_that_ends_with_0_is_a_success_whatever_it_left_behind(
    when: RestartWhen, state: TaskState
) -> None:
    """A daemon that forks twice: its unit is stopped, which ends the processes that it left."""
    spec = a_spec(restart=RestartPolicy(when=when))
    found = observed_unit(_reported("success", 0, None))
    decision = decide(a_record(spec=spec), ObservedTask(found, root=True), NOW)

    assert (decision.task.state, str(decision.action)) == (state, "stop")
    assert decision.task.reason == "it ended with exit code 0"


@pytest.mark.behaviour("BUG-AG102")
@pytest.mark.parametrize("signal", [*CLEAN, "SIGSEGV", "SIGUSR1"])
async def test_a_task_that_a_signal_ended_is_started_again(host: FakeHost, signal: str) -> None:
    """Work that SIGPIPE or SIGTERM ended counted as done, and was not started again."""
    host.fake.systemd.programs["/bin/killed"] = ends_with(signal=signal)
    async with host.agent() as client:
        await client.put_task("web", a_spec(command=["/bin/killed"], restart=ON_FAILURE))
        status = await until(client, "web", lambda s: s.state is TaskState.BACKOFF)

    assert (status.reason, status.restarts) == (f"it was ended by signal {signal}", 1)
    assert status.last_exit is not None
    assert (status.last_exit.result, status.last_exit.signal) == ("signal", signal)


@pytest.mark.behaviour("BUG-AG102")
async def test_a_signal_fails_an_init_step(host: FakeHost) -> None:
    host.fake.systemd.programs["/bin/migrate"] = ends_with(signal="SIGPIPE")
    life = Life(init=[Step(name="migrate", command=["/bin/migrate"])])
    async with host.agent() as client:
        await client.put_task("web", a_spec(life=life, restart=ON_FAILURE))
        status = await until(client, "web", lambda s: s.state is TaskState.BACKOFF)

    assert status.reason.endswith("failed: it was ended by signal SIGPIPE")
    assert unit("web") not in host.fake.systemd.started


@pytest.mark.behaviour("BUG-AG102")
async def test_a_signal_fails_a_probe(host: FakeHost) -> None:
    host.fake.systemd.programs["/bin/ask"] = lambda _argv, _properties: Ended(None, "SIGTERM")
    probe = Probe(kind=ProbeKind.EXEC, command=["/bin/ask"], failures=1, start_period_s=0)
    async with host.agent() as client:
        await client.put_task("web", a_spec(probe=probe))
        status = await until(client, "web", lambda s: s.health is Health.UNHEALTHY)

    assert status.reason == "probe command /bin/ask: it was ended by signal SIGTERM"
