"""How fast Chromium draws the operations of a large job, and how smoothly they scroll.

    python -m tests.bench.web_gantt [--tasks 10000] [--bars 10] [--json]

A console with a separate front end, whose one job has `--tasks` tasks with `--bars` operations each
in 24 h. Production keeps 1,024 events of a job; the bench measures the page and not the log. The
browser is Debian's Chromium without a graphics card. `first_paint_ms` is first-contentful-paint of
the page of operations, and `rows_ms` the time when the script has drawn the rows. Both count from
the start of the navigation and are medians of five loads. `browser_cpu_ms` is the CPU time of the
page's main thread for one load, `page_cpu_ms` that of the server. `pause_cpu_ms` and `held_ms` are
the longest pauses of its loop (see `web.py`). Then the rows are scrolled down, zoomed and moved;
`longest_scroll_task_ms` is the longest task of the main thread meanwhile (PerformanceObserver
reports those above 50 ms; 0: there was none). `scroll_step_cpu_ms` is the mean CPU time of the main
thread for one of 300 steps, without the time that other processes got.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web
from selenium.webdriver import Chrome

from agent.api import Limits
from control_plane.api.jobs import JobPhase, JobRecord, JobSpec, JobStatus
from control_plane.api.operations import Cause, JobEvent, JobEvents, OperationKind, OperationState
from control_plane.api.routes import ROUTES
from control_plane.identity.sessions import BrowserSessions
from control_plane.web.serving import Console
from tests.bench.control_plane import Pauses
from tests.integration.web.test_console import chromium
from wire.fairness import Peer
from wire.routes import Route
from wire.server import Call

DAY_S = 86_400.0
KINDS = (OperationKind.UPDATE, OperationKind.RESTART, OperationKind.MOVE)
SCROLL = """
const done = arguments[0], rows = document.querySelector(".gantt-rows"), tasks = [];
new PerformanceObserver((list) => tasks.push(...list.getEntries().map((one) => one.duration)))
  .observe({type: "longtask"});
const gantt = document.querySelector(".gantt").gantt, end = rows.scrollHeight, steps = STEPS;
let step = 0;
const next = () => {
  rows.scrollTop = end * step / steps;
  if (step % 30 === 10) gantt.zoom(0.7);
  if (step % 30 === 20) gantt.pan(0.05);
  if (step++ < steps) requestAnimationFrame(next); else setTimeout(() => done(tasks), 500);
};
next();
"""
STEPS, LOADS = 300, 5
ROWS = "document.querySelector('.gantt-rows') && performance.getEntriesByName('rows')[0]?.startTime"
PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"


class OneJob:
    """A front end with one job and its events."""

    def __init__(self, tasks: int, bars: int) -> None:
        chance, now = random.Random(1), time.time()
        spec = JobSpec(
            name="web",
            entitlement="front",
            tasks=tasks,
            image="sha256:" + "0" * 64,
            limits=Limits(memory_max_bytes=64 << 20),
        )
        self.events = [
            JobEvent(
                seq=number + 1,
                task=number % tasks,
                operation=str(number),
                kind=chance.choice(KINDS),
                cause=Cause.RELEASE,
                outcome=OperationState.DONE,
                from_machine=f"m{chance.randrange(5000)}",
                to_machine=f"m{chance.randrange(5000)}",
                start=(start := now - chance.uniform(0, DAY_S)),
                end=min(now, start + chance.uniform(5, 900)),
            )
            for number in range(tasks * bars)
        ]
        self.status = JobStatus(
            record=JobRecord(name="web", spec=spec, version=1),
            phase=JobPhase.STABLE,
            wanted=tasks,
            running=tasks,
            healthy=tasks,
            updated=tasks,
        )
        self.sessions = BrowserSessions()
        self.handlers = {"get_job": self._job, "job_events": self._events}

    def authorize(self, _: web.Request, __: Route) -> Peer:
        return Peer("user", "ann")

    def check(self, _: Call) -> None:
        pass

    async def refused(self, *_: object) -> None:
        pass

    async def _job(self, _: Call) -> JobStatus:
        return self.status

    async def _events(self, _: Call) -> JobEvents:
        return JobEvents(job="web", events=self.events)


@contextmanager
def served(front_end: OneJob, pauses: Pauses) -> Iterator[str]:
    """Yield the address of a front end's console, served by a thread whose pauses are recorded."""
    loop, ready, port = asyncio.new_event_loop(), threading.Event(), [0]

    async def serve() -> None:
        app = web.Application()
        Console(front_end, ROUTES, lambda: 1).add_to(app)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port[0] = runner.addresses[0][1]
        watching = asyncio.create_task(pauses.watch())
        ready.set()
        await ended.wait()
        watching.cancel()
        await runner.cleanup()

    ended = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    ready.wait()
    yield f"http://127.0.0.1:{port[0]}"
    loop.call_soon_threadsafe(ended.set)
    thread.join()


def cpu_s(browser: Chrome) -> float:
    """Return the CPU time that the main thread of the page has used so far."""
    metrics = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return next(one["value"] for one in metrics if one["name"] == "TaskDuration")


def _there(browser: Chrome, script: str) -> float:
    """Return the number that a script gives, once it gives one."""
    while (found := browser.execute_script(f"return {script}")) is None:
        time.sleep(0.05)
    return float(found)


def measured(tasks: int, bars: int) -> dict[str, Any]:
    """Return the cost for Chromium, and its waiting times."""
    pauses = Pauses()
    job = OneJob(tasks, bars)
    with served(job, pauses) as base, chromium(f"{base}/ui/jobs/web/operations") as browser:
        page, paints, rows, server, main = (
            f"{base}/ui/jobs/web/operations?window=24h",
            [],
            [],
            [],
            [],
        )
        browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        _there(browser, ROWS)
        for number in range(LOADS):
            pauses.phase = "first" if number == 0 else "page"
            used = time.process_time()
            browser.get(page)
            rows.append(_there(browser, ROWS))
            paints.append(_there(browser, PAINT))
            server.append(1000 * (time.process_time() - used))
            main.append(1000 * cpu_s(browser))
        pauses.phase = "scroll"
        browser.set_script_timeout(300)
        before = cpu_s(browser)
        long_tasks = browser.execute_async_script(SCROLL.replace("STEPS", str(STEPS)))
        used_s = cpu_s(browser) - before
        return {
            "tasks": tasks,
            "bars": tasks * bars,
            "first_paint_ms": round(statistics.median(paints)),
            "rows_ms": round(statistics.median(rows)),
            "rows_ms_least": round(min(rows)),
            "page_cpu_ms": round(statistics.median(server)),
            "browser_cpu_ms": round(statistics.median(main)),
            "pause_cpu_ms": round(1000 * pauses.cpu["page"], 1),
            "held_ms": round(1000 * pauses.held["page"], 1),
            "scroll_step_cpu_ms": round(1000 * used_s / STEPS, 1),
            "longest_scroll_task_ms": round(max(long_tasks, default=0)),
            "long_scroll_tasks": len(long_tasks),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--bars", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sys.setswitchinterval(1e-4)  # as a control plane has it on SQLite
    result = measured(options.tasks, options.bars)
    print(
        json.dumps(result) if options.json else "\n".join(f"{k:24} {v}" for k, v in result.items())
    )


if __name__ == "__main__":
    main()
