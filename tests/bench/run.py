"""Runs every bench and writes the results into RESULTS.md.

    python -m tests.bench.run [NAME …] [--list] [--to FILE]

A bench is a file of this folder with a `main`. It runs as a separate process with `--json`, and its
last line is an object of figures. A bench that needs a guest has `NEEDS_GUEST = True` after its
imports and takes `--lab NAME`. One guest is booted for all of these, with the largest `MEMORY_MIB`
of them; a bench with `CPUS` other than 1 gets another guest.

Each bench has its own section. Only the sections of benches that ran are replaced, so one bench can
be repeated alone. The section and the exit code show a failed bench; the others still run.
FINDINGS.md has the findings of earlier runs, written by hand.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = HERE / "RESULTS.md"
_HEAD = """# Measured

Written by `make bench`; the findings of runs are in [FINDINGS.md](FINDINGS.md), written by hand.
"""
_SECTION = "\n## "


@dataclass(frozen=True)
class Bench:
    """One file with a bench."""

    name: str
    about: str
    """The first line of its docstring."""
    needs_guest: bool
    memory_mib: int = 0
    """Least memory of its guest; 0: the default of a guest."""
    cpus: int = 1
    """Number of CPUs of its guest."""


def benches(folder: Path = HERE) -> list[Bench]:
    """Return every bench of a folder by name, without importing any."""
    found = []
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text())
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if "main" not in names or path.name == Path(__file__).name:
            continue
        about = (ast.get_docstring(tree) or path.stem).splitlines()[0]
        constants = _constants(tree)
        needs = (
            constants.get("NEEDS_GUEST") is True,
            constants.get("MEMORY_MIB", 0),
            constants.get("CPUS", 1),
        )
        found.append(Bench(path.stem, about, *needs))
    return found


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Return the names of a file that are assigned a constant, with their values."""
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def command(bench: Bench, lab: str) -> list[str]:
    """Return the command of a bench; `lab` is the lab of the guest, if it needs one."""
    line = [sys.executable, "-m", f"tests.bench.{bench.name}", "--json"]
    return [*line, "--lab", lab] if lab else line


def measured(line: Sequence[str], cwd: Path = ROOT) -> dict[str, Any]:
    """Run a bench and return its figures, or raise `RuntimeError` with the reason."""
    done = subprocess.run(line, cwd=cwd, stdout=subprocess.PIPE, check=False, text=True)
    if done.returncode:
        raise RuntimeError(f"ended with {done.returncode}")
    try:
        figures = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError) as e:
        raise RuntimeError(f"its last line is no JSON: {e}") from e
    if not isinstance(figures, dict):
        raise RuntimeError("its last line is no object")
    return figures


def section(bench: Bench, figures: Mapping[str, Any], where: str) -> str:
    """Return a bench's part of the page; its `details` repeat the content of the page at length."""
    listed = {name: value for name, value in figures.items() if name != "details"}
    rows = [f"| `{name}` | {_shown(value)} |" for name, value in _flat(listed)]
    table = "\n".join(["| figure | value |", "|---|---|", *rows])
    how = f"`python -m tests.bench.{bench.name} --json`; {where}"
    return f"{_title(bench)}\n\n{bench.about}\n\n{how}\n\n{table}\n"


def failed(bench: Bench, why: str, where: str) -> str:
    """Return the part of the page for a bench without figures."""
    return f"{_title(bench)}\n\n{bench.about}\n\n**It failed**: {why}; {where}\n"


def _title(bench: Bench) -> str:
    return f"## {bench.name}"


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every figure by its path: `churn.rates.asks`."""
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from _flat(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.4g}" if isinstance(value, float) and abs(value) < 1000 else _plain(value)


def _plain(value: Any) -> str:
    return f"{value:,.0f}" if isinstance(value, float) else json.dumps(value)


def merged(page: str, sections: Mapping[str, str]) -> str:
    """Return the page with these benches' sections in place of their old ones, by name."""
    parts = dict(_parts(page)) | dict(sections)
    return _HEAD + "".join(f"\n{parts[name].strip()}\n" for name in sorted(parts))


def _parts(page: str) -> Iterator[tuple[str, str]]:
    _, *sections = page.split(_SECTION)
    for text in sections:
        yield text.split(None, 1)[0].rstrip(":"), f"## {text}"


def _where() -> str:
    """Return the environment: the commit, the day, the processors and their load."""
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, cwd=ROOT, stdout=subprocess.PIPE, check=False, text=True)
    cpus, load, day = os.cpu_count(), os.getloadavg()[0], time.strftime("%Y-%m-%d")
    at = commit.stdout.strip() or "no commit"
    return f"{at}, {day}, {cpus} CPUs ({platform.machine()}), load {load:.1f} before"


class _PendingConnection:
    """A guest for all benches with this number of CPUs, booted for the first of them."""

    def __init__(self, memory_mib: int) -> None:
        self._cpus = 0
        self._memory = ("--memory-mib", str(memory_mib)) if memory_mib else ()

    def name(self, cpus: int = 1) -> str:
        if self._cpus != cpus:
            self._lab("down", "--name", "bench")  # also the guest of a run that was killed
            self._cpus = cpus
            one = ("--name", "bench", "--bare", "--count", "1", "--variant", "bench")
            try:
                self._lab("up", *one, "--cpus", str(cpus), *self._memory)
            except BaseException:
                self.down()
                raise
        return "bench"

    def down(self) -> None:
        if self._cpus:
            self._lab("down", "--name", "bench")
            self._cpus = 0

    def _lab(self, *arguments: str) -> None:
        line = [sys.executable, "-m", "vm_lab.cli", *arguments]
        if subprocess.run(line, cwd=ROOT, stdout=sys.stderr, check=False).returncode:
            raise RuntimeError(f"no guest: {' '.join(line[1:])} failed")


def main() -> None:
    """Run the named benches, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="benches; all if none is named")
    parser.add_argument("--list", action="store_true", help="only say which there are")
    parser.add_argument("--to", type=Path, default=RESULTS, help="the page to write")
    options = parser.parse_args()
    every = {bench.name: bench for bench in benches()}
    if unknown := [name for name in options.names if name not in every]:
        parser.error(f"there is no bench {unknown[0]!r}; there are {', '.join(every)}")
    chosen = [every[name] for name in options.names or every]
    if options.list:
        for bench in chosen:
            print(f"{bench.name:16} {'guest  ' if bench.needs_guest else '       '}{bench.about}")
        return
    guest = _PendingConnection(max((b.memory_mib for b in chosen if b.needs_guest), default=0))
    broken: list[str] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for bench in chosen:
            print(f"── {bench.name} ──", file=sys.stderr, flush=True)
            where = _where()
            try:
                lab = guest.name(bench.cpus) if bench.needs_guest else ""
                text = section(bench, measured(command(bench, lab)), where)
            except RuntimeError as e:
                broken.append(f"{bench.name}: {e}")
                text = failed(bench, str(e), where)
            page = options.to.read_text() if options.to.exists() else ""
            # written now, in case a later bench is killed
            options.to.write_text(merged(page, {bench.name: text}))
    finally:
        guest.down()
    if broken:
        raise SystemExit("\n".join(broken))


if __name__ == "__main__":
    main()
