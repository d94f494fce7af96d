"""A scratch file system is made on empty space or over our own, never over other data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from recorded import RecordedHost, put

from agent.machine import Completed
from sidekick.apply import ApplyRun
from sidekick.facts import read_facts
from sidekick.profile import Library
from sidekick.record import Target
from sidekick.report import ApplyOutcome, ProfileState
from sidekick.settings import SETTINGS, scratch
from sidekick.settings.scratch import MIB, ScratchSetting
from sidekick.targets import target_of
from wire.errors import HostError, ProgramError

DEVICE = "/dev/nvme7n1"
SETTING = f"scratch.{DEVICE}"
MADE = {"mkfs.xfs": (0, b"XFSB", 108), "mkfs.btrfs": (0x10040, b"_BHRfS_M", 0x1012B)}


class Disks:
    """mkfs, mount, umount and dd, as far as sidekick uses them, on files below a root."""

    def __init__(self, fake: RecordedHost) -> None:
        self.fake = fake
        self.ran: list[str] = []
        self.others = fake.processes.run

    def run(self, argv: Sequence[str], *, timeout_s: float = 60.0, check: bool = True) -> Completed:
        name = argv[0].rpartition("/")[2]
        self.ran.append(name)
        fs, words = self.fake.fs, dict(a.split("=", 1) for a in argv if "=" in a)
        if name in MADE:
            at, magic, label = MADE[name]
            sizes = [w.removeprefix("size=").removesuffix("m") for w in argv if w[-1:] == "m"]
            size = int(sizes[0]) * MIB if sizes else 8 * MIB
            reported = {
                "mkfs.xfs": (4, (4096).to_bytes(4) + (size // 4096).to_bytes(8)),
                "mkfs.btrfs": (0x10070, size.to_bytes(8, "little")),
            }
            with fs.path(argv[-1]).open("r+b") as file:
                file.truncate(8 * MIB)
                for offset, data in ((at, magic), (label, b"twine\0"), reported[name]):
                    file.seek(offset)
                    file.write(data)
        elif name == "dd":
            block = {"1M": MIB, "1": 1}[words["bs"]]
            with fs.path(words["of"]).open("r+b") as file:
                file.seek(int(words["seek"]) * block)
                file.write(bytes(block * int(words["count"])))
        elif name == "mount" and argv[1] == "-t":
            line = f"{argv[5]} {argv[6]} {argv[2]} rw,{argv[4].replace(',loop', '')} 0 0"
            put(fs, "/proc/self/mounts", f"{fs.read('/proc/self/mounts')}\n{line}")
        elif name == "umount":
            lines = fs.read("/proc/self/mounts").splitlines()
            left = [line for line in lines if line.split()[1] != argv[1]]
            put(fs, "/proc/self/mounts", "\n".join(left))
        else:
            return self.others(argv, timeout_s=timeout_s, check=check)
        return Completed(0, "", "")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedHost:
    found = RecordedHost(tmp_path / "host", "intel")
    path = found.fs.path(DEVICE)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(8 * MIB))
    (found.root / "scratch").mkdir()
    for maker in MADE:
        put(found.fs, f"/sbin/{maker}", "a program")
    monkeypatch.setattr(scratch, "MIN_BYTES", {"xfs": 4 * MIB, "btrfs": 4 * MIB})
    monkeypatch.setattr(found.processes, "run", Disks(found).run)
    return found


def target(fake: RecordedHost, table: str = "") -> Target:
    folder = fake.root.parent / "profiles"
    folder.mkdir(exist_ok=True)
    (folder / "p.toml").write_text(f"description='p'\n[scratch]\ndevice='{DEVICE}'\n{table}\n")
    library = Library([folder], SETTINGS)
    return target_of(library.load("p", read_facts(fake.fs)), fake.host())


def apply(fake: RecordedHost, wanted: Target) -> tuple[ProfileState, dict[str, str]]:
    report = ApplyRun(fake.host(), fake.state, wanted).carry_out()
    return report.state, {s.setting: s.outcome.value for s in report.settings}


def read(fake: RecordedHost) -> str | None:
    return ScratchSetting().read(fake.host(), SETTING)


@pytest.mark.behaviour("HP2")
def test_an_empty_device_gets_a_file_system_and_is_empty_again(fake: RecordedHost) -> None:
    before = fake.everything()
    for kind in ("xfs", "btrfs"):
        state, outcomes = apply(fake, target(fake, f"filesystem='{kind}'\noptions=['noatime']"))
        assert (state, outcomes[SETTING]) == (ProfileState.VERIFIED, "applied")
        assert read(fake) == f"{kind} at /scratch noatime"
        again = ApplyRun(
            fake.host(), fake.state, target(fake, f"filesystem='{kind}'\noptions=['noatime']")
        )
        assert again.observation.plan.changes == ()
    assert apply(fake, Target())[0] is ProfileState.NONE
    assert read(fake) == "empty"
    assert fake.everything() == before


@pytest.mark.behaviour("HP2")
def test_a_boot_loses_the_mount_and_nothing_else(fake: RecordedHost) -> None:
    apply(fake, target(fake))
    data = fake.fs.path(DEVICE).read_bytes()
    lines = fake.fs.read("/proc/self/mounts").splitlines()
    put(fake.fs, "/proc/self/mounts", "\n".join(x for x in lines if "/scratch" not in x))
    put(fake.fs, "/proc/sys/kernel/random/boot_id", "boot-2")
    assert read(fake) == "xfs"
    state, outcomes = apply(fake, target(fake))
    assert (state, outcomes[SETTING]) == (ProfileState.VERIFIED, "applied")
    assert fake.fs.path(DEVICE).read_bytes() == data, "it was not made again"
    apply(fake, Target())
    assert read(fake) == "empty"


@pytest.mark.behaviour("HP2")
@pytest.mark.parametrize(
    ("at", "data"),
    [
        (0, b"XFSB"),
        (0x10040, b"_BHRfS_M"),
        (0x438, b"\x53\xef"),
        (510, b"\x55\xaa"),
        (8 * MIB - 4096, b"RAID"),
        (MIB - 1, b"x"),
    ],
    ids=["xfs", "btrfs", "ext4", "partitions", "at the end", "raw"],
)
def test_objects_with_user_data_are_not_touched(fake: RecordedHost, at: int, data: bytes) -> None:
    with fake.fs.path(DEVICE).open("r+b") as file:
        file.seek(at)
        file.write(data)
    before = fake.everything()
    state, outcomes = apply(fake, target(fake))
    assert (state, outcomes[SETTING]) == (ProfileState.VERIFIED, "unsupported")
    report = ApplyRun(fake.host(), fake.state, target(fake, "required=true")).carry_out()
    assert report.state is ProfileState.DEGRADED
    assert "holds foreign data" in report.settings[0].detail
    with pytest.raises(HostError, match="no longer belongs to sidekick"):
        ScratchSetting().write(fake.host(), SETTING, "xfs at /scratch")
    assert fake.everything() == before


def test_a_device_that_is_in_use_is_left_alone(fake: RecordedHost) -> None:
    mounts = fake.fs.read("/proc/self/mounts")
    put(fake.fs, "/proc/self/mounts", f"{mounts}\n{DEVICE} /data2 ext4 rw 0 0")
    assert read(fake) is None
    put(fake.fs, "/proc/self/mounts", mounts)
    assert read(fake) == "empty"
    put(fake.fs, "/sys/class/block/nvme7n1/holders/dm-0/dev", "253:0")
    assert read(fake) is None, "part of a mapped device"
    (fake.root / "sys/class/block/nvme7n1/holders/dm-0/dev").unlink()
    (fake.root / "sys/class/block/nvme7n1/holders/dm-0").rmdir()
    put(fake.fs, "/proc/swaps", f"Filename Type Size\n{DEVICE} partition 8")
    assert read(fake) is None, "swap"
    fake.fs.path("/proc/swaps").unlink()
    assert read(fake) == "empty"
    fake.fs.path(DEVICE).unlink()
    assert read(fake) is None


def test_a_mkfs_that_fails_is_undone(fake: RecordedHost, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fake.everything()
    good = fake.processes.run

    def run(argv: Sequence[str], **how: object) -> Completed:
        if argv[0].endswith("mount") and "-t" in argv:
            raise ProgramError("mount failed with 32: unknown filesystem type")
        return good(argv, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(fake.processes, "run", run)
    report = ApplyRun(fake.host(), fake.state, target(fake)).carry_out()
    assert (report.state, report.rolled_back) == (ProfileState.DEGRADED, True)
    assert report.settings[0].outcome is ApplyOutcome.FAILED
    assert fake.everything() == before


def test_a_path_that_climbs_is_refused(fake: RecordedHost) -> None:
    folder = fake.root.parent / "bad"
    folder.mkdir()
    (folder / "p.toml").write_text("description='p'\n[scratch]\ndevice='/dev/../etc/passwd'\n")
    profile = Library([folder], SETTINGS).load("p", read_facts(fake.fs))
    assert "contains .." in ScratchSetting().check(profile)[0].reason


def test_a_file_is_recognized_by_any_of_its_loop_devices(fake: RecordedHost) -> None:
    """Seen on a guest: the loop device of an earlier mount still existed when the next was made."""
    apply(fake, target(fake))
    mounts = fake.fs.read("/proc/self/mounts").replace(DEVICE, "/dev/loop1")
    put(fake.fs, "/proc/self/mounts", mounts)
    for loop in ("loop0", "loop1"):
        put(fake.fs, f"/sys/block/{loop}/loop/backing_file", DEVICE)
    assert read(fake) == "xfs at /scratch"


@pytest.mark.behaviour("HP2")
def test_a_remaining_loop_device_is_waited_for_and_then_reported(fake: RecordedHost) -> None:
    """The device would be mounted again, with cached data of the earlier file system."""
    apply(fake, target(fake))
    run = fake.processes.run

    def umount_leaves_a_loop(argv: Sequence[str], **options: float) -> Completed:
        done: Completed = run(argv, **options)  # type: ignore[arg-type]
        if argv[0] == "/bin/umount":
            put(fake.fs, "/sys/block/loop3/loop/backing_file", DEVICE)
        return done

    fake.processes.run = umount_leaves_a_loop  # type: ignore[method-assign,assignment]
    before = fake.time_s
    state, outcomes = apply(fake, target(fake, "filesystem='btrfs'"))
    assert (state, outcomes[SETTING]) == (ProfileState.DEGRADED, "failed")
    assert fake.time_s - before > scratch.LOOP_S
    assert fake.fs.path(DEVICE).read_bytes()[:4] == b"XFSB", "nothing was made next to it"


@pytest.mark.behaviour("HP2", "HP10")
@pytest.mark.parametrize("kind", ["xfs", "btrfs"])
def test_a_share_of_a_device_is_exposed_and_no_more(fake: RecordedHost, kind: str) -> None:

    before = fake.everything()
    half = target(fake, f"filesystem='{kind}'\nshare=0.5")
    assert apply(fake, half)[0] is ProfileState.VERIFIED
    assert read(fake) == f"{kind}:4 at /scratch"
    assert ApplyRun(fake.host(), fake.state, half).observation.plan.changes == ()
    more = target(fake, f"filesystem='{kind}'\nshare=0.75")
    assert apply(fake, more)[0] is ProfileState.VERIFIED
    assert read(fake) == f"{kind}:6 at /scratch"
    assert apply(fake, target(fake, f"filesystem='{kind}'"))[0] is ProfileState.VERIFIED
    assert read(fake) == f"{kind} at /scratch"
    apply(fake, Target())
    assert fake.everything() == before


def test_a_share_that_is_too_small_for_a_file_system_changes_nothing(fake: RecordedHost) -> None:
    before = fake.everything()
    assert apply(fake, target(fake, "share=0.25"))[0] is ProfileState.DEGRADED
    assert fake.everything() == before


@pytest.mark.behaviour("HP2")
def test_without_mkfs_the_device_is_not_changed(fake: RecordedHost) -> None:
    apply(fake, target(fake))
    before = fake.fs.path(DEVICE).read_bytes()
    fake.fs.path("/sbin/mkfs.btrfs").unlink()
    fake.fs.path(DEVICE).write_bytes(before[:-1] + b"x")
    state, outcomes = apply(fake, target(fake, "filesystem='btrfs'"))
    assert (state, outcomes[SETTING]) == (ProfileState.DEGRADED, "failed")
    assert fake.fs.path(DEVICE).read_bytes() == before[:-1] + b"x"
    assert read(fake) == "xfs at /scratch"
