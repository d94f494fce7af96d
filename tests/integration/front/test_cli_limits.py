"""`twinectl limit`, `/metrics`, and the front end's own limit."""

from __future__ import annotations

import asyncio
import json

import pytest
from click.testing import CliRunner, Result

from control_plane.api.people import GroupSpec
from control_plane.api.routes import ROUTES
from control_plane.cli import main
from control_plane.front_end.limit_handlers import DELETES_BURST
from wire.client import WireClient
from wire.errors import Busy

from .conftest import Region

ROUTE = {route.name: route for route in ROUTES}


def ctl(region: Region, *arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, env={"TWINE_ENDPOINT": f"unix:{region.socket}"})


async def delete_groups(client: WireClient, number: int, said: list[str]) -> int:
    """Return how many of so many groups were deleted before one was refused."""
    for n in range(number):
        await client.call(ROUTE["put_group"], GroupSpec(members=["x"]), group=f"g{n}")
    for n in range(number):
        try:
            await client.call(ROUTE["delete_group"], group=f"g{n}")
        except Busy as e:
            said.append(f"{e}; {e.hint}")
            return n
    return number


def test_nobody_deletes_everything_by_mistake(region: Region) -> None:
    """AV5: one person's deletions are limited, and an operator lifts that with a reason."""

    said = list[str]()

    async def spree() -> int:
        async with region.client() as client:
            return await delete_groups(client, DELETES_BURST + 25, said)

    deleted = asyncio.run(spree())
    assert DELETES_BURST <= deleted < DELETES_BURST + 25
    assert "deletes more than 30 objects at once" in said[0]
    assert "twinectl limit lift deletes" in said[0]
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


def test_what_limits_hold_back_is_in_the_metrics(region: Region) -> None:
    """AV5: what waits is seen without asking for it."""

    async def scrape() -> str:
        async with (
            region.client() as client,
            client._open().get("http://local/metrics") as answer,
        ):
            return await answer.text()

    text = asyncio.run(scrape())
    assert 'twine_limit_holds{limit="deletes"} 0.0' in text
    assert 'twine_limit_lifted{limit="deletes"} 0.0' in text


@pytest.mark.parametrize("name", ["everything", ""])
def test_a_limit_that_there_is_not_is_wrong_usage(region: Region, name: str) -> None:
    assert ctl(region, "limit", "lift", name, "--reason", "x").exit_code == 64
