"""How long does a switch of host profiles take, compared with TuneD, and what does a no-op cost?

On a recorded Intel host (a tree of files, real fsyncs): the whole command, the engine alone, a
repeated apply against `plan`, and CPU Turbo on and off. With --inside, which runs as root in a
guest that has TuneD: TuneD's `throughput-performance` and `latency-performance`, converted by
`sidekick import-tuned`, against `tuned-adm profile` with its daemon warm, in turns; and huge pages
on fragmented memory, by sidekick and by a plain write.

The timer's check: processor time of a check of an unchanged host, against a full `verify` and a
bare interpreter, on the recorded host with its largest profile.

The progress is printed on stderr. Keys: `command_ms`, `engine_ms`, `noop_ratio` (repeated apply /
plan, whole commands), `turbo_p90_ms`, `tuned_adm_ms`, `ratio_command`, `ratio_engine` (TuneD /
ours), `hugepages_reached`, `hugepages_plain_reached` (shares of attempts), `look_cpu_ms`,
`verify_cpu_ms`, `bare_cpu_ms`, `look_settings`. A figure that was not measured in this run is null.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import mmap
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from sidekick import look
from sidekick.apply import ApplyRun
from sidekick.cli import main as sidekick
from sidekick.context import real_host
from sidekick.facts import read_facts
from sidekick.profile import Library
from sidekick.settings import SETTINGS
from sidekick.state import StateFolder
from sidekick.targets import target_of

COMMAND = [str(Path(sys.prefix, "bin", "sidekick"))]
"""Path of the installed program."""
LEFT_BYTES = 64 << 20
"""Memory for the guest's own programs while memory is full."""
MADV_POPULATE_WRITE = 23
"""Fault all pages in at once (include/uapi/asm-generic/mman-common.h); Linux 5.14 and later."""
DIRTY = ("/proc/sys/vm/dirty_background_ratio", "/proc/sys/vm/dirty_ratio")
FILE = Path("/var/lib/twine/bench-file")

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
PAIR = ("throughput-performance", "latency-performance")
PARTS = ("tree", "look", "tuned", "pages")
LARGEST = "memcache"
SHAPES = {
    "throughput-performance": "description='t'\n[power]\ngovernor='performance'\n"
    "[thp]\nenabled='always'\n[block]\nflash={read_ahead_kb=4096}\nrotating={read_ahead_kb=4096}\n"
    "[sysctl]\n'vm.dirty_ratio'=40\n'vm.dirty_background_ratio'=10\n'vm.swappiness'=10\n"
    "'net.core.somaxconn'=8192\n",
    "latency-performance": "description='l'\n[power]\ngovernor='performance'\n"
    "energy_preference='performance'\n[cstates]\nmax_latency_us=1\n[thp]\nenabled='madvise'\n"
    "[sysctl]\n'vm.dirty_ratio'=10\n'vm.dirty_background_ratio'=3\n'vm.swappiness'=10\n",
    "turbo-on": "description='on'\n[turbo]\nmode='on'\nrequired=true\n",
    "turbo-off": "description='off'\n[turbo]\nmode='off'\nrequired=true\n",
}
"""The effect of both in TuneD 2.20, as far as the recorded host has it."""


def timed(act: Callable[[], object]) -> float:
    """Return the duration of an action in milliseconds."""
    began = time.perf_counter()
    act()
    return (time.perf_counter() - began) * 1000


def run(argv: Sequence[str], codes: Sequence[int] = (0,)) -> None:
    """Run a program to its end; any other exit code than these ends the bench."""
    done = subprocess.run(argv, capture_output=True, check=False, text=True, cwd=ROOT)
    if done.returncode not in codes:
        raise SystemExit(
            f"bench: {' '.join(argv)}: {done.returncode}: {done.stderr or done.stdout}"
        )


def report_progress(text: str) -> None:
    """Print the progress, because an emulated guest takes minutes."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def processor_ms(argv: Sequence[str], n: int) -> float:
    """Return the median CPU time of a program, in milliseconds."""
    took = []
    for _ in range(n):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run(argv)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return round(statistics.median(took) * 1000, 1)


def readings(folder: Path, n: int) -> dict[str, float | None]:
    """Measure the cost of a drift check on the recorded Intel host."""
    sys.path.insert(0, str(ROOT / "tests" / "unit" / "sidekick"))
    from fake_host import PROFILES
    from recorded import RecordedHost

    tree, state = folder / "looked", folder / "looked-state"
    fake = RecordedHost(tree, "intel")
    fake.state = StateFolder(state)
    ApplyRun(fake.host(), fake.state, fake.target(LARGEST)).carry_out()
    verify = [sys.executable, "-m", "sidekick", f"--root={tree}", f"--state={state}"]
    verify += [f"--profiles={PROFILES}", "verify", "--timer"]
    run(verify)
    bare = [sys.executable, "-I", "-S"]
    figures: dict[str, float | None] = {
        "look_cpu_ms": processor_ms([*bare, look.__file__, str(state), "/bin/false"], n),
        "bare_cpu_ms": processor_ms([*bare, "-c", "pass"], n),
        "verify_cpu_ms": processor_ms(verify, n),
    }
    report = fake.state.read_status()
    assert report is not None
    return figures | {"look_settings": len(report.settings)}


def on_a_tree(folder: Path, n: int) -> dict[str, float | None]:
    """Measure on the recorded Intel host."""
    sys.path.insert(0, str(ROOT / "tests" / "unit" / "sidekick"))
    from recorded import RecordedHost

    tree, profiles = folder / "tree", folder / "profiles"
    RecordedHost(tree, "intel")
    profiles.mkdir()
    for name, text in SHAPES.items():
        (profiles / f"{name}.toml").write_text(text)
    options = [f"--root={tree}", f"--state={folder / 'state'}", f"--profiles={profiles}"]
    program = [sys.executable, "-m", "sidekick", *options]
    library = Library([profiles], SETTINGS)

    def engine(name: str) -> None:
        host = real_host(tree)
        target = target_of(library.load(name, read_facts(host.fs)), host)
        report = ApplyRun(host, StateFolder(folder / "state"), target).carry_out()
        assert report.state == "verified", report

    figures: dict[str, list[float]] = {
        k: [] for k in ("command", "engine", "noop", "plan", "turbo")
    }
    for turn in range(2 * (n + 1)):
        name = PAIR[turn % 2]
        taken = {
            "command": timed(lambda name=name: run([*program, "apply-profile", name])),
            "noop": timed(lambda name=name: run([*program, "apply-profile", name])),
            "plan": timed(lambda name=name: run([*program, "plan", name])),
        }
        taken["engine"] = timed(lambda turn=turn: engine(PAIR[(turn + 1) % 2]))
        engine(name)
        mode = ("turbo-on", "turbo-off")[turn % 2]
        taken["turbo"] = timed(lambda mode=mode: run([*program, "apply-profile", mode]))
        report_progress(f"tree: turn {turn + 1} of {2 * (n + 1)}: " + shown(taken))
        for kind, took in taken.items() if turn > 1 else ():
            figures[kind].append(took)
    median = {kind: statistics.median(values) for kind, values in figures.items()}
    return {
        "command_ms": round(median["command"], 1),
        "engine_ms": round(median["engine"], 1),
        "noop_ratio": round(median["noop"] / median["plan"], 2),
        "turbo_p90_ms": round(percentile(figures["turbo"], 90), 1),
    }


def shown(taken: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {took:.0f} ms" for kind, took in taken.items())


def percentile(values: Sequence[float], p: float) -> float:
    """Return the smallest value that p percent do not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(len(values) * p / 100) - 1)]


def against_tuned(folder: Path, n: int) -> dict[str, float | None]:
    """Measure in a guest: our switches and TuneD's in turns, with the same profiles."""
    profiles = folder / "converted"
    for name in PAIR:
        code = _quiet(["import-tuned", str(_of_tuned(name)), "--into", str(profiles)])
        assert code in (0, 2), f"import-tuned {name}: {code}"
    program = [*COMMAND, f"--profiles={profiles}"]
    library = Library([profiles], SETTINGS)
    run(["systemctl", "stop", "sidekick-verify.timer"])  # it would take its turn, too
    run(["systemctl", "start", "tuned"])

    def engine(name: str) -> None:
        host = real_host(Path("/"))
        target = target_of(library.load(name, read_facts(host.fs)), host)
        ApplyRun(host, StateFolder(Path("/var/lib/twine/sidekick")), target).carry_out()

    ours: list[float] = []
    inside: list[float] = []
    theirs: list[float] = []
    for turn in range(2 * (n + 1)):
        name, other = PAIR[turn % 2], PAIR[(turn + 1) % 2]
        theirs.append(timed(lambda name=name: run(["tuned-adm", "profile", name])))
        run(["tuned-adm", "off"], (0, 1))
        ours.append(timed(lambda name=name: run([*program, "apply-profile", name])))
        inside.append(timed(lambda other=other: engine(other)))
        run([*program, "rollback"])
        taken = {"tuned-adm": theirs[-1], "command": ours[-1], "engine": inside[-1]}
        report_progress(f"tuned: turn {turn + 1} of {2 * (n + 1)}: " + shown(taken))
    command, engine_ms, tuned = (statistics.median(v[2:]) for v in (ours, inside, theirs))
    return {
        "command_ms": round(command, 1),
        "engine_ms": round(engine_ms, 1),
        "tuned_adm_ms": round(tuned, 1),
        "ratio_command": round(tuned / command, 2),
        "ratio_engine": round(tuned / engine_ms, 2),
    }


def _of_tuned(name: str) -> Path:
    """Return the folder of one of TuneD's profiles, which moved in 2.23."""
    folders = (Path("/usr/lib/tuned/profiles", name), Path("/usr/lib/tuned", name))
    return next(folder for folder in folders if folder.is_dir())


def _quiet(argv: list[str]) -> int:
    with contextlib.redirect_stdout(io.StringIO()):
        return sidekick(argv)


def on_fragmented_memory(folder: Path, n: int) -> dict[str, float | None]:
    """Return how often the target was reached without a boot, by sidekick and by a plain write."""
    pool = Path("/proc/sys/vm/nr_hugepages")
    pages = _meminfo()["MemTotal"] * 2 // 5 // (2 << 20)
    (folder / "pages.toml").write_text(
        f"description='p'\n[hugepages]\npages_2m={pages}\nif_short='undo'\n"
    )
    program = [*COMMAND, f"--profiles={folder}"]
    reached = {"hugepages_reached": 0, "hugepages_plain_reached": 0}
    for number in range(n):
        came = {}
        for key in reached:
            with fragmented():
                if key == "hugepages_reached":
                    run([*program, "apply-profile", "pages"], (0, 4))
                else:
                    pool.write_text(f"{pages}\n")
                came[key] = int(pool.read_text())
            reached[key] += came[key] >= pages
            if key == "hugepages_reached":
                run([*program, "rollback"])
            pool.write_text("0\n")
        report_progress(f"pages: attempt {number + 1} of {n}: of {pages} {came}, so far {reached}")
    return {key: round(count / n, 3) for key, count in reached.items()}


@contextlib.contextmanager
def fragmented() -> Iterator[None]:
    """Fill memory so that every other page belongs to a file that is not on the disk yet.

    Such pages cannot be dropped, and single free pages lie between them. A machine is in this
    state when a large service has ended while another one writes, or while an image is pulled.
    """
    before = {path: path.read_text() for path in map(Path, DIRTY)}
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n")
    for path, percent in zip(before, ("90\n", "95\n"), strict=True):
        path.write_text(percent)
    size = (_meminfo()["MemAvailable"] - LEFT_BYTES) // mmap.PAGESIZE * mmap.PAGESIZE
    held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held.madvise(mmap.MADV_NOHUGEPAGE)
    held.madvise(MADV_POPULATE_WRITE)
    for at in range(0, size, 2 * mmap.PAGESIZE):
        held.madvise(mmap.MADV_DONTNEED, at, mmap.PAGESIZE)
    with FILE.open("wb") as file:
        for _ in range(size // 2 >> 20):
            file.write(b"x" * (1 << 20))
    held.close()
    try:
        yield
    finally:
        FILE.unlink()
        for path, text in before.items():
            path.write_text(text)


def _meminfo() -> dict[str, int]:
    """Return the sizes of /proc/meminfo in bytes."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("-n", type=int, default=10, help="pairs of switches")
    parser.add_argument("--attempts", type=int, default=20, help="at huge pages")
    parser.add_argument("--inside", action="store_true", help="this is a guest with TuneD; as root")
    parser.add_argument(
        "--part", action="append", choices=PARTS, help="of what --inside does; all by default"
    )
    options = parser.parse_args()
    parts = options.part or PARTS
    keys = "command_ms engine_ms tuned_adm_ms ratio_command ratio_engine noop_ratio"
    more = "hugepages_reached hugepages_plain_reached turbo_p90_ms"
    costs = "look_cpu_ms verify_cpu_ms bare_cpu_ms look_settings n"
    figures: dict[str, float | None] = dict.fromkeys(f"{keys} {more} {costs}".split())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "tree" in parts:
            figures |= on_a_tree(folder, options.n)
        if "look" in parts:
            figures |= readings(folder, 2 * options.n + 1)
        if options.inside and "tuned" in parts:
            figures |= against_tuned(folder, options.n)
        if options.inside and "pages" in parts:
            figures |= on_fragmented_memory(folder, options.attempts)
    figures["n"] = options.n
    if options.json:
        print(json.dumps(figures))
        return
    for key, value in figures.items():
        print(f"{key:26}{'not measured' if value is None else value}")


if __name__ == "__main__":
    main()
