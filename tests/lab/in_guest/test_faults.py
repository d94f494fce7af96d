"""The faults F-64 to F-75 of host profiles, each on a real kernel and a real systemd."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from pathlib import Path

import pytest
from guest_host import OURS, STATE, GuestHost, differences, everything, memory_in_pieces, profile

from agent.api import ProfileSpec
from agent.client import AgentClient
from sidekick.cli import main
from sidekick.profile import PROFILES
from sidekick.report import ApplyOutcome, ProfileState
from wire.errors import Unreachable

pytestmark = pytest.mark.behaviour("F-64", "F-75")

SIDEKICK = "/opt/twine/bin/sidekick"
POOL = Path("/proc/sys/vm/nr_hugepages")
SWAPPINESS = Path("/proc/sys/vm/swappiness")
STAGED = Path("/etc/twine/boot-line")
CONFIG = Path("/etc/twine/sidekick.toml")
WAIT_S = 600.0


def sidekick(*arguments: str) -> int:
    """Return the exit code of the command."""
    folders = [f"--profiles={folder}" for folder in (OURS, *PROFILES)]
    return main([*folders, *arguments])


def shell(command: str) -> str:
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def reported() -> dict[str, str]:
    """Return the outcome of each setting in the last report."""
    report = json.loads((STATE / "status.json").read_bytes())
    return {s["setting"]: s["outcome"] for s in report["settings"]}


@pytest.mark.behaviour("F-64")
@pytest.mark.parametrize(
    "line",
    ["'vm.no_such'=1", "'kernel.ngroups_max'=5", "'vm.swappiness'=201", "'kernel.pid_max'=1"],
    ids=["unknown", "read-only", "out-of-range", "refused"],
)
def test_f64_a_value_that_the_kernel_refuses_takes_everything_back(
    host: GuestHost, untouched: dict[str, str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    profile("bad", f"[sysctl]\n'net.core.somaxconn'=5000\n{line}\n[thp]\nenabled='never'\n")
    assert sidekick("plan", "bad") == 2
    output = capsys.readouterr().out
    assert ("lacks" in output or "missing" in output) is ("no_such" in line), output
    assert sidekick("apply-profile", "bad") == 4
    assert differences(untouched, everything()) == []
    assert sidekick("status", "-o", "json") == 0
    assert host.state.read_status().state is ProfileState.DEGRADED  # type: ignore[union-attr]
    assert "failed" in reported().values()


@pytest.mark.behaviour("F-66", "HP3")
def test_f66_pages_that_do_not_come_are_counted_and_wait_for_a_boot(
    host: GuestHost, untouched: dict[str, str]
) -> None:
    pages, before = 120, POOL.read_text()
    for policy in ("reboot", "undo", "keep"):
        budget = f"[hugepages]\npages_2m={pages}\nbudget_s=1\nif_short='{policy}'\n"
        profile(f"short-{policy}", budget)
    with memory_in_pieces(0.62):
        report = host.apply("short-reboot")
        got = int(POOL.read_text())
        assert got < pages, "memory was not in pieces: the test shows nothing"
        assert report.state is ProfileState.PENDING_REBOOT
        assert f"hugepages={pages}" in STAGED.read_text()
        assert reported()["hugepages.2m.node0"] == ApplyOutcome.PENDING_REBOOT
        assert sidekick("apply-profile", "short-undo") == 4
        host.release()
        assert (POOL.read_text(), STAGED.exists()) == (before, False)
        assert sidekick("apply-profile", "short-keep") == 0
        assert reported()["hugepages.2m.node0"] == ApplyOutcome.PARTIAL
    assert sidekick("apply-profile", "short-undo") == 0
    assert int(POOL.read_text()) == pages
    host.release()
    assert differences(untouched, everything()) == []


@pytest.mark.behaviour("F-67")
def test_f67_pages_that_would_starve_the_host_are_refused(
    host: GuestHost, untouched: dict[str, str]
) -> None:
    before = POOL.read_text()
    kib = int(Path("/proc/meminfo").read_text().split()[1])
    profile("greedy", f"[hugepages]\npages_2m={kib // 2048 - 8}\n")
    assert sidekick("plan", "greedy") == 5
    assert sidekick("apply-profile", "greedy") == 5
    assert differences(untouched, everything()) == []
    assert POOL.read_text() == before


HOSTILE = (
    "init=/bin/sh",
    "root=/dev/none",
    "nosoftlockup init=/bin/sh",
    "nosoftlockup\\ninit=/bin/sh",
    "isolcpus=$(reboot)",
    "isolcpus=`reboot`",
    'isolcpus=\\"1',
    "isolcpus=1;reboot",
    "mitigations=off",
    "cgroup_disable=memory",
    "--",
)


@pytest.mark.behaviour("F-68")
def test_f68_an_invalid_argument_never_reaches_the_kernel_command_line(
    host: GuestHost, untouched: dict[str, str]
) -> None:
    for argument in HOSTILE:
        profile("hostile", f'[kernel]\ncmdline = ["{argument}"]\n')
        for command in ("plan", "apply-profile"):
            assert sidekick(command, "hostile") == 78, (command, argument)
    assert not STAGED.exists()
    assert differences(untouched, everything()) == []


@pytest.mark.behaviour("F-70")
def test_f70_turbo_that_a_guest_lacks_is_unsupported_unless_it_is_required(
    host: GuestHost, untouched: dict[str, str]
) -> None:
    profile("may", "[turbo]\nmode='off'\n[sysctl]\n'vm.swappiness'=7\n")
    profile("must", "[turbo]\nmode='off'\nrequired=true\n[sysctl]\n'vm.swappiness'=8\n")
    assert sidekick("apply-profile", "may") == 0
    assert reported()["turbo.mode"] == ApplyOutcome.UNSUPPORTED
    assert sidekick("apply-profile", "must") == 4
    assert SWAPPINESS.read_text().strip() == "7"
    host.release()
    assert differences(untouched, everything()) == []


@pytest.mark.behaviour("F-71")
def test_of_two_sidekicks_one_is_refused(host: GuestHost) -> None:
    before = SWAPPINESS.read_text()
    profile("one", "[sysctl]\n'vm.swappiness'=7\n")
    at_work = host.host()
    with host.state.lock(60.0, at_work.monotonic, at_work.sleep):
        argv = [SIDEKICK, f"--profiles={OURS}", "apply-profile", "one"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 75, done.stderr
    assert "another sidekick is running" in done.stderr
    assert SWAPPINESS.read_text() == before
    assert subprocess.run(argv, capture_output=True, check=False).returncode == 0
    assert SWAPPINESS.read_text().strip() == "7"


@pytest.mark.behaviour("F-72", "BUG-SK3")
def test_a_foreign_change_is_found_and_repaired_only_on_request(
    host: GuestHost,
) -> None:
    profile("one", "[sysctl]\n'vm.swappiness'=7\n")
    assert sidekick("apply-profile", "one") == 0
    SWAPPINESS.write_text("33")
    assert sidekick("verify") == 2
    assert reported()["sysctl.vm.swappiness"] == ApplyOutcome.DRIFTED
    shell("systemctl start sidekick-verify.service")  # the command that the timer starts
    assert SWAPPINESS.read_text().strip() == "33", "no repair was requested"
    CONFIG.parent.mkdir(exist_ok=True)
    CONFIG.write_text("repair_drift = true\n")
    try:
        shell("systemctl start sidekick-verify.service")
    finally:
        CONFIG.unlink()
    assert SWAPPINESS.read_text().strip() == "7"
    assert sidekick("verify") == 0
    commands = [e["command"] for e in history()]
    assert commands == ["apply", "repair"]


def history() -> list[dict[str, str]]:
    return [json.loads(line) for line in (STATE / "history.jsonl").read_text().splitlines()]


@pytest.mark.behaviour("F-73", "HP12")
def test_f73_there_and_back_leaves_no_trace(host: GuestHost, untouched: dict[str, str]) -> None:
    host.apply("web")
    as_web = everything()
    host.apply("cache")
    assert differences(as_web, everything())
    host.apply("web")
    assert differences(as_web, everything()) == []
    host.release()
    assert differences(untouched, everything()) == []
    again = host.release()
    assert (again.state, again.settings) == (ProfileState.NONE, [])


@pytest.mark.behaviour("F-74", "HP12")
def test_f74_the_end_of_an_agent_undoes_no_profile(host: GuestHost) -> None:
    """The agent applies the profile (`PUT /v1/profile`), is killed, and is then stopped."""
    shell("systemctl start twine-agent.service")
    try:
        status = asyncio.run(_profile_by_the_agent("cache"))
        assert status.state == "verified", status
        assert {s.outcome for s in status.settings} <= {"applied", "already", "unsupported"}
        switched = status.switched
        assert switched
        assert (switched.name, switched.command, switched.state) == ("cache", "apply", "verified")
        assert all(s.took_ms > 0 for s in switched.settings)
        assert SWAPPINESS.read_text().strip() == "1"
        shell("systemctl kill --signal=SIGKILL twine-agent.service")
        assert SWAPPINESS.read_text().strip() == "1"
    finally:
        shell("systemctl stop twine-agent.service sidekick-verify.timer")
    assert SWAPPINESS.read_text().strip() == "1"
    assert sidekick("verify") == 0
    shell("systemctl start sidekick-verify.timer")


async def _profile_by_the_agent(name: str):  # type: ignore[no-untyped-def]
    """Request a profile and poll until it is applied; a busy agent gets the request again."""
    began = time.monotonic()
    async with AgentClient("unix:/run/twine/agent.sock") as client:
        accepted = status = None
        while status is None or status.name != name or status.state == "applying":
            assert time.monotonic() - began < WAIT_S, status
            try:
                accepted = accepted or await client.put_profile(
                    ProfileSpec(name=name, generation=1)
                )
                status = await client.get_profile()
            except Unreachable:
                continue
            await asyncio.sleep(0.2)
        return status


@pytest.mark.behaviour("F-75")
def test_f75_tasks_are_not_disturbed_by_a_profile(
    host: GuestHost, untouched: dict[str, str]
) -> None:
    profile("gentle", "[sysctl]\n'vm.swappiness'=7\n")
    profile("rough", "[controllers]\ndisable=['cpu']\nrequired=true\n[sysctl]\n'vm.swappiness'=9\n")
    shell(
        "systemd-run --quiet --collect --slice=workload.slice --unit=twine-task-f75 sleep infinity"
    )
    try:
        assert sidekick("apply-profile", "gentle") == 0, "what is live needs no drain"
        assert sidekick("apply-profile", "rough") == 5
        assert SWAPPINESS.read_text().strip() == "7"
        staged = profile("boots", "[kernel]\ncmdline=['nosoftlockup']\n")
        assert sidekick("apply-profile", "--reboot", staged) == 5, "no reboot under a task"
    finally:
        shell("systemctl stop twine-task-f75.service")
    assert sidekick("apply-profile", "rough") == 0
    assert reported()["controllers.disabled"] == ApplyOutcome.APPLIED
    host.release()
    assert differences(untouched, everything()) == []
