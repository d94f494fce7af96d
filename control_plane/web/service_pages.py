"""The pages about the autoscaler and the conveyor, which are read through their own APIs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from control_plane.web.core.delivery import gate_rows, pipeline_row, run_row, step_rows
from control_plane.web.core.sizes import (
    SHOWN_SIZES,
    SizeRow,
    amount_of,
    load_charts,
    size_row,
    size_rows,
)
from control_plane.web.core.usage import about_size_of
from control_plane.web.page_request import Page, PageRequest
from wire.errors import NotFound, TwineError

EVERY_S = 5
"""Seconds after which these pages are loaded again: their services have stores of their own."""
ROWS_A_PAGE, RUNS, VERDICTS, STEPS = 200, 10, 200, 50
"""Rows of tables; of steps, those before and after the present one."""
amount = amount_of(about_size_of)


async def _answer_or_error(load: Awaitable[Any]) -> tuple[Any, str, str]:
    """Return an answer; or None, why there is none, and what to try."""
    try:
        return await load, "", ""
    except TwineError as e:
        return None, str(e), e.hint


async def _autoscaling(request: PageRequest) -> dict[str, Any]:
    text, only = request.query.get("search", ""), request.one_of("only", SHOWN_SIZES)
    first = request.number("first")
    jobs = (await request.shared.get("jobs", lambda: request.api.get("list_jobs"))).jobs
    loading = request.shared.get("sizings", request.services.sizings)
    found, silent, hint = await _answer_or_error(loading)

    def select() -> tuple[list[SizeRow], Counter[str], int]:
        """Return the rows to show, counts by state of those with the name, and the total."""
        rows = size_rows(jobs, found.sizings if found is not None else [])
        named = [row for row in rows if text in row.job.record.name]
        counts = Counter(row.state for row in named)
        counts["all"] = len(named)
        return [r for r in named if only in ("all", r.state)], counts, len(rows)

    rows, counts, total = await asyncio.to_thread(select)
    return {
        "sizes": rows[first : first + ROWS_A_PAGE],
        "suitable": len(rows),
        "all": total,
        "counts": counts,
        "first": first,
        "rows": ROWS_A_PAGE,
        "search": text,
        "only": only,
        "onlys": SHOWN_SIZES,
        "failing": found.failing if found is not None else "",
        "round_at": found.round_at if found is not None else 0.0,
        "silent": silent,
        "hint": hint,
        "amount": amount,
        "every": EVERY_S,
    }


async def _sizing(request: PageRequest) -> dict[str, Any]:
    name = request.path["job"]
    job = await request.api.get("get_job", {"job": name})
    loading = request.shared.get(f"sizing {name}", lambda: request.services.sizing(name))
    view, silent, hint = await _answer_or_error(loading)
    row = size_row(job, view)
    if row is None:
        raise NotFound(
            f"job {name} is not autoscaled",
            hint="its job file needs an [autoscale] table (docs/autoscaling.md)",
        )
    load_text: Callable[[float], str] = partial(amount, row.policy.signal)
    return {
        "size": row,
        "charts": load_charts(view, load_text) if view is not None else [],
        "silent": silent,
        "hint": hint,
        "amount": amount,
        "every": EVERY_S,
    }


async def _pipelines(request: PageRequest) -> dict[str, Any]:
    first = request.number("first")
    loading = request.shared.get("pipelines", request.services.pipelines)
    found, silent, hint = await _answer_or_error(loading)
    views = found.pipelines if found is not None else []
    return {
        "pipelines": [pipeline_row(view) for view in views[first : first + ROWS_A_PAGE]],
        "damaged": found.damaged if found is not None and not first else {},
        "all": len(views),
        "first": first,
        "rows": ROWS_A_PAGE,
        "silent": silent,
        "hint": hint,
        "every": EVERY_S,
    }


async def _pipeline(request: PageRequest) -> dict[str, Any]:
    name, number, services = request.path["pipeline"], request.number("run"), request.services
    shared = request.shared
    view = await shared.get(f"pipeline {name}", lambda: services.pipeline(name))
    found = await shared.get(f"runs {name}", lambda: services.runs(name, RUNS))
    known = {run.number: run for run in found.runs}
    row = pipeline_row(view)
    number = number or (row.run.number if row.run is not None else 0)
    if number and number not in known:
        found = await shared.get(f"run {number} {name}", lambda: services.runs(name, 1, number))
    shown = next((run for run in found.runs if run.number == number), None)
    rows = step_rows(shown) if shown is not None else []
    begun = sum(one.began is not None for one in rows)
    near = rows[max(0, begun - STEPS) : begun + STEPS]
    return {
        "pipeline": row,
        "applied": (view.record.applied_by, view.record.applied_at),
        "good": view.record.good,
        "jobs": view.jobs,
        "runs": [run_row(run) for run in known.values()],
        "run": run_row(shown) if shown is not None else None,
        "steps": near,
        "hidden": len(rows) - len(near),
        "gates": gate_rows(shown) if shown is not None else [],
        "verdicts": found.verdicts.get(number, [])[: -VERDICTS - 1 : -1],
        "log": list(shown.log[::-1]) if shown is not None else [],
        "every": EVERY_S,
    }


SERVICE_PAGES: tuple[Page, ...] = (
    Page("/ui/autoscaling", "autoscaling.html", _autoscaling, ("search", "only", "first")),
    Page("/ui/autoscaling/{job}", "sizing.html", _sizing),
    Page("/ui/pipelines", "pipelines.html", _pipelines, ("first",)),
    Page("/ui/pipelines/{pipeline}", "pipeline.html", _pipeline, ("run",)),
)
