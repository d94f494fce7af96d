"""Every shipped profile on a booted machine: applied, verified, switched, released."""

from __future__ import annotations

import itertools
import time

import pytest
from guest_host import PROFILES, GuestHost, differences, everything, output_of

from sidekick.profile import Library
from sidekick.report import ApplyOutcome, ProfileState
from sidekick.settings import SETTINGS
from sidekick.status import verify

SHIPPED = Library(PROFILES, SETTINGS).names()
STAGED = {"batch"}
"""Needs a boot, which `test_0_boot_loader.py` does; here it is only staged and rolled back."""
UNABLE = {"turbo"}
"""Requires hardware that no guest has, so sidekick refuses it as a whole."""


def applied(host: GuestHost, name: str) -> None:
    """Apply a profile and read the host's state again."""
    report = host.apply(name)
    if name in UNABLE:
        assert (report.state, report.rolled_back) == (ProfileState.DEGRADED, True), report
        return
    expected = ProfileState.PENDING_REBOOT if name in STAGED else ProfileState.VERIFIED
    assert report.state is expected, (name, report)
    assert verify(host.host(), host.state).state is expected
    failed = [
        s for s in report.settings if s.outcome in (ApplyOutcome.FAILED, ApplyOutcome.DRIFTED)
    ]
    assert failed == []


@pytest.mark.behaviour("F-73", "HP6", "HP12")
def test_every_profile_in_a_row_and_none_at_the_end(
    host: GuestHost, untouched: dict[str, str]
) -> None:
    assert len(SHIPPED) >= 11
    for name in [*SHIPPED, *reversed(SHIPPED)]:
        applied(host, name)
    host.release()
    assert differences(untouched, everything()) == []


@pytest.mark.behaviour("F-73", "HP12")
@pytest.mark.long
def test_every_profile_to_every_other_and_released(
    host: GuestHost, untouched: dict[str, str]
) -> None:
    """After any switch, the settings in force are those that the profile sets as the first one."""
    alone = {}
    for name in SHIPPED:
        applied(host, name)
        alone[name] = everything()
        host.release()
        assert differences(untouched, everything()) == [], name
    for one, other in itertools.permutations(SHIPPED, 2):
        applied(host, one)
        applied(host, other)
        if other not in UNABLE:
            assert differences(alone[other], everything()) == [], (one, other)
    host.release()
    assert differences(untouched, everything()) == []


VERIFY = "sidekick-verify.service"


def shown() -> str:
    """Return which check was the last one, after it has ended."""
    while output_of(f"systemctl is-active {VERIFY}").strip() in ("active", "activating"):
        time.sleep(0.2)
    return output_of(f"systemctl show -P InvocationID {VERIFY}").strip()


@pytest.mark.behaviour("BUG-SK34", "BUG-SK35")
@pytest.mark.parametrize(
    ("action", "device"),
    [("online", "/sys/devices/system/cpu/cpu0"), ("add", "/sys/class/block/vda")],
)
def test_udev_has_sidekick_look_when_hardware_comes_or_goes(
    host: GuestHost, action: str, device: str
) -> None:
    """Sidekick checks within a moment, not only when the timer fires next."""
    output_of("systemctl stop sidekick-verify.timer")
    try:
        assert host.apply("web").state is ProfileState.VERIFIED
        before = shown()
        output_of(f"udevadm trigger --settle --action={action} {device}")
        until = time.monotonic() + 300
        while shown() == before:
            assert time.monotonic() < until, "udev started no look"
            time.sleep(0.5)
    finally:
        output_of("systemctl start sidekick-verify.timer")
