"""How fast do task lines reach the journal, at what CPU, compared with podman's journald driver?

Needs root, systemd's journald and podman (without one, its figures are None), but no guest: a
separate journald runs in a mount namespace, and keeps its data in memory. The same program writes
the same lines of 92 characters in turns into a task's pipe, which the program of
twine-output.service copies, and in a container of podman (`--log-driver=journald`). For each:

    lines_per_s     lines by the time between the first and the last in the journal
    cpu_us          CPU time per line of its carriers: copier or conmon, and journald
    arrived         share of the lines that are in the journal

`ratio_lines_per_s`, `ratio_cpu`: podman over ours. Medians of -n turns; --json for programs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve()
LINES, WRITERS = 9_000, 5
"""Lines of each writer: below the limit of a task, 10,000 lines in 10 s."""
LINE = "a usual line of a log with some hundred characters in it, as programs of all kinds write it"
SCRIPT = f"/bin/busybox yes '{LINE}' | /bin/busybox head -n {LINES}; echo over"
JOURNALD = "/usr/lib/systemd/systemd-journald"
NAMESPACE = "twine-local"
PIPES = Path("/run/twine/output")
TICKS = os.sysconf("SC_CLK_TCK")
LIMITS = ("--ulimit=nofile=256:256", "--ulimit=nproc=256:256")
"""A user without the right to raise limits can run it, too."""
WAIT_S = 300.0


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process (proc_pid_stat(5))."""
    words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(words[11]) + int(words[12])) / TICKS


def output_of(*words: str) -> str:
    """Return the output of a program."""
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout


def arrived(match: str) -> list[float]:
    """Return when the lines of one writer arrived; empty until all of them are there."""
    shown = output_of("journalctl", f"--namespace={NAMESPACE}", "-q", "-o", "json", match)
    entries = [json.loads(line) for line in shown.splitlines()]
    words = [str(entry["MESSAGE"]).rstrip("\n") for entry in entries]  # conmon keeps the newline
    if "over" not in words:
        return []
    pairs = zip(entries, words, strict=True)
    return [int(e["__REALTIME_TIMESTAMP"]) / 1e6 for e, word in pairs if word == LINE]


def waited(match: str) -> list[float]:
    """Return when the lines of one writer arrived, once all are there."""
    until = time.monotonic() + WAIT_S
    while not (found := arrived(match)):
        assert time.monotonic() < until, f"the last line of {match} did not come"
        time.sleep(0.5)
    return found


def figures(times: list[list[float]], cpu: float) -> dict[str, float]:
    """Return the figures of one turn."""
    count = sum(map(len, times))
    took = sum(one[-1] - one[0] for one in times)
    return {
        "lines_per_s": count / took,
        "cpu_us": cpu * 1e6 / count,
        "arrived": count / (LINES * WRITERS),
    }


class Bench:
    """A separate journald, the copier, and podman's storage in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journald = self.copier = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run both; this runs in a mount namespace with an empty /run."""
        conf = Path(f"/run/systemd/journald@{NAMESPACE}.conf.d/bench.conf")
        conf.parent.mkdir(parents=True)
        conf.write_text("[Journal]\nStorage=volatile\nRateLimitIntervalSec=0\nRuntimeMaxUse=400M\n")
        sockets = Path(f"/run/systemd/journal.{NAMESPACE}")
        sockets.mkdir()
        Path("/run/systemd/journal").symlink_to(sockets)  # podman's conmon uses this path
        Path("/run/log/journal").mkdir(parents=True)
        quiet = subprocess.DEVNULL
        env = {**os.environ, "RUNTIME_DIRECTORY": str(sockets)}
        with subprocess.Popen([JOURNALD, NAMESPACE], env=env, stdout=quiet, stderr=quiet) as one:
            self.journald = one.pid
            copier = [sys.executable, "-m", "agent.runtime.output_copier"]
            with subprocess.Popen(copier) as two:
                self.copier = two.pid
                for target in (sockets / "socket", PIPES / ".wake"):
                    while not target.exists():
                        time.sleep(0.1)
                try:
                    yield
                finally:
                    two.send_signal(signal.SIGTERM)
                    one.send_signal(signal.SIGTERM)

    def agent(self, turn: int) -> dict[str, float]:
        """Return the figures of tasks, which write one after the other."""
        before = cpu_s(self.copier) + cpu_s(self.journald)
        times = []
        for writer in range(WRITERS):
            pipe = PIPES / "local" / f"bench-{turn}-{writer}"
            pipe.parent.mkdir(exist_ok=True)
            os.mkfifo(pipe)
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as wake:
                wake.sendto(b"x", str(PIPES / ".wake"))
            with pipe.open("wb") as out:  # waits for the copier
                subprocess.run(["/bin/sh", "-c", SCRIPT], stdout=out, check=True)
            times.append(waited(f"OBJECT_SYSTEMD_UNIT=twine-task-{pipe.name}.service"))
            pipe.unlink()
        return figures(times, cpu_s(self.copier) + cpu_s(self.journald) - before)

    def podman(self, turn: int) -> dict[str, float]:
        """Return the figures of containers, which write one after the other."""
        root = self.folder / "root"
        if not root.exists():
            for name in ("bin", "proc", "sys", "dev", "etc", "tmp", "run"):
                (root / name).mkdir(parents=True)
            shutil.copy("/bin/busybox", root / "bin/busybox")
            (root / "bin/sh").symlink_to("busybox")
        storage = ["--root", str(self.folder / "graph"), "--runroot", "/run/graph"]
        command = ["podman", *storage, "--storage-driver=vfs", "--cgroup-manager=cgroupfs"]
        cpu, times = 0.0, []
        for writer in range(WRITERS):
            name = f"bench-{turn}-{writer}"
            run = ["run", "-d", "--cgroups=disabled", "--network=host", *LIMITS]
            wait = f"while [ ! -e /tmp/{name} ]; do /bin/busybox sleep 1; done"
            script = f"{wait}; {SCRIPT}; /bin/busybox sleep 1000"
            output_of(
                *command,
                *run,
                "--log-driver=journald",
                "--name",
                name,
                "--rootfs",
                str(root),
                "/bin/sh",
                "-c",
                script,
            )
            pid = int(output_of(*command, "inspect", "-f", "{{.State.ConmonPid}}", name))
            before = cpu_s(pid) + cpu_s(self.journald)
            (root / "tmp" / name).touch()
            times.append(waited(f"CONTAINER_NAME={name}"))
            cpu += cpu_s(pid) + cpu_s(self.journald) - before
            output_of(*command, "rm", "-f", "-t", "0", name)
        return figures(times, cpu)


def measure(folder: Path, n: int) -> dict[str, float | None]:
    """Return all figures."""
    bench = Bench(folder)
    kinds = {"agent": bench.agent}
    if shutil.which("podman"):
        kinds["podman"] = bench.podman
    turns: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    with bench.running():
        for turn in range(n):
            for kind, once in kinds.items():
                turns[kind].append(once(turn))
                print(f"logs: {kind} {turns[kind][-1]}", file=sys.stderr, flush=True)
    found: dict[str, float | None] = dict.fromkeys(
        f"podman_{name}" for name in ("lines_per_s", "cpu_us", "arrived")
    )
    for kind, all_turns in turns.items():
        for name in all_turns[0]:
            found[f"{kind}_{name}"] = round(statistics.median(t[name] for t in all_turns), 2)
    for ratio, name in (("ratio_lines_per_s", "lines_per_s"), ("ratio_cpu", "cpu_us")):
        theirs, ours = found[f"podman_{name}"], found[f"agent_{name}"]
        found[ratio] = round(theirs / ours, 2) if theirs and ours else None
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("-n", type=int, default=3, help="turns of each")
    parser.add_argument("--inside", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(measure(Path(options.inside), options.n)))
        return
    folder = Path("/var/tmp/twine-bench-logs")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    inside = [sys.executable, str(HERE), "--inside", str(folder), "-n", str(options.n)]
    script = 'mount -t tmpfs tmpfs /run && mount -t cgroup2 cgroup2 /sys/fs/cgroup && exec "$@"'
    argv = ["unshare", "--mount", "--propagation=private", "sh", "-c", script, "sh", *inside]
    try:
        shown = json.loads(output_of(*argv).splitlines()[-1])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = (f"{key:20} {value}" for key, value in shown.items())
    print(json.dumps(shown) if options.json else "\n".join(rows))


if __name__ == "__main__":
    main()
