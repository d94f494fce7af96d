"""The kernel command line: every argument has an owner."""

from __future__ import annotations

import pytest
from fake_host import FakeHost, a_profile, a_target

from sidekick.bootline import (
    compose,
    group_of,
    in_force,
    leftovers,
    owned_groups,
    split,
    without_owned,
)
from sidekick.loaders.direct import FILE
from sidekick.record import OwnedGroup
from sidekick.report import ApplyOutcome, ProfileState
from sidekick.setting import Contribution
from sidekick.settings.hugepages import Hugepages, HugepagesSetting
from sidekick.settings.kernel import Kernel, KernelSetting
from sidekick.status import verify
from wire.errors import ConfigError

HOST = 'root=/dev/vda1 ro quiet dyndbg="file a.c +p" console=tty0 console=ttyS0'
THP = "transparent_hugepage=always"


def test_quotes_hold_an_argument_together() -> None:
    assert split(HOST)[3] == 'dyndbg="file a.c +p"'
    assert " ".join(split(HOST)) == HOST


def groups(*arguments: str) -> dict[str, tuple[str, ...]]:
    return {group_of(a): (a,) for a in arguments}


def there_and_back(own: str, *arguments: str) -> str:
    line = compose(own, groups(*arguments))
    return without_owned(line, owned_groups(own, groups(*arguments)))


def test_ours_are_added_and_the_hosts_stay() -> None:
    ours = groups(THP, "nosmt")
    assert compose(f"BOOT_IMAGE=/vmlinuz initrd=/i {HOST}", ours) == f"{HOST} {THP} nosmt"
    assert [o.arguments for o in owned_groups(HOST, ours)] == [(THP,), ("nosmt",)]


def test_arguments_of_init_stay_behind_the_dashes() -> None:
    line = compose(f"{HOST} -- --debug preempt=full", groups("preempt=none"))
    assert line == f"{HOST} preempt=none -- --debug preempt=full"


def test_an_argument_of_the_host_is_replaced_and_restored_in_its_place() -> None:
    before = "ro transparent-hugepage=madvise quiet"
    assert compose(before, groups(THP)) == f"ro {THP} quiet"
    (owned,) = owned_groups(before, groups(THP))
    assert owned.displaced == ("transparent-hugepage=madvise",)
    assert there_and_back(before, THP) == before
    assert there_and_back("a hugepages=3 b", "hugepages=9") == "a hugepages=3 b"


def test_a_line_without_our_arguments_is_the_hosts_own() -> None:
    assert without_owned(HOST, owned_groups(HOST, groups(THP))) == HOST


def test_an_argument_of_the_host_itself_does_not_become_sidekicks() -> None:
    assert owned_groups(f"{HOST} {THP}", groups(THP)) == ()


def test_a_repeated_argument_is_removed_each_time() -> None:
    owned = OwnedGroup(group="transparent_hugepage", arguments=(THP,))
    assert without_owned(f"{THP} ro {THP}", (owned,)) == "ro"


def test_the_last_argument_of_a_key_is_in_force() -> None:
    line = "preempt=full preempt=none -- preempt=voluntary"
    assert in_force(line, "preempt", ("preempt=none",))
    assert not in_force(line, "preempt", ("preempt=full",))
    assert not in_force(HOST, "preempt", ("preempt=none",))


def test_pages_that_linger_on_the_line_ask_for_no_reboot() -> None:
    pages = OwnedGroup(group="hugepages", arguments=("hugepages=8",), late=True)
    owned = (pages, *owned_groups("ro", groups(THP)))
    assert leftovers(f"ro hugepages=8 {THP}", owned, {}) == [THP]


@pytest.mark.behaviour("F-68")
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
        "panic=0",
        "cgroup_disable=memory",
        "cgroup_disable=cpu,memory",
        "cgroup_disable=pids",
    ],
)
def test_a_hostile_argument_is_refused(argument: str) -> None:
    (error,) = KernelSetting().check(a_profile(cmdline=(argument,)))
    assert error.field == "kernel.cmdline"


@pytest.mark.behaviour("BUG-SK4")
def test_privileges_that_void_every_limit_are_refused_by_name() -> None:
    check = KernelSetting().check
    (error,) = check(a_profile(cmdline=("cgroup_disable=memory",)))
    assert "would void every limit of tasks: memory must stay" in error.reason
    assert check(a_profile(cmdline=("cgroup_disable=cpu",))) == []


@pytest.mark.behaviour("F-68")
def test_a_kernel_version_cannot_change_a_path() -> None:
    for version in ("../../tmp/x", "6.1 init=/bin/sh", "", "$(reboot)"):
        assert KernelSetting().check(a_profile(kernel=Kernel(version=version)))


def test_two_settings_with_different_values_of_one_argument_are_reported_before_any_write(
    fake: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def isolate(self: object, wanted: object, own: str) -> list[Contribution]:
        group = Contribution(settings=("cpus.x",), group="isolcpus", arguments=("isolcpus=3",))
        return [group]

    monkeypatch.setattr(HugepagesSetting, "boot", isolate)
    pages = Hugepages(pages_2m=1)
    with pytest.raises(ConfigError) as caught:
        a_target(fake, cmdline=("isolcpus=1",), hugepages=pages)
    assert "cpus.x sets isolcpus=3" in str(caught.value.errors[0].reason)
    assert a_target(fake, cmdline=("isolcpus=3",), hugepages=pages)


def test_a_line_the_kernel_would_cut_off_is_refused(fake: FakeHost) -> None:
    fake.boot("root=/dev/vda1 " + "x" * 2030)
    report = fake.apply(a_target(fake, cmdline=(THP,)))
    assert report.rolled_back
    assert "longer than 2047" in report.detail


def test_in_force_staged_and_gone_are_distinguished(fake: FakeHost) -> None:
    target = a_target(fake, cmdline=(THP,))
    assert fake.apply(target).state is ProfileState.PENDING_REBOOT
    line = fake.fs.read(FILE).splitlines()[-1]
    assert line == f"root=/dev/vda1 ro quiet {THP} panic=30"
    fake.drop(FILE)
    report = verify(fake.host(), fake.state)
    assert {s.setting: s.outcome for s in report.settings} == {
        "kernel.cmdline": ApplyOutcome.DRIFTED,
        "boot.line": ApplyOutcome.DRIFTED,
    }
    fake.apply(target)
    fake.boot(line)
    assert fake.resume().state is ProfileState.VERIFIED
    fake.drop(FILE)
    report = verify(fake.host(), fake.state)
    assert report.state is ProfileState.DRIFTED, "the next boot would lose it"


def test_pages_and_arguments_are_one_line_and_one_boot(fake: FakeHost) -> None:
    fake.fs.free_pages["node0"] = 4
    target = a_target(fake, cmdline=(THP, "nosmt"), hugepages=Hugepages(pages_2m=8))
    fake.apply(target, may_reboot=True)
    assert [argv[0] for argv in fake.processes.ran] == ["kexec", "systemctl"]
    (line,) = [a for a in fake.processes.ran[0] if a.startswith("--command-line=")]
    assert line.endswith(f"quiet hugepagesz=2M hugepages=8 {THP} nosmt panic=30")
