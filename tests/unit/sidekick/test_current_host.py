"""A profile is checked against the current host: disks and CPUs may change after `apply`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from recorded import CPUS, RecordedHost

from agent.api import Location
from agent.identity.identity import CandidateIdentity, write_location
from sidekick import look
from sidekick.cli import main
from sidekick.observe import record_for_boot
from sidekick.record import Record
from sidekick.report import ApplyOutcome, ProfileState, Report
from sidekick.setting import Host

PROFILE = """description = "disks and a number of the processors"
[block.flash]
read_ahead_kb = 64
[block.rotating]
read_ahead_kb = 64
[sysctl]
"net.core.netdev_max_backlog" = "= cpu.count * 1000"
"""
BACKLOG = "sysctl.net.core.netdev_max_backlog"


class Bench:
    """A recorded host, a folder with one profile, and the command."""

    def __init__(self, folder: Path, text: str = PROFILE) -> None:
        self.fake = RecordedHost(folder / "host", "intel")
        self.profiles = folder / "profiles"
        self.profiles.mkdir()
        self.write(text)
        fs = self.fake.fs
        self.disk = fs.path(f"/sys/block/{fs.names('/sys/block')[0]}")

    def write(self, text: str) -> None:
        (self.profiles / "mine.toml").write_text(text)

    def run(self, *arguments: str) -> int:
        fake = self.fake
        options = [
            f"--root={fake.root}",
            f"--state={fake.state.folder}",
            f"--profiles={self.profiles}",
        ]

        def host(root: Path) -> Host:
            return fake.host(root)

        return main([*options, *arguments], make_host=host)

    def add_disk(self, read_ahead_kb: int = 128) -> None:
        new = self.disk.with_name("nvme9n1")
        shutil.copytree(self.disk, new)
        (new / "queue/read_ahead_kb").write_text(f"{read_ahead_kb}\n")

    def remove_disk(self) -> None:
        shutil.rmtree(self.disk.with_name("nvme9n1"))

    def report(self) -> Report:
        found = self.fake.state.read_status()
        assert found
        return found

    def outcome(self, setting: str) -> ApplyOutcome | None:
        return next((s.outcome for s in self.report().settings if s.setting == setting), None)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    made = Bench(tmp_path)
    assert made.run("apply-profile", "mine") == 0
    assert made.run("verify") == 0
    return made


@pytest.mark.behaviour("BUG-SK34")
def test_bug_sk34_a_disk_that_appears_is_found_by_verify_and_plan(bench: Bench) -> None:

    bench.add_disk()
    assert bench.run("plan", "mine") == 2
    assert bench.run("verify") == 2
    found = {s.setting: s for s in bench.report().settings}["block.nvme9n1.read_ahead_kb"]
    assert (found.outcome, found.wanted, found.actual) == (ApplyOutcome.DRIFTED, "64", "128")
    assert "lacked it when the profile was applied" in found.detail
    assert bench.run("apply-profile", "mine") == 0
    assert bench.run("verify") == 0
    assert bench.run("rollback") == 0
    read = (bench.disk.with_name("nvme9n1") / "queue/read_ahead_kb").read_text()
    assert read.strip() == "128"


@pytest.mark.behaviour("BUG-SK71")
@pytest.mark.parametrize(("removable", "kept"), [("0", "512"), ("1", "128")])
def test_a_disk_that_replaces_another_one_keeps_its_own_value(
    bench: Bench, removable: str, kept: str
) -> None:
    """The rollback gave it the value of the disk that had its name before.

    A medium in a drive is another disk to the kernel, but the queue is the drive's.
    """
    bench.add_disk()
    new = bench.disk.with_name("nvme9n1")
    (new / "diskseq").write_text("7\n")
    (new / "removable").write_text(f"{removable}\n")
    assert bench.run("apply-profile", "mine") == 0
    bench.remove_disk()
    bench.add_disk(512)
    (new / "diskseq").write_text("8\n")
    (new / "removable").write_text(f"{removable}\n")
    assert bench.run("apply-profile", "mine") == 0
    assert (new / "queue/read_ahead_kb").read_text().strip() == "64"
    assert bench.run("rollback") == 0
    assert (new / "queue/read_ahead_kb").read_text().strip() == kept


@pytest.mark.behaviour("BUG-SK71")
def test_originals_of_an_interface_belong_to_its_index(bench: Bench) -> None:
    host, name = bench.fake.host(), "nic.eth0.rx_ring"
    boot_id = host.hardware.boot_id
    record = Record(boot_id=boot_id, originals={name: "256"}, devices={name: "2"})
    assert record_for_boot(host, record) == record
    assert record_for_boot(host, replace(record, devices={name: "3"})) == Record(boot_id=boot_id)
    gone = "nic.eth9.rx_ring"
    record = replace(record, originals={gone: "256"}, devices={gone: "3"})
    assert record_for_boot(host, record) == record


@pytest.mark.behaviour("BUG-SK71")
def test_a_rollback_leaves_a_replaced_disk_as_it_is(bench: Bench) -> None:
    bench.add_disk()
    new = bench.disk.with_name("nvme9n1")
    (new / "diskseq").write_text("7\n")
    assert bench.run("apply-profile", "mine") == 0
    bench.remove_disk()
    bench.add_disk(512)
    (new / "diskseq").write_text("8\n")
    assert bench.run("rollback") == 0
    assert (new / "queue/read_ahead_kb").read_text().strip() == "512"


@pytest.mark.behaviour("BUG-SK34")
def test_bug_sk34_a_disk_that_goes_away_is_no_drift(bench: Bench) -> None:
    bench.add_disk()
    assert bench.run("apply-profile", "mine") == 0
    bench.remove_disk()
    assert bench.run("verify") == 0
    assert bench.outcome("block.nvme9n1.read_ahead_kb") is None
    assert bench.run("plan", "mine") == 0
    assert bench.run("rollback") == 0


@pytest.mark.behaviour("BUG-SK35")
def test_a_processor_that_goes_offline_changes_the_wanted_values(bench: Bench) -> None:

    before = bench.fake.fs.read("/proc/sys/net/core/netdev_max_backlog")
    bench.fake.fs.path(f"{CPUS}/online").write_text("0-1\n")
    assert bench.run("plan", "mine") == 2
    assert bench.run("verify") == 2
    found = {s.setting: s for s in bench.report().settings}[BACKLOG]
    assert (found.wanted, found.actual) == ("2000", before)
    assert bench.run("apply-profile", "mine") == 0
    assert bench.fake.fs.read("/proc/sys/net/core/netdev_max_backlog") == "2000"


@pytest.mark.behaviour("BUG-SK34", "BUG-SK35")
@pytest.mark.parametrize("change", [Bench.add_disk, lambda b: _offline(b)])
def test_bug_sk34_the_timers_check_detects_that_the_host_changed(
    bench: Bench, change: Callable[[Bench], None]
) -> None:
    assert bench.run("verify", "--timer") == 0
    assert look.is_unchanged(str(bench.fake.state.folder))
    change(bench)
    assert not look.is_unchanged(str(bench.fake.state.folder))


def _offline(bench: Bench) -> None:
    bench.fake.fs.path(f"{CPUS}/online").write_text("0-1\n")


@pytest.mark.behaviour("BUG-SK34")
def test_bug_sk34_the_timer_sets_up_a_new_device_if_repair_is_enabled(bench: Bench) -> None:

    config = bench.fake.root / "etc/twine/sidekick.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text("repair_drift = true\n")
    bench.add_disk()
    assert bench.run("verify", "--timer") == 0
    assert bench.report().state is ProfileState.VERIFIED
    read = (bench.disk.with_name("nvme9n1") / "queue/read_ahead_kb").read_text()
    assert read.strip() == "64"


@pytest.mark.behaviour("BUG-SK34")
def test_bug_sk34_a_boot_applies_the_profile_to_the_present_disks(bench: Bench) -> None:

    bench.fake.fs.write("/proc/sys/kernel/random/boot_id", "another")
    bench.add_disk()
    assert bench.run("resume") == 0
    assert bench.outcome("block.nvme9n1.read_ahead_kb") is ApplyOutcome.APPLIED


@pytest.mark.behaviour("BUG-SK34")
def test_an_edited_file_is_no_drift_before_it_is_applied(bench: Bench) -> None:
    bench.write(PROFILE.replace("= 64", "= 32"))
    assert bench.run("verify") == 0
    (bench.profiles / "mine.toml").unlink()
    assert bench.run("verify") == 0
    bench.write("not toml [")
    assert bench.run("verify") == 0


@pytest.mark.behaviour("BUG-SK35")
def test_bug_sk35_a_profile_that_no_longer_fits_is_reported_without_an_error(bench: Bench) -> None:

    text = PROFILE.replace("cpu.count * 1000", "60000 // (cpu.count - 2)")
    bench.write(text)
    assert bench.run("apply-profile", "mine") == 0
    _offline(bench)
    assert bench.run("verify") == 2
    assert bench.report().state is ProfileState.DRIFTED
    assert "does not fit the present host" in bench.report().detail


@pytest.mark.behaviour("BUG-SK35")
def test_bug_sk35_a_setting_that_changes_facts_is_settled_in_one_command(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, PROFILE + '[smt]\nmode = "off"\n')
    assert bench.run("apply-profile", "mine") == 0
    assert bench.run("verify") == 0
    assert bench.run("plan", "mine") == 0
    assert bench.run("rollback") == 0
    assert bench.fake.state.load().originals == {}


TURBO = """description = "Turbo where there is power"
[[when]]
if = "location.datacenter in ['dc1', 'dc3'] and machine.type == 'web'"
sysctl."vm.swappiness" = 7
"""


@pytest.mark.behaviour("HP10")
@pytest.mark.parametrize(("datacenter", "wanted"), [("dc1", "7"), ("dc2", "60")])
def test_hp10_a_profile_may_use_the_location_of_the_machine(
    tmp_path: Path, datacenter: str, wanted: str
) -> None:
    bench = Bench(tmp_path, TURBO)
    candidate = CandidateIdentity(
        machine="m1",
        address="127.0.0.1:1",
        facts=None,  # type: ignore[arg-type]
        location=Location(datacenter=datacenter),
        machine_type="web",
    )
    bench.fake.fs.write("/proc/sys/vm/swappiness", "60")
    write_location(candidate, bench.fake.fs.path("/etc/twine/location.toml"))
    assert bench.run("apply-profile", "mine") == 0
    assert bench.fake.fs.read("/proc/sys/vm/swappiness") == wanted


@pytest.mark.behaviour("HP10")
@pytest.mark.parametrize("text", ["not toml [", "colour = 'red'\n", "msb = 3\n"])
def test_hp10_a_bad_file_of_the_location_is_one_error(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = Bench(tmp_path, TURBO)
    path = bench.fake.fs.path("/etc/twine/location.toml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert bench.run("plan", "mine") == 78
    assert "/etc/twine/location.toml" in capsys.readouterr().err


@pytest.mark.behaviour("BUG-SK34")
def test_a_record_of_an_earlier_release_is_verified_as_it_was_written(bench: Bench) -> None:

    record = bench.fake.state.load()
    assert record.applied
    fields = {name: getattr(record, name) for name in Record.__struct_fields__}
    applied = record.applied
    old = type(applied)(name=applied.name, wanted=applied.wanted)
    bench.fake.state.save(Record(**{**fields, "applied": old}))
    bench.add_disk()
    assert bench.run("verify") == 0
