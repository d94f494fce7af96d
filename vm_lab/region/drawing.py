"""One seed as a picture: copies that ran, tasks listed for clients, and the events."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape

from vm_lab.region.seed import SeedOutcome

WIDTH, PLOT, ROW, LEFT, TOP = 1100, 260, 15, 150, 60
_COLOURS = {
    "plane": "#7b3294",
    "store": "#b35806",
    "cut": "#c51b7d",
    "power": "#b2182b",
    "client": "#4d9221",
    "other": "#777777",
}
_LINES = (("wanted", "#999999", "5 4"), ("copies", "#2166ac", ""), ("listed", "#1b7837", ""))


def as_svg(outcome: SeedOutcome) -> str:
    """Return the picture of one seed."""
    begin = min((s.at for s in outcome.samples), default=0.0)
    end = max(outcome.virtual_s, begin + 1.0)
    kinds = list(dict.fromkeys(fault.kind for fault in outcome.story))
    height = TOP + PLOT + 50 + ROW * (len(kinds) + 1) + 40

    def x(at: float) -> float:
        return LEFT + (at - begin) / (end - begin) * (WIDTH - LEFT - 20)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}"'
        f' viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{escape(outcome.scenario)}, seed'
        f" {outcome.seed}: {'nothing broke' if outcome.ok else 'a rule broke'}</text>",
        *_legend(),
        *_axes(outcome, x, begin, end),
        *_curves(outcome, x),
        *_events(outcome, x, kinds),
        *_violations(outcome, x),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _most(outcome: SeedOutcome) -> int:
    samples = outcome.samples
    return max((max(s.wanted, s.copies, s.listed) for s in samples), default=1) or 1


def _axes(
    outcome: SeedOutcome, x: Callable[[float], float], begin: float, end: float
) -> Iterable[str]:
    most = _most(outcome)
    steps = min(4, most)
    for share in range(steps + 1):
        value = most * share / steps
        y = TOP + PLOT - PLOT * share / steps
        yield f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eeeeee"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.0f} tasks</text>'
    step = 60.0
    while (end - begin) / step > 16:
        step *= 2
    at = 0.0
    while at <= end:
        if at >= begin:
            yield (
                f'<text x="{x(at):.1f}" y="{TOP + PLOT + 16}" text-anchor="middle">'
                f"{at / 60:.0f} min</text>"
            )
        at += step


def _legend() -> Iterable[str]:
    names = {"wanted": "wanted", "copies": "copies that run", "listed": "listed for clients"}
    for number, (name, colour, dash) in enumerate(_LINES):
        left = LEFT + number * 170
        yield (
            f'<line x1="{left}" x2="{left + 26}" y1="40" y2="40" stroke="{colour}"'
            f' stroke-width="2" stroke-dasharray="{dash}"/>'
        )
        yield f'<text x="{left + 32}" y="44">{names[name]}</text>'


def _curves(outcome: SeedOutcome, x: Callable[[float], float]) -> Iterable[str]:
    most = _most(outcome)
    for name, colour, dash in _LINES:
        path = []
        before: float | None = None
        for sample in outcome.samples:
            y = TOP + PLOT - PLOT * getattr(sample, name) / most
            if before is not None and before != y:
                path.append(f"{x(sample.at):.1f},{before:.1f}")
            path.append(f"{x(sample.at):.1f},{y:.1f}")
            before = y
        yield (
            f'<polyline points="{" ".join(path)}" fill="none" stroke="{colour}"'
            f' stroke-width="1.6" stroke-dasharray="{dash}"/>'
        )


def _events(outcome: SeedOutcome, x: Callable[[float], float], kinds: list[str]) -> Iterable[str]:
    top = TOP + PLOT + 40
    for row, kind in enumerate(kinds):
        y = top + row * ROW
        yield f'<text x="{LEFT - 8}" y="{y + 10}" text-anchor="end">{escape(kind)}</text>'
        for fault in outcome.story:
            if fault.kind != kind:
                continue
            left = x(outcome.story_at + fault.at)
            right = max(
                left + 2.5, x(min(outcome.virtual_s, outcome.story_at + fault.at + fault.seconds))
            )
            yield (
                f'<rect x="{left:.1f}" y="{y + 2}" width="{right - left:.1f}" height="{ROW - 5}"'
                f' fill="{_colour(kind)}" fill-opacity="0.65"><title>{escape(str(fault))}'
                "</title></rect>"
            )


def _violations(outcome: SeedOutcome, x: Callable[[float], float]) -> Iterable[str]:
    named: set[str] = set()
    for violation in outcome.violations:
        at = x(violation.at)
        name = "" if violation.rule in named else violation.rule
        named.add(violation.rule)
        anchor = "end" if at > WIDTH - 120 else "middle"
        yield (
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{TOP + PLOT}" stroke="#d7191c"'
            f' stroke-width="1.5"><title>{escape(str(violation))}</title></line>'
        )
        yield (
            f'<text x="{at:.1f}" y="{TOP - 3}" fill="#d7191c" text-anchor="{anchor}">'
            f"{escape(name)}</text>"
        )


def _colour(kind: str) -> str:
    group = kind.partition("-")[0]
    if group in ("cut", "delay", "loss", "duplicate", "flap"):
        group = "cut"
    elif group in ("power", "reboot", "agent", "slow", "garbled"):
        group = "power"
    elif kind in (
        "resize",
        "release",
        "stop-job",
        "drain",
        "upgrade",
        "switch",
        "power-cap",
        "twice",
        "restart",
    ):
        group = "client"
    return _COLOURS.get(group, _COLOURS["other"])
