"""The outcomes of seeds: as text for users, as rows and CSV for programs."""

from __future__ import annotations

import csv
import io
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from vm_lab.region.kinds import KINDS
from vm_lab.region.seed import SeedOutcome
from vm_lab.region.story import write


def as_text(outcomes: Sequence[SeedOutcome]) -> str:
    """Return the summary, then every violation."""
    cpu = [outcome.cpu_s for outcome in outcomes]
    virtual = sum(outcome.virtual_s for outcome in outcomes)
    broken = [outcome for outcome in outcomes if not outcome.ok]
    faults = Counter[str]()
    for outcome in outcomes:
        faults.update({k: n for k, n in outcome.figures.items() if k in KINDS})
    lines = [
        f"{len(outcomes)} seed{'s' if len(outcomes) > 1 else ''}, {len(broken)} broke a rule;"
        f" {virtual / 3600:.1f} hours of the"
        f" region in {sum(cpu):.1f} s of CPU, {statistics.median(cpu):.2f} s a seed",
        f"lives of the control plane: {sum(o.lives for o in outcomes)}; at rest after"
        f" {statistics.median(o.settle_s for o in outcomes):.0f} s (median),"
        f" {max(o.settle_s for o in outcomes):.0f} s at most",
        "events: " + ", ".join(f"{kind} {count}" for kind, count in sorted(faults.items())),
    ]
    for outcome in broken:
        lines.append(f"seed {outcome.seed} of {outcome.scenario}:")
        lines += [f"  {violation}" for violation in outcome.violations[:8]]
        if len(outcome.violations) > 8:
            lines.append(f"  … and {len(outcome.violations) - 8} more")
    return "\n".join(lines)


def as_rows(outcomes: Sequence[SeedOutcome]) -> list[dict[str, Any]]:
    """Return one flat row for each seed."""
    return [
        {
            "scenario": outcome.scenario,
            "seed": outcome.seed,
            "ok": outcome.ok,
            "violations": len(outcome.violations),
            "rules": " ".join(sorted({v.rule for v in outcome.violations})),
            "digest": outcome.digest,
            "virtual_s": round(outcome.virtual_s, 1),
            "settle_s": round(outcome.settle_s, 1),
            "cpu_s": round(outcome.cpu_s, 3),
            "events": outcome.events,
            "lives": outcome.lives,
            "calls": outcome.figures["calls to agents"],
            "transactions": outcome.figures["transactions"],
            "largest_value": outcome.figures["largest value"],
            "largest_transaction": outcome.figures["largest transaction"],
        }
        for outcome in outcomes
    ]


def as_csv(outcomes: Sequence[SeedOutcome]) -> str:
    """Return the rows as CSV with a header."""
    rows = as_rows(outcomes)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def as_story(outcome: SeedOutcome) -> str:
    """Return the story of a failing seed, with its violations as comments."""
    broken = "\n".join(f"# breaks {violation}" for violation in outcome.violations[:5])
    return f"# scenario {outcome.scenario}, seed {outcome.seed}\n{broken}\n{write(outcome.story)}"
