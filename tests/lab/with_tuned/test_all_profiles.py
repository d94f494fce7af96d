"""Converts every profile that TuneD ships: each has TuneD's effect, or the difference is reported.

Runs in a guest that has TuneD. For each profile, ours is applied, inspected and rolled back; then
TuneD's is. Each setting that ours changed has TuneD's value. For each setting that only TuneD
changed, `import-tuned` reported the line as left out, or sidekick refused it with a reason.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from guest_host import differences, everything

INTO = Path("/run/of-tuned")
FOLDERS = ("/usr/lib/tuned/profiles", "/usr/lib/tuned")
OF_TUNED = re.compile(
    r"unit tuned\.service|/(etc|run)/(tuned|systemd)/.*|/boot/.*|ethtool|module .*"
)
"""State of TuneD's daemon itself, and boot entries that TuneD writes before a boot."""
OTHERWISE = {("postgresql", "sysctl vm.dirty_ratio")}
"""The profile sets `dirty_bytes` and its parent sets `dirty_ratio`, two names of one limit. TuneD
writes both, the parent's last, so the profile's value is lost. Ours keeps it (BUG-SK21).
"""


def run(*argv: str) -> tuple[int, str]:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def changed(before: dict[str, str], after: dict[str, str]) -> dict[str, str]:
    """Return the settings that differ, as text, without differences in blanks."""
    names = before.keys() | after.keys()
    return {
        name: " ".join(after.get(name, "(gone)").split())
        for name in names
        if before.get(name) != after.get(name)
    }


def imported() -> dict[str, Any]:
    """Convert all profiles; return the outcome of each by TuneD's name."""
    folder = next(f for f in map(Path, FOLDERS) if list(f.glob("*/tuned.conf")))
    shutil.rmtree(INTO, ignore_errors=True)  # left by an earlier run, in a guest that was kept
    code, output = run("sidekick", "import-tuned", str(folder), "--into", str(INTO), "-o", "json")
    assert code in (0, 2), output
    found = {one["name"]: one for one in json.loads(output)}
    names = {path.parent.name for path in folder.glob("*/tuned.conf")}
    assert len(found) == len(names), names ^ found.keys()
    return {name: found[name.replace("_", "-")] for name in sorted(names)}


def ancestors(name: str, found: dict[str, Any]) -> list[str]:
    """Return a profile and all profiles that it includes."""
    text = found[name]["text"]
    parent = re.search(r'^extends = "([^"]+)"', text, re.MULTILINE)
    by_name = {one["name"]: tuned for tuned, one in found.items()}
    above = ancestors(by_name[parent[1]], found) if parent and parent[1] in by_name else []
    return [name, *above]


@pytest.mark.behaviour("BUG-SK20", "BUG-SK22")
def test_every_tuned_profile_has_the_same_effect_or_reports_the_difference() -> None:
    """TuneD 2.25 (Debian 13) has 39 profiles."""
    run("systemctl", "stop", "sidekick-verify.timer")
    run("systemctl", "start", "tuned")
    found, wrong, rows = imported(), [], []
    assert len(found) > 30
    for name, one in found.items():
        run("tuned-adm", "off")
        before = everything()
        code, output = run("sidekick", f"--profiles={INTO}", "apply-profile", one["name"])
        ours = changed(before, everything())
        if code not in (0, 1, 2, 4, 5, 64):
            wrong.append(f"{name}: apply-profile ended with {code}: {output}")
        run("sidekick", f"--profiles={INTO}", "rollback")
        if left := differences(before, everything()):
            wrong.append(f"{name}: rollback left {left}")
            before = everything()
        took, words = run("tuned-adm", "profile", name)
        theirs = changed(before, everything())
        theirs = {k: v for k, v in theirs.items() if not OF_TUNED.fullmatch(k)}
        mine = {k: v for k, v in ours.items() if not k.startswith(("/etc/", "/run/", "module "))}
        if took == 0:
            other = {
                k: (v, theirs.get(k))
                for k, v in mine.items()
                if theirs.get(k, v) != v and (name, k) not in OTHERWISE
            }
            if other:
                wrong.append(f"{name}: ours and TuneD's: {other}")
        missing = sorted(theirs.keys() - mine.keys()) if took == 0 else []
        reported = [left for each in ancestors(name, found) for left in found[each]["left"]]
        if missing and not reported and code == 0:
            wrong.append(f"{name}: TuneD changed {missing}, and nothing was reported")
        rows.append(
            f"{name}: ours {code}, {len(mine)} changed; TuneD {took}, {len(theirs)} changed;"
            f" {len(reported)} lines reported; only TuneD's: {missing}"
        )
        print(rows[-1], *wrong[-1:], sep="\n", flush=True)
        if took:
            print(words)
    run("tuned-adm", "off")
    print("\n".join(rows))
    assert wrong == [], "\n".join(wrong)
