"""A guest that boots from its disk by GRUB: one-shot entries, and lines that do not boot."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.one_guest import OneGuest

pytestmark = pytest.mark.long
CUSTOM = "/boot/grub/custom.cfg"
PROFILES = "--profiles /run/test-profiles"
BOOTS = "description = 'of a test'\n[kernel]\ncmdline = ['nosoftlockup']\n"
NO_KEXEC = "echo 1 > /proc/sys/kernel/kexec_load_disabled"
"""Lasts until the next boot, so the reboot has to pass through the boot loader."""


@pytest.fixture(scope="module")
def booted() -> Iterator[OneGuest]:
    found = OneGuest("grub")
    found.up()
    yield found
    found.down()


@pytest.fixture
def guest(booted: OneGuest) -> OneGuest:
    """Yield a guest on the host's kernel line, with the profile `boots` to apply and no kexec."""
    if booted.find(f"ls {CUSTOM}") or "nosoftlockup" in booted.line():
        boot = booted.boot_id()
        booted.ssh("sidekick rollback; (nohup systemctl reboot >/dev/null 2>&1 &)")
        booted.booted_again(boot)
    booted.ssh("sidekick rollback; rm -rf /var/lib/twine/sidekick; true")
    booted.put("/run/test-profiles/boots.toml", BOOTS)
    booted.ssh(NO_KEXEC)
    return booted


def reboot(guest: OneGuest, command: str = "systemctl reboot") -> None:
    boot = guest.boot_id()
    guest.ssh(f"nohup {command} >/dev/null 2>&1 &")
    guest.booted_again(boot)


def test_it_is_grub_that_boots_it(guest: OneGuest) -> None:
    assert "BOOT_IMAGE=/vmlinuz" in " ".join(guest.line())
    assert guest.ssh("findmnt -n -o FSTYPE /boot").strip() == "ext4"
    assert guest.ssh("hostname").strip() == "m1"


@pytest.mark.behaviour("HP2", "HP12", "F-69")
def test_an_entry_is_tried_once_and_the_default_once_it_came_up(guest: OneGuest) -> None:

    before, menu = guest.line(), guest.ssh("cat /boot/grub/grub.cfg")
    reboot(guest, f"sidekick {PROFILES} apply-profile boots --reboot")
    assert {"nosoftlockup", "panic=30"} <= set(guest.line())
    assert guest.status()["state"] == "verified"
    assert 'set default="twine"' in guest.ssh(f"cat {CUSTOM}")
    reboot(guest)
    assert "nosoftlockup" in guest.line(), "an unrequested boot keeps it"
    guest.ssh(NO_KEXEC)
    reboot(guest, "sidekick rollback --reboot")
    assert guest.line() == before
    assert guest.find(f"ls {CUSTOM}") == ""
    assert "next_entry=twine" not in guest.ssh("cat /boot/grub/grubenv")
    assert guest.ssh("cat /boot/grub/grub.cfg") == menu
    assert guest.status()["state"] == "none"


@pytest.mark.behaviour("F-69")
@pytest.mark.parametrize("broken", ["root=/dev/none", "rdinit=/none root=/dev/none"])
def test_f69_a_line_that_does_not_boot_is_followed_by_the_hosts_own(
    guest: OneGuest, broken: str
) -> None:
    """One line has a missing root, one makes the kernel panic. The machine recovers without an
    operator.
    """
    before = guest.line()
    guest.ssh(f"sidekick {PROFILES} apply-profile boots; test $? = 2")
    guest.ssh(f"sed -i 's#root=/dev/vda2#{broken}#' {CUSTOM}; grep -q {broken.split()[0]} {CUSTOM}")
    reboot(guest, "sh -c 'grub-reboot twine && systemctl reboot'")
    assert guest.line() == before
    status = guest.status()
    assert status["state"] in ("degraded", "drifted", "pending_reboot"), status
    reboot(guest)
    assert guest.line() == before, "the broken one is not tried again"
    guest.ssh("sidekick rollback")
    assert guest.find(f"ls {CUSTOM}") == ""


@pytest.mark.behaviour("HP2")
def test_an_update_of_the_menu_keeps_the_profiles_entry(guest: OneGuest) -> None:
    """`update-grub` writes another menu. The entry is then an outdated copy, and sidekick reports
    that.
    """
    guest.ssh(f"sidekick {PROFILES} apply-profile boots; test $? = 2")
    guest.ssh("sed -i 's/quiet/quiet loglevel=3/' /etc/default/grub; update-grub")
    assert "nosoftlockup" in guest.ssh(f"cat {CUSTOM}")
    guest.ssh(f"sidekick {PROFILES} apply-profile boots; test $? = 2")
    reboot(guest, f"sidekick {PROFILES} apply-profile boots --reboot")
    assert {"nosoftlockup", "loglevel=3"} <= set(guest.line())
    assert guest.status()["state"] == "verified"
