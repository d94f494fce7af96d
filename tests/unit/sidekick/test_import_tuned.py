"""TuneD's profiles become ours, line by line, and no line is lost in silence."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from fake_host import FakeHost

from sidekick.cli import main
from sidekick.profile import Library
from sidekick.settings import SETTINGS
from sidekick.tuned import convert
from wire.errors import NotFound

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
devices=sda
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


def test_what_has_a_counterpart_is_converted(folder: Path, fake: FakeHost) -> None:
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


def test_what_a_profile_of_ours_may_not_say_is_told_with_its_line(
    folder: Path, fake: FakeHost, capsys: pytest.CaptureFixture[str]
) -> None:
    into = fake.root / "imported"
    code, out = run(fake, capsys, str(folder), "--into", str(into))
    assert code == 2
    told = {line.split("\t")[1]: line.split("\t") for line in out.splitlines()[:-1]}
    assert told["[sysctl] kernel.core_pattern = |/bin/x"][2] == "makes the kernel run programs"
    assert told["[bootloader] cmdline_fast = +nosmt init=/bin/sh"][2].startswith("init ")
    assert told["[service] service.sshd = stop"][2].startswith("sshd.service is not a profile's")
    assert told["[main] include = fast, other"][2] == "a profile has one parent; other is left out"
    assert told["[net] features = gro off hw-tc-offload on"][2] == (
        "hw-tc-offload has no counterpart; the rest is converted"
    )
    where = told["[cpu] energy_perf_bias = performance"][0]
    assert (
        where
        == f"{folder}/fast/tuned.conf:{FAST.splitlines().index('energy_perf_bias=performance') + 1}"
    )
    assert all(line[2] for line in told.values())
    assert out.splitlines()[-1] == "2 profiles, 16 lines not converted"
    library = Library([into], SETTINGS)
    for name in library.names():
        profile = library.load(name, {})
        assert [e for s in SETTINGS.values() for e in s.check(profile)] == []
    assert library.load("the-child", {}).lineage == ("the-child", "fast")


def test_no_line_is_neither_converted_nor_told(
    folder: Path, fake: FakeHost, capsys: pytest.CaptureFixture[str]
) -> None:
    """Comparing what comes out with a count of what went in, section by section."""
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
                "transparent_hugepages",
            ) or line.startswith("#")
            if not equals or quiet:
                continue
            words = value.strip().strip('"').replace("|", " ").split() or [value]
            told = any(key.strip() in left["line"] for left in converted["left"])
            assert (
                told
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


def test_a_folder_without_profiles_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"holds no tuned\.conf"):
        convert(tmp_path, lambda kind, word: "")
