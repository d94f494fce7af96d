"""Every page of docs/ that describes a file begins with a complete example."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from fake_agents import IMAGE
from msgspec.structs import replace
from virtual_time import run
from world import World, a_region

from agent.api import TaskSpec
from agent.cli.task_options import checked_spec
from control_plane.api.capacity import EntitlementSpec
from control_plane.cli.jobfile import read_job
from control_plane.profiles.core.proposal import check_text
from wire.quantity_fields import parse_quantities

pytestmark = pytest.mark.behaviour("BUG-UX4")

DOCS = Path(__file__).parents[4] / "docs"
JOBS = (
    *("allocation", "job-file", "network", "requirements-grammar", "resources", "taskcontrol"),
    *("updates", "volumes"),
)
"""Pages about the content of job files."""


def first_block(page: str) -> str:
    """Return the first block of a page, which must be a file in TOML."""
    text = (DOCS / f"{page}.md").read_text()
    found = re.search(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    assert found[1] == "toml"
    assert len(text[: found.start()].splitlines()) < 30, "it is at the beginning"
    return found[2]


@pytest.mark.behaviour("BUG-UX4")
@pytest.mark.parametrize("page", JOBS)
def test_the_first_job_file_of_a_page_can_be_applied(page: str, tmp_path: Path) -> None:
    """The file is applied unchanged, except that the test replaces the image."""
    path = tmp_path / "job.toml"
    path.write_text(first_block(page))
    spec = replace(read_job(path, []), image=IMAGE)

    async def main() -> None:
        world = World(a_region(16))
        async with world.running():
            for machine in world.region.machines.values():
                await world.cp.joined(machine.join())
            await world.cp.capacity.put_entitlement(
                spec.entitlement, EntitlementSpec(machines=16, host_profile="web")
            )
            await world.cp.apply_job(spec)
            made = (await world.cp.get_job(spec.name)).record.spec
            assert (made.command, made.tasks) == (spec.command, spec.tasks)

    run(main())


@pytest.mark.behaviour("BUG-UX4")
def test_the_task_file_example_is_valid_for_the_agent() -> None:
    """Checks docs/task-lifecycle.md."""
    document = parse_quantities(tomllib.loads(first_block("task-lifecycle")), TaskSpec)
    assert checked_spec(document).command == ["/bin/serve"]


@pytest.mark.behaviour("BUG-UX4")
def test_the_profile_example_is_valid_for_an_owner() -> None:
    """Checks docs/profiles.md."""
    assert check_text(first_block("profiles"), "web", ["sysctl.net.*"]) == []
