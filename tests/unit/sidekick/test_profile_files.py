"""Profiles are found, rendered, inherited and decoded, with all their errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_host import PROFILES, FakeHost, shipped

from sidekick.expression import Fact
from sidekick.facts import FACTS as KNOWN
from sidekick.facts import read_facts
from sidekick.profile import Library
from sidekick.profile_file import MAX_BYTES
from sidekick.report import WantedSetting
from sidekick.settings import SETTINGS
from sidekick.settings.sysctl import values_of
from sidekick.targets import target_of
from wire.errors import ConfigError, NotFound, Unprocessable

FACTS: dict[str, Fact] = {
    "cpu.count": 4,
    "cpu.vendor": "intel",
    "host.name": "m1",
    "kernel.version": [6, 12],
    "memory.mib": 1024,
    "nic.speed_mbps": 0,
}


def library(folder: Path, **files: str) -> Library:
    for name, text in files.items():
        (folder / f"{name}.toml").write_text(text)
    return Library([folder], SETTINGS)


def test_a_child_overrides_its_parent_name_by_name(tmp_path: Path) -> None:
    found = library(
        tmp_path,
        base="description='b'\n[sysctl]\n'vm.swappiness'=60\n'kernel.panic'=10\n"
        "[kernel]\ncmdline=['nosmt', 'preempt=full']",
        web="description='w'\nextends='base'\n[sysctl]\n'vm.swappiness'=1\n"
        "[kernel]\ncmdline=['preempt=none']",
    ).load("web", FACTS)
    assert {k: v.value for k, v in values_of(found).items()} == {
        "vm.swappiness": 1,
        "kernel.panic": 10,
    }
    assert found.section("kernel").cmdline == ["nosmt", "preempt=none"]
    assert found.lineage == ("web", "base")
    assert found.source_of("sysctl.vm.swappiness") == "web:4"
    assert found.source_of("sysctl.kernel.panic") == "base:4"
    assert found.source_of("kernel.nosmt") == "base:6"


BASE = (
    "description='b'\n[sysctl]\n'vm.swappiness'=60\n'kernel.panic'=10\n"
    "[modules]\nload=['br_netfilter', 'bfq']\n[block.flash]\nscheduler='none'\nnr_requests=64\n"
    "[thp]\nenabled='never'\n[[when]]\nif='cpu.count > 99'\nsysctl.'vm.dirty_ratio'=5\n"
)


@pytest.mark.behaviour("BUG-SK21")
def test_bug_sk21_a_setting_that_a_child_unsets_is_not_changed_on_the_host(tmp_path: Path) -> None:

    names = "'sysctl.vm.swappiness', 'modules.bfq', 'block.flash.scheduler', 'thp'"
    child = f"description='c'\nextends='base'\nunset=[{names}, 'sysctl.vm.dirty_ratio']\n"
    folder = library(tmp_path, base=BASE, child=child)
    found = folder.load("child", FACTS)
    assert values_of(found).keys() == {"kernel.panic"}
    assert found.section("modules").load == ["br_netfilter"]
    assert (found.section("block").flash.scheduler, found.section("block").flash.nr_requests) == (
        None,
        64,
    )
    assert found.section("thp") is None
    assert values_of(folder.load("child", FACTS | {"cpu.count": 128})).keys() == {"kernel.panic"}
    (tmp_path / "again.toml").write_text(
        "description='g'\nextends='child'\n[sysctl]\n'vm.swappiness'=5\n"
    )
    assert values_of(folder.load("again", FACTS))["vm.swappiness"].value == 5


@pytest.mark.behaviour("BUG-SK21")
def test_bug_sk21_what_no_parent_sets_cannot_be_unset(tmp_path: Path) -> None:
    child = "description='c'\nextends='base'\nunset=['sysctl.vm.swapiness', 'modules.bfq']\n"
    with pytest.raises(ConfigError) as caught:
        library(tmp_path, base=BASE, child=child).load("child", FACTS)
    assert [(e.field, e.reason) for e in caught.value.errors] == [
        ("unset[0]", "no parent of child sets sysctl.vm.swapiness (child:3)")
    ]


@pytest.mark.behaviour("BUG-SK21")
def test_an_owner_unsets_only_keys_that_it_may_set(tmp_path: Path) -> None:
    base = BASE.replace("[sysctl]", "[allow]\nteam=['sysctl.*']\n[sysctl]", 1)
    child = "description='c'\nowner='team'\nextends='base'\nunset=['thp', 'sysctl.kernel.panic']\n"
    with pytest.raises(ConfigError) as caught:
        library(tmp_path, base=base, child=child).load("child", FACTS)
    assert [(e.field, e.reason) for e in caught.value.errors] == [
        ("unset[0]", "team may set sysctl.* (child:4)")
    ]


def test_facts_of_the_host_give_values(tmp_path: Path) -> None:
    text = (
        "description='w'\n[sysctl]\n'vm.dirty_bytes'='= memory.mib // 4'\n"
        "'net.ipv4.tcp_rmem'=[4096, '= max(cpu.count, 2)', 8192]\n"
        "'kernel.panic'={value='= 10', required=false}"
    )
    found = library(tmp_path, web=text).load("web", FACTS)
    assert values_of(found)["vm.dirty_bytes"].value == 256
    assert values_of(found)["net.ipv4.tcp_rmem"].value == [4096, 4, 8192]
    assert (values_of(found)["kernel.panic"].value, values_of(found)["kernel.panic"].required) == (
        10,
        False,
    )


def test_conditional_tables_follow_the_others_in_the_order_of_their_conditions(
    tmp_path: Path,
) -> None:
    text = (
        "description='w'\n[sysctl]\n'vm.swappiness'=1\n'kernel.panic'=1\n"
        "[[when]]\nif=\"cpu.vendor == 'intel'\"\nsysctl.'vm.swappiness'=2\n"
        "[[when]]\nif='kernel.version >= [6, 1] and cpu.count > 2'\n"
        "[when.sysctl]\n'vm.swappiness'=3\n'kernel.panic'=3\n"
        "[[when]]\nif='nic.speed_mbps >= 25000'\nsysctl.'vm.swappiness'=4\n"
    )
    folder = library(tmp_path, web=text, child="description='c'\nextends='web'\n")
    found = folder.load("web", FACTS)
    assert {k: v.value for k, v in values_of(found).items()} == {
        "vm.swappiness": 3,
        "kernel.panic": 3,
    }
    assert found.source_of("sysctl.vm.swappiness") == "web:11"
    fast = folder.load("child", FACTS | {"nic.speed_mbps": 100_000})
    assert values_of(fast)["vm.swappiness"].value == 4
    plain = folder.load("web", FACTS | {"cpu.vendor": "amd", "cpu.count": 1})
    assert values_of(plain)["vm.swappiness"].value == 1


def test_tables_whose_condition_is_false_are_checked_too(tmp_path: Path) -> None:
    text = (
        "description='w'\n[[when]]\nif='cpu.count > 99'\ncolour=1\n"
        "sysctl.'vm.swappiness'=1.5\nsysctl.'kernel.panic'='= cpu.cuont'\n"
        "sysctl.'vm.dirty_bytes'='= 1 // nic.speed_mbps'\n[[when]]\nsysctl.'kernel.panic'=1\n"
        "[[when]]\nif='cpu.count'\n[[when]]\nif=3\n[when.sysctl]\n'kernel.panic'='=(1'\n"
    )
    with pytest.raises(ConfigError) as caught:
        library(tmp_path, web=text).load("web", FACTS)
    reported = {f"{e.field}: {e.reason}" for e in caught.value.errors}
    kinds = ", ".join(SETTINGS)
    assert reported == {
        f"colour: unknown; known are if, {kinds} (web:4)",
        "sysctl.kernel.panic: 'cpu.cuont': there is no fact cpu.cuont; "
        "there are cpu.count, cpu.vendor (web:6)",
        "if: is required: an expression of facts, as text (web:8)",
        "if: 'cpu.count' is neither true nor false (web:11)",
        "if: is required: an expression of facts, as text (web:13)",
        "sysctl.kernel.panic: '(1': ')' was expected before its end (web:15)",
    }


OWNED = (
    "description='w'\n[allow]\nweb-team=['sysctl.net.*', 'hugepages.*']\n"
    "[sysctl]\n'vm.swappiness'=1\n"
)


@pytest.mark.behaviour("HP13")
def test_an_owner_sets_what_the_parent_profile_allows(tmp_path: Path) -> None:
    mine = "description='m'\nextends='web'\nowner='{}'\n[sysctl]\n'net.core.somaxconn'=9\n"
    greedy = mine + "'vm.swappiness'=2\n[[when]]\nif='true'\nkernel.cmdline=['nosmt']\n"
    folder = library(
        tmp_path,
        web=OWNED,
        good=mine.format("web-team"),
        greedy=greedy.format("web-team"),
        outsider=mine.format("else"),
        platform=greedy.replace("owner='{}'\n", ""),
        usurper=mine.format("web-team") + "[allow]\nweb-team=['*']\n",
    )
    assert values_of(folder.load("good", FACTS))["net.core.somaxconn"].value == 9
    assert values_of(folder.load("platform", FACTS))["vm.swappiness"].value == 2
    reasons = {}
    for name in ("greedy", "outsider", "usurper"):
        with pytest.raises(ConfigError) as caught:
            folder.load(name, FACTS)
        reasons[name] = [f"{e.field}: {e.reason}" for e in caught.value.errors]
    may = "web-team may set sysctl.net.*, hugepages.*"
    assert reasons == {
        "greedy": [
            f"sysctl.vm.swappiness: {may} (greedy:6)",
            f"kernel.cmdline: {may} (greedy:9)",
        ],
        "outsider": ["sysctl.net.core.somaxconn: else may set nothing (outsider:5)"],
        "usurper": ["allow: may not be changed by web-team (usurper:6)"],
    }


def test_errors_of_a_file_and_its_parent_are_reported_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 2 errors") as caught:
        library(
            tmp_path,
            web="description='w'\nextends='basis'\ncolour=1\n",
            basis="description='b'\n\n[sysctl]\n'vm.swappiness' = []\n'kernel.panic' = 1.5\n",
        ).load("web", FACTS)
    assert [e.reason.split()[-1] for e in caught.value.errors] == ["(web:3)", "(basis:5)"]


def test_every_fact_is_documented_and_read(fake: FakeHost) -> None:
    assert read_facts(fake.fs).keys() == KNOWN.keys()
    assert all(KNOWN.values())


def test_the_first_folder_that_has_a_profile_wins(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    mine.mkdir()
    theirs.mkdir()
    library(mine, web="description='mine'")
    library(theirs, web="description='theirs'", cache="description='c'")
    both = Library([mine, tmp_path / "none", theirs], SETTINGS)
    assert both.load("web", FACTS).description == "mine"
    assert both.names() == ["cache", "web"]


def test_an_error_about_an_unknown_fact_has_the_place_and_the_known_facts(tmp_path: Path) -> None:
    text = "description='w'\n[sysctl]\n'vm.swappiness'='= memory.mbi'"
    with pytest.raises(ConfigError) as caught:
        library(tmp_path, web=text).load("web", FACTS)
    assert [f"{e.field}: {e.reason}" for e in caught.value.errors] == [
        "sysctl.vm.swappiness: 'memory.mbi': there is no fact memory.mbi; "
        "there are memory.mib (web:3)"
    ]


def test_every_error_of_a_file_is_reported_with_its_field(tmp_path: Path) -> None:
    text = (
        "colour='blue'\nextends=3\n[sysctl]\n'vm.swappiness'=1.5\n"
        "'kernel.panic'={value=1, wanted=2}\n[hugepages]\npages_2m=-1\nsize=2\n"
        "[kernel]\ncmdline=['nosmt', 7]"
    )
    with pytest.raises(ConfigError, match="has 8 errors") as caught:
        library(tmp_path, web=text).load("web", FACTS)
    assert sorted(e.field for e in caught.value.errors) == [
        "colour",
        "description",
        "extends",
        "hugepages.pages_2m",
        "hugepages.size",
        "kernel.cmdline[1]",
        "sysctl.kernel.panic",
        "sysctl.vm.swappiness",
    ]
    assert all(e.reason for e in caught.value.errors)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"web": "description='w'\n[sysctl\n"}, "is not TOML"),
        ({"web": "description='w'\nextends='web'"}, "web -> web"),
        (
            {"web": "description='w'\nextends='a'", "a": "description='a'\nextends='web'"},
            "web -> a -> web",
        ),
        ({"web": "description='w'\nextends='gone'"}, "extends 'gone'"),
        ({"web": "description='w'" + " " * MAX_BYTES}, "is larger than"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(
    tmp_path: Path, files: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        library(tmp_path, **files).load("web", FACTS)


@pytest.mark.behaviour("BUG-SK90")
@pytest.mark.parametrize("separator", ["\u2028", "\x85"])
def test_lines_are_counted_as_editors_count_them(tmp_path: Path, separator: str) -> None:
    text = f"description='w'\n# one{separator}line\n[sysctl]\n'vm.swappiness'=10\n"
    profile = library(tmp_path, web=text).load("web", FACTS)
    assert profile.source_of("sysctl.vm.swappiness") == "web:4"


@pytest.mark.behaviour("BUG-SK85")
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_the_size_of_a_file_is_counted_in_bytes(tmp_path: Path, start: str) -> None:
    """Characters of several bytes do not hide settings at the end of the file."""
    comment = "# " + "é" * (MAX_BYTES // 2) + "\n"
    text = f"{start}description='w'\n{comment}[sysctl]\n'vm.swappiness'=10\n"
    with pytest.raises(ConfigError, match="is larger than"):
        library(tmp_path, web=text).load("web", FACTS)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "web.toml").write_bytes(b"description='\xff'")
    with pytest.raises(ConfigError, match="cannot read profile"):
        Library([tmp_path], SETTINGS).load("web", FACTS)


@pytest.mark.parametrize("name", ["wbe", "../web", "/etc/passwd", "", "WEB"])
def test_a_name_that_is_no_profile_is_not_found(tmp_path: Path, name: str) -> None:
    with pytest.raises(NotFound) as caught:
        library(tmp_path, web="description='w'").load(name, FACTS)
    assert "known: web" in caught.value.hint


def test_all_settings_are_checked_before_any_is_wanted(fake: FakeHost, tmp_path: Path) -> None:
    text = (
        "description='w'\n[sysctl]\n'vm.nr_hugepages'=3\n'vm..x'=1\n'kernel.core_pattern'='|x'\n"
        "'vm.dirty_bytes'=4096000\n'vm.dirty_ratio'=3\n'kernel.panic'=\"1\\n2\"\n"
        "[hugepages]\npages_2m=1\npercent_of_memory=3\n[kernel]\ncmdline=['init=/bin/sh']"
    )
    profile = library(tmp_path, web=text).load("web", FACTS)
    with pytest.raises(ConfigError) as caught:
        target_of(profile, fake.host())
    assert [e.field for e in caught.value.errors] == [
        "sysctl.vm.nr_hugepages",
        "sysctl.vm..x",
        "sysctl.kernel.core_pattern",
        "sysctl.vm.dirty_bytes",
        "sysctl.kernel.panic",
        "hugepages",
        "kernel.cmdline",
    ]


@pytest.mark.parametrize("memory_mib", [960, 1024, 4096, 65536])
@pytest.mark.parametrize("name", Library([PROFILES], SETTINGS).names())
def test_the_shipped_profiles_fit_hosts_of_any_size(
    tmp_path: Path, name: str, memory_mib: int
) -> None:
    fake = FakeHost(tmp_path, memory_mib=memory_mib)
    assert shipped(fake, name).wanted


@pytest.mark.behaviour("HP2")
def test_the_shipped_profiles_differ_where_it_shows(fake: FakeHost) -> None:
    facts = read_facts(fake.fs)
    library = Library([PROFILES], SETTINGS)
    loaded = {name: library.load(name, facts) for name in ("web", "cache", "batch")}
    for sysctl in ("vm.swappiness", "net.core.somaxconn"):
        assert len({values_of(p)[sysctl].value for p in loaded.values()}) == 3
    assert loaded["cache"].section("hugepages")
    assert [name for name, p in loaded.items() if p.section("kernel")] == ["batch"]


@pytest.mark.behaviour("F-67")
def test_a_profile_that_starves_the_host_is_refused(fake: FakeHost) -> None:
    text = "description='w'\n[hugepages]\npages_2m=300"
    profile = library(fake.root, greedy=text).load("greedy", FACTS)
    with pytest.raises(Unprocessable, match=r"600 MiB of 1024 MiB.*512 MiB must stay") as caught:
        target_of(profile, fake.host())
    assert caught.value.hint == "at most 256 pages of 2 MiB fit this host"


def test_a_wanted_value_names_its_file(fake: FakeHost) -> None:
    wanted = {w.setting: w for w in shipped(fake, "web").wanted}
    assert wanted["sysctl.vm.swappiness"] == WantedSetting(
        setting="sysctl.vm.swappiness", value="10", source="web:15"
    )
    assert wanted["sysctl.kernel.panic"].source == "base:9"
    assert not wanted["sysctl.kernel.numa_balancing"].required
