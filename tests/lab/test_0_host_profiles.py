"""Host profiles on one booted guest: the faults F-64 to F-75, every shipped profile, real boots.

The tests themselves are in `in_guest` and run there. This file runs first in the suite and in a
separate lab, so that no other test uses its machine.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.one_guest import OneGuest

pytestmark = pytest.mark.behaviour("F-64", "F-75")

BOOTS = "description = 'of a test'\n[kernel]\ncmdline = ['nosoftlockup']\n"
PROFILES = "--profiles /run/test-profiles"


@pytest.fixture(scope="module")
def guest() -> Iterator[OneGuest]:
    found = OneGuest()
    found.up()
    yield found
    found.down()


@pytest.mark.behaviour(
    "F-64", "F-65", "F-66", "F-67", "F-68", "F-70", "F-71", "F-72", "F-73", "F-74", "F-75", "HP12"
)
@pytest.mark.long
def test_f64_to_f75_on_a_real_kernel(guest: OneGuest) -> None:

    guest.pytest("-m", "not long")


@pytest.mark.behaviour("F-65", "F-73")
@pytest.mark.long
def test_every_kill_point_and_every_pair_of_profiles(guest: OneGuest) -> None:
    guest.pytest("-m", "long", timeout_s=4 * 3600)


def prepared(guest: OneGuest) -> str:
    """Install the profile `boots` without applying it; return the id of this boot."""
    guest.ssh("sidekick rollback; rm -rf /var/lib/twine/sidekick; true")
    guest.put("/run/test-profiles/boots.toml", BOOTS)
    return guest.boot_id()


@pytest.mark.behaviour("HP2", "HP12", "F-65")
@pytest.mark.long
def test_a_command_line_is_applied_by_kexec_and_undone_by_the_next_boot(
    guest: OneGuest,
) -> None:
    boot, before = prepared(guest), guest.line()
    guest.ssh(f"nohup sidekick {PROFILES} apply-profile boots --reboot >/dev/null 2>&1 &")
    guest.booted_again(boot)
    assert set(guest.line()) - set(before) == {"nosoftlockup", "panic=30"}
    assert guest.status()["state"] == "verified"
    boot = guest.boot_id()
    guest.ssh("nohup sidekick rollback --reboot >/dev/null 2>&1 &")
    guest.booted_again(boot)
    assert guest.line() == before
    assert guest.status()["state"] == "none"
    assert guest.find("ls /etc/twine/boot-line") == ""


@pytest.mark.behaviour("F-69")
@pytest.mark.long
@pytest.mark.parametrize("broken", ["root=/dev/none", "rdinit=/none root=/dev/none"])
def test_a_broken_kernel_line_is_restored_after_kexec(guest: OneGuest, broken: str) -> None:
    """The line has no root and, with `rdinit`, makes the kernel panic. The guard on the line
    restarts the host, and the firmware boots the host's own line. The profile is degraded and not
    tried again.
    """
    boot, before = prepared(guest), guest.line()
    guest.ssh(f"sidekick {PROFILES} apply-profile boots; test $? = 2")
    line = guest.ssh("tail -n 1 /etc/twine/boot-line").split()  # follows a comment line
    line = [word for word in line if not word.startswith("root=")] + broken.split()
    guest.ssh(
        "kexec -l /boot/vmlinuz-$(uname -r) --initrd=/boot/initrd.img-$(uname -r) "
        f"--command-line='{' '.join(line)}' && (nohup systemctl kexec >/dev/null 2>&1 &)"
    )
    guest.booted_again(boot)
    assert guest.line() == before
    status = guest.status()
    assert status["state"] in ("pending_reboot", "degraded"), status
    guest.ssh("sidekick rollback")
