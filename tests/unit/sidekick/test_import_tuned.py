"""TuneD's profiles are converted line by line, and every lost line is reported."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from fake_host import FakeHost

from sidekick.cli import main
from sidekick.profile import Library, Profile
from sidekick.settings import SETTINGS, settings_of
from sidekick.tuned import convert
from wire.errors import InvalidInput, NotFound

FAST = """
[main]
summary=Much throughput

[variables]
# a comment
thp = always
cores = ${f:cpulist_invert:1}

[cpu]
governor=schedutil|performance
energy_perf_bias=performance
energy_performance_preference=performance
no_turbo=0
force_latency=99

[tuned_disks]
type=disk
devices=*
readahead=>4096
elevator=none

[vm]
transparent_hugepages=${thp}
dirty_ratio = 40

[sysctl]
vm.swappiness=10
net.ipv4.tcp_rmem="4096 131072 16777216"
kernel.sched_min_granularity_ns = 10000000
kernel.core_pattern=|/bin/x
net.core.somaxconn=>2048

[net]
ring = rx 4096 tx 512
features = gro off hw-tc-offload on
nf_conntrack_hashsize=131072

[modules]
tcp-bbr = +r
nvme = poll_queues=4

[service]
service.irqbalance = stop,disable
service.sshd = stop

[script]
script=${i:PROFILE_DIR}/script.sh

[bootloader]
cmdline_fast=+nosmt init=/bin/sh

[sysfs]
/sys/devices/system/cpu/intel_pstate/no_turbo = 1
/sys/kernel/mm/ksm/run = 0
"""
CHILD = "[main]\ninclude=fast, other\nsummary=child\n[scheduler]\nsched_x=1\n[unheard]\na=b\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("fast", FAST), ("the_child", CHILD)):
        (tmp_path / "tuned" / name).mkdir(parents=True)
        (tmp_path / "tuned" / name / "tuned.conf").write_text(text)
    return tmp_path / "tuned"


def test_an_option_with_a_counterpart_is_converted(folder: Path, fake: FakeHost) -> None:
    fast = next(c for c in convert(folder, lambda kind, word: "") if c.name == "fast")
    assert tomllib.loads(fast.text) == {
        "description": "Much throughput",
        "power": {
            "governor": ["schedutil", "performance"],
            "energy_preference": ["performance"],
        },
        "turbo": {"mode": "off"},
        "cstates": {"max_latency_us": 99},
        "block": {"flash": {"scheduler": "none"}, "rotating": {"scheduler": "none"}},
        "thp": {"enabled": "always"},
        "sysctl": {
            "vm.dirty_ratio": {"value": 40, "required": False},
            "vm.swappiness": {"value": 10, "required": False},
            "net.ipv4.tcp_rmem": {"value": [4096, 131072, 16777216], "required": False},
            "kernel.sched_min_granularity_ns": {"value": 10000000, "required": False},
            "kernel.core_pattern": {"value": "|/bin/x", "required": False},
        },
        "nic": {"rx_ring": 4096, "tx_ring": 512, "gro": "off"},
        "modules": {"load": ["tcp_bbr"]},
        "services": {"stopped": ["irqbalance.service", "sshd.service"]},
        "kernel": {"cmdline": ["nosmt", "init=/bin/sh"]},
    }


def run(fake: FakeHost, capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    options = [f"--root={fake.root}", f"--state={fake.state.folder}"]
    code = main([*options, "import-tuned", *argv], make_host=lambda root: fake.host(root))
    return code, capsys.readouterr().out


def test_a_line_that_a_profile_may_not_have_is_reported_with_its_number(
    folder: Path, fake: FakeHost, capsys: pytest.CaptureFixture[str]
) -> None:
    into = fake.root / "imported"
    code, out = run(fake, capsys, str(folder), "--into", str(into))
    assert code == 2
    reported = {line.split("\t")[1]: line.split("\t") for line in out.splitlines()[:-1]}
    assert reported["[sysctl] kernel.core_pattern = |/bin/x"][2] == "makes the kernel run programs"
    assert reported["[bootloader] cmdline_fast = +nosmt init=/bin/sh"][2].startswith("init ")
    assert reported["[service] service.sshd = stop"][2].startswith(
        "sshd.service may not be started or stopped by a profile"
    )
    assert (
        reported["[main] include = fast, other"][2] == "a profile has one parent; other is left out"
    )
    assert reported["[net] features = gro off hw-tc-offload on"][2] == (
        "hw-tc-offload has no counterpart; the rest is converted"
    )
    where = reported["[cpu] energy_perf_bias = performance"][0]
    assert (
        where
        == f"{folder}/fast/tuned.conf:{FAST.splitlines().index('energy_perf_bias=performance') + 1}"
    )
    assert all(line[2] for line in reported.values())
    assert out.splitlines()[-1] == "2 profiles, 15 lines not converted"
    library = Library([into], SETTINGS)
    for name in library.names():
        profile = library.load(name, {})
        assert [e for s in settings_of(profile.sections) for e in s.check(profile)] == []
    assert library.load("the-child", {}).lineage == ("the-child", "fast")


def test_every_line_is_converted_or_reported(
    folder: Path, fake: FakeHost, capsys: pytest.CaptureFixture[str]
) -> None:
    """The test compares the output with a count of the input, section by section."""
    _, out = run(fake, capsys, str(folder), "-o", "json")
    for converted in json.loads(out):
        name = {"the-child": "the_child"}.get(converted["name"], converted["name"])
        text = (folder / name / "tuned.conf").read_text()
        for line in text.splitlines():
            key, equals, value = line.partition("=")
            quiet = key.strip() in (
                "type",
                "thp",
                "cores",
                "devices",
                "transparent_hugepages",
            ) or line.startswith("#")
            if not equals or quiet:
                continue
            words = value.strip().strip('"').replace("|", " ").split() or [value]
            reported = any(key.strip() in left["line"] for left in converted["left"])
            assert (
                reported
                or any(word.strip("+,") in converted["text"] for word in words)
                or (key in ("no_turbo",) and "turbo" in converted["text"])
            ), line


def test_files_that_are_there_are_not_overwritten(
    folder: Path, fake: FakeHost, capsys: pytest.CaptureFixture[str]
) -> None:
    into = fake.root / "imported"
    into.mkdir()
    (into / "fast.toml").write_text("mine")
    assert run(fake, capsys, str(folder), "--into", str(into))[0] == 64
    assert [p.name for p in into.iterdir()] == ["fast.toml"]
    assert (into / "fast.toml").read_text() == "mine"


@pytest.mark.behaviour("BUG-SK65")
@pytest.mark.parametrize("into", ["file", "file/below", "/proc/twine"])
def test_a_folder_that_cannot_be_written_is_one_error(
    folder: Path, fake: FakeHost, capsys: pytest.CaptureFixture[str], into: str
) -> None:
    """Formerly it was a traceback, and a full disk left half a profile."""
    (fake.root / "file").write_text("mine")
    line = [f"--root={fake.root}", "import-tuned", str(folder), "--into", str(fake.root / into)]
    assert main(line, make_host=fake.host) == 1
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.behaviour("BUG-SK64")
@pytest.mark.parametrize(("one", "other"), [("my_fast", "my-fast"), ("Fast", "fast"), ("---", "")])
def test_two_folders_that_would_be_one_profile_are_refused(
    folder: Path, one: str, other: str
) -> None:
    """Formerly one of both was lost without a message."""
    for name in filter(None, (one, other)):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "tuned.conf").write_text(CHILD)
    with pytest.raises(InvalidInput, match=f"'{one}'.* would be the profile"):
        convert(folder, lambda kind, word: "")


def test_a_folder_without_profiles_is_reported(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"has no tuned\.conf"):
        convert(tmp_path, lambda kind, word: "")


CONDITIONAL = r"""
[main]
summary=As TuneD ships it

[variables]
thunderx_cpuinfo_regex=CPU part\s+:\s+(0x0?516)|(0x0?af)

[vm]
dirty_ratio=40
[service]
service.a=stop

[vm.thunderx]
type=vm
uname_regex=aarch64
cpuinfo_regex=${thunderx_cpuinfo_regex}
transparent_hugepages=never

[vm.arm]
type=vm
uname_regex=aarch64
transparent_hugepages=madvise
[sysctl.intel]
type=sysctl
uname_regex=x86_64
cpuinfo_regex=vendor_id\s+:\s+GenuineIntel
kernel.numa_balancing=0
[service.arm]
type=service
uname_regex=aarch64
service.b=stop

[disk.sda]
type=disk
devices=sda
elevator=none
[disk.all]
type=disk
devices=*
readahead=8192 s
[net.eth0]
type=net
devices_udev_regex=(ID_MODEL=x)
ring=rx 4096
[sysctl.off]
type=sysctl
enabled=false
vm.swappiness=1
"""


@pytest.mark.behaviour("BUG-SK20")
def test_a_condition_is_converted_or_its_instance_is_left_out(tmp_path: Path) -> None:
    """TuneD's own throughput-performance was converted to `thp = never` on every x86 host."""
    (tmp_path / "tuned.conf").write_text(CONDITIONAL)
    (found,) = convert(tmp_path, lambda table, key: "")
    raw = tomllib.loads(found.text)
    assert "thp" not in raw
    assert raw["when"] == [
        {
            "if": "cpu.arch == 'arm64'",
            "thp": {"enabled": "madvise"},
            "services": {"stopped": ["a.service", "b.service"]},
        },
        {
            "if": "cpu.arch == 'amd64' and cpu.vendor == 'intel'",
            "sysctl": {"kernel.numa_balancing": {"value": 0, "required": False}},
        },
    ]
    assert raw["block"] == {"flash": {"read_ahead_kb": 4096}, "rotating": {"read_ahead_kb": 4096}}
    assert "sysctl.off" not in found.text
    reason = "holds only where cpuinfo_regex matches: no fact is equivalent"
    assert [(left.line, left.reason) for left in found.left] == [
        *(
            (f"[vm.thunderx] {line}", reason)
            for line in (
                "uname_regex = aarch64",
                "cpuinfo_regex = ${thunderx_cpuinfo_regex}",
                "transparent_hugepages = never",
            )
        ),
        *(
            (f"[disk.sda] {line}", "holds for devices=sda only: name devices by hand")
            for line in ("devices = sda", "elevator = none")
        ),
        *(
            (
                f"[net.eth0] {line}",
                "holds for devices_udev_regex=(ID_MODEL=x) only: name devices by hand",
            )
            for line in ("devices_udev_regex = (ID_MODEL=x)", "ring = rx 4096")
        ),
    ]
    (tmp_path / f"{found.name}.toml").write_text(found.text)
    for arch, enabled in (("arm64", "madvise"), ("amd64", None)):
        facts = {"cpu.arch": arch, "cpu.vendor": "intel"}
        thp = Library([tmp_path], SETTINGS).load(found.name, facts).section("thp")
        assert (thp.enabled if thp else None) == enabled


@pytest.mark.behaviour("BUG-SK20")
def test_values_of_a_parent_are_not_kept_silently(tmp_path: Path) -> None:
    """`enabled=0` and `replace=1` restrict the inherited values."""
    text = "[main]\ninclude=base\n[vm]\nenabled=0\n[sysctl]\nreplace=1\nvm.swappiness=1\n"
    (tmp_path / "tuned.conf").write_text(text)
    (found,) = convert(tmp_path, lambda table, key: "")
    reasons = {left.line: left.reason for left in found.left}
    assert reasons["[vm] enabled = 0"] == "cannot switch off a setting of a parent"
    assert reasons["[sysctl] replace = 1"] == "cannot remove a setting of a parent"


@pytest.mark.behaviour("BUG-SK22")
def test_a_folder_of_current_tuned_is_known(tmp_path: Path) -> None:
    """TuneD 2.23 and later keeps its profiles one folder deeper."""
    folder = tmp_path / "profiles" / "mine"
    folder.mkdir(parents=True)
    (folder / "tuned.conf").write_text("[sysctl]\nvm.swappiness=1\n")
    (tmp_path / "recommend.d").mkdir()
    assert [c.name for c in convert(tmp_path, lambda table, key: "")] == ["mine"]


def test_a_number_that_toml_does_not_have_is_kept_as_text(tmp_path: Path) -> None:
    """TuneD's sap-netweaver became an unreadable profile: TOML has 63 bits."""
    (tmp_path / "own").mkdir()
    most = "18446744073692774399"
    (tmp_path / "own" / "tuned.conf").write_text(
        f"[sysctl]\nkernel.shmmax={most}\nvm.swappiness=1\n"
    )
    (found,) = convert(tmp_path, lambda table, key: "")
    sysctls = tomllib.loads(found.text)["sysctl"]
    assert sysctls["kernel.shmmax"] == {"value": most, "required": False}
    assert sysctls["vm.swappiness"]["value"] == 1
    assert SETTINGS["sysctl"].check(Profile(name="own", sections={"sysctl": sysctls})) == []
