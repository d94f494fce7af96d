"""Programs that check a proxy's file and reload the proxy."""

from __future__ import annotations

from pathlib import Path

import pytest

from resolver import proxy_file
from resolver.proxy_file import ProxyFile, run_program
from wire.errors import ProgramError


@pytest.mark.behaviour("BUG-AG65")
async def test_a_reload_may_leave_a_process_that_keeps_its_output_open(tmp_path: Path) -> None:
    """For instance a proxy that is started in the background."""
    left = tmp_path / "pid"
    script = f"sleep 600 & echo $! > {left}"
    file = ProxyFile(tmp_path / "twine.cfg", [], ["sh", "-c", script])
    try:
        assert await file.update("text")
    finally:
        await run_program(["kill", left.read_text().strip()])


async def test_a_program_that_does_not_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_file, "PROGRAM_S", 0.1)
    with pytest.raises(ProgramError, match=r"sleep 600 did not end within 0\.1 s"):
        await run_program(["sleep", "600"])


async def test_the_last_line_of_a_long_output_is_the_reason() -> None:
    script = "i=0; while [ $i -lt 40000 ]; do echo a warning; i=$((i+1)); done; echo bad; exit 3"
    with pytest.raises(ProgramError, match=r"failed with 3: bad$"):
        await run_program(["sh", "-c", script])
    with pytest.raises(ProgramError, match="failed with 1: it printed nothing"):
        await run_program(["sh", "-c", "exec >&- 2>&-; exit 1"])
