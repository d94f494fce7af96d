"""One sysctl is named, written, read again and restored."""

from __future__ import annotations

import pytest
from fake_host import FakeHost, a_profile
from hypothesis import given
from hypothesis import strategies as st

from sidekick.profile import Profile
from sidekick.record import Target
from sidekick.report import ApplyOutcome, ProfileState, SettingChange, WantedSetting
from sidekick.settings.sysctl import SysctlSetting, Value, text_of
from sidekick.sysctl_ranges import why_out_of_range
from sidekick.targets import target_of
from wire.errors import KernelFileError

SETTING = SysctlSetting()


def a_change(setting: str, before: str, after: str) -> SettingChange:
    return SettingChange(setting=f"sysctl.{setting}", before=before, after=after)


def test_a_name_with_slashes_may_have_dots_in_its_parts() -> None:
    assert SETTING.path("sysctl.vm.swappiness") == "/proc/sys/vm/swappiness"
    assert (
        SETTING.path("sysctl.net/ipv4/conf/eth0.100/rp_filter")
        == "/proc/sys/net/ipv4/conf/eth0.100/rp_filter"
    )


def test_values_are_compared_as_the_kernel_separates_them() -> None:
    assert SETTING.same("4096\t87380\t6291456", "4096 87380 6291456")
    assert not SETTING.same("4096 87380", "4096 87380 6291456")
    assert [text_of(v) for v in (True, 7, " a ", [1, 2])] == ["1", "7", "a", "1\t2"]


def test_a_value_is_applied_only_once_it_reads_back(fake: FakeHost) -> None:
    change = a_change("net.ipv4.tcp_rmem", "4096\t131072\t6291456", "4096 131072 8388608")
    assert SETTING.apply(fake.host(), change).outcome is ApplyOutcome.APPLIED
    assert fake.sysctl("net.ipv4.tcp_rmem") == "4096\t131072\t8388608"


def test_a_value_that_the_kernel_rounds_is_not_applied(fake: FakeHost) -> None:
    fake.fs.rounds["/proc/sys/vm/min_free_kbytes"] = lambda value: str(int(value) // 64 * 64)
    applied = SETTING.apply(fake.host(), a_change("vm.min_free_kbytes", "45056", "50000"))
    assert applied.outcome is ApplyOutcome.FAILED
    assert applied.actual == "49984"
    assert "wrote '50000', but the kernel keeps '49984'" in applied.detail


@pytest.mark.behaviour("F-64")
def test_a_value_out_of_range_is_the_kernels_refusal(fake: FakeHost) -> None:
    with pytest.raises(KernelFileError, match="Invalid argument"):
        SETTING.apply(fake.host(), a_change("vm.swappiness", "60", "300"))


@pytest.mark.behaviour("BUG-SK89")
def test_a_limit_with_two_names_may_be_written_with_slashes(fake: FakeHost) -> None:
    before = fake.live()
    profile = a_profile(sysctl={"vm/dirty_bytes": 8388608})
    assert fake.apply(target_of(profile, fake.host())).state is ProfileState.VERIFIED
    assert fake.sysctl("vm.dirty_ratio") == "0"
    assert fake.apply(Target()).state is ProfileState.NONE
    assert fake.live() == before


@pytest.mark.behaviour("BUG-SK89")
@pytest.mark.parametrize("other", ["vm.dirty_ratio", "vm.dirty_bytes"])
def test_both_names_of_a_limit_are_refused_in_either_spelling(other: str) -> None:
    profile = a_profile(sysctl={"vm/dirty_bytes": 8388608, other: 5})
    assert [error.field for error in SETTING.check(profile)] == ["sysctl.vm/dirty_bytes"]
    assert SETTING.merge({other: 5}, {"vm/dirty_bytes": 1}) == {"vm/dirty_bytes": 1}


def test_a_limit_with_two_names_is_restored_through_the_other_name(fake: FakeHost) -> None:
    wanted = [WantedSetting(setting="sysctl.vm.dirty_bytes", value="8388608", source="web")]
    observed = SETTING.observe(fake.host(), [w.setting for w in wanted])
    (change,) = SETTING.plan(wanted, observed, {})
    assert (change.undo_setting, change.undo_value) == ("sysctl.vm.dirty_ratio", "20")
    SETTING.apply(fake.host(), change)
    assert fake.sysctl("vm.dirty_ratio") == "0"
    SETTING.undo(fake.host(), change)
    assert (fake.sysctl("vm.dirty_ratio"), fake.sysctl("vm.dirty_bytes")) == ("20", "0")


def test_the_original_of_a_limit_with_two_names_is_one_write(fake: FakeHost) -> None:
    fake.fs.write("/proc/sys/vm/dirty_bytes", "8388608")
    originals = {"sysctl.vm.dirty_bytes": "0", "sysctl.vm.dirty_ratio": "20"}
    observed = SETTING.observe(fake.host(), originals)
    (change,) = SETTING.plan([], observed, originals)
    assert (change.setting, change.after) == ("sysctl.vm.dirty_ratio", "20")


def test_the_other_name_of_a_wanted_limit_is_left_alone(fake: FakeHost) -> None:
    fake.fs.write("/proc/sys/vm/dirty_bytes", "8388608")
    originals = {"sysctl.vm.dirty_bytes": "0", "sysctl.vm.dirty_ratio": "20"}
    wanted = [WantedSetting(setting="sysctl.vm.dirty_ratio", value="5")]
    observed = SETTING.observe(fake.host(), [*originals, "sysctl.vm.dirty_ratio"])
    (change,) = SETTING.plan(wanted, observed, originals)
    assert (change.setting, change.after) == ("sysctl.vm.dirty_ratio", "5")


def test_an_undo_that_does_not_read_back_is_an_error(fake: FakeHost) -> None:
    fake.fs.rounds["/proc/sys/vm/swappiness"] = lambda value: "7"
    change = a_change("vm.swappiness", "60", "10")
    SETTING.apply(fake.host(), change)
    with pytest.raises(KernelFileError, match=r"cannot restore sysctl.vm.swappiness to '60'"):
        SETTING.undo(fake.host(), change)


@pytest.mark.behaviour("BUG-SK4")
@pytest.mark.parametrize(
    "name",
    [
        "kernel.unprivileged_bpf_disabled",
        "kernel.yama.ptrace_scope",
        "kernel.modules_disabled",
        "kernel.tainted",
        "net.ipv6.conf.all.disable_ipv6",
        "net.ipv6.conf.all.mtu",
        "net/ipv6/conf/eth0.100/disable_ipv6",
        "net.ipv4.ip_forward",
    ],
)
def test_a_setting_that_cannot_be_restored_is_refused_by_name(name: str) -> None:
    (error,) = SETTING.check(a_profile(sysctl={name: 1}))
    assert "undone" in error.reason or "be restored" in error.reason


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("vm.swappiness", 201, "must be 0 to 200"),
        ("vm.swappiness", [1, 2], "must be 0 to 200"),
        ("vm.swappiness", "much", "must be a number"),
        ("net.ipv4.tcp_rmem", [4096, 131072], "takes 3 numbers, not 2"),
        ("net.ipv4.tcp_mem", [3, 2, 1], "must not fall"),
        ("vm.swappiness", 200, ""),
        ("vm.swappiness", 0, ""),
        ("net.ipv4.tcp_mem", [1, 2, 2], ""),
        ("net.ipv4.tcp_congestion_control", "bbr", ""),
        ("kernel.sched_rt_runtime_us", -1, ""),
    ],
)
def test_lint_reports_a_value_that_no_kernel_accepts(name: str, value: Value, why: str) -> None:
    reported = why_out_of_range(name, text_of(value))
    assert why in reported
    assert bool(reported) is bool(why)


@pytest.mark.behaviour("BUG-SK27")
@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("0x10", "16"),
        ("010", "8"),
        ("-0x1", "-1"),
        ("8080,8081,9000", "8080-8081,9000"),
        ("9000,8080-8081", "8080-8081,9000"),
        ("1 0x2  3", "1\t2\t3"),
    ],
)
def test_bug_sk27_a_spelling_that_the_kernel_changes_is_the_same_value(
    written: str, read: str
) -> None:
    assert SysctlSetting().same(written, read)


@pytest.mark.behaviour("BUG-SK27")
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("16", "10"),
        ("1-3", "1,3"),
        ("1 2", "2 1"),
        ("fq", "fq_codel"),
        ("", "0"),
        ("08", "8"),
        ("3-1", "1-3"),
    ],
)
def test_bug_sk27_different_values_stay_different(one: str, other: str) -> None:
    assert not SysctlSetting().same(one, other)


@pytest.mark.behaviour("BUG-SK27")
@given(st.sets(st.integers(0, 200), min_size=2))
def test_bug_sk27_any_spelling_of_a_set_of_ports_is_one_value(ports: set[int]) -> None:

    listed = ",".join(map(str, sorted(ports, reverse=True)))
    ranges: list[list[int]] = []
    for port in sorted(ports):
        if ranges and ranges[-1][-1] == port - 1:
            ranges[-1][1:] = [port]
        else:
            ranges.append([port])
    joined = ",".join("-".join(map(str, part)) for part in ranges)
    assert SysctlSetting().same(listed, joined)


@pytest.mark.behaviour("BUG-SK28")
def test_bug_sk28_a_secret_that_cannot_be_unset_is_refused_by_name() -> None:
    name = "net.ipv6.conf.eth0.stable_secret"
    found = Profile(name="x", sections={"sysctl": {name: "2001:db8::1"}})
    assert "cannot be unset" in SysctlSetting().check(found)[0].reason


@pytest.mark.behaviour("BUG-SK50")
@pytest.mark.parametrize("name", ["net.ipv6.conf.eth0.forwarding", "net/ipv6/conf/e.1/forwarding"])
def test_bug_sk50_forwarding_that_drops_default_routes_is_refused(name: str) -> None:
    """The kernel drops advertised default routes at a write of 1; a write of 0 restores none."""
    (error,) = SysctlSetting().check(Profile(name="x", sections={"sysctl": {name: 1}}))
    assert "cannot be undone" in error.reason


@pytest.mark.behaviour("BUG-SK50")
def test_bug_sk50_forwarding_of_later_interfaces_drops_no_route_and_is_allowed() -> None:
    name = "net.ipv6.conf.default.forwarding"
    assert not SysctlSetting().check(Profile(name="x", sections={"sysctl": {name: 1}}))
