"""A release of Twine itself by a pipeline on three VMs, and a broken one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.lab_client import NAME, LabClient
from vm_lab.release_demo import BROKEN, MACHINES, NEW, ReleaseDemo

pytestmark = [pytest.mark.long, pytest.mark.behaviour("CV3", "AV15")]


@pytest.fixture
def releases(web: LabClient) -> Iterator[ReleaseDemo]:
    demo = ReleaseDemo(NAME)
    try:
        demo.begin()
        yield demo
    finally:
        demo.end()
        web.lab("proxy", "stop")


def test_agents_are_released_before_the_control_plane_and_a_broken_one_is_rolled_back(
    releases: ReleaseDemo,
) -> None:
    """No task restarts, and no request fails."""
    outcome = releases.release_good_version()
    assert [step["name"] for step in outcome["run"]["steps"]] == [
        *("fleet/agents: canary 1", "fleet/agents: all"),
        *("fleet/control-plane: canary 1", "fleet/control-plane: all"),
    ]
    assert outcome["releases"] == dict.fromkeys((*MACHINES, "cp"), NEW)
    assert (outcome["failed"], outcome["again"]) == (0, [])
    outcome = releases.release_broken_version()
    assert outcome["run"]["image"] == BROKEN
    assert outcome["run"]["reason"].startswith("fleet agents: host m1: ")
    assert outcome["releases"] == dict.fromkeys((*MACHINES, "cp"), NEW)
    assert (outcome["failed"], outcome["again"]) == (0, [])
