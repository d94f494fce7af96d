"""Huge pages: what the kernel gives is read, not believed."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_host import FakeHost, a_profile, a_target

from agent.errors import KernelFileError
from sidekick.profile import Hugepages
from sidekick.report import Change, Outcome, Wanted
from sidekick.settings.hugepages import BUDGET_S, HugepagesSetting, boot_argument, reserved

SETTING = HugepagesSetting()


def a_change(before: int, after: int, node: int = 0) -> Change:
    return Change(setting=f"hugepages.2m.node{node}", before=str(before), after=str(after))


def test_pages_are_spread_over_the_nodes(tmp_path: Path) -> None:  # HP3
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
    fake.drop("/sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages")
    (wanted,) = a_target(fake, hugepages=Hugepages(pages_2m=4)).wanted
    assert wanted.setting == "hugepages.2m.all"
    change = Change(setting=wanted.setting, before="0", after="4")
    assert SETTING.apply(fake.host(), change).outcome is Outcome.APPLIED


@pytest.mark.parametrize("pages", [16, 64])
def test_pages_that_are_there_are_applied_at_once(fake: FakeHost, pages: int) -> None:
    applied = SETTING.apply(fake.host(), a_change(0, pages))
    assert (applied.outcome, applied.actual) == (Outcome.APPLIED, str(pages))
    assert fake.slept == []


def test_a_shortfall_is_met_by_compaction(fake: FakeHost) -> None:  # F-66
    fake.fs.free_pages["node0"] = 20
    fake.fs.compacted.extend([4, 8])
    applied = SETTING.apply(fake.host(), a_change(0, 32))
    assert (applied.outcome, fake.pages()) == (Outcome.APPLIED, 32)
    assert applied.detail == "after 3 tries with compaction"
    assert fake.sysctl("vm.drop_caches") == "3"


def test_a_lasting_shortfall_is_left_to_the_boot_within_a_minute(fake: FakeHost) -> None:
    fake.fs.free_pages["node0"] = 20
    began = fake.time_s
    applied = SETTING.apply(fake.host(), a_change(0, 32))
    assert (applied.outcome, applied.actual) == (Outcome.PENDING_REBOOT, "20")
    assert "20 of 32 pages" in applied.detail
    assert BUDGET_S / 2 < fake.time_s - began <= BUDGET_S


def test_the_last_free_memory_is_not_taken(fake: FakeHost) -> None:
    meminfo = "MemTotal: 1048576 kB\nMemAvailable: 131072 kB\nHugepagesize:    2048 kB\n"
    fake.put("/proc/meminfo", meminfo)
    asked: list[str] = []
    path = "/sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages"

    def use(value: str) -> str:
        asked.append(value)
        fake.put("/proc/meminfo", meminfo.replace("131072", "98304"))
        return value

    fake.fs.rounds[path] = use
    applied = SETTING.apply(fake.host(), a_change(0, 200))
    assert (applied.outcome, applied.actual) == (Outcome.PENDING_REBOOT, "16")
    assert set(asked) == {"16"}, "128 MiB less 96 to spare"


def test_what_the_boot_could_not_reserve_either_has_failed(fake: FakeHost) -> None:
    fake.fs.free_pages["node0"] = 20
    fake.boot("root=/dev/vda1 hugepages=32")
    fake.put("/sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages", "20")
    applied = SETTING.apply(fake.host(), a_change(0, 32))
    assert applied.outcome is Outcome.FAILED
    assert "told at boot to reserve 32" in applied.detail


def test_the_boot_cannot_help_where_its_pages_are_of_another_size(fake: FakeHost) -> None:
    fake.fs.free_pages["node0"] = 20
    fake.put("/proc/meminfo", "MemTotal: 1048576 kB\nHugepagesize:    1048576 kB\n")
    assert SETTING.apply(fake.host(), a_change(0, 32)).outcome is Outcome.FAILED


def test_pages_that_stay_in_use_are_not_given_back(fake: FakeHost) -> None:
    path = "/sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages"
    fake.fs.rounds[path] = lambda value: str(max(int(value), 5))
    applied = SETTING.apply(fake.host(), a_change(8, 0))
    assert (applied.outcome, applied.actual) == (Outcome.FAILED, "5")
    with pytest.raises(KernelFileError, match="it has 5"):
        SETTING.undo(fake.host(), a_change(0, 8))


def test_pools_shrink_before_others_grow() -> None:
    wanted = [
        Wanted(setting="hugepages.2m.node0", value="8"),
        Wanted(setting="hugepages.2m.node1", value="0"),
    ]
    observed = {"hugepages.2m.node0": "0", "hugepages.2m.node1": "8"}
    assert [c.after for c in SETTING.plan(wanted, observed, {})] == ["0", "8"]


def test_the_boot_argument_names_nodes_where_there_are_several() -> None:
    one = [Wanted(setting="hugepages.2m.node0", value="8")]
    two = [*one, Wanted(setting="hugepages.2m.node1", value="16")]
    assert boot_argument(one) == "hugepages=8"
    assert boot_argument(two) == "hugepages=0:8,1:16"
    assert boot_argument([Wanted(setting="hugepages.2m.node0", value="0")]) == ""
    assert reserved("a hugepages=8", "node0", 2) == 4
    assert reserved("a hugepages=0:8,1:16", "node1", 2) == 16
    assert reserved("a hugepages=x hugepages=0:y", "node0", 1) == 0


def test_node_names_are_checked() -> None:
    profile = a_profile(hugepages=Hugepages(pages_2m={"../x": 1}))
    assert [e.field for e in SETTING.check(profile)] == ["hugepages.pages_2m.../x"]
