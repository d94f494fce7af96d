"""The kernel command line: every argument has an owner."""

from __future__ import annotations

import pytest
from fake_host import FakeHost, a_profile

from agent.errors import HostError
from sidekick.report import Change, Outcome, RebootNeed, Wanted
from sidekick.settings.kernel import (
    CMDLINE,
    STAGED,
    KernelSetting,
    grub_drop_in,
    leftovers,
    merge,
    split,
    value_of,
)
from sidekick.state import OwnedArgument

HOST = 'root=/dev/vda1 ro quiet dyndbg="file a.c +p" console=tty0 console=ttyS0'
THP = "transparent_hugepage=always"


def test_quotes_hold_an_argument_together() -> None:
    assert split(HOST)[3] == 'dyndbg="file a.c +p"'
    assert " ".join(split(HOST)) == HOST


def test_ours_are_added_and_the_hosts_stay() -> None:
    line, ours = merge(f"BOOT_IMAGE=/vmlinuz initrd=/i {HOST}", (), [THP, "nosmt"])
    assert line == f"{HOST} {THP} nosmt"
    assert ours == (OwnedArgument(argument=THP), OwnedArgument(argument="nosmt"))


def test_arguments_of_init_stay_behind_the_dashes() -> None:
    line, _ = merge(f"{HOST} -- --debug preempt=full", (), ["preempt=none"])
    assert line == f"{HOST} preempt=none -- --debug preempt=full"


def test_an_argument_of_the_host_is_set_aside_and_given_back_in_its_place() -> None:
    before = "ro transparent-hugepage=madvise quiet"
    line, ours = merge(before, (), [THP])
    assert line == f"ro {THP} quiet"
    assert ours == (OwnedArgument(argument=THP, displaced=("transparent-hugepage=madvise",)),)
    line, again = merge(line, ours, ["transparent_hugepage=never"])
    assert line == "ro transparent_hugepage=never quiet"
    assert merge(line, again, []) == (before, ())


def test_merging_twice_changes_nothing() -> None:
    line, ours = merge(HOST, (), [THP])
    assert merge(line, ours, [THP]) == (line, ours)
    assert merge(HOST, ours, [THP]) == (line, ours)  # staged, not booted yet


def test_an_argument_the_host_has_by_itself_does_not_become_ours() -> None:
    line, ours = merge(f"{HOST} {THP}", (), [THP])
    assert (line, ours) == (f"{HOST} {THP}", ())


def test_an_argument_that_stands_twice_is_taken_out_twice() -> None:
    line, _ = merge(f"{THP} ro {THP}", (OwnedArgument(argument=THP),), [])
    assert line == "ro"


def test_the_last_argument_of_a_key_is_in_force() -> None:
    assert value_of("preempt=full preempt=none -- preempt=voluntary", "preempt=x") == "preempt=none"
    assert value_of(HOST, "preempt=none") == ""


def test_pages_that_linger_on_the_line_ask_for_no_reboot() -> None:
    owned = (OwnedArgument(argument="hugepages=8"), OwnedArgument(argument=THP))
    assert leftovers(f"ro hugepages=8 {THP}", owned, []) == [THP]


@pytest.mark.parametrize(
    "argument",
    [
        "init=/bin/sh",
        "nosmt init=/bin/sh",
        "nosmt\ninit=/bin/sh",
        'isolcpus="1 init=/x"',
        "isolcpus=$(reboot)",
        "isolcpus=1;reboot",
        "isolcpus=`x`",
        "isolcpus=",
        "mitigations=off",
        "root=/dev/sdb",
        "systemd.unit=rescue.target",
        "hugepages=8",
        "default-hugepagesz=1G",
        "--",
        "",
        "nosmt\x00",
    ],
)
def test_a_hostile_argument_is_refused(argument: str) -> None:  # F-68
    (error,) = KernelSetting().check(a_profile(cmdline=(argument,)))
    assert error.field == "kernel.cmdline"


def stage(fake: FakeHost, *arguments: str) -> tuple[KernelSetting, Change]:
    _, ours = merge(fake.cmdline, (), arguments)
    setting = KernelSetting(ours)
    observed = setting.observe(fake.host(), ())
    wanted = [Wanted(setting=CMDLINE, value=" ".join(arguments), source="batch")]
    (change,) = setting.plan(wanted, observed, {STAGED: observed[STAGED]})
    return setting, change


def test_a_line_is_staged_and_never_called_applied(fake: FakeHost) -> None:
    setting, change = stage(fake, THP)
    assert change.needs is RebootNeed.KEXEC
    applied = setting.apply(fake.host(), change)
    assert applied.outcome is Outcome.PENDING_REBOOT
    assert "no boot loader" in applied.detail
    assert fake.fs.read("/etc/kernel/cmdline") == f"root=/dev/vda1 ro quiet {THP}"
    setting.undo(fake.host(), change)
    assert not fake.fs.exists("/etc/kernel/cmdline")


def test_a_boot_loader_is_updated_and_its_result_read_back(fake: FakeHost) -> None:
    fake.with_grub()
    setting, change = stage(fake, THP)
    applied = setting.apply(fake.host(), change)
    assert "90-twine.cfg" in applied.detail
    assert THP in fake.fs.read("/boot/grub/grub.cfg")
    setting.apply(fake.host(), change)
    assert len(fake.processes.ran) == 1, "nothing changed, so nothing to update"
    setting.undo(fake.host(), change)
    assert THP not in fake.fs.read("/boot/grub/grub.cfg")
    assert not fake.fs.exists("/etc/default/grub.d/90-twine.cfg")


def test_a_boot_loader_that_ignores_the_drop_in_is_an_error(fake: FakeHost) -> None:
    fake.with_grub()
    setting, change = stage(fake, THP)
    fake.processes.run = lambda argv, **_: None  # type: ignore[assignment,method-assign]
    with pytest.raises(HostError, match="lacks transparent_hugepage=always"):
        setting.apply(fake.host(), change)


def test_a_line_the_kernel_would_cut_off_is_refused(fake: FakeHost) -> None:
    fake.boot("root=/dev/vda1 " + "x" * 2030)
    setting, change = stage(fake, THP)
    assert setting.apply(fake.host(), change).outcome is Outcome.FAILED


def test_the_drop_in_is_plain_shell_without_surprises() -> None:
    text = grub_drop_in([THP, "nosmt"])
    assert text.splitlines()[-1] == f'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX {THP} nosmt"'
    assert "transparent[_-]hugepage=*" in text


def test_verify_tells_in_force_from_staged_from_gone(fake: FakeHost) -> None:
    setting, change = stage(fake, THP)
    wanted = Wanted(setting=CMDLINE, value=THP)

    def outcome() -> Outcome:
        return setting.verify(wanted, setting.observe(fake.host(), ())).outcome

    assert outcome() is Outcome.DRIFTED
    setting.apply(fake.host(), change)
    assert outcome() is Outcome.PENDING_REBOOT
    fake.boot(f"root=/dev/vda1 ro quiet {THP}")
    assert outcome() is Outcome.APPLIED
