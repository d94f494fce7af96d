"""`twine-agent run | stop | restart` wait for a gate, or for an agent that restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import IMAGE, FakeHost, a_spec, unit

from agent.api import Life, TaskState
from agent.cli import waiting
from agent.cli.waiting import StatusWatch
from agent.client import AgentClient
from agent.machine.fake_programs import ends_with
from wire.errors import Unreachable

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("program", "code", "message"),
    [("/bin/good", 0, "web: running, healthy"), ("/bin/bad", 1, "web: ")],
)
def test_a_first_version_without_a_probe_has_to_run_for_the_time_of_its_gate(
    host: FakeHost, run: Run, program: str, code: int, message: str
) -> None:
    """The command reported healthy, with 0, before the task ended."""
    host.fake.systemd.programs["/bin/bad"] = ends_with(4)  # and is started repeatedly
    ended, out, _ = run(
        *("run", "web", f"--image={IMAGE}", "--health-gate=0.2s", "--", program), host=host
    )

    assert ended == code
    assert message in out


def test_a_version_that_fails_after_its_gate_is_reported_with_the_restored_one(
    host: FakeHost, run: Run
) -> None:
    host.fake.systemd.programs["/bin/bad"] = ends_with(4)
    gated = ("run", "web", f"--image={IMAGE}", "--health-gate=60s", "--")
    assert run("run", "web", f"--image={IMAGE}", "--", "/bin/good", host=host)[0] == 0
    code, out, _ = run(*gated, "/bin/bad", host=host)

    assert code == 1
    assert "did not pass its health gate" in out
    assert "was restored" in out


async def test_a_waiter_continues_with_the_next_agent(tmp_path: Path) -> None:
    """The command ended with 69 as soon as the agent stopped."""
    host = FakeHost(tmp_path / "host")
    host.give_image()
    host.fake.systemd.never_up.add(unit("web"))
    async with AgentClient(f"unix:{host.config.socket}") as client:
        watch = StatusWatch(client)
        async with host.agent():
            await client.put_task("web", a_spec(life=Life(health_gate_s=0.01)))
            before = await watch.begin("web")
            verdict = asyncio.create_task(watch.wait_settled("web"))
            await asyncio.sleep(0)
        with pytest.raises(Unreachable):
            await client.get_task("web")
        assert not verdict.done()
        host.fake.systemd.never_up.clear()
        async with host.agent(), asyncio.timeout(60):
            status = await verdict
            leaving = asyncio.create_task(watch.wait_removed("web", status.generation))
            assert before is not None
        assert not leaving.done()
        async with host.agent() as other, asyncio.timeout(60):
            await other.delete_task("web")
            reported = await leaving

    assert status.state is TaskState.RUNNING
    assert reported == "gone"


async def test_an_absent_agent_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.0)
    async with AgentClient(f"unix:{tmp_path}/absent.sock") as client:
        with pytest.raises(Unreachable):
            await StatusWatch(client).wait_settled("web")


def test_logs_of_a_time_are_requested_by_their_age(host: FakeHost, run: Run) -> None:
    """The option took seconds since 1970, which users do not know."""
    run("run", "web", f"--image={IMAGE}", "--", "/bin/server", host=host)
    code = run("logs", "web", "--since=10m", host=host)[0]
    wrong = run("logs", "web", "--since=yesterday", host=host)

    call_of_journalctl = [call for call in host.fake.processes.calls if call[0] == "journalctl"][-1]
    assert code == 0
    assert any(word.startswith("--since=@") for word in call_of_journalctl)
    assert wrong[0] == 64
    assert "is not a duration" in wrong[2]
