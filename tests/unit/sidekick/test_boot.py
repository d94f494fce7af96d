"""Changes that only a boot applies, and changes that every boot undoes."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_host import CUSTOM, KERNEL, LARGE_POOL, FakeHost, a_target, shipped
from msgspec.structs import replace

from sidekick import status as standing
from sidekick.apply import ApplyRun
from sidekick.loaders.direct import FILE
from sidekick.record import Record, Target
from sidekick.report import ApplyOutcome, ProfileState, Report, exit_code
from sidekick.settings.hugepages import Hugepages
from sidekick.settings.kernel import Kernel
from wire.errors import ConfigError, ProgramError, Unprocessable

THP = "transparent_hugepage=always"
ROOT = "root=/dev/vda1 ro quiet"
LINE = f"{ROOT} {THP} panic=30"
PAGES = f"{ROOT} hugepagesz=2M hugepages=32 panic=30"


def batch(fake: FakeHost, generation: int = 1) -> Target:
    return a_target(fake, "batch", generation, sysctl={"vm.swappiness": 70}, cmdline=(THP,))


def apply(fake: FakeHost, target: Target, reboot: bool = False) -> Report:
    return fake.apply(target, may_reboot=reboot)


def resume(fake: FakeHost) -> Report:
    return fake.resume()


def by_name(report: Report, setting: str) -> ApplyOutcome:
    return next(s.outcome for s in report.settings if s.setting == setting)


@pytest.mark.behaviour("HP2", "HP12")
def test_a_command_line_is_pending_until_it_is_seen_in_force(fake: FakeHost) -> None:
    report = apply(fake, batch(fake))
    assert (report.state, exit_code(report)) == (ProfileState.PENDING_REBOOT, 2)
    assert by_name(report, "kernel.cmdline") is ApplyOutcome.PENDING_REBOOT
    assert standing.verify(fake.host(), fake.state).state is ProfileState.PENDING_REBOOT
    fake.boot(fake.fs.read(FILE).splitlines()[-1])
    assert standing.status(fake.host(), fake.state).state is ProfileState.DRIFTED
    report = resume(fake)
    assert report.state is ProfileState.VERIFIED
    assert by_name(report, "kernel.cmdline") is ApplyOutcome.ALREADY
    assert fake.sysctl("vm.swappiness") == "70"


def test_kexec_gets_the_whole_line(fake: FakeHost) -> None:
    report = apply(fake, batch(fake), reboot=True)
    assert report.detail == "rebooting by kexec"
    assert fake.processes.ran == [
        [
            "kexec",
            "-l",
            f"/boot/vmlinuz-{KERNEL}",
            f"--command-line={LINE}",
            f"--initrd=/boot/initrd.img-{KERNEL}",
        ],
        ["systemctl", "kexec"],
    ]


def test_no_reboot_where_none_is_needed_or_allowed(fake: FakeHost) -> None:
    apply(fake, shipped(fake, "web"), reboot=True)
    apply(fake, batch(fake))
    assert fake.processes.ran == []


def test_without_kexec_the_boot_loader_must_have_the_line(fake: FakeHost) -> None:
    fake.drop("/usr/sbin/kexec")
    with pytest.raises(Unprocessable, match="would restore the old command line") as caught:
        apply(fake, batch(fake), reboot=True)
    assert "kexec is not installed" in str(caught.value)
    assert fake.processes.ran == []
    report = standing.status(fake.host(), fake.state)
    assert report.state is ProfileState.PENDING_REBOOT
    assert "no boot loader that sidekick knows" in report.detail
    fake.with_grub()
    apply(fake, batch(fake), reboot=True)
    assert fake.processes.commands()[-2:] == ["twine", "systemctl reboot"]


def test_a_kernel_that_refuses_kexec_is_rebooted_through_its_boot_loader(fake: FakeHost) -> None:
    fake.processes.fails["kexec"] = "Operation not permitted"
    with pytest.raises(ProgramError, match="not permitted"):
        apply(fake, batch(fake), reboot=True)
    fake.with_grub()
    apply(fake, batch(fake, generation=2), reboot=True)
    assert fake.processes.commands()[-1] == "systemctl reboot"


@pytest.mark.behaviour("BUG-SK87")
def test_a_reboot_that_could_not_be_prepared_is_not_blamed_for_the_old_line(fake: FakeHost) -> None:
    """The host is rebooted for another reason later, and its profile still waits for a boot."""
    fake.processes.fails["kexec"] = "Operation not permitted"
    with pytest.raises(ProgramError, match="not permitted"):
        apply(fake, batch(fake), reboot=True)
    assert fake.state.load().attempt is None
    fake.boot(ROOT)
    assert resume(fake).state is ProfileState.PENDING_REBOOT
    assert fake.state.load().reboots == ()


@pytest.mark.parametrize("gone", ["vmlinuz", "initrd.img"])
def test_the_kernel_to_load_can_be_configured(fake: FakeHost, gone: str) -> None:
    fake.drop(f"/boot/{gone}-{KERNEL}")
    with pytest.raises(Unprocessable, match=f"there is no /boot/{gone}"):
        apply(fake, batch(fake), reboot=True)
    fake.put("/srv/vmlinuz", "")
    fake.put("/etc/twine/sidekick.toml", "kexec_kernel = '/srv/vmlinuz'")
    apply(fake, batch(fake), reboot=True)
    assert fake.processes.ran[0] == ["kexec", "-l", "/srv/vmlinuz", f"--command-line={LINE}"]


def test_a_disabled_kexec_and_a_bad_configuration_are_reported(fake: FakeHost) -> None:
    fake.put("/proc/sys/kernel/kexec_load_disabled", "1")
    with pytest.raises(Unprocessable, match="switched off until the next boot"):
        apply(fake, batch(fake), reboot=True)
    fake.put("/etc/twine/sidekick.toml", "kexec = true")
    with pytest.raises(ConfigError, match="unknown field"):
        apply(fake, batch(fake), reboot=True)


def test_a_reboot_that_did_not_help_is_not_repeated(fake: FakeHost) -> None:
    apply(fake, batch(fake), reboot=True)
    fake.boot(ROOT)  # the boot loader had the old line
    fake.processes.ran.clear()
    report = resume(fake)
    assert (report.state, exit_code(report)) == (ProfileState.DEGRADED, 1)
    assert "does not reboot it again" in report.detail
    assert THP in report.detail
    report = apply(fake, batch(fake), reboot=True)
    assert report.state is ProfileState.DEGRADED
    assert fake.processes.ran == []
    assert standing.verify(fake.host(), fake.state).state is ProfileState.DEGRADED
    apply(fake, batch(fake, generation=2), reboot=True)
    assert fake.processes.commands()[-1] == "systemctl kexec", "a new request may try again"


@pytest.mark.behaviour("F-69")
def test_a_failed_boot_with_a_replaced_argument_is_detected(fake: FakeHost) -> None:
    # seen on a guest; the host's own line has neither the old argument nor the new one
    fake.apply(batch(fake))
    fake.boot(LINE)
    fake.resume()
    other = a_target(fake, "other", 2, cmdline=("transparent_hugepage=never",))
    fake.apply(other, may_reboot=True)
    fake.boot(ROOT)
    assert fake.resume().state is ProfileState.DEGRADED
    fake.processes.ran.clear()
    fake.apply(other, may_reboot=True)
    assert fake.processes.ran == []


def test_a_reboot_by_hand_applies_the_pending_command_line(fake: FakeHost) -> None:
    apply(fake, batch(fake), reboot=True)
    fake.boot(ROOT)
    resume(fake)
    fake.boot(LINE)
    assert resume(fake).state is ProfileState.VERIFIED
    assert fake.state.load().attempt is None


def test_the_next_profile_takes_the_argument_off_again(fake: FakeHost) -> None:
    fake.boot(f"{ROOT} transparent_hugepage=madvise")
    before = fake.everything()
    apply(fake, batch(fake), reboot=True)
    fake.boot(LINE)
    resume(fake)
    report = apply(fake, a_target(fake, "web", sysctl={"vm.swappiness": 1}), reboot=True)
    assert report.state is ProfileState.PENDING_REBOOT
    assert fake.processes.ran[2][3] == f"--command-line={ROOT} transparent_hugepage=madvise"
    fake.boot(f"{ROOT} transparent_hugepage=madvise")
    assert resume(fake).state is ProfileState.VERIFIED
    apply(fake, Target())
    assert fake.everything() == before
    assert fake.state.load().boot == ()


def test_a_rollback_gives_the_staged_line_of_the_host_back(fake: FakeHost) -> None:
    fake.with_grub().put(CUSTOM, "menuentry 'mine' {\n}\n")
    before = fake.everything()
    apply(fake, batch(fake))
    assert fake.everything() != before
    report = apply(fake, Target())
    assert report.state is ProfileState.NONE
    assert fake.everything() == before


def test_a_rollback_after_the_boot_waits_for_another_one(fake: FakeHost) -> None:
    apply(fake, batch(fake))
    fake.boot(LINE)
    resume(fake)
    report = apply(fake, Target())
    assert (report.state, exit_code(report)) == (ProfileState.PENDING_REBOOT, 2)
    assert standing.verify(fake.host(), fake.state).state is ProfileState.PENDING_REBOOT
    fake.boot(ROOT)
    assert resume(fake).state is ProfileState.NONE
    assert fake.state.load().boot == ()


@pytest.mark.behaviour("HP12")
def test_every_boot_brings_the_profile_back(fake: FakeHost) -> None:
    fake.with_grub()
    apply(fake, shipped(fake, "cache"))
    wanted = fake.live()
    fake.boot()
    assert fake.live() != wanted
    assert resume(fake).state is ProfileState.VERIFIED
    assert fake.live() == wanted
    assert fake.processes.ran == []


def test_originals_end_with_the_boot_they_belong_to(fake: FakeHost) -> None:
    fake.fs.write("/proc/sys/vm/swappiness", "33")
    apply(fake, a_target(fake, sysctl={"vm.swappiness": 1, "kernel.panic": 5}))
    fake.boot()  # the 33 that an operator had set is lost too
    resume(fake)
    apply(fake, a_target(fake, sysctl={"kernel.panic": 5}))
    assert fake.sysctl("vm.swappiness") == "60"


@pytest.mark.behaviour("HP3")
def test_pages_that_memory_cannot_give_come_with_the_boot(fake: FakeHost) -> None:
    fake.fs.free_pages["node0"] = 10
    target = a_target(fake, "cache", hugepages=Hugepages(pages_2m=32))
    report = apply(fake, target, reboot=True)
    assert report.state is ProfileState.PENDING_REBOOT
    assert {s.setting: s.outcome for s in report.settings} == {
        "hugepages.2m.node0": ApplyOutcome.PENDING_REBOOT,
        "boot.line": ApplyOutcome.PENDING_REBOOT,
    }, "nothing is called applied that is only staged"
    assert fake.processes.ran[0][3] == f"--command-line={PAGES}"
    fake.boot(PAGES)
    report = resume(fake)
    assert report.state is ProfileState.VERIFIED
    assert fake.pages() == 32
    assert apply(fake, target).state is ProfileState.VERIFIED
    assert fake.fs.read(FILE).splitlines()[-1] == PAGES, "still wanted"


def test_pages_that_the_boot_brought_go_without_another(fake: FakeHost) -> None:
    fake.fs.free_pages["node0"] = 10
    apply(fake, a_target(fake, "cache", hugepages=Hugepages(pages_2m=32)))
    fake.boot(PAGES)
    resume(fake)
    report = apply(fake, a_target(fake, "web", sysctl={"vm.swappiness": 1}))
    assert report.state is ProfileState.VERIFIED
    assert fake.pages() == 0
    assert not fake.fs.exists(FILE)


def test_pages_that_the_boot_did_not_bring_fail_the_profile(fake: FakeHost) -> None:
    fake.fs.free_pages["node0"] = 10
    apply(fake, a_target(fake, "cache", hugepages=Hugepages(pages_2m=32)), reboot=True)
    fake.boot(PAGES)
    fake.put("/sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages", "20")
    report = resume(fake)
    assert (report.state, exit_code(report)) == (ProfileState.DEGRADED, 4)
    assert "booted with 32" in report.detail


@pytest.mark.behaviour("F-69")
def test_a_run_is_undone_if_the_boot_loader_cannot_be_written(fake: FakeHost) -> None:
    fake.with_grub()
    before = fake.everything()
    fake.fs.path(f"{CUSTOM}.new").mkdir()
    report = fake.apply(batch(fake))
    assert (report.rolled_back, exit_code(report)) == (True, 4)
    assert "cannot write" in report.detail
    fake.fs.path(f"{CUSTOM}.new").rmdir()
    assert fake.everything() == before


@pytest.mark.behaviour("HP3")
def test_pages_come_back_with_a_boot_on_every_node(tmp_path: Path) -> None:
    fake = FakeHost(tmp_path, nodes=2, memory_mib=8192)
    fake.fs.free_pages.update(node0=10, node1=0)
    fake.fs.free_large.update(node0=0, node1=0)
    pages = Hugepages(pages_2m={"node0": 32, "node1": 8}, pages_1g={"node1": 1}, budget_s=1)
    fake.apply(a_target(fake, "cache", hugepages=pages), may_reboot=True)
    line = fake.processes.ran[0][3].removeprefix("--command-line=")
    assert "hugepagesz=1G hugepages=0:0,1:1 hugepagesz=2M hugepages=0:32,1:8" in line
    fake.boot(line)
    assert fake.resume().state is ProfileState.VERIFIED
    assert (fake.pages(0), fake.pages(1), fake.pages(1, LARGE_POOL)) == (32, 8, 1)
    fake.apply(Target())
    assert (fake.pages(0), fake.pages(1), fake.pages(1, LARGE_POOL)) == (0, 0, 0)


@pytest.mark.behaviour("F-69", "F-73")
def test_the_guards_effect_ends_once_the_boot_has_come_up(fake: FakeHost) -> None:
    fake.apply(batch(fake))
    fake.boot(LINE)
    fake.put("/proc/sys/kernel/panic", "30")
    fake.resume()
    assert fake.sysctl("kernel.panic") == "0"


@pytest.mark.behaviour("F-69")
def test_a_loop_of_requests_is_no_loop_of_reboots(fake: FakeHost) -> None:
    for generation in (1, 2, 3):
        fake.apply(batch(fake, generation), may_reboot=True)
        fake.boot(ROOT)
        fake.resume()
    with pytest.raises(Unprocessable, match="rebooted 3 times within 60 minutes"):
        fake.apply(batch(fake, 4), may_reboot=True)
    assert fake.processes.commands().count("systemctl kexec") == 3


@pytest.mark.behaviour("BUG-SK43")
def test_reboots_are_counted_at_any_clock(fake: FakeHost) -> None:
    """Without a battery each boot's clock starts earlier than the last boot ended."""
    times = iter(range(1_700_000_000, 0, -10_000_000))

    def apply_at(generation: int) -> None:
        host = replace(fake.host(), now=lambda: float(next(times)))
        ApplyRun(host, fake.state, batch(fake, generation), may_reboot=True).carry_out()

    for generation in (1, 2, 3):
        apply_at(generation)
        fake.boot(ROOT)
        fake.resume()
    with pytest.raises(Unprocessable, match="rebooted 3 times within 60 minutes"):
        apply_at(4)
    fake.time_s += 3600.0
    apply_at(4)


@pytest.mark.behaviour("BUG-SK43")
def test_a_reboot_that_did_not_happen_is_not_counted(fake: FakeHost) -> None:
    """Boots are distinguished by their id."""
    for generation in (1, 2, 3, 4, 5):
        fake.apply(batch(fake, generation), may_reboot=True)
    assert len(fake.state.load().reboots) == 1


def test_reboots_that_an_earlier_release_noted_still_count(fake: FakeHost) -> None:
    times = (1_699_999_000.0, 1_699_999_500.0, 1_800_000_000.0)
    fake.state.save(Record(boot_id="boot-1", reboots=times))
    with pytest.raises(Unprocessable, match="rebooted 3 times"):
        fake.apply(batch(fake), may_reboot=True)


@pytest.mark.behaviour("BUG-SK44")
@pytest.mark.parametrize("own", ["0", "10", "30"])
def test_the_record_distinguishes_the_hosts_own_panic_from_the_guards(
    fake: FakeHost, own: str
) -> None:
    """Any value of 30 was treated as the guard's and became 0, also after rollback."""
    fake.put("/proc/sys/kernel/panic", own)
    fake.apply(batch(fake))
    for line in (LINE, LINE, ROOT):
        fake.boot(line)
        # the value that sysctl.d(5) sets at every boot, which overrides the line
        fake.put("/proc/sys/kernel/panic", own if own != "0" else "30" if "panic" in line else "0")
        fake.resume() if line != ROOT else fake.apply(Target())
        assert fake.sysctl("kernel.panic") == own
        assert standing.verify(fake.host(), fake.state).state is not ProfileState.DRIFTED


@pytest.mark.behaviour("BUG-SK44")
@pytest.mark.parametrize("name", ["kernel.panic", "kernel/panic"])
def test_a_profiles_value_of_panic_is_not_mistaken_for_the_hosts(fake: FakeHost, name: str) -> None:
    """The host's own value is the original of the setting, not the current value."""
    wanted = a_target(fake, "p", sysctl={name: 30}, cmdline=(THP,))
    fake.apply(a_target(fake, "p", sysctl={name: 30}))
    fake.apply(wanted)
    fake.boot(LINE)
    fake.put("/proc/sys/kernel/panic", "30")
    fake.resume()
    fake.apply(Target())
    assert fake.sysctl("kernel.panic") == "0"


@pytest.mark.behaviour("BUG-SK42")
def test_kexec_never_gets_a_boot_loaders_source_text(fake: FakeHost) -> None:
    """GRUB's variables were passed literally, and `$kernelopts` left no root."""
    fake.with_grub()
    menu = fake.fs.read("/boot/grub/grub.cfg")
    fake.put("/boot/grub/grub.cfg", menu.replace(ROOT, "root=/dev/vda1 $tuned_params $kernelopts"))
    fake.boot(f"BOOT_IMAGE=/vmlinuz {ROOT} skew_tick=1")
    fake.apply(batch(fake), may_reboot=True)
    assert fake.processes.ran[0][3] == f"--command-line={ROOT} skew_tick=1 {THP} panic=30"
    assert "$tuned_params $kernelopts" in fake.fs.read(CUSTOM), "GRUB itself expands them"
    fake.boot(f"{ROOT} skew_tick=1 {THP} panic=30")
    fake.resume()
    fake.processes.ran.clear()
    fake.apply(Target(), may_reboot=True)
    assert fake.processes.ran[-2][3] == f"--command-line={ROOT} skew_tick=1"


@pytest.mark.behaviour("BUG-SK42")
def test_kexec_is_not_used_if_only_the_loader_knows_an_argument(fake: FakeHost) -> None:
    """The replaced argument is a variable, so only a boot through the loader restores it."""
    fake.with_grub()
    menu = fake.fs.read("/boot/grub/grub.cfg")
    fake.put("/boot/grub/grub.cfg", menu.replace(ROOT, f"{ROOT} transparent_hugepage=$thp"))
    fake.boot(f"{ROOT} transparent_hugepage=never")
    fake.apply(batch(fake))
    fake.boot(f"{ROOT} {THP} panic=30")
    fake.resume()
    fake.processes.ran.clear()
    fake.apply(Target(), may_reboot=True)
    assert fake.processes.commands()[-1] == "systemctl reboot"
    assert "kexec" not in " ".join(fake.processes.commands())


@pytest.mark.behaviour("F-75")
def test_no_reboot_under_running_tasks(fake: FakeHost) -> None:
    events = "/sys/fs/cgroup/workload.slice/workload-a.slice/twine-task-x.service/cgroup.events"
    fake.put(events, "populated 1")
    with pytest.raises(Unprocessable, match="no reboot while tasks run"):
        fake.apply(batch(fake), may_reboot=True)
    assert fake.processes.ran == []
    assert standing.status(fake.host(), fake.state).state is ProfileState.PENDING_REBOOT


@pytest.mark.behaviour("HP2")
def test_another_kernel_is_booted_by_its_version(fake: FakeHost) -> None:
    target = a_target(fake, "new", kernel=Kernel(version="6.13.1-amd64"))
    report = fake.apply(target)
    assert "there is no /boot/vmlinuz-6.13.1-amd64" in report.settings[0].detail
    for name in ("vmlinuz", "initrd.img"):
        fake.put(f"/boot/{name}-6.13.1-amd64", "")
    fake.with_grub()
    fake.apply(target, may_reboot=True)
    assert fake.processes.ran[0][2] == "/boot/vmlinuz-6.13.1-amd64"
    assert "linux\t/boot/vmlinuz-6.13.1-amd64 root=" in fake.fs.read(CUSTOM)
    fake.boot(f"{ROOT} panic=30")
    fake.put("/proc/sys/kernel/osrelease", "6.13.1-amd64")
    assert fake.resume().state is ProfileState.VERIFIED
    assert 'set default="twine"' in fake.fs.read(CUSTOM)
    fake.apply(Target())
    assert not fake.fs.exists(CUSTOM)
