"""An agent that serves in a separate thread, and the program that calls it."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from builders import FakeHost, unit

from agent.cli import main
from agent.host.logs import LoggedRun as LoggedRun
from agent.host.logs import journal_command

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[FakeHost]:
    """Run an agent in a separate thread, because the command line tool runs its own loop."""
    host = FakeHost(tmp_path / "host")
    host.give_image()
    host.fake.processes.answers[("journalctl",)] = [b"one\n", b"t\x1bwo\n"]
    host.fake.processes.answers[tuple(journal_command(LoggedRun(unit("nothing"))))] = []
    ready, stop, loops = threading.Event(), asyncio.Event(), []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        async with host.agent():
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(60)
    yield host
    loops[0].call_soon_threadsafe(stop.set)
    thread.join(60)
    assert not thread.is_alive()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Return a function that calls the program: exit code, standard output, standard error."""
    monkeypatch.delenv("TWINE_AGENT", raising=False)

    def call(*argv: str, host: FakeHost | None = None) -> tuple[int, str, str]:
        config = tmp_path / "agent.toml"
        socket = host.config.socket if host else str(tmp_path / "nothing.sock")
        config.write_text(f'socket = "{socket}"\n')
        monkeypatch.setattr(sys, "argv", ["twine-agent", f"--config={config}", *argv])
        code = 0
        try:
            main()
        except SystemExit as e:
            code = int(e.code or 0)
        out, err = capfd.readouterr()
        return code, out, err

    return call
