"""A profile on trial, and drift: unconfirmed or unwanted changes are reverted automatically."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from fake_host import Crash, FakeHost, a_target

from sidekick import trial
from sidekick.journal import Began
from sidekick.record import Target
from sidekick.report import ApplyOutcome, ProfileState, Report
from sidekick.settings.hugepages import Hugepages
from sidekick.state import StateFolder
from sidekick.status import status, verify
from sidekick.unattended import verify_by_timer
from wire.errors import Conflict, HostError, ProgramError, Unprocessable

WEB = {"vm.swappiness": 10, "net.core.somaxconn": 6144}
CACHE = {"vm.swappiness": 1, "vm.max_map_count": 262144}
REVERT = ["sidekick", "revert", "--due"]


def web(fake: FakeHost) -> Target:
    return a_target(fake, "web", sysctl=WEB)


def cache(fake: FakeHost) -> Target:
    return a_target(fake, "cache", sysctl=CACHE, hugepages=Hugepages(pages_2m=16))


def begin(fake: FakeHost, for_s: float = 60.0) -> Report:
    return trial.begin(fake.host(), fake.state, cache(fake), for_s, REVERT)


def the_timer(fake: FakeHost) -> Report:
    """Run the timer's command at the end of the trial."""
    fake.time_s += 61.0
    return trial.revert(fake.host(), fake.state, due_only=True)


@pytest.fixture
def on_web(fake: FakeHost) -> FakeHost:
    """A host that runs the profile web."""
    fake.apply(web(fake))
    fake.processes.ran.clear()
    return fake


def test_a_trial_without_confirmation_is_reverted(on_web: FakeHost) -> None:
    before = on_web.live()
    report = begin(on_web)
    assert (report.state, report.name) == (ProfileState.VERIFIED, "cache")
    assert "`sidekick confirm` keeps it" in report.detail
    assert on_web.processes.ran[1] == [
        *("systemd-run", "--collect", "--unit=twine-sidekick-revert", "--on-active=60s"),
        *("--timer-property=AccuracySec=1s", *REVERT),
    ]
    early = trial.revert(on_web.host(), on_web.state, due_only=True)
    assert (early.name, on_web.pages()) == ("cache", 16)
    assert "on trial for" in early.detail
    report = the_timer(on_web)
    assert (report.state, report.name) == (ProfileState.VERIFIED, "web")
    assert on_web.live() == before
    assert on_web.state.load().trial is None


@pytest.mark.behaviour("BUG-SK46")
def test_a_trial_may_last_for_weeks(on_web: FakeHost) -> None:
    """systemd accepts no exponents, and a timer that fires early reverts nothing."""
    report = begin(on_web, 30 * 86_400.25)
    assert report.state is ProfileState.VERIFIED
    assert "on trial for 30d" in report.detail
    assert "--on-active=2592008s" in on_web.processes.ran[1]


def test_a_confirmed_trial_stays(on_web: FakeHost) -> None:
    begin(on_web)
    assert trial.confirm(on_web.host(), on_web.state).state is ProfileState.VERIFIED
    assert on_web.processes.commands()[-1] == "systemctl stop"
    assert the_timer(on_web).name == "cache"
    assert on_web.pages() == 16
    with pytest.raises(Conflict, match="no profile is on trial"):
        trial.confirm(on_web.host(), on_web.state)


def test_a_trial_that_is_over_cannot_be_confirmed(on_web: FakeHost) -> None:
    begin(on_web)
    on_web.time_s += 61.0
    with pytest.raises(Conflict, match="no profile is on trial"):
        trial.confirm(on_web.host(), on_web.state)


def test_a_second_trial_restores_the_state_before_the_first(on_web: FakeHost) -> None:
    before = on_web.live()
    begin(on_web)
    trial.begin(on_web.host(), on_web.state, a_target(on_web, "third"), 60, REVERT)
    the_timer(on_web)
    assert on_web.live() == before


@pytest.mark.behaviour("BUG-SK68")
@pytest.mark.parametrize("bad", ["refused value", "refused timer", "full disk"])
def test_a_second_trial_that_fails_leaves_the_first_one_its_timer(
    on_web: FakeHost, bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timer of the first trial was stopped, so its profile stayed without a confirmation."""
    begin(on_web)
    on_web.time_s += 20.0
    on_web.processes.ran.clear()
    values = {"kernel.panic": 9, **({"vm.swappiness": 300} if bad == "refused value" else {})}
    target = a_target(on_web, "third", sysctl=values)
    host = on_web.host()
    with monkeypatch.context() as failing, contextlib.suppress(HostError):
        if bad == "refused timer":
            run = host.processes.run

            def once(argv: list[str], **given: Any) -> Any:
                if argv[0] == "systemd-run" and "--on-active=600s" in argv:
                    raise ProgramError("systemd-run: no answer")
                return run(argv, **given)

            failing.setattr(host.processes, "run", once)
        if bad == "full disk":
            failing.setattr(StateFolder, "reserve", _refuse)
        trial.begin(host, on_web.state, target, 600.0, REVERT)
    started = [ran for ran in on_web.processes.ran if ran[0] == "systemd-run"]
    assert "--on-active=40s" in started[-1]
    assert on_web.processes.ran[-1] == started[-1]


def _refuse(_: StateFolder) -> None:
    raise HostError("No space left on device")


def test_the_verify_timer_ends_a_trial_whose_own_timer_is_lost(on_web: FakeHost) -> None:
    before = on_web.live()
    begin(on_web)
    on_web.time_s += 61.0
    assert verify_by_timer(on_web.host(), on_web.state, repair=False).name == "web"
    assert on_web.live() == before


@pytest.mark.behaviour("F-65")
@pytest.mark.parametrize("end", ["timer", "boot", "crashed sidekick resumes"])
def test_a_trial_that_is_killed_at_any_point_is_reverted(tmp_path: Path, end: str) -> None:
    whole = FakeHost(tmp_path / "whole")
    whole.apply(web(whole))
    before, first = whole.live(), whole.points.passed
    begin(whole)
    for point in range(first + 1, whole.points.passed + 1):
        fake = FakeHost(tmp_path / f"{point}")
        fake.apply(web(fake))
        fake.points.at = point
        with pytest.raises(Crash):
            begin(fake)
        fake.points.at = None
        if end == "boot":
            fake.boot()
            assert fake.resume().name == "web"
        elif end == "timer":
            the_timer(fake)
        else:
            fake.resume()
            the_timer(fake)
        assert fake.live() == before, f"at point {point}"
        assert fake.state.load().trial is None
        assert (
            verify(fake.host(), fake.state).state is ProfileState.VERIFIED
            or fake.state.unfinished()
        )


@pytest.mark.behaviour("F-65", "BUG-SK68")
@pytest.mark.parametrize("end", ["a second trial", "revert", "confirm"])
def test_the_end_of_a_trial_that_is_killed_at_any_point_leaves_one_whole_profile(
    tmp_path: Path, end: str
) -> None:
    def ended(fake: FakeHost) -> Report:
        if end == "a second trial":
            third = a_target(fake, "third", sysctl={"vm.swappiness": 5, "kernel.panic": 9})
            return trial.begin(fake.host(), fake.state, third, 60.0, REVERT)
        end_now = trial.revert if end == "revert" else trial.confirm
        return end_now(fake.host(), fake.state)

    whole = FakeHost(tmp_path / "whole")
    whole.apply(web(whole))
    on_web = whole.live()
    begin(whole)
    on_cache, first = whole.live(), whole.points.passed
    ended(whole)
    assert whole.points.passed > first
    for point in range(first + 1, whole.points.passed + 1):
        fake = FakeHost(tmp_path / f"{point}")
        fake.apply(web(fake))
        begin(fake)
        fake.points.at = point
        with pytest.raises(Crash):
            ended(fake)
        fake.points.at = None
        fake.time_s += 61.0
        verify_by_timer(fake.host(), fake.state, repair=False)
        record = fake.state.load()
        is_kept = end == "confirm" and point > first + 1
        assert fake.live() == (on_cache if is_kept else on_web), f"at point {point}"
        assert record.trial is None
        assert record.applied == (cache(fake) if is_kept else web(fake))


def test_a_trial_that_fails_leaves_nothing_to_end(on_web: FakeHost) -> None:
    before = on_web.live()
    bad = a_target(on_web, "bad", sysctl={"kernel.panic": 9, "vm.swappiness": 300})
    report = trial.begin(on_web.host(), on_web.state, bad, 60, REVERT)
    assert report.rolled_back
    assert on_web.live() == before
    assert on_web.state.load().trial is None


def test_a_setting_that_needs_a_boot_is_not_tried(on_web: FakeHost) -> None:
    before = on_web.everything()
    target = a_target(on_web, "batch", cmdline=("nosmt",))
    with pytest.raises(Unprocessable, match="the boot ends the trial"):
        trial.begin(on_web.host(), on_web.state, target, 60, REVERT)
    assert on_web.everything() == before
    assert on_web.processes.ran == []


def test_a_trial_shows_in_the_status(on_web: FakeHost) -> None:
    begin(on_web)
    verify(on_web.host(), on_web.state)
    assert "on trial for" in status(on_web.host(), on_web.state).detail


@pytest.mark.behaviour("BUG-SK3", "F-72")
def test_drift_is_reported_with_time_and_program_if_known(on_web: FakeHost) -> None:

    on_web.put("/etc/sysctl.d/99-other.conf", "# mine\n-vm/swappiness = 77")
    on_web.fs.write("/proc/sys/vm/swappiness", "77")
    on_web.fs.write("/proc/sys/net/core/somaxconn", "1")
    report = verify_by_timer(on_web.host(), on_web.state, repair=False)
    assert report.state is ProfileState.DRIFTED
    details = {s.setting: s.detail for s in report.settings}
    when = "changed after 2023-11-14 22:13:20 UTC"
    assert (
        details["sysctl.vm.swappiness"] == f"{when}, to the value in /etc/sysctl.d/99-other.conf:2"
    )
    assert details["sysctl.net.core.somaxconn"] == when
    again = verify_by_timer(on_web.host(), on_web.state, repair=False)
    assert {s.setting: s.detail for s in again.settings} == details
    assert on_web.sysctl("vm.swappiness") == "77", "reported, not repaired"


@pytest.mark.behaviour("BUG-SK3", "F-72")
def test_drift_is_repaired_where_the_policy_requires_it(on_web: FakeHost) -> None:
    on_web.fs.write("/proc/sys/vm/swappiness", "77")
    report = verify_by_timer(on_web.host(), on_web.state, repair=True)
    assert report.state is ProfileState.VERIFIED
    assert report.detail.startswith("repaired: sysctl.vm.swappiness changed after")
    assert on_web.sysctl("vm.swappiness") == "10"
    outcomes = {s.setting: s.outcome for s in report.settings}
    assert outcomes["sysctl.net.core.somaxconn"] is ApplyOutcome.ALREADY
    assert verify_by_timer(on_web.host(), on_web.state, repair=True).detail == ""


def test_a_check_of_a_host_without_drift_writes_nothing_to_it(on_web: FakeHost) -> None:
    on_web.fs.writes.clear()
    assert verify_by_timer(on_web.host(), on_web.state, repair=True).state is ProfileState.VERIFIED
    assert on_web.fs.writes == []
    assert on_web.processes.ran == []


@pytest.mark.behaviour("F-74")
def test_a_daemon_that_ends_takes_nothing_back(on_web: FakeHost) -> None:
    """sidekick has no daemon: after the run no process is left that could end."""
    before = on_web.live()
    verify(on_web.host(), on_web.state)
    assert on_web.live() == before
    assert not on_web.state.is_locked()


def test_an_interrupted_trial_cannot_be_confirmed(on_web: FakeHost) -> None:
    """The host may then have only half of the profile."""
    begin(on_web)
    on_web.state.begin(
        Began(command="apply", target=cache(on_web), changes=(), boot_id="b", at=0.0)
    )
    with pytest.raises(Conflict, match="the trial was interrupted"):
        trial.confirm(on_web.host(), on_web.state)
    assert on_web.state.load().trial is not None


@pytest.mark.behaviour("BUG-SK88")
def test_the_run_that_finishes_an_interrupted_trial_is_named_resume(on_web: FakeHost) -> None:
    begin(on_web)
    on_web.fs.write("/proc/sys/vm/swappiness", "33")
    assert on_web.resume().command == "resume"
    assert on_web.state.load().trial is not None


def test_a_run_that_changes_nothing_opens_no_journal(
    on_web: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = list[Began]()
    monkeypatch.setattr(StateFolder, "begin", lambda _, began: begun.append(began))
    assert on_web.apply(web(on_web)).state is ProfileState.VERIFIED
    assert begun == []


def test_drift_that_no_report_came_before_has_no_date(on_web: FakeHost) -> None:
    (on_web.state.folder / "status.json").unlink()
    on_web.fs.write("/proc/sys/net/core/somaxconn", "1")
    report = verify_by_timer(on_web.host(), on_web.state, repair=False)
    [drifted] = [s for s in report.settings if s.outcome is ApplyOutcome.DRIFTED]
    assert (drifted.setting, drifted.detail) == ("sysctl.net.core.somaxconn", "")
