"""Mount options on the kernel's own mounts, in a separate mount namespace."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.root

PRELUDE = """
import sys
from pathlib import Path
from sidekick.apply import ApplyRun
from sidekick.context import real_host
from sidekick.profile import Library
from sidekick.settings import SETTINGS
from sidekick.record import Target
from sidekick.state import StateFolder
from sidekick.targets import target_of
from wire.errors import HostError

folder = Path(sys.argv[1])
host, state = real_host(Path("/")), StateFolder(folder / "state")

def table():
    lines = [line.split(" ", 3) for line in open("/proc/self/mountinfo")]
    return {number: rest.replace("shared", "") for number, _, _, rest in lines}

def target(text):
    (folder / "p.toml").write_text("description='p'\\n" + text)
    return target_of(Library([folder], SETTINGS).load("p", {}), host)

def apply(wanted):
    report = ApplyRun(host, state, wanted).carry_out()
    return report, {s.setting: s.outcome.value for s in report.settings}

def changed(before):
    now = table()
    return {row.split()[1] for number, row in now.items() if before.get(number) != row}

before = table()
"""


def in_a_namespace(tmp_path: Path, prepare: str, script: str) -> None:
    argv = [sys.executable, "-c", PRELUDE + script, str(tmp_path)]
    shell = f'set -e; cd {tmp_path}; {prepare}; cd {ROOT}; exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", shell, "sh", *argv],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "ok\n", done.stdout + done.stderr


@pytest.mark.behaviour("BUG-SK33")
def test_a_read_only_bind_mount_changes_alone_and_comes_back(tmp_path: Path) -> None:
    """The file system below a read-only bind mount stays writable."""
    prepare = (
        "mkdir fs ro; mount -t tmpfs -o nosuid,nodev,relatime t fs; mkdir fs/in; "
        "mount --bind fs/in ro; mount -o remount,bind,ro,nodiratime ro; touch fs/x"
    )
    script = """
point = str(folder / "ro")
report, outcomes = apply(target(f"[mounts]\\n'{point}'={{atime='noatime'}}\\n"))
assert outcomes == {f"mounts.atime:{point}": "applied"}, report
assert changed(before) == {point}, changed(before)
(folder / "fs/y").write_text("still writable")
options = next(row for row in table().values() if row.split()[1] == point).split()[2]
assert {"ro", "noatime", "nodiratime", "nosuid", "nodev"} <= set(options.split(",")), options
apply(Target())
assert table() == before
(folder / "fs/z").write_text("still writable")
print("ok")
"""
    in_a_namespace(tmp_path, prepare, script)


@pytest.mark.behaviour("BUG-SK33")
def test_options_of_a_file_system_leave_its_mounts_as_they_are(tmp_path: Path) -> None:
    """`commit` and `lazytime` are set at the first mount, and a bind mount has none."""
    prepare = (
        "truncate -s 32M disk; mkfs.ext4 -q disk; mkdir fs bind; "
        "mount -o loop,nosuid disk fs; mount --bind fs bind; mount -o remount,bind,ro bind"
    )
    script = """
point, bind = str(folder / "fs"), str(folder / "bind")
text = "atime='strictatime', lazytime='on', commit=60"
report, outcomes = apply(target(f"[mounts]\\n'{point}'={{{text}}}\\n'{bind}'={{commit=30}}\\n"))
assert outcomes.pop(f"mounts.commit:{bind}") == "unsupported", report
assert set(outcomes.values()) == {"applied"}, report
own = {row.split()[1]: row.split()[2] for row in table().values()}
assert own[bind] == "ro,nosuid,relatime", own[bind]
assert own[point] == "rw,nosuid", own[point]
(folder / "fs/y").write_text("still writable")
assert changed(before) <= {point, bind}
apply(Target())
assert table() == before
print("ok")
"""
    in_a_namespace(tmp_path, prepare, script)


@pytest.mark.behaviour("BUG-SK33")
def test_a_covered_mount_is_left_alone(tmp_path: Path) -> None:
    """A mount is known by its id, not by its path."""
    prepare = "mkdir -p a/b; mount -t tmpfs one a/b; mount -t tmpfs two a; mkdir a/b"
    script = """
point = str(folder / "a/b")
report, outcomes = apply(target(f"[mounts]\\n'{point}'={{atime='noatime'}}\\n"))
assert report.rolled_back, report
assert "covered" in report.detail, report
assert table() == before
print("ok")
"""
    in_a_namespace(tmp_path, prepare, script)


@pytest.mark.behaviour("BUG-SK39")
def test_a_state_disk_that_is_really_full_leaves_a_way_back(tmp_path: Path) -> None:
    """Rollback works on a file system without a free block."""
    prepare = "mkdir fs state; mount -t tmpfs t fs; mount -t tmpfs -o size=2M s state"
    script = """
import os
point = str(folder / "fs")
apply(target(f"[mounts]\\n'{point}'={{atime='noatime'}}\\n"))
assert (folder / "state/reserve").stat().st_blocks * 512 == 1 << 20

def fill():
    with open(folder / "state/others", "ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    assert os.statvfs(folder / "state").f_bavail == 0

fill()
report, _ = apply(target(f"[mounts]\\n'{point}'={{atime='strictatime'}}\\n"))
assert report.state == "verified", report
assert state.load().applied.wanted[0].value == "strictatime"
fill()
try:
    apply(Target())
except HostError as e:
    assert "state.json: No space left" in str(e)
assert table() == before
(folder / "state/others").unlink()
apply(Target())
assert table() == before
assert state.load().applied is None
print("ok")
"""
    in_a_namespace(tmp_path, prepare, script)
