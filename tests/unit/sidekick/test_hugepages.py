"""Huge pages: sidekick reads how many the kernel gave and does not assume the number."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from fake_host import FakeHost, a_profile, a_target

from sidekick.apply import ApplyRun
from sidekick.report import ApplyOutcome, Disruption, ProfileState, SettingChange, WantedSetting
from sidekick.settings.hugepages import BUDGET_S, Hugepages, HugepagesSetting
from sidekick.settings.hugepages_line import SIZES, PageArguments
from wire.errors import KernelFileError, Unprocessable

SETTING = HugepagesSetting()


def a_change(before: int, after: int, node: int = 0, if_short: str = "reboot") -> SettingChange:
    return SettingChange(
        setting=f"hugepages.2m.node{node}",
        before=str(before),
        after=str(after),
        options={"if_short": if_short},
    )


@pytest.mark.behaviour("HP3")
def test_pages_are_spread_over_the_nodes(tmp_path: Path) -> None:
    fake = FakeHost(tmp_path, nodes=3, memory_mib=4096)
    target = a_target(fake, hugepages=Hugepages(pages_2m=8))
    assert [(w.setting, w.value) for w in target.wanted] == [
        ("hugepages.2m.node0", "3"),
        ("hugepages.2m.node1", "3"),
        ("hugepages.2m.node2", "2"),
    ]


def test_pages_may_be_given_by_node_and_the_others_get_none(tmp_path: Path) -> None:
    fake = FakeHost(tmp_path, nodes=2, memory_mib=4096)
    target = a_target(fake, hugepages=Hugepages(pages_2m={"node1": 8}))
    assert {w.setting: w.value for w in target.wanted} == {
        "hugepages.2m.node0": "0",
        "hugepages.2m.node1": "8",
    }


def test_a_share_of_memory_is_rounded_down_to_pages(fake: FakeHost) -> None:
    target = a_target(fake, hugepages=Hugepages(percent_of_memory=6.25))
    assert [w.value for w in target.wanted] == ["32"]


def test_a_kernel_without_numa_has_one_pool(fake: FakeHost) -> None:
    shutil.rmtree(fake.fs.path("/sys/devices/system/node/node0/hugepages"))
    (wanted,) = a_target(fake, hugepages=Hugepages(pages_2m=4)).wanted
    assert wanted.setting == "hugepages.2m.all"
    change = SettingChange(setting=wanted.setting, before="0", after="4")
    assert SETTING.apply(fake.host(), change).outcome is ApplyOutcome.APPLIED


@pytest.mark.parametrize("pages", [16, 64])
def test_pages_that_are_there_are_applied_at_once(fake: FakeHost, pages: int) -> None:
    applied = SETTING.apply(fake.host(), a_change(0, pages))
    assert (applied.outcome, applied.actual) == (ApplyOutcome.APPLIED, str(pages))
    assert fake.slept == []


@pytest.mark.behaviour("F-66")
def test_a_shortfall_is_met_by_compaction(fake: FakeHost) -> None:
    fake.fs.free_pages["node0"] = 20
    fake.fs.compacted.extend([4, 8])
    applied = SETTING.apply(fake.host(), a_change(0, 32))
    assert (applied.outcome, fake.pages()) == (ApplyOutcome.APPLIED, 32)
    assert applied.detail == "after 3 tries with compaction"
    assert fake.sysctl("vm.drop_caches") == "3"


def test_a_lasting_shortfall_is_left_to_the_boot_within_a_minute(fake: FakeHost) -> None:
    fake.fs.free_pages["node0"] = 20
    began = fake.time_s
    applied = SETTING.apply(fake.host(), a_change(0, 32))
    assert (applied.outcome, applied.actual) == (ApplyOutcome.PENDING_REBOOT, "20")
    assert "20 of 32 pages" in applied.detail
    assert BUDGET_S / 2 < fake.time_s - began <= BUDGET_S


def test_the_last_free_memory_is_not_taken(fake: FakeHost) -> None:
    meminfo = "MemTotal: 1048576 kB\nMemAvailable: 131072 kB\nHugepagesize:    2048 kB\n"
    fake.put("/proc/meminfo", meminfo)
    written: list[str] = []
    path = "/sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages"

    def use(value: str) -> str:
        written.append(value)
        fake.put("/proc/meminfo", meminfo.replace("131072", "98304"))
        return value

    fake.fs.rounds[path] = use
    applied = SETTING.apply(fake.host(), a_change(0, 200))
    assert (applied.outcome, applied.actual) == (ApplyOutcome.PENDING_REBOOT, "16")
    assert set(written) == {"16"}, "128 MiB less 96 to spare"


def test_pages_that_the_boot_could_not_reserve_either_fail(fake: FakeHost) -> None:
    fake.fs.free_pages["node0"] = 20
    fake.boot("root=/dev/vda1 hugepages=32")
    fake.put("/sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages", "20")
    applied = SETTING.apply(fake.host(), a_change(0, 32))
    assert applied.outcome is ApplyOutcome.FAILED
    assert "booted with 32" in applied.detail


def test_the_profile_decides_the_result_of_a_lasting_shortfall(fake: FakeHost) -> None:
    fake.fs.free_pages["node0"] = 20
    kept = SETTING.apply(fake.host(), a_change(0, 32, if_short="keep"))
    assert (kept.outcome, kept.actual) == (ApplyOutcome.PARTIAL, "20")
    undone = SETTING.apply(fake.host(), a_change(0, 32, if_short="undo"))
    assert undone.outcome is ApplyOutcome.FAILED


def test_pages_that_stay_in_use_are_not_given_back(fake: FakeHost) -> None:
    path = "/sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages"
    fake.fs.rounds[path] = lambda value: str(max(int(value), 5))
    applied = SETTING.apply(fake.host(), a_change(8, 0))
    assert (applied.outcome, applied.actual) == (ApplyOutcome.FAILED, "5")
    with pytest.raises(KernelFileError, match="it has 5"):
        SETTING.undo(fake.host(), a_change(0, 8))


def test_pools_shrink_before_others_grow() -> None:
    wanted = [
        WantedSetting(setting="hugepages.2m.node0", value="8"),
        WantedSetting(setting="hugepages.2m.node1", value="0"),
    ]
    observed = {"hugepages.2m.node0": "0", "hugepages.2m.node1": "8"}
    assert [c.after for c in SETTING.plan(wanted, observed, {})] == ["0", "8"]


def boot_line(fake: FakeHost, own: str = "", **pages: object) -> str:
    wanted = a_target(fake, hugepages=Hugepages(**pages)).wanted  # type: ignore[arg-type]
    return " ".join(a for c in SETTING.boot(wanted, own) for a in c.arguments)


@pytest.mark.behaviour("HP3")
def test_boot_arguments_name_every_page_size_and_each_of_several_nodes(
    tmp_path: Path,
) -> None:
    one = FakeHost(tmp_path / "one", memory_mib=8192)
    two = FakeHost(tmp_path / "two", nodes=2, memory_mib=8192)
    assert boot_line(one, pages_2m=8) == "hugepagesz=2M hugepages=8"
    assert boot_line(two, pages_2m=24, pages_1g={"node1": 2}) == (
        "hugepagesz=1G hugepages=0:0,1:2 hugepagesz=2M hugepages=0:12,1:12"
    )
    assert boot_line(one, pages_2m=0) == ""


@pytest.mark.behaviour("BUG-SK1")
def test_a_count_never_becomes_one_of_another_size(tmp_path: Path) -> None:
    fake = FakeHost(tmp_path, memory_mib=8192)
    own = "ro hugepagesz=1G hugepages=4 quiet"
    assert boot_line(fake, own, pages_2m=200) == (
        "hugepagesz=1G hugepages=4 hugepagesz=2M hugepages=200"
    )
    own = "default_hugepagesz=1G hugepages=3"
    assert boot_line(fake, own, pages_2m=200) == (
        "default_hugepagesz=1G hugepagesz=1G hugepages=3 hugepagesz=2M hugepages=200"
    )
    with pytest.raises(Unprocessable, match="with the host's own huge pages reserves 7"):
        boot_line(fake, "hugepagesz=1G hugepages=6", pages_2m=600)


def test_pairs_are_read_as_the_kernel_reads_them() -> None:
    pairs = PageArguments.of(["hugepages=8", "hugepagesz=1G", "hugepages=0:1,1:3"])
    assert pairs.reserved(SIZES["2m"], "node0", 2) == 4
    assert pairs.reserved(SIZES["1g"], "node1", 2) == 3
    assert PageArguments.of(["hugepages=x"]).reserved(SIZES["2m"], "node0", 1) == 0
    assert PageArguments.of(["hugepages=0:y"]).reserved(SIZES["2m"], "node0", 1) == 0


def test_pools_shrink_before_others_grow_and_large_pages_come_before_small_ones(
    tmp_path: Path,
) -> None:
    fake = FakeHost(tmp_path, memory_mib=8192)
    fake.apply(a_target(fake, "old", hugepages=Hugepages(pages_2m=64)))
    target = a_target(fake, "new", hugepages=Hugepages(pages_1g=2, pages_2m=32))
    changes = ApplyRun(fake.host(), fake.state, target).observation.plan.changes
    assert [(c.setting, c.after) for c in changes] == [
        ("hugepages.2m.node0", "32"),
        ("hugepages.1g.node0", "2"),
    ]
    fake.apply(target)
    target = a_target(fake, "more", hugepages=Hugepages(pages_1g=3, pages_2m=48))
    changes = ApplyRun(fake.host(), fake.state, target).observation.plan.changes
    assert [c.setting for c in changes] == ["hugepages.1g.node0", "hugepages.2m.node0"]


@pytest.mark.behaviour("F-67", "F-75")
def test_memory_in_use_is_not_taken_from_running_tasks(fake: FakeHost) -> None:
    fake.put("/proc/meminfo", "MemTotal: 1048576 kB\nMemAvailable: 131072 kB\n")
    events = "/sys/fs/cgroup/workload.slice/workload-a.slice/twine-task-x.service/cgroup.events"
    fake.put(events, "populated 1\nfrozen 0")
    before = fake.live()
    small = a_target(fake, hugepages=Hugepages(pages_2m=8))
    large = a_target(fake, hugepages=Hugepages(pages_2m=64))
    with pytest.raises(Unprocessable, match=r"while tasks run \(twine-task-x.service\)"):
        fake.apply(large)
    assert fake.live() == before
    assert fake.state.unfinished() is None
    assert fake.apply(small).state is ProfileState.VERIFIED
    fake.put(events, "populated 0\nfrozen 0")
    assert ApplyRun(fake.host(), fake.state, large).observation.plan.needs is Disruption.DRAIN
    fake.apply(large)
    assert fake.pages() > 8


def test_node_names_are_checked() -> None:
    profile = a_profile(hugepages=Hugepages(pages_2m={"../x": 1}))
    assert [e.field for e in SETTING.check(profile)] == ["hugepages.pages_2m.../x"]
