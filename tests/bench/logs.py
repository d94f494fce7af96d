"""How fast do lines of a task reach the journal, and at what CPU, beside podman's journald driver?

Boots a guest with podman (or uses the lab named by --lab). One program writes the same lines of
92 characters in a root of busybox: as a task, and in `podman run --log-driver=journald`.
Measured inside, in turns, for each of the two (`agent`, `podman`):

    lines_per_s     lines by the time between the first and the last in the journal
    cpu_us          CPU of all that carries a line: copier or conmon, and journald
    arrived         share of the lines that are in the journal

`ratio_lines_per_s`, `ratio_cpu`: podman over ours. Medians of -n turns; --json for programs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from pathlib import Path

HERE = Path(__file__).resolve()
NEEDS_GUEST = True
LINES = 9_000
"""Below the rate that both limit: 10,000 lines in 10 s (a task), in 30 s (journald's default)."""
LINE = "a usual line of a log with some hundred characters in it, as programs of all kinds write it"
SETTLED_S = 20.0
"""The program waits so long before it writes; nothing of its start is measured."""
SCRIPT = f"""/bin/busybox sleep {SETTLED_S + 10:g}
/bin/busybox yes '{LINE}' | /bin/busybox head -n {LINES}
/bin/busybox sleep 100000"""
CGROUPS = Path("/sys/fs/cgroup")
JOURNALS = "system.slice/system-systemd\\x2djournald.slice/systemd-journald@twine-local.service"
OURS = ("hostcritical.slice/twine-output.service", JOURNALS)
QUIET_US = 3000
"""All was carried once so little CPU is used in three seconds."""
TURN_S = 600.0


def said(*words: str) -> str:
    """Return what a program says."""
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def cpu_us(cgroups: tuple[str, ...]) -> int:
    """Return the CPU time of cgroups in microseconds; one that is not there has none."""
    found = 0
    for name in cgroups:
        stat = CGROUPS / name / "cpu.stat"
        if stat.exists():
            found += int(stat.read_text().split()[1])
    return found


def lines(*where: str) -> list[float]:
    """Return when each line came, in seconds."""
    shown = said("journalctl", "--quiet", "-o", "json", "--output-fields=MESSAGE", *where)
    entries = map(json.loads, shown.splitlines())
    return [int(e["__REALTIME_TIMESTAMP"]) / 1e6 for e in entries if e.get("MESSAGE") == LINE]


def carried(cgroups: tuple[str, ...], where: tuple[str, ...]) -> dict[str, float]:
    """Return the figures of one turn, of a program that writes soon."""
    began, until = cpu_us(cgroups), time.monotonic() + TURN_S
    before = -1
    while time.monotonic() < until:
        time.sleep(3.0)
        now = cpu_us(cgroups)
        if now - began > LINES and now - before < QUIET_US:
            break
        before = now
    used = cpu_us(cgroups) - began
    at = lines(*where)
    assert len(at) > LINES // 2, f"only {len(at)} lines are in the journal"
    return {
        "lines_per_s": len(at) / max(at[-1] - at[0], 1e-6),
        "cpu_us": used / len(at),
        "arrived": len(at) / LINES,
    }


def of_agent(tar: Path, turn: int) -> dict[str, float]:
    """Return the figures of a task."""
    name = f"bench-{turn}"
    run = ("twine-agent", "run", name, "--image", str(tar), "--memory", "64MiB", "--no-wait")
    said(*run, "--", "/bin/sh", "-c", SCRIPT)
    time.sleep(SETTLED_S)
    unit = f"OBJECT_SYSTEMD_UNIT=twine-task-{name}.service"
    found = carried(OURS, ("--namespace=twine-local", unit))
    said("twine-agent", "stop", name)
    return found


def of_podman(tar: Path, turn: int) -> dict[str, float]:
    """Return the figures of a container."""
    name = f"bench-{turn}"
    run = ("podman", "run", "-d", "--rm", "--network=host", "--pull=never", "--name", name)
    whole = said(*run, "--log-driver=journald", "twine-bench", "/bin/sh", "-c", SCRIPT).strip()
    time.sleep(SETTLED_S)
    conmon = f"machine.slice/libpod-conmon-{whole}.scope"
    assert (CGROUPS / conmon).exists(), conmon
    journald = "system.slice/systemd-journald.service"
    found = carried((conmon, journald), (f"CONTAINER_ID_FULL={whole}",))
    subprocess.run(["podman", "rm", "-f", "-t", "0", name], check=True, capture_output=True)
    return found


def measure(tar: Path, n: int) -> dict[str, float]:
    """Return all figures."""
    said("podman", "import", "-q", str(tar), "twine-bench")
    kinds = {"agent": of_agent, "podman": of_podman}
    turns: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for turn in range(n):
        for kind, once in kinds.items():
            turns[kind].append(once(tar, turn))
    figures = {
        f"{kind}_{name}": round(statistics.median(one[name] for one in found), 2)
        for kind, found in turns.items()
        for name in found[0]
    }
    figures["ratio_lines_per_s"] = figures["podman_lines_per_s"] / figures["agent_lines_per_s"]
    figures["ratio_cpu"] = figures["podman_cpu_us"] / figures["agent_cpu_us"]
    return {name: round(value, 2) for name, value in figures.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lab", default="", help="use this lab instead of booting one")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("-n", type=int, default=3, help="turns of each")
    parser.add_argument("--inside", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(measure(Path(options.inside), options.n)))
        return
    from tests.bench.guest import inside, shown

    shown(
        lambda name: inside(name, HERE, "-n", str(options.n)),
        options.lab,
        *("--variant", "bench"),
        as_json=options.json,
    )


if __name__ == "__main__":
    main()
