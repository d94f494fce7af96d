"""An agent over a machine in memory, in a separate process: the target of the tests."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path

from agent.config import AgentConfig
from agent.daemon import Agent
from agent.machine.fake import FakeMachine
from agent.machine.fake_systemd import Program
from wire import log as logs


async def main(
    folder: Path, listen: str, boots: int, programs: Mapping[str, Program] | None = None
) -> None:
    """Serve until killed, with the identity in the folder; `boots`: number of earlier boots."""
    logs.configure("twine-agent", "info")
    config = AgentConfig(
        state_dir=str(folder / "state"),
        run_dir=str(folder / "run"),
        socket=str(folder / "cp.sock"),
        socket_group="root",
        listen=listen,
        sidekick="/opt/twine/bin/sidekick",
        sidekick_state_dir=str(folder / "sidekick"),
    )
    fake = FakeMachine(folder)
    fake.systemd.programs.update(programs or {})
    for _ in range(boots):
        fake.reboot()
    async with Agent(config, fake.machine).running():
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int((*sys.argv[3:], "0")[0])))
