"""An agent over a machine in memory that accepts every host profile: it runs tasks of jobs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
from agent_process import main

from agent.api import ProfileState, ProfileStatus
from agent.machine import Property
from agent.machine.fake_systemd import Ended


def sidekick(folder: Path, argv: list[str], _: Mapping[str, Property]) -> Ended:
    """Report the requested profile as verified."""
    numbers = dict(word.removeprefix("--").split("=") for word in argv if "=" in word)
    status = ProfileStatus(
        name=argv[2],
        generation=int(numbers["generation"]),
        epoch=int(numbers["epoch"]),
        state=ProfileState.VERIFIED,
    )
    (folder / "sidekick").mkdir(exist_ok=True)
    (folder / "sidekick/status.json").write_bytes(msgspec.json.encode(status))
    return Ended(0)


if __name__ == "__main__":
    here = Path(sys.argv[1])
    programs = {"sidekick": lambda argv, properties: sidekick(here, argv, properties)}
    asyncio.run(main(here, sys.argv[2], int((*sys.argv[3:], "0")[0]), programs))
