"""What a run of the compatibility suite found → docs/compatibility.md."""

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
    "Dockerfiles do, runs each on a guest, and writes this page.",
    "The recipes are in `tests/compat/recipes.toml`. No image of a public registry is used: these "
    "behave like them (entrypoints of root that chown,",
    "logs linked to `/dev/stdout`, pid files in `/run`, sockets, forks, users by name and number).",
    "",
    "Each is run as `twine-agent run NAME --image … --network private --memory …`, with a "
    "persistent volume where the image's documentation",
    "names one. It has to serve, to be in the log, to end by its own stop signal, and to have its "
    "data after a restart. *Nothing* in the",
    "column of keys means: no key beyond memory, network and volume.",
    "",
)
_MEANING = (
    "",
    "- **serves**: it answered over its port, or a client inside it did.",
    "- **logs**: what the image writes to its log or to `/dev/stdout` is in `twine-agent logs`.",
    "- **stops**: it ended by its stop signal within 30 s; systemd had to kill nothing.",
    "- **keeps**: what was written before a restart was there after it (images with data only).",
    "- Times are from one emulated processor that other work shared: they compare images, and say "
    "nothing about a server.",
    "",
)


def write_page(table: Sequence[Recipe], results: Mapping[str, Any]) -> None:
    """Write the page; an image that was not run yet is listed as such."""
    done = [r for r in table if r.name in results]
    fine = [r for r in done if "problem" not in results[r.name]]
    bare = [r for r in fine if not r.keys]
    lines = [
        *_HEAD,
        f"Of {len(table)} images {len(done)} were run: {len(fine)} do all they should, {len(bare)} "
        "of them with no key beyond the defaults.",
        f"CI runs {len(FIXED)} (`tests/lab/test_2_compatibility.py`): {', '.join(FIXED)}.",
        "",
        "| image | behaves like | serves | logs | stops | keeps | keys | ready after |",
        "|---|---|---|---|---|---|---|---|",
        *(_row(r, results.get(r.name)) for r in table),
        *_MEANING,
    ]
    needing = [r for r in done if r.keys]
    if needing:
        lines += ["## Keys that some need", ""]
        for r in needing:
            keys = "; ".join(line for line in r.keys.strip().splitlines())
            lines.append(f"- **{r.name}**: `{keys}`. {r.why}")
        lines.append("")
    odd = [r for r in done if "problem" in results[r.name]]
    if odd:
        lines += ["## What does not work", ""]
        lines += [f"- **{r.name}**: {_plain(results[r.name]['problem'])}" for r in odd]
        lines.append("")
    PAGE.write_text("\n".join(lines))


def _row(recipe: Recipe, found: Mapping[str, Any] | None) -> str:
    if found is None:
        cells = ["not run", "–", "–", "–"]
    else:
        keeps = ("yes" if found.get("keeps") else "**no**") if recipe.write else "–"
        yes = ["yes" if found.get(word) else "**no**" for word in ("serves", "logs", "stops")]
        cells = [*yes, keeps]
    keys = "see below" if recipe.keys else "nothing"
    ready = f"{found['ready_s']:.0f} s" if found and found.get("serves") else "–"
    return f"| {recipe.name} | {' | '.join([recipe.like, *cells, keys, ready])} |"


def _plain(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:300]
