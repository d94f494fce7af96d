"""The service manager behaviour that Twine relies on, on a fake and on real systemd."""

from __future__ import annotations

import itertools
import queue
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from agent.resources.core.huge_pages import with_page_limits
from agent.runtime.core.unit_parts import in_memory
from agent.tasks.core.unit_properties import TASK_HARDENING, not_after
from wire.errors import Conflict, InvalidInput, SystemdError

from .conftest import Host

SLEEP = ["/bin/sleep", "1000"]

HARDENING: dict[str, object] = {
    **TASK_HARDENING,
    "LogRateLimitBurst": 1000,
    "LogRateLimitIntervalUSec": 10_000_000,
    "MemorySwapMax": 0,
    "OOMPolicy": "kill",
    "TemporaryFileSystem": [in_memory("/dev/shm", 64 << 20)],
}
"""Defaults of every task, from the shipped table."""

_numbers = itertools.count()


@pytest.fixture
def unit() -> str:
    """Return a name that no earlier test used."""
    return f"twine-contract-{time.monotonic_ns()}-{next(_numbers)}.service"


@pytest.fixture
def signals(host: Host) -> Iterator[queue.Queue[str]]:
    """Yield the names with which a listener is called."""
    names: queue.Queue[str] = queue.Queue()
    end = host.systemd.listen(names.put)
    yield names
    end()


def a_service(*argv: str, **changes: object) -> dict[str, object]:
    """Return the properties with which the agent starts a service."""
    return {
        "ExecStart": [list(argv) or SLEEP],
        "Type": "exec",
        "RemainAfterExit": True,
        "TimeoutStopUSec": 5_000_000,
        **changes,
    }


def sh(script: str, **changes: object) -> dict[str, object]:
    """Return the properties of a service that runs a script."""
    return a_service("/bin/sh", "-c", script, **changes)


def test_a_started_unit_runs_and_has_an_invocation(host: Host, unit: str) -> None:
    before = time.time() - 5

    host.systemd.start_transient(unit, a_service(Description="the task web/0"))

    state = host.running(unit)
    assert (state.unit, state.active, state.result) == (unit, "active", "success")
    assert len(state.invocation_id) == 32
    assert state.description == "the task web/0"
    assert (state.main_pid, state.control_group) == (0, ""), "it costs a question each"
    whole = host.whole(unit)
    assert whole.main_pid > 1
    assert whole.control_group == f"/system.slice/{unit}"
    assert replace(whole, main_pid=0, control_group="") == state
    assert state.started_at
    assert before < state.started_at < time.time() + 5
    assert (state.exit_code, state.exit_signal, state.exited_at) == (None, None, None)


def test_each_start_is_another_invocation(host: Host, unit: str) -> None:
    seen = set()
    for _ in range(2):
        host.systemd.start_transient(unit, a_service())
        seen.add(host.running(unit).invocation_id)
        host.systemd.stop(unit)
        host.until(unit, lambda state: state is None)

    assert len(seen) == 2


@pytest.mark.parametrize(
    ("script", "active", "result", "code", "killed_by"),
    [
        ("exit 0", "active", "success", 0, None),
        ("exit 3", "failed", "exit-code", 3, None),
        ("kill -KILL $$; sleep 9", "failed", "signal", None, "SIGKILL"),
    ],
)
def test_how_a_unit_ended_can_be_read_afterwards(
    host: Host,
    unit: str,
    script: str,
    active: str,
    result: str,
    code: int | None,
    killed_by: str | None,
) -> None:
    host.systemd.start_transient(unit, sh(script))

    state = host.ended(unit)

    assert (state.active, state.result) == (active, result)
    assert (state.exit_code, state.exit_signal) == (code, killed_by)
    assert state.main_pid == 0
    assert len(state.invocation_id) == 32
    assert state.exited_at
    assert state.started_at
    assert state.started_at <= state.exited_at < time.time() + 5


def test_a_unit_over_its_memory_limit_ends_as_an_oom_kill(host: Host, unit: str) -> None:
    limits = {"MemoryMax": 8 << 20, "MemorySwapMax": 0, "OOMPolicy": "kill"}

    host.systemd.start_transient(unit, sh("tail /dev/zero; sleep 9", **limits))

    assert host.ended(unit).result == "oom-kill"


def test_a_oneshot_unit_runs_its_commands_in_turn_until_one_fails(host: Host, unit: str) -> None:
    commands = [["/bin/true"], ["/bin/sh", "-c", "exit 4"], SLEEP]

    host.systemd.start_transient(unit, a_service(Type="oneshot", ExecStart=commands))

    state = host.ended(unit)
    assert (state.active, state.result, state.exit_code) == ("failed", "exit-code", 4)


def test_a_oneshot_unit_that_works_is_still_starting(host: Host, unit: str) -> None:
    host.systemd.start_transient(unit, a_service(Type="oneshot"))

    state = host.until(unit, lambda s: s is not None and s.main_pid > 0)
    assert state
    assert (state.active, state.sub) == ("activating", "start")


def test_a_unit_that_need_not_be_remembered_vanishes(host: Host, unit: str) -> None:
    forgets = {"RemainAfterExit": False, "CollectMode": "inactive-or-failed"}

    host.systemd.start_transient(unit, sh("exit 3", **forgets))

    assert host.until(unit, lambda state: state is None) is None


def test_a_stopped_unit_is_gone(host: Host, unit: str) -> None:
    host.systemd.start_transient(unit, a_service())
    host.running(unit)

    host.systemd.stop(unit)

    assert host.until(unit, lambda state: state is None) is None


def test_a_unit_that_ended_cleanly_is_gone_once_stopped(host: Host, unit: str) -> None:
    host.systemd.start_transient(unit, sh("exit 0"))
    host.ended(unit)

    host.systemd.stop(unit)

    assert host.until(unit, lambda state: state is None) is None


def test_a_failed_unit_stays_until_it_is_reset(host: Host, unit: str) -> None:
    host.systemd.start_transient(unit, sh("exit 3"))
    host.ended(unit)

    host.systemd.stop(unit)
    assert host.ended(unit).active == "failed"
    with pytest.raises(Conflict, match=unit):
        host.systemd.start_transient(unit, a_service())
    host.systemd.reset_failed(unit)

    assert host.until(unit, lambda state: state is None) is None


def test_a_unit_that_exists_cannot_be_started_again(host: Host, unit: str) -> None:
    host.systemd.start_transient(unit, a_service())
    first = host.running(unit)

    with pytest.raises(Conflict, match=f"cannot start {unit}.*already loaded"):
        host.systemd.start_transient(unit, a_service())

    assert host.running(unit).invocation_id == first.invocation_id


@pytest.mark.behaviour("F-09", "F-10")
def test_a_unit_that_ignores_a_stop_is_killed_with_its_processes(host: Host, unit: str) -> None:
    script = "trap '' TERM; setsid sh -c \"trap '' TERM; sleep 1000\" & sleep 1000"
    host.systemd.start_transient(unit, sh(script, TimeoutStopUSec=1_000_000))
    group = host.whole(unit).control_group
    if not host.real:
        host.systemd.ignores_term.add(unit)  # type: ignore[attr-defined]
    else:
        procs = Path("/sys/fs/cgroup") / group.lstrip("/") / "cgroup.procs"
        host.until(unit, lambda _: len(procs.read_text().split()) >= 3)

    host.systemd.stop(unit)

    state = host.ended(unit)
    assert (state.result, state.exit_signal) == ("timeout", "SIGKILL")
    if host.real:
        assert not procs.exists()


@pytest.mark.behaviour("AG4")
def test_a_slow_start_is_distinguished_from_a_long_run(host: Host, unit: str) -> None:
    """systemd reports `timeout` for both, but only one of the two units ever ran."""
    if not host.real:
        host.systemd.never_up.add(unit)  # type: ignore[attr-defined]
    slow = a_service(ExecStartPre=[["/bin/sleep", "1000"]], TimeoutStartUSec=1_000_000)
    host.systemd.start_transient(unit, slow)

    assert host.ended(unit).result == "start-timeout"


def test_a_signal_reaches_a_unit(host: Host, unit: str) -> None:
    host.systemd.start_transient(unit, a_service())
    host.running(unit)

    host.systemd.kill(unit, signal.SIGKILL)

    state = host.ended(unit)
    assert (state.active, state.result, state.exit_signal) == ("failed", "signal", "SIGKILL")


def test_a_unit_that_heeds_a_polite_signal_ended_well(host: Host, unit: str) -> None:
    host.systemd.start_transient(unit, a_service())
    host.running(unit)

    host.systemd.kill(unit, signal.SIGTERM)

    state = host.ended(unit)
    assert (state.active, state.result, state.exit_signal) == ("active", "success", "SIGTERM")


def test_a_missing_unit_can_be_stopped_killed_and_reset(host: Host, unit: str) -> None:
    host.systemd.stop(unit)
    host.systemd.kill(unit, signal.SIGTERM)
    host.systemd.reset_failed(unit)

    assert host.systemd.find(unit) is None


@pytest.mark.behaviour("BUG-AG48", "BUG-AG50")
def test_a_value_that_is_refused_is_named(host: Host, unit: str) -> None:
    with pytest.raises(
        SystemdError, match=f"cannot start {unit} with CPUWeight=20000: .*CPUWeight"
    ):
        host.systemd.start_transient(unit, a_service(CPUWeight=20_000, TasksMax=10))
    with pytest.raises(SystemdError, match="RootDirectory='not/absolute'"):
        host.systemd.start_transient(unit, a_service(RootDirectory="not/absolute"))
    with pytest.raises(SystemdError, match=unit):
        host.systemd.start_transient(unit, {"Type": "exec"})
    with pytest.raises(SystemdError, match=unit):
        host.systemd.start_transient(unit, a_service(ExecSearchPath=["/usr//bin"]))
    with pytest.raises(SystemdError, match=unit):
        host.systemd.start_transient(unit, a_service(Environment=["A=1", "A=2"]))

    assert host.systemd.find(unit) is None


def test_a_property_that_does_not_exist_or_fit_is_named(host: Host, unit: str) -> None:
    with pytest.raises(InvalidInput, match="cannot set CPUWait to 1"):
        host.systemd.start_transient(unit, a_service(CPUWait=1))
    with pytest.raises(InvalidInput, match="cannot set CPUWeight to 'high'"):
        host.systemd.start_transient(unit, a_service(CPUWeight="high"))

    assert host.systemd.find(unit) is None


def test_limits_can_be_changed_while_a_unit_runs(host: Host, unit: str) -> None:
    host.systemd.start_transient(unit, a_service(CPUWeight=100))
    group = host.whole(unit).control_group

    host.systemd.set_properties(unit, {"CPUWeight": 50, "MemoryMax": 64 << 20})

    if host.real:
        folder = Path("/sys/fs/cgroup") / group.lstrip("/")
        host.until(unit, lambda _: (folder / "cpu.weight").read_text() == "50\n")
        assert (folder / "memory.max").read_text() == f"{64 << 20}\n"
    with pytest.raises(SystemdError, match="CPUWeight=20000"):
        host.systemd.set_properties(unit, {"CPUWeight": 20_000})


def test_a_slice_starts_with_properties_set_before(host: Host, unit: str) -> None:
    name = unit.replace("-", "_").replace(".service", ".slice")
    host.systemd.set_properties(name, {"CPUWeight": 50, "AllowedCPUs": (0,)})
    host.systemd.start_transient(unit, a_service(Slice=name))
    group = host.whole(unit).control_group
    assert group == f"/{name}/{unit}"
    if host.real:
        folder = Path("/sys/fs/cgroup") / name
        assert (folder / "cpu.weight").read_text() == "50\n"
        assert (folder / "cpuset.cpus").read_text() == "0\n"
        # An empty list changes nothing while a cgroup below needs the controller, as where tasks
        # are bound. Otherwise the file disappears together with the controller.
        host.systemd.set_properties(unit, {"AllowedCPUs": (0,)})
        host.systemd.set_properties(name, {"AllowedCPUs": ()})
        assert (folder / "cpuset.cpus").read_text() == "0\n"
    else:
        assert host.systemd.properties(name)["CPUWeight"] == 50  # type: ignore[attr-defined]
    host.systemd.stop(unit)
    host.until(unit, lambda state: state is None)


def test_huge_pages_are_limited_before_a_unit_runs(host: Host, unit: str) -> None:
    cores = Path("/sys/fs/cgroup/cgroup.controllers")
    assert not host.real or "hugetlb" in cores.read_text().split()
    values = {"hugetlb.2MB.rsvd.max": str(4 << 20), "hugetlb.2MB.max": str(4 << 20)}
    host.systemd.start_transient(unit, with_page_limits(a_service(), values))
    group = host.whole(unit).control_group
    read = host.cgroups.values(group, list(values))
    assert read == values
    host.systemd.set_properties(unit, {"CPUWeight": 50})
    assert host.cgroups.values(group, list(values)) == values
    host.systemd.stop(unit)
    host.until(unit, lambda state: state is None)


def test_a_listener_receives_start_exit_and_disappearance(
    host: Host, unit: str, signals: queue.Queue[str]
) -> None:
    def wait_for_word() -> None:
        while signals.get(timeout=20) != unit:
            pass

    host.systemd.start_transient(unit, sh("sleep 0.5; exit 0"))
    wait_for_word()
    if not host.real:
        host.systemd.exit(unit)  # type: ignore[attr-defined]
    while (state := host.systemd.find(unit)) is None or state.sub != "exited":
        wait_for_word()
    host.systemd.stop(unit)
    while host.systemd.find(unit) is not None:
        wait_for_word()


def test_an_ended_listener_receives_nothing(host: Host, unit: str) -> None:
    quiet: queue.Queue[str] = queue.Queue()
    loud: queue.Queue[str] = queue.Queue()
    end_quiet = host.systemd.listen(quiet.put)
    end_loud = host.systemd.listen(loud.put)

    end_quiet()
    host.systemd.start_transient(unit, a_service())

    while loud.get(timeout=20) != unit:
        pass
    end_loud()
    assert unit not in quiet.queue


@pytest.mark.behaviour("F-19", "F-20")
@pytest.mark.parametrize("disturbance", ["restart dbus", "daemon-reexec", "daemon-reload"])
def test_units_and_listeners_survive_restarts_of_dbus_and_systemd(
    host: Host, unit: str, signals: queue.Queue[str], disturbance: str
) -> None:
    """Signals may be lost in the meantime; the listener is notified by an empty name."""
    host.systemd.start_transient(unit, a_service())
    before = host.running(unit)

    if host.real:
        disturbing = unit.replace(".service", "-disturbing.service")
        host.systemd.start_transient(disturbing, sh(f"systemctl {disturbance}", Type="oneshot"))
        assert host.ended(disturbing).exit_code == 0
    else:
        host.systemd.lose_bus()  # type: ignore[attr-defined]
    if disturbance == "restart dbus":
        while signals.get(timeout=20) != "":
            pass

    assert host.running(unit).invocation_id == before.invocation_id
    host.systemd.stop(unit)
    while signals.get(timeout=20) != unit or host.systemd.find(unit):
        pass


def test_units_are_found_by_pattern(host: Host, unit: str) -> None:
    first, second = unit.replace(".service", "-a.service"), unit.replace(".service", "-b.service")
    for name in (first, second):
        host.systemd.start_transient(name, a_service())
        host.running(name)

    found = host.systemd.units(unit.replace(".service", "-*.service"))

    assert {state.unit: state.sub for state in found} == {first: "running", second: "running"}
    assert host.systemd.units("twine-no-such-*.service") == []
    states = host.systemd.unit_states(unit.replace(".service", "-*.service"))
    assert states == dict.fromkeys((first, second), ("active", "running"))
    assert host.systemd.unit_states("twine-no-such-*.service") == {}


def test_a_name_with_wildcards_finds_only_itself(host: Host, unit: str) -> None:
    host.systemd.start_transient(unit, a_service())
    host.running(unit)

    assert host.systemd.find(unit.replace("contract", "*")) is None
    assert host.systemd.find(unit.replace("contract", "contrac[t]")) is None


def test_a_slice_holds_its_units_and_is_made_with_limits(host: Host, unit: str) -> None:
    name = "twinecontract-web.slice"
    host.systemd.start_transient(name, {"CPUWeight": 300, "MemoryLow": 16 << 20})

    host.systemd.start_transient(unit, a_service(Slice=name))

    group = f"/twinecontract.slice/{name}"
    assert host.whole(unit).control_group == f"{group}/{unit}"
    state = host.systemd.find(name)
    assert state
    assert (state.active, state.control_group) == ("active", group)
    if host.real:
        assert Path(f"/sys/fs/cgroup{group}/cpu.weight").read_text() == "300\n"
    with pytest.raises(Conflict, match=name):
        host.systemd.start_transient(name, {"CPUWeight": 300})

    host.systemd.stop(name)
    assert host.until(unit, lambda state: state is None) is None


def test_a_missing_slice_is_made_with_its_first_unit(host: Host, unit: str) -> None:
    name = "twinecontract-implied.slice"

    host.systemd.start_transient(unit, a_service(Slice=name))
    host.running(unit)

    state = host.systemd.find(name)
    assert state
    assert state.active == "active"
    host.systemd.stop(unit)
    host.until(unit, lambda state: state is None)
    host.systemd.stop(name)


@pytest.mark.behaviour("BUG-AU8")
def test_a_hardened_task_starts_from_its_own_root(host: Host, unit: str) -> None:
    """The test uses the shipped properties."""
    assert all(HARDENING[name] is value for name, value in TASK_HARDENING.items())
    root = {"RootDirectory": str(host.root), "MemoryMax": 64 << 20, "TasksMax": 64}

    host.systemd.start_transient(unit, a_service(**HARDENING, **root))

    state = host.whole(unit)
    if host.real:
        status = Path(f"/proc/{state.main_pid}/status").read_text()
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert int(fields["Uid"].split()[0]) > 60_000, "a user of its own"
        assert fields["NoNewPrivs"] == "1"
        assert fields["Seccomp"] == "2"
        assert {fields[name] for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}


def test_a_start_that_comes_too_late_leaves_nothing(host: Host, unit: str) -> None:
    """The condition runs outside of the task's root, where a shell and a clock are available."""
    root = {**HARDENING, "RootDirectory": str(host.root), "MemoryMax": 64 << 20}
    seconds = int(time.clock_gettime(time.CLOCK_BOOTTIME))
    if not host.real:
        host.fake_clock(seconds)

    host.systemd.start_transient(unit, a_service(**root, **not_after(seconds + 600.9)))
    assert host.whole(unit).main_pid
    host.systemd.stop(unit)
    host.until(unit, lambda state: state is None)

    host.systemd.start_transient(unit, a_service(**root, **not_after(seconds)))
    host.until(unit, lambda state: state is None)


def test_an_argument_arrives_as_it_is(host: Host, unit: str, tmp_path: Path) -> None:
    """Variables and specifiers are not replaced; quotes and spaces have no special meaning."""
    word = "a  b\"c'%i $HOME ${HOME} $$ \\x"
    expected = tmp_path / "expected"
    expected.write_text(word)
    same = 'exit $((1 - ($(printf %s "$1" | cmp -s - "$2" && echo 1 || echo 0))))'

    if host.real:
        host.systemd.start_transient(
            unit, a_service("/bin/sh", "-c", same, "sh", word, str(expected))
        )
        assert host.ended(unit).exit_code == 0
    else:
        host.systemd.start_transient(unit, a_service("/bin/echo", word))
        assert host.systemd.properties(unit)["ExecStart"] == [["/bin/echo", word]]  # type: ignore[attr-defined]


def test_the_version_is_a_number(host: Host) -> None:
    assert host.systemd.version() >= 252
