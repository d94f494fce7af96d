"""Originals that the kernel refuses: the rest is restored, and the next boot restores these."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_host import FakeHost, a_target
from recorded import RecordedHost

from sidekick.cli import main
from sidekick.record import Target
from sidekick.report import ApplyOutcome, ProfileState, exit_code
from sidekick.status import status, verify
from sidekick.unattended import resume

STUCK, OTHER = "net.core.somaxconn", "vm.swappiness"
PATH = "/proc/sys/net/core/somaxconn"


@pytest.fixture
def stuck(fake: FakeHost) -> FakeHost:
    """A host whose kernel keeps one value of the applied profile, whatever is written."""
    assert fake.apply(a_target(fake, sysctl={STUCK: 5000, OTHER: 7})).state is ProfileState.VERIFIED
    fake.fs.rounds[PATH] = lambda _: "5000"
    return fake


@pytest.mark.behaviour("BUG-SK36")
def test_bug_sk36_rollback_restores_the_rest_and_names_what_a_boot_brings(
    stuck: FakeHost,
) -> None:
    report = stuck.apply(Target())
    assert (report.state, report.rolled_back) == (ProfileState.PENDING_REBOOT, False)
    assert exit_code(report) == 2
    assert stuck.fs.read("/proc/sys/vm/swappiness") == "60"
    (left,) = [s for s in report.settings if s.outcome is ApplyOutcome.PENDING_REBOOT]
    assert (left.setting, left.wanted, left.actual) == (f"sysctl.{STUCK}", "4096", "5000")
    assert "the next boot restores the original" in left.detail


@pytest.mark.behaviour("BUG-SK36")
def test_bug_sk36_it_stays_reported_until_the_boot_and_no_longer(stuck: FakeHost) -> None:

    stuck.apply(Target())
    for look in (verify, status):
        assert look(stuck.host(), stuck.state).state is ProfileState.PENDING_REBOOT
    stuck.fs.rounds.clear()
    stuck.boot()
    report = resume(stuck.host(), stuck.state)
    assert report.state is ProfileState.NONE
    assert verify(stuck.host(), stuck.state).state is ProfileState.NONE
    # written by the operator, in the boot after: no longer a value of any profile
    stuck.put(PATH, "6000")
    assert verify(stuck.host(), stuck.state).state is ProfileState.NONE


@pytest.mark.behaviour("BUG-SK36")
def test_the_next_profile_is_applied_and_reports_leftovers(stuck: FakeHost) -> None:

    report = stuck.apply(a_target(stuck, sysctl={OTHER: 9}))
    assert report.state is ProfileState.PENDING_REBOOT
    assert stuck.fs.read("/proc/sys/vm/swappiness") == "9"
    again = stuck.apply(a_target(stuck, sysctl={OTHER: 8}))
    assert again.state is ProfileState.PENDING_REBOOT
    assert stuck.fs.read("/proc/sys/vm/swappiness") == "8"


@pytest.mark.behaviour("BUG-SK36")
def test_bug_sk36_a_value_restored_by_hand_is_no_longer_reported(
    stuck: FakeHost,
) -> None:
    stuck.apply(Target())
    stuck.put(PATH, "4096")
    assert verify(stuck.host(), stuck.state).state is ProfileState.NONE


@pytest.mark.behaviour("BUG-SK36", "F-64")
def test_bug_sk36_a_wanted_value_that_is_refused_still_undoes_everything(fake: FakeHost) -> None:

    fake.fs.rounds[PATH] = lambda _: "4096"
    report = fake.apply(a_target(fake, sysctl={STUCK: 5000, OTHER: 7}))
    assert (report.state, report.rolled_back) == (ProfileState.DEGRADED, True)
    assert fake.fs.read("/proc/sys/vm/swappiness") == "60"
    assert fake.state.load().left == {}


SCHEDULED = "description = 'x'\n[block.rotating]\nscheduler = 'mq-deadline'\n"


@pytest.mark.behaviour("BUG-SK29")
def test_bug_sk29_a_module_that_a_value_loaded_is_unloaded_with_it(tmp_path: Path) -> None:

    fake = RecordedHost(tmp_path / "host", "vm")
    (tmp_path / "x.toml").write_text(SCHEDULED)
    fake.fs.path("/sys/block/vda/queue/scheduler").write_text("[none] mq-deadline\n")
    listing = fake.fs.path(f"/lib/modules/{fake.host().hardware.kernel}/modules.dep")
    listing.parent.mkdir(parents=True, exist_ok=True)
    listing.write_text("kernel/block/mq-deadline.ko.xz:\n")

    def sidekick(*arguments: str) -> int:
        options = [f"--root={fake.root}", f"--state={fake.state.folder}", f"--profiles={tmp_path}"]
        return main([*options, *arguments], make_host=lambda _: fake.host())

    assert sidekick("apply-profile", "x") == 0
    loaded = fake.fs.path("/sys/module/mq_deadline/initstate")
    loaded.parent.mkdir(parents=True)  # as the kernel does at the write
    loaded.write_text("live\n")
    assert sidekick("verify") == 0
    assert sidekick("plan", "x") == 0
    assert sidekick("rollback") == 0
    assert ["/sbin/modprobe", "-r", "mq_deadline"] in fake.processes.ran
