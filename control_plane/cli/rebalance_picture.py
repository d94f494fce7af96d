"""A plan of the ReBalancer as a picture in SVG: use of each MSB and row before and after it."""

from __future__ import annotations

from html import escape

from control_plane.api.rebalancing import PlaceUse, PowerUse, RebalancePlan

_LEFT, _WIDTH, _BAR, _GAP, _HEAD = 190, 620, 9, 10, 40
_COLOURS = {"cpu": "#1565c0", "memory": "#2e7d32", "network": "#ef6c00", "power": "#6a1b9a"}
_DIMENSIONS = ("cpu", "memory", "network")
_FULL = 1.25
"""The value at full width: budgets may be exceeded, and machines by measured loads."""


def picture(plan: RebalancePlan) -> str:
    """Return the picture; pale bars are before the plan, full ones after it."""
    body, top = list[str](), _HEAD
    for place in plan.places:
        body += _place(place, top)
        top += 2 * _BAR * len(_DIMENSIONS) + _GAP
    for power in plan.power:
        body += _power(power, top)
        top += 2 * _BAR + _GAP
    full = _x(1.0)
    title = (
        f"{len(plan.moves)} moves: hot machines {plan.hot_before} \u2192 {plan.hot_after};"
        " pale: before, full: after, tick: hottest machine"
    )
    legend = "".join(
        f'<tspan fill="{colour}" dx="12">{name}</tspan>' for name, colour in _COLOURS.items()
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 60} {top + 10}"'
        ' font-family="sans-serif" font-size="11">\n'
        '<rect width="100%" height="100%" fill="white"/>\n'
        f'<text x="4" y="15">{escape(title)}</text>\n<text x="4" y="31">{legend}</text>\n'
        + "\n".join(body)
        + f'\n<line x1="{full:.1f}" x2="{full:.1f}" y1="{_HEAD}" y2="{top}" stroke="#c62828"/>\n'
        "</svg>\n"
    )


def _x(share: float) -> float:
    return _LEFT + _WIDTH * min(share, _FULL) / _FULL


def _place(place: PlaceUse, top: int) -> list[str]:
    name = f"{place.level} {place.place} ({place.machines})"
    found = [f'<text x="4" y="{top + 14}">{escape(name)}</text>']
    for number, dimension in enumerate(_DIMENSIONS):
        at = top + 2 * _BAR * number
        before, after = place.before.get(dimension, 0.0), place.after.get(dimension, 0.0)
        found += _bars(at, before, after, _COLOURS[dimension])
    height = 2 * _BAR * len(_DIMENSIONS)
    ticks = ((place.hottest_before, "#bdbdbd"), (place.hottest_after, "#000000"))
    return found + [
        f'<line x1="{_x(share):.1f}" x2="{_x(share):.1f}" y1="{top}" y2="{top + height}"'
        f' stroke="{colour}"/>'
        for share, colour in ticks
    ]


def _power(power: PowerUse, top: int) -> list[str]:
    limit = max(power.limit_w, 1.0)
    name = f"power of {power.place}"
    return [
        f'<text x="4" y="{top + 14}">{escape(name)}</text>',
        *_bars(top, power.before_w / limit, power.after_w / limit, _COLOURS["power"]),
    ]


def _bars(top: int, before: float, after: float, colour: str) -> list[str]:
    return [
        f'<rect x="{_LEFT}" y="{top + _BAR * at}" width="{_x(share) - _LEFT:.1f}"'
        f' height="{_BAR - 1}" fill="{colour}" opacity="{opacity}">'
        f"<title>{share:.1%}</title></rect>"
        for at, (share, opacity) in enumerate(((before, 0.35), (after, 1.0)))
    ]
