"""Writes the results of the compatibility suite to docs/compatibility.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.compat.recipes import FIXED, Recipe

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
_HEAD = (
    "# Which images run",
    "",
    "`make compat` builds these images from packages of Debian, npm and PyPI as their usual "
    "Dockerfiles do, runs each on a guest,",
    "and writes this page. The recipes are in `tests/compat/recipes.toml`. The images do not come "
    "from a public registry, but they",
    "behave like the public ones (entrypoints of root that chown, logs linked to `/dev/stdout`, "
    "pid files in `/run`, sockets, forks,",
    'users by name and number). `make compat IMAGES="--rest"` runs the images without a successful '
    'run, `IMAGES="nginx redis"`',
    "only these two.",
    "",
    "Each image is run as `twine-agent run NAME --image … --network private --memory …`, with a "
    "persistent volume if the image's",
    "documentation names one. *None* in the column of keys means: no key beyond memory, network "
    "and volume.",
    "",
)
_MEANING = (
    "",
    "- **starts**: seconds until its program runs.",
    "- **serves**: seconds until it answered a request of its protocol over its port, or until a "
    "client inside it got its answer.",
    "- **logs**: the output to the image's log or to `/dev/stdout` is in `twine-agent logs`.",
    "- **stops**: seconds until no process was left. It ended by its own stop signal within 30 s; "
    "systemd killed no process.",
    "- **keeps**: data written before a restart existed after it (images with data only).",
    "- Two images at a time and other work shared two emulated processors. So the times compare "
    "images, and do not predict a server.",
    "",
)


def write_page(table: Sequence[Recipe], results: Mapping[str, Any]) -> None:
    """Write the page. It lists an image without a result as not run yet."""
    done = [r for r in table if r.name in results]
    fine = [r for r in done if "problem" not in results[r.name]]
    bare = [r for r in fine if not r.keys]
    lines = [
        *_HEAD,
        f"Of {len(table)} images {len(done)} were run: {len(fine)} passed all checks, {len(bare)} "
        f"of them with no key beyond the defaults. {_when([results[r.name] for r in done])}",
        f"CI runs {len(FIXED)} (`tests/lab/test_2_compatibility.py`): {', '.join(FIXED)}.",
        "",
        "| image | starts | serves | logs | stops | keeps | keys | remark |",
        "|---|---|---|---|---|---|---|---|",
        *(_row(r, results.get(r.name)) for r in table),
        *_MEANING,
    ]
    needing = [r for r in table if r.keys]
    if needing:
        lines += ["## Keys that some need", ""]
        for r in needing:
            keys = "; ".join(line for line in r.keys.strip().splitlines())
            lines.append(f"- **{r.name}**: `{keys}`. {r.why}")
        lines.append("")
    PAGE.write_text("\n".join(lines))


def _when(found: Sequence[Mapping[str, Any]]) -> str:
    dates = sorted({one["date"] for one in found})
    kernels = sorted({one["kernel"] for one in found if "kernel" in one})
    if not kernels:
        return ""
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    bare = sum("kernel" not in one for one in found)
    unknown = f" (of {bare} it was not noted)" if bare else ""
    return f"Run on {days}, kernel {' and '.join(kernels)}{unknown}."


def _row(recipe: Recipe, found: Mapping[str, Any] | None) -> str:
    keys, remark = "see below" if recipe.keys else "none", recipe.like
    if found is None:
        return f"| {recipe.name} | not run | – | – | – | – | {keys} | {remark} |"
    if "problem" in found:
        remark += f". **{_plain(found['problem'])}**"
    cells = [
        _seconds({"serves": "start_s" in found, **found}, "serves", "start_s"),
        _seconds(found, "serves", "ready_s"),
        "yes" if found.get("logs") else "**no**",
        _seconds(found, "stops", "stop_s"),
        ("yes" if found.get("keeps") else "**no**") if recipe.write else "–",
    ]
    return f"| {recipe.name} | {' | '.join(cells)} | {keys} | {remark} |"


def _seconds(found: Mapping[str, Any], fact: str, time: str) -> str:
    if not found.get(fact):
        return "**no**"
    return f"{found[time]:.0f} s" if time in found else "yes"


def _plain(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:300]
