"""A scratch file system in a file, on this kernel: made, shared, made again, removed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys
from pathlib import Path
from sidekick.context import real_host
from sidekick.report import SettingChange, ApplyOutcome
from sidekick.settings.scratch import ScratchSetting

MIB = 1 << 20
file, place = Path(sys.argv[1]), Path(sys.argv[2])
setting, host, name = ScratchSetting(), real_host(Path("/")), f"scratch.{sys.argv[1]}"

def to(value):
    before = setting.read(host, name)
    made = setting.apply(host, SettingChange(setting=name, before=before or "", after=value))
    assert (made.outcome, made.actual) == (ApplyOutcome.APPLIED, value), made

def size():
    found = os.statvfs(place)
    return found.f_blocks * found.f_frsize // MIB

to(f"btrfs at {place} noatime")
assert size() == 600
(place / "data").write_text("x")
to(f"btrfs:300 at {place} noatime")
assert (size(), [*place.iterdir()]) == (300, [])
to(f"btrfs at {place}")
assert size() == 600
to("empty")
with file.open("rb") as device:
    assert not any(device.read(MIB))
assert not os.path.ismount(place)
print("ok")
"""


@pytest.mark.behaviour("HP2", "HP10")
@pytest.mark.root
def test_btrfs_in_a_file_is_made_in_a_share_and_taken_back() -> None:
    name = f"twine-scratch-{os.getpid()}"
    file, place = Path(f"/var/lib/{name}.img"), Path(f"/mnt/{name}")
    with file.open("wb") as made:
        made.truncate(600 << 20)
    try:
        argv = ["unshare", "--mount", sys.executable, "-c", SCRIPT, str(file), str(place)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert (done.stdout, done.returncode) == ("ok\n", 0), done.stderr
    finally:
        file.unlink()
        if place.exists():
            place.rmdir()
