"""One agent at a time manages the tasks of a host."""

from __future__ import annotations

import pytest
from builders import FakeHost
from msgspec.structs import replace

from agent.daemon import Agent
from wire.errors import Busy


@pytest.mark.behaviour("BUG-AG68")
async def test_one_agent_at_a_time_uses_a_state_folder(host: FakeHost) -> None:
    """Two would start and stop the units of the same tasks."""
    run = host.folder / "run2"
    other = replace(host.config, run_dir=str(run), socket=str(run / "a.sock"))
    async with host.agent():
        with pytest.raises(Busy, match="another agent runs on this host"):
            async with Agent(host.config, host.fake.machine).running():
                pass
        with pytest.raises(Busy, match=f"another agent uses the state folder {host.state}"):
            async with Agent(other, host.fake.machine).running():
                pass
    async with Agent(other, host.fake.machine).running() as services:
        assert services.ready
