"""The guest's systemd rates the exposure of tasks with relaxations, in every combination.

It rates the units that the agent requests, written as files, in the root file system of the guests.
This machine's kernel runs that systemd, so all 53 combinations take seconds.
"""

from __future__ import annotations

import itertools
import re
import subprocess
from pathlib import Path

import pytest

from agent.api import Network, NetworkMode, Relaxation, TaskSpec
from agent.api.relaxations import exposure_of
from agent.runtime.core.records import has_own_init
from agent.tasks.core import own_init
from agent.tasks.core.unit_properties import unit_properties
from vm_lab.image.build import build_image

SMALL = (Relaxation.PROC, Relaxation.NETLINK, Relaxation.SCHEDULING, Relaxation.DEBUG)
MIXTURES = [s for n in range(5) for s in itertools.combinations(SMALL, n)]
SETS = [*MIXTURES, (Relaxation.RAW,)]
NETWORKS = {
    "host": Network(),
    "host-unix": Network(unix_sockets=True),
    "private": Network(mode=NetworkMode.PRIVATE),
}
MACHINES = [(Relaxation.OWN_INIT,), (Relaxation.OWN_INIT, Relaxation.NESTED)]
UNITS = [(row, names) for row in NETWORKS for names in SETS]
UNITS += [("private", names) for names in MACHINES]
NOT_COMPARED = frozenset(
    (
        *("Description", "Environment", "CollectMode", "LogNamespace", "MemoryMax"),
        *("ExecStart", "ExecStartPre", "ExecStopPost", "BPFProgram"),
    )
)
"""Properties that have another form in a file and are not rated; so are all that end in USec."""
ASK = """
set -e
there=$(mktemp -d)
mount -o loop,ro,subvol=@ "$1" "$there"
mount -t proc proc "$there/proc"
mount --bind /dev "$there/dev"
mount -t tmpfs tmpfs "$there/run"
mount --bind "$2" "$there/tmp"
for unit in "$2"/*.service; do
    chroot "$there" systemd-analyze security --offline=true --no-pager "/tmp/$(basename "$unit")"
done
"""


def as_file(properties: dict[str, object]) -> str:
    """Return a unit's properties as lines of a file (systemd.exec(5))."""
    lines = ["[Service]", "ExecStart=/bin/true"]
    for name, value in properties.items():
        if name in NOT_COMPARED or name.endswith("USec") or name == "SystemCallErrorNumber":
            continue
        values = value if isinstance(value, tuple | list) else (value,)
        if name == "SystemCallFilter":
            denied = [str(w)[1:] for w in values if str(w).startswith("~")]
            allowed = [str(w) for w in values if not str(w).startswith("~")]
            lines += [f"{name}=~{' '.join(denied)}", f"{name}={' '.join(allowed)}"]
            continue
        lines.append(f"{name}={' '.join(_word(name, word) for word in values)}")
    return "\n".join(lines) + "\n"


def _word(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:04o}" if name == "UMask" else str(value)


@pytest.mark.behaviour("AG8", "F-83")
def test_the_exposure_of_each_combination_matches_systemd(tmp_path: Path) -> None:
    """A change of the sandbox without a change of the table is detected."""
    for row, names in UNITS:
        spec = TaskSpec(
            image="sha256:" + "0" * 64,
            command=["/bin/true"],
            network=NETWORKS[row],
            relaxations=list(names),
        )
        unit = unit_properties("web", spec, "/")
        if has_own_init(spec):
            unit = own_init.container_unit("web", spec, unit, own_init.FIRST_ID, "/s", "/r")
        (tmp_path / f"{row}__{'_'.join(names)}.service").write_text(as_file(unit))
    base = build_image("base", print, project=False, disk=False).folder / "base.raw"
    argv = ["unshare", "--mount", "--propagation", "private", "bash", "-c", ASK, "ask"]
    done = subprocess.run(
        [*argv, str(base), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    scores: dict[frozenset[str], float] = {}
    found = re.findall(r"exposure level for \S+?__(\S*)\.service: (\d+\.\d) ", done.stdout)
    assert len(found) == len(UNITS)
    for names, score in found:
        mixture = frozenset(names.split("_")) - {""}
        scores[mixture] = max(float(score), scores.get(mixture, 0.0))
    assert scores == {frozenset(str(n) for n in names): exposure_of(names) for _, names in UNITS}
