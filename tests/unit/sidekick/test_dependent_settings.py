"""Values that limit, change or cause each other are applied and restored completely."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_host import KERNEL, FakeHost, FakeKernel, a_profile, a_target
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.machine import Completed
from sidekick.record import Target
from sidekick.report import ApplyOutcome, ProfileState
from sidekick.settings.block import Block, Disks
from sidekick.settings.modules import Modules
from sidekick.settings.sysctl import SysctlSetting
from sidekick.settings.thp import FOLDER, TransparentHugepages
from wire.errors import KernelFileError

PERIOD, RUNTIME = "kernel.sched_rt_period_us", "kernel.sched_rt_runtime_us"
PORTS, LOWEST = "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start"
PERCENT, RATE = "kernel.perf_cpu_time_max_percent", "kernel.perf_event_max_sample_rate"
RESERVED = "net.ipv4.ip_local_reserved_ports"
FREE = "vm.min_free_kbytes"
BRIDGE = "net.bridge.bridge-nf-call-iptables"

DEFAULTS = {
    PERIOD: "1000000", RUNTIME: "950000", PORTS: "32768\t60999", LOWEST: "1024",
    PERCENT: "25", RATE: "100000",
}  # fmt: skip


def path(name: str) -> str:
    return f"/proc/sys/{name.replace('.', '/')}"


class BoundingKernel(FakeKernel, frozen=True):
    """A kernel that checks a write against the other values in force, as Linux does."""

    after: dict[str, Callable[[str], None]] = msgspec.field(default_factory=dict)
    """Other effects of a write, by path."""

    def write(self, path: str, value: str) -> None:
        if not value:
            return  # a write(2) of no bytes never reaches the handler
        if self._bounded(path, value):
            raise KernelFileError(f"cannot set {path} to {value!r}: {os.strerror(22)}")
        super().write(path, value.strip())
        self.after.get(path, str)(value)

    def _bounded(self, written: str, value: str) -> bool:
        def now(name: str) -> list[int]:
            text = value if path(name) == written else self.find(path(name)) or "0"
            return [int(part) for part in text.split()]

        if written in (path(PERIOD), path(RUNTIME)):
            return now(RUNTIME)[0] > now(PERIOD)[0]
        if written in (path(PORTS), path(LOWEST)):
            return now(PORTS)[0] < now(LOWEST)[0]
        return written == path(RATE) and now(PERCENT)[0] in (0, 100)


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    return a_host(tmp_path)


def a_host(folder: Path) -> FakeHost:
    fake = FakeHost(folder)
    fake.fs = BoundingKernel(folder, points=fake.points)
    fake.processes.fs = fake.fs
    for name, value in DEFAULTS.items():
        fake.put(path(name), value)
    return fake


def values(fake: FakeHost) -> dict[str, str]:
    return {name: fake.sysctl(name) for name in DEFAULTS}


@pytest.mark.behaviour("BUG-SK23")
@pytest.mark.parametrize(
    "sysctl",
    [
        {PERIOD: 2000000, RUNTIME: 1500000},
        {PERIOD: 500000, RUNTIME: 400000},
        {PORTS: [40000, 60999], LOWEST: 35000},
        {PERCENT: 0, RATE: 50000},
        {PERCENT: 100, RATE: 50000, PERIOD: 500000, RUNTIME: 400000},
    ],
)
def test_values_that_limit_each_other_are_applied_and_restored(
    host: FakeHost, sysctl: dict[str, Any]
) -> None:
    report = host.apply(a_target(host, sysctl=sysctl))
    assert report.state is ProfileState.VERIFIED, report.detail
    assert host.apply(Target()).state is ProfileState.NONE
    assert values(host) == DEFAULTS
    assert host.state.load().originals == {}


@pytest.mark.behaviour("BUG-SK23")
def test_a_failed_run_undoes_values_that_limit_each_other(host: FakeHost) -> None:
    wanted = {PERIOD: 500000, RUNTIME: 400000, PERCENT: 0, RATE: 50000, "vm.swappiness": 10}
    host.fs.refuses.add(path("vm.swappiness"))
    report = host.apply(a_target(host, sysctl=wanted))
    assert (report.state, report.rolled_back) == (ProfileState.DEGRADED, True)
    assert values(host) == DEFAULTS


def is_valid(sysctl: dict[str, Any]) -> bool:
    """Return whether the kernel can hold these values next to its defaults."""
    runtime, period = sysctl.get(RUNTIME, 950000), sysctl.get(PERIOD, 1000000)
    return runtime <= period and sysctl.get(PORTS, [32768])[0] >= sysctl.get(LOWEST, 1024)


PERIODS = st.integers(1, 6)
STATES = st.fixed_dictionaries(
    {},
    optional={
        PERIOD: PERIODS.map(lambda n: n * 400000), RUNTIME: PERIODS.map(lambda n: n * 300000),
        PORTS: PERIODS.map(lambda n: [n * 8000, 60999]), LOWEST: PERIODS.map(lambda n: n * 7000),
        PERCENT: st.sampled_from([0, 25, 50, 100]), RATE: st.sampled_from([50000, 80000]),
    },
)  # fmt: skip


@pytest.mark.behaviour("BUG-SK23")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(profiles=st.lists(STATES.filter(is_valid), min_size=1, max_size=3))
def test_any_sequence_of_profiles_is_undone_on_a_kernel_with_dependent_values(
    tmp_path_factory: pytest.TempPathFactory, profiles: list[dict[str, Any]]
) -> None:
    fake = a_host(tmp_path_factory.mktemp("host"))
    for sysctl in profiles:
        before = values(fake)
        report = fake.apply(a_target(fake, sysctl=sysctl))
        # If a percentage bars changes of the rate, no order of writes leads to another rate.
        is_barred = before[PERCENT] in ("0", "100") and sysctl.get(PERCENT) in (0, 100)
        assert report.state is ProfileState.VERIFIED or (is_barred and values(fake) == before)
    assert fake.apply(Target()).state is ProfileState.NONE
    assert values(fake) == DEFAULTS


@pytest.mark.behaviour("BUG-SK25")
def test_an_empty_value_is_restored_as_empty(host: FakeHost) -> None:
    host.put(path(RESERVED), "")
    assert host.apply(a_target(host, sysctl={RESERVED: "8080"})).state is ProfileState.VERIFIED
    assert host.apply(Target()).state is ProfileState.NONE
    assert host.sysctl(RESERVED) == ""


@pytest.mark.behaviour("BUG-SK25")
def test_a_refused_spelling_leaves_an_empty_value_empty(host: FakeHost) -> None:
    host.put(path(RESERVED), "")
    host.fs.rounds[path(RESERVED)] = lambda value: value.replace("8080,8081", "8080")
    report = host.apply(a_target(host, sysctl={RESERVED: "8080,8081"}))
    assert (report.state, report.rolled_back) == (ProfileState.DEGRADED, True)
    assert host.sysctl(RESERVED) == ""


def with_module(fake: FakeHost, monkeypatch: pytest.MonkeyPatch, brings: bool = True) -> None:
    """Give the kernel a module br_netfilter, and a modprobe that loads it."""
    fake.put(f"/lib/modules/{KERNEL}/modules.dep", "kernel/net/bridge/br_netfilter.ko.xz:")
    run = fake.processes.run

    def modprobe(argv: list[str], **how: Any) -> Completed:
        if argv[-1] == "br_netfilter":
            there = "-r" not in argv
            folder = fake.fs.path("/sys/module/br_netfilter")
            folder.mkdir(parents=True) if there else folder.rmdir()
            if brings:
                fake.put(path(BRIDGE), "1") if there else fake.drop(path(BRIDGE))
        return run(argv, **how)

    monkeypatch.setattr(fake.processes, "run", modprobe)


@pytest.mark.behaviour("BUG-SK30")
def test_a_module_is_loaded_before_its_sysctls_are_read(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_module(host, monkeypatch)
    target = a_target(host, sysctl={BRIDGE: 0}, modules=Modules(load=["br_netfilter"]))
    report = host.apply(target)
    assert report.state is ProfileState.VERIFIED, report.detail
    assert host.sysctl(BRIDGE) == "0"
    assert host.apply(Target()).state is ProfileState.NONE
    assert not host.fs.exists("/sys/module/br_netfilter")


@pytest.mark.behaviour("BUG-SK30")
def test_a_module_that_does_not_bring_the_sysctl_is_unloaded(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_module(host, monkeypatch, brings=False)
    target = a_target(host, sysctl={BRIDGE: 0}, modules=Modules(load=["br_netfilter"]))
    report = host.apply(target)
    assert (report.state, report.rolled_back) == (ProfileState.DEGRADED, True)
    assert "lacks sysctl.net.bridge" in report.detail
    assert not host.fs.exists("/sys/module/br_netfilter")


def with_huge_pages(fake: FakeHost) -> None:
    """Make the kernel resize its reserve whenever transparent huge pages are switched."""
    fake.put(f"{FOLDER}/enabled", "always [madvise] never")
    shown = {"always": "[always] madvise never", "madvise": "always [madvise] never"}
    fake.fs.rounds[f"{FOLDER}/enabled"] = lambda value: shown[value]
    fake.fs.after[f"{FOLDER}/enabled"] = lambda _: fake.put(path(FREE), "67584")


@pytest.mark.behaviour("BUG-SK37")
def test_huge_pages_and_the_reserve_that_they_change_are_both_applied(
    host: FakeHost,
) -> None:
    with_huge_pages(host)
    thp = TransparentHugepages(enabled="always")
    report = host.apply(a_target(host, sysctl={FREE: 131072}, thp=thp))
    assert report.state is ProfileState.VERIFIED, report.detail
    assert host.sysctl(FREE) == "131072"
    assert host.apply(Target()).state is ProfileState.NONE
    assert host.sysctl(FREE) == "45056"


@pytest.mark.behaviour("BUG-SK37")
@pytest.mark.parametrize("fails", [False, True])
def test_the_memory_reserve_that_huge_pages_changed_is_restored(
    host: FakeHost, fails: bool
) -> None:
    with_huge_pages(host)
    host.put(f"{FOLDER}/defrag", "always")
    if fails:
        host.fs.refuses.add(f"{FOLDER}/defrag")
    thp = TransparentHugepages(enabled="always", defrag="never")
    report = host.apply(a_target(host, thp=thp))
    assert report.state is (ProfileState.DEGRADED if fails else ProfileState.VERIFIED)
    assert (host.sysctl(FREE) == "45056") is fails
    host.apply(Target())
    assert host.sysctl(FREE) == "45056"


@pytest.mark.behaviour("BUG-SK21")
def test_a_childs_name_of_a_limit_replaces_its_parents_other() -> None:
    merged = SysctlSetting().merge(
        {"vm.dirty_ratio": 10, "vm.swappiness": 1}, {"vm.dirty_bytes": 8388608}
    )
    assert merged == {"vm.swappiness": 1, "vm.dirty_bytes": 8388608}
    assert SysctlSetting().check(a_profile(sysctl=merged)) == []


@pytest.mark.behaviour("BUG-SK32")
@pytest.mark.parametrize("module", ["bfq.ko.xz", "kyber-iosched.ko.xz"])
def test_a_scheduler_that_is_a_module_is_loaded_by_the_write(host: FakeHost, module: str) -> None:
    queue, choice = "/sys/block/vda/queue", module.partition(".")[0].removesuffix("-iosched")
    host.put(f"{queue}/scheduler", "[none] mq-deadline")
    host.put(f"{queue}/rotational", "0")
    host.put("/sys/block/vda/device/vendor", "0x1af4")
    host.put(f"/lib/modules/{KERNEL}/modules.dep", f"kernel/block/{module}:")
    host.fs.rounds[f"{queue}/scheduler"] = lambda value: f"none mq-deadline [{value}]"
    target = a_target(host, block=Block(flash=Disks(scheduler=choice)))
    report = host.apply(target)
    assert [(s.setting, s.outcome) for s in report.settings] == [
        ("block.vda.scheduler", ApplyOutcome.APPLIED)
    ]


NEIGH = "net.ipv4.neigh.default."


@pytest.mark.behaviour("BUG-SK26")
@pytest.mark.parametrize(
    ("coarse", "exact", "unit", "original"),
    [
        (f"{NEIGH}unres_qlen", f"{NEIGH}unres_qlen_bytes", 2304, 212992),
        ("net/ipv4/neigh/eth0.7/unres_qlen", "net/ipv4/neigh/eth0.7/unres_qlen_bytes", 2304, 7000),
        (f"{NEIGH}base_reachable_time", f"{NEIGH}base_reachable_time_ms", 1000, 30500),
        ("net.ipv6.route.gc_min_interval", "net.ipv6.route.gc_min_interval_ms", 1000, 500),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_a_coarse_name_of_a_value_is_undone_through_its_exact_name(
    host: FakeHost, coarse: str, exact: str, unit: int, original: int, fails: bool
) -> None:
    one, other = (SysctlSetting().path(f"sysctl.{name}") for name in (coarse, exact))
    host.put(one, str(original // unit))
    host.put(other, str(original))
    host.fs.after[one] = lambda value: host.put(other, str(int(value) * unit))
    host.fs.after[other] = lambda value: host.put(one, str(int(value) // unit))
    if fails:
        host.fs.refuses.add(path("vm.swappiness"))
    report = host.apply(a_target(host, sysctl={coarse: 40, "vm.swappiness": 10}))
    assert report.state is (ProfileState.DEGRADED if fails else ProfileState.VERIFIED)
    if not fails:
        assert host.fs.read(one) == "40"
        assert host.apply(Target()).state is ProfileState.NONE
    assert host.fs.read(other) == str(original)
    assert host.state.load().originals == {}


@pytest.mark.behaviour("BUG-SK29")
@pytest.mark.parametrize("fails", [False, True])
def test_the_list_that_a_congestion_control_extended_is_restored(
    host: FakeHost, fails: bool
) -> None:
    chosen, allowed = "net.ipv4.tcp_congestion_control", "net.ipv4.tcp_allowed_congestion_control"
    host.put(path(chosen), "cubic")
    host.put(path(allowed), "reno cubic")

    def allow(name: str) -> None:
        listed = host.sysctl(allowed).split()
        host.put(path(allowed), " ".join([*listed, *({name} - {*listed})]))

    host.fs.after[path(chosen)] = allow
    target = a_target(host, sysctl={chosen: "bbr", "vm.swappiness": 10})
    if fails:
        host.fs.refuses.add(path("vm.swappiness"))
    report = host.apply(target)
    assert report.state is (ProfileState.DEGRADED if fails else ProfileState.VERIFIED)
    if not fails:
        assert host.sysctl(allowed) == "reno cubic bbr"
        assert host.apply(target).state is ProfileState.VERIFIED
        assert host.sysctl(allowed) == "reno cubic bbr"
        assert host.apply(Target()).state is ProfileState.NONE
    assert host.sysctl(chosen) == "cubic"
    assert host.sysctl(allowed).split() == ["reno", "cubic"]
    assert host.state.load().originals == {}
