"""Runs switch from one profile to another and back, and report the result."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from fake_host import FakeHost, a_target, shipped

from sidekick import status as standing
from sidekick.apply import ApplyRun
from sidekick.record import Target
from sidekick.report import ApplyOutcome, Disruption, ProfileState, Report, exit_code
from sidekick.settings.hugepages import Hugepages
from sidekick.settings.sysctl import SysctlValue
from wire.errors import HostError

WEB = {"vm.swappiness": 10, "net.core.somaxconn": 6144, "vm.dirty_bytes": 8388608}
CACHE = {"vm.swappiness": 1, "vm.max_map_count": 262144, "net.ipv4.tcp_rmem": [1, 2, 3]}


def apply(fake: FakeHost, target: Target, **how: bool) -> Report:
    return fake.apply(target, **how)


def outcomes(report: Report) -> dict[str, str]:
    return {s.setting: s.outcome.value for s in report.settings}


@pytest.mark.behaviour("HP1", "HP12")
def test_a_profile_is_applied_read_back_and_reported(fake: FakeHost) -> None:
    report = apply(fake, a_target(fake, sysctl=WEB, generation=7))
    assert report.state is ProfileState.VERIFIED
    assert (report.name, report.generation, report.effective) == ("web", 7, "web")
    assert set(outcomes(report).values()) == {"applied"}
    assert fake.sysctl("vm.swappiness") == "10"
    assert all(s.took_ms > 0 for s in report.settings)
    assert fake.state.read_status() == report


@pytest.mark.behaviour("HP12")
def test_the_same_profile_again_writes_nothing(fake: FakeHost) -> None:
    target = a_target(fake, sysctl=WEB)
    apply(fake, target)
    fake.fs.refuses.update(f"/proc/sys/{name.replace('.', '/')}" for name in WEB)
    report = apply(fake, target)
    assert set(outcomes(report).values()) == {"already"}
    assert exit_code(report) == 0


def test_a_switch_changes_only_what_differs(fake: FakeHost) -> None:
    apply(fake, a_target(fake, "web", sysctl=WEB))
    plan = ApplyRun(fake.host(), fake.state, a_target(fake, "cache", sysctl=CACHE)).observation.plan
    assert {c.setting.removeprefix("sysctl."): (c.before, c.after) for c in plan.changes} == {
        "net.core.somaxconn": ("6144", "4096"),
        "vm.dirty_ratio": ("0", "20"),
        "vm.swappiness": ("10", "1"),
        "vm.max_map_count": ("65530", "262144"),
        "net.ipv4.tcp_rmem": ("4096\t131072\t6291456", "1\t2\t3"),
    }
    assert plan.needs is Disruption.LIVE


@pytest.mark.behaviour("F-73")
def test_a_switch_and_its_undo_leave_the_host_as_before(fake: FakeHost) -> None:
    web, cache = a_target(fake, "web", sysctl=WEB), a_target(fake, "cache", sysctl=CACHE)
    untouched = fake.live()
    apply(fake, web)
    first = fake.live()
    apply(fake, cache)
    apply(fake, web)
    assert fake.live() == first
    report = apply(fake, Target())
    assert fake.live() == untouched
    assert (report.state, report.effective) == (ProfileState.NONE, "")
    assert fake.state.load().originals == {}


@pytest.mark.behaviour("F-73")
def test_all_shipped_profiles_in_a_row_leave_no_trace(fake: FakeHost) -> None:
    untouched = fake.everything()
    for name in ("web", "cache", "batch", "web", "batch", "cache", "web"):
        report = apply(fake, shipped(fake, name))
        expected = ProfileState.PENDING_REBOOT if name == "batch" else ProfileState.VERIFIED
        assert report.state is expected, report.detail
    apply(fake, Target())
    assert fake.everything() == untouched


@pytest.mark.behaviour("HP6")
def test_profile_web_never_needs_a_reboot(fake: FakeHost) -> None:
    apply(fake, shipped(fake, "cache"))
    assert (
        ApplyRun(fake.host(), fake.state, shipped(fake, "web")).observation.plan.needs
        is Disruption.LIVE
    )


def test_an_original_is_the_value_before_the_first_profile(fake: FakeHost) -> None:
    apply(fake, a_target(fake, sysctl={"vm.swappiness": 60}))  # the value that it already had
    fake.fs.write("/proc/sys/vm/swappiness", "33")  # drift
    apply(fake, a_target(fake, sysctl={"vm.swappiness": 5}))
    apply(fake, Target())
    assert fake.sysctl("vm.swappiness") == "60"


@pytest.mark.behaviour("F-64")
def test_a_refused_value_takes_everything_back(fake: FakeHost) -> None:
    apply(fake, a_target(fake, "web", sysctl=WEB))
    web = fake.live()
    report = apply(fake, a_target(fake, "bad", sysctl={**CACHE, "vm.swappiness": 300}))
    assert fake.live() == web
    assert (report.name, report.state, report.effective) == ("bad", ProfileState.DEGRADED, "web")
    assert exit_code(report) == 4
    assert "Invalid argument" in report.detail
    assert outcomes(report)["sysctl.vm.swappiness"] == "failed"
    assert outcomes(report)["sysctl.net.core.somaxconn"] == "undone"
    assert fake.state.unfinished() is None


def test_writes_are_undone_in_reverse_order(fake: FakeHost) -> None:
    bad = {"net.core.somaxconn": 9, "kernel.panic": 9, "vm.swappiness": 300}
    apply(fake, a_target(fake, "bad", sysctl=bad))
    names = [path.rpartition("/")[2] for path in fake.fs.writes]
    tried = ["somaxconn", "panic", "swappiness", "swappiness"]
    # after the undo the refused value is written first, and refused again
    assert names == [*tried, "panic", "somaxconn", "swappiness"]


def test_a_failed_switch_stays_visible_until_the_next_good_one(fake: FakeHost) -> None:
    apply(fake, a_target(fake, "web", sysctl=WEB))
    apply(fake, a_target(fake, "bad", sysctl={"vm.swappiness": 300}, generation=2))
    report = standing.verify(fake.host(), fake.state)
    assert (report.name, report.generation) == ("bad", 2)
    assert report.state is ProfileState.DEGRADED
    assert set(outcomes(report).values()) == {"applied"}, "web is still applied"
    assert apply(fake, a_target(fake, "web", sysctl=WEB)).state is ProfileState.VERIFIED


def test_a_required_setting_that_the_kernel_lacks_is_reported_before_any_write(
    fake: FakeHost,
) -> None:
    untouched = fake.live()
    report = apply(fake, a_target(fake, sysctl={"vm.swappiness": 1, "vm.new_knob": 1}))
    assert exit_code(report) == 4
    assert "lacks sysctl.vm.new_knob" in report.detail
    assert fake.live() == untouched


@pytest.mark.behaviour("F-70")
def test_an_optional_setting_that_the_kernel_lacks_is_unsupported(fake: FakeHost) -> None:
    optional = SysctlValue(value=1, required=False)
    report = apply(fake, a_target(fake, sysctl={"vm.swappiness": 1, "vm.new_knob": optional}))
    assert report.state is ProfileState.VERIFIED
    assert outcomes(report)["sysctl.vm.new_knob"] == "unsupported"


def test_a_change_that_cannot_be_undone_is_reported_and_kept_for_the_next_run(
    fake: FakeHost,
) -> None:
    untouched = fake.live()
    path = "/proc/sys/net/core/somaxconn"
    fake.fs.rounds[path] = lambda value: "6000" if value == "4096" else value
    bad = {"net.core.somaxconn": 6144, "vm.swappiness": 300}
    report = apply(fake, a_target(fake, sysctl=bad))
    assert exit_code(report) == 1
    assert "some changes could not be undone" in report.detail
    assert standing.status(fake.host(), fake.state).state is ProfileState.DEGRADED
    del fake.fs.rounds[path]
    apply(fake, Target())
    assert fake.live() == untouched


def test_two_writes_that_undo_each_other_are_noticed(fake: FakeHost) -> None:
    def meddle(path: str) -> Callable[[str], str]:
        def change_other(value: str) -> str:
            fake.put(path, "99")
            return value

        return change_other

    swappiness, backlog = "/proc/sys/vm/swappiness", "/proc/sys/net/core/somaxconn"
    fake.fs.rounds.update({backlog: meddle(swappiness), swappiness: meddle(backlog)})
    report = apply(fake, a_target(fake, sysctl={"vm.swappiness": 1, "net.core.somaxconn": 9}))
    assert exit_code(report) == 1
    assert "reads '99' again" in report.detail
    assert "cannot restore sysctl." in report.detail, "nor can both be taken back"


@pytest.mark.behaviour("F-72")
def test_drift_is_found_and_left_alone(fake: FakeHost) -> None:
    apply(fake, a_target(fake, sysctl=WEB))
    fake.fs.write("/proc/sys/vm/swappiness", "55")
    report = standing.verify(fake.host(), fake.state)
    assert report.state is ProfileState.DRIFTED
    (drifted,) = [s for s in report.settings if s.outcome is ApplyOutcome.DRIFTED]
    assert (drifted.wanted, drifted.actual) == ("10", "55")
    assert fake.sysctl("vm.swappiness") == "55"
    assert apply(fake, a_target(fake, sysctl=WEB)).state is ProfileState.VERIFIED


def test_without_a_profile_there_is_nothing_to_verify(fake: FakeHost) -> None:
    assert standing.verify(fake.host(), fake.state).state is ProfileState.NONE
    assert standing.status(fake.host(), fake.state).state is ProfileState.NONE
    assert fake.resume().state is ProfileState.NONE
    assert apply(fake, Target()).state is ProfileState.NONE


def test_a_disk_that_is_full_stops_the_run_before_the_first_write(fake: FakeHost) -> None:
    untouched = fake.live()
    (fake.state.folder).mkdir(parents=True)
    (fake.state.folder / "state.json.new").mkdir()
    with pytest.raises(HostError, match=r"cannot write .*state.json"):
        apply(fake, a_target(fake, sysctl=WEB))
    assert fake.live() == untouched


def test_the_agent_reads_the_status_file_as_its_own_type(fake: FakeHost) -> None:
    from agent.api import ProfileStatus

    report = apply(fake, a_target(fake, sysctl=WEB, generation=3))
    text = (fake.state.folder / "status.json").read_bytes()
    status = msgspec.json.decode(text, type=ProfileStatus)
    assert (status.name, status.generation, status.state.value) == ("web", 3, "verified")
    assert [s.setting for s in status.settings] == [s.setting for s in report.settings]


def test_a_request_that_cannot_start_is_reported_in_the_status_file(fake: FakeHost) -> None:
    apply(fake, a_target(fake, "web", sysctl=WEB))
    target = Target(name="nope", generation=4)
    standing.refuse(fake.host(), fake.state, target, HostError("no profile 'nope'"))
    report = fake.state.read_status()
    assert report is not None
    assert (report.name, report.generation, report.effective) == ("nope", 4, "web")
    assert (report.state, report.detail) == (ProfileState.DEGRADED, "no profile 'nope'")


def test_pages_and_sysctls_are_given_back_together(fake: FakeHost) -> None:
    untouched = fake.live()
    apply(fake, a_target(fake, sysctl=WEB, hugepages=Hugepages(pages_2m=24)))
    assert fake.pages() == 24
    apply(fake, a_target(fake, "bad", sysctl={"vm.swappiness": 300}))
    assert fake.pages() == 24
    apply(fake, Target())
    assert fake.live() == untouched


@pytest.mark.behaviour("HP4")
def test_the_time_of_a_switch_is_reported_until_the_next_one(fake: FakeHost) -> None:
    assert standing.verify(fake.host(), fake.state).switched is None
    fake.apply(a_target(fake, "web", 3, sysctl={"vm.swappiness": 10, "kernel.panic": 9}))
    for _ in range(2):
        switched = standing.verify(fake.host(), fake.state).switched
        assert switched
        assert (switched.name, switched.generation, switched.command) == ("web", 3, "apply")
        assert switched.state is ProfileState.VERIFIED
        assert switched.took_ms >= sum(s.took_ms for s in switched.settings) > 0
        assert {s.setting for s in switched.settings} == {
            "sysctl.vm.swappiness",
            "sysctl.kernel.panic",
        }
    fake.apply(a_target(fake, "web", 4, sysctl={"vm.swappiness": 10, "kernel.panic": 9}))
    assert standing.status(fake.host(), fake.state).switched == switched, "nothing was written"
    fake.apply(a_target(fake, "bad", 5, sysctl={"kernel.panic": 8, "vm.swappiness": 300}))
    failed = standing.status(fake.host(), fake.state).switched
    assert failed
    assert (failed.name, failed.state, failed.rolled_back) == ("bad", ProfileState.DEGRADED, True)
    assert {s.outcome for s in failed.settings} == {ApplyOutcome.FAILED, ApplyOutcome.UNDONE}
