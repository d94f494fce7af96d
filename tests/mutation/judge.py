"""Judges drawn mutants: a pytest plugin that forks for each of them, and simulated seeds."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FIRST_CPU_S, TIMES, SEED_CPU_S = 20, 10, 60
"""A test counts as hanging after `TIMES` its CPU time without a mutant plus `FIRST_CPU_S`, a seed
after `SEED_CPU_S`."""
WAIT_S = 600.0
"""A mutant whose tests make no step for this time hangs as well: they wait for an event that never
comes."""
Tries = Iterator[tuple[str, float, Callable[[], bool]]]
"""What may notice a mutant: its name, its limit of CPU time, and the function that runs it."""


class Judge:
    """Takes over the loop of a pytest run in the copy of the tree."""

    def __init__(
        self, folder: Path, rooms: list[tuple[list[str], list[int]]], seeds: list[str]
    ) -> None:
        """`rooms` has the own tests and the mutants of each room; `seeds` has simulated seeds:
        "everything 1".

        `folder` keeps the learnt data, and gets a line of JSON for each judged mutant.
        """
        self._folder, self._rooms, self._seeds = folder, rooms, seeds
        self._failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a failed test."""
        if report.failed:
            self._failed.append(report.nodeid)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Judge by tests of the room, survivors by all tests, and further survivors by simulated
        seeds."""
        if session.testsfailed:
            raise session.Interrupted("tests cannot be collected")
        gc.freeze()
        survivors = []
        for folders, mutants in self._rooms:
            own = {i.nodeid: i for i in session.items if i.nodeid.startswith(tuple(folders))}
            reached = self._known("reached.jsonl", lambda known, own=own: self._learn(own, known))
            survivors += [
                (n, own) for n in mutants if not self._is_killed(n, self._tests(n, own, reached))
            ]
        items = {i.nodeid: i for i in session.items}
        reached = self._known("reached.jsonl", lambda known: self._learn(items, known))
        for number, own in survivors:
            others = {name: item for name, item in items.items() if name not in own}
            if not self._is_killed(number, self._tests(number, others, reached)):
                seeds = self._known("seeds.jsonl", self._learn_seeds)
                self._is_killed(number, self._simulated(number, seeds))
        return True

    def _is_killed(self, number: int, tries: Tries) -> bool:
        """Try in a fork until a test or seed notices the mutant, and record the outcome."""
        *_, (outcome, by) = [("not reached", ""), *_results_of_fork(lambda: _tried(number, tries))]
        if not outcome:
            outcome, by = "killed", f"hangs: {by}"
        row = {"number": number, "outcome": outcome, "by": by}
        with (self._folder / "results.jsonl").open("a") as file:
            print(json.dumps(row), file=file)
        return bool(outcome == "killed")

    def _known(self, name: str, learn: Callable[[dict[str, Any]], Iterator[Any]]) -> dict[str, Any]:
        """Return the data that a former run learnt, after learning what is missing."""
        path = self._folder / name
        path.touch()
        known = dict(json.loads(line) for line in path.read_text().splitlines())
        with path.open("a") as file:
            for row in _results_of_fork(lambda: learn(known)):
                print(json.dumps(row), file=file, flush=True)
                known[row[0]] = row[1]
        if failed := [each for each, verdict in known.items() if verdict is None]:
            raise pytest.UsageError(f"fails without a mutant: {failed}")
        return known

    def _learn(self, items: dict[str, pytest.Item], known: dict[str, Any]) -> Iterator[list[Any]]:
        """Yield for each new test the mutants that it reaches and its CPU time."""
        for name in [n for n in items if n not in known]:
            switch().passed.clear()
            began = time.process_time()
            fails = self._fails(items[name])
            took = time.process_time() - began
            yield [name, None if fails else {"reached": sorted(switch().passed), "cpu_s": took}]

    def _tests(self, number: int, items: dict[str, pytest.Item], reached: dict[str, Any]) -> Tries:
        """Yield the tests that reach a mutant, fast ones first."""
        chosen = [name for name in items if number in reached[name]["reached"]]
        for name in sorted(chosen, key=lambda n: reached[n]["cpu_s"]):
            most_s = FIRST_CPU_S + TIMES * reached[name]["cpu_s"]
            yield name, most_s, lambda n=name: self._fails(items[n])

    def _simulated(self, number: int, reached: dict[str, Any]) -> Tries:
        """Yield the seeds that reach a mutant."""
        for name in [name for name in self._seeds if number in reached[name]]:
            yield f"seed {name}", SEED_CPU_S, lambda n=name: not _holds(n)

    def _learn_seeds(self, known: dict[str, Any]) -> Iterator[list[Any]]:
        for name in [n for n in self._seeds if n not in known]:
            switch().passed.clear()
            holds = _holds(name)
            yield [name, sorted(switch().passed) if holds else None]

    def _fails(self, item: pytest.Item) -> bool:
        self._failed.clear()
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        return bool(self._failed)


def switch() -> Any:
    """Return the module of the copied tree that holds the number of the active mutant."""
    import mutation_switch  # type: ignore[import-not-found]

    return mutation_switch


def _tried(number: int, tries: Tries) -> Iterator[tuple[str, str]]:
    """Turn the mutant on. Yield each step, and at the end the outcome."""
    switch().number = number
    os.environ["TWINE_MUTANT"] = str(number)  # for programs started by tests
    for name, cpu_s, fails in tries:
        yield "", name
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # ends this process
        if fails():
            yield "killed", name
            return
        yield "survived", ""


def _holds(name: str) -> bool:
    from vm_lab.region import scenario
    from vm_lab.region.seed import run_seed

    kind, _, number = name.partition(" ")
    try:
        return run_seed(scenario.load(kind), int(number)).ok
    except Exception:
        return False


def _results_of_fork(work: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Do the work in a fork and yield its results. A fork that is silent for `WAIT_S` is ended."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        os.close(reader)
        try:
            with os.fdopen(writer, "w") as file:
                for row in work():
                    print(json.dumps(row), file=file, flush=True)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        previous = signal.signal(signal.SIGALRM, lambda *_: os.killpg(child, signal.SIGKILL))
        signal.alarm(int(WAIT_S))
        for line in file:
            signal.alarm(int(WAIT_S))
            yield json.loads(line)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) > 0:
        raise RuntimeError("judging failed")


if __name__ == "__main__":
    judge = Judge(Path(sys.argv[1]), *map(json.loads, sys.argv[2:4]))
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[4:]], plugins=[judge]))
