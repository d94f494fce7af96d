"""`make dev` runs the services that `twinectl pipeline` and `autoscale` call."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from control_plane.cli import main
from vm_lab import fleet

PATIENCE_S = 120
COMMANDS = (["machine", "list"], ["pipeline", "list"], ["autoscale", "status"])


@pytest.mark.behaviour("BUG-CP131")
async def test_the_printed_variables_serve_all_printed_commands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = ""
    staying = asyncio.create_task(fleet._run_dev_region(2))
    try:
        async with asyncio.timeout(PATIENCE_S):
            while "Ctrl-C ends it" not in shown and not staying.done():
                await asyncio.sleep(0.05)
                shown += capsys.readouterr().out
        variables = dict(re.findall(r"export (\w+)=(\S+)", shown))
        for command in COMMANDS:
            assert f"twinectl {' '.join(command)}" in shown
            found = await asyncio.to_thread(CliRunner().invoke, main, command, env=variables)
            assert found.exit_code == 0, found.output
    finally:
        staying.cancel()
        await asyncio.gather(staying, return_exceptions=True)
    assert not Path(variables["TWINE_AUTOSCALER"].removeprefix("unix:")).exists()
