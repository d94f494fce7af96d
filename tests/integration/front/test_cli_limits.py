"""`twinectl limit`, `/metrics`, and the front end's own limit."""

from __future__ import annotations

import asyncio
import json
import os

import pytest
from click.testing import CliRunner, Result

from control_plane.api.people import GroupSpec
from control_plane.api.routes import ROUTES
from control_plane.cli import main
from control_plane.front_end.safety_handlers import DELETES_BURST
from wire.client import WireClient
from wire.errors import Busy

from .conftest import Region

ROUTE = {route.name: route for route in ROUTES}


def ctl(region: Region, *arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, env={"TWINE_ENDPOINT": f"unix:{region.socket}"})


async def delete_groups(client: WireClient, number: int, results: list[str]) -> int:
    """Return how many of this number of groups were deleted before one was refused."""
    for n in range(number):
        await client.call(ROUTE["put_group"], GroupSpec(members=["x"]), group=f"g{n}")
    for n in range(number):
        try:
            await client.call(ROUTE["delete_group"], group=f"g{n}")
        except Busy as e:
            results.append(f"{e}; {e.hint}")
            return n
    return number


@pytest.mark.behaviour("AV5", "BUG-UX138")
def test_deleting_everything_needs_a_confirmation(region: Region) -> None:
    """One user's deletions are limited, and an operator lifts that limit with a reason."""

    results = list[str]()

    async def spree() -> int:
        async with region.client() as client:
            return await delete_groups(client, DELETES_BURST + 25, results)

    deleted = asyncio.run(spree())
    assert DELETES_BURST <= deleted < DELETES_BURST + 25
    assert results[0].startswith(f"local:{os.getuid()} deletes more than 30 objects at once")
    assert "twinectl limit lift deletes" in results[0]
    (line,) = [x for x in ctl(region, "limit", "list").stdout.splitlines() if "deletes" in x]
    assert line.split()[:3] == ["deletes", "0.5", "30"]
    assert "more than 30 objects" in line
    lifted = ctl(region, "limit", "lift", "deletes", "--for", "5m", "--reason", "tidying up")
    assert lifted.stdout.startswith("limit deletes: lifted for ")
    audit = ctl(region, "audit", "-o", "json").stdout
    assert "limit/deletes" in audit
    assert "tidying up" in audit
    assert asyncio.run(spree()) == DELETES_BURST + 25
    found = json.loads(ctl(region, "limit", "list", "-o", "json").stdout)["limits"]
    (deletes,) = [one for one in found if one["name"] == "deletes"]
    assert deletes["lifted_why"] == "tidying up"
    held = ctl(region, "limit", "lift", "deletes", "--for", "0s", "--reason", "done")
    assert held.stdout == "limit deletes holds\n"


async def scrape(region: Region) -> list[str]:
    """Return the lines of `/metrics`."""
    async with (
        region.client() as client,
        client._open().get("http://local/metrics") as answer,
    ):
        return (await answer.text()).splitlines()


def limit_metrics(region: Region) -> tuple[bool, bool]:
    """Return whether `/metrics` shows that the limit `deletes` holds, and that it is lifted."""
    lines = asyncio.run(scrape(region))
    found = []
    for name in ("holds", "lifted"):
        (line,) = [x for x in lines if x.startswith(f'twine_limit_{name}{{limit="deletes"}} ')]
        found.append(line.endswith(" 1.0"))
    return found[0], found[1]


@pytest.mark.behaviour("AV5", "BUG-AU5")
def test_changes_held_back_by_limits_are_in_the_metrics(region: Region) -> None:
    """The metrics show what waits without a request for it."""

    async def spree() -> int:
        async with region.client() as client:
            return await delete_groups(client, DELETES_BURST + 25, [])

    assert limit_metrics(region) == (False, False)
    assert asyncio.run(spree()) < DELETES_BURST + 25
    assert limit_metrics(region) == (True, False)
    ctl(region, "limit", "lift", "deletes", "--for", "5m", "--reason", "tidying up")
    assert limit_metrics(region)[1]


@pytest.mark.behaviour("AL24", "BUG-AU5")
def test_decisions_of_the_allocator_are_in_the_metrics(region: Region) -> None:
    counts = region.control_plane.allocations[0].counts
    counts.hits, counts.misses, counts.conflicts = 7, 3, 2
    counts.stored, counts.taken, counts.cpu_s = 4, 5, 1.5
    lines = asyncio.run(scrape(region))
    assert {
        'twine_allocations_total{cache="hit"} 7.0',
        'twine_allocations_total{cache="miss"} 3.0',
        "twine_allocator_conflicts_total 2.0",
        "twine_allocator_stored_total 4.0",
        "twine_allocator_machines_taken_total 5.0",
        "twine_allocator_cpu_seconds_total 1.5",
    } <= set(lines)


@pytest.mark.parametrize("name", ["everything", ""])
def test_an_unknown_limit_is_a_usage_error(region: Region, name: str) -> None:
    assert ctl(region, "limit", "lift", name, "--reason", "x").exit_code == 64
