"""One agent at a time manages the tasks of a host, with paths that it can use."""

from __future__ import annotations

import pytest
from builders import FakeHost
from msgspec.structs import replace

from agent.daemon import Agent
from wire.errors import Busy, HostError


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


@pytest.mark.behaviour("BUG-AG81", "BUG-AG104")
@pytest.mark.parametrize(
    ("setting", "path", "why"),
    [
        ("run_dir", "file", "File exists"),
        ("state_dir", "file/state", "Not a directory"),
        ("state_dir", "a\0b", "embedded null byte"),
        ("socket", "file/a.sock", "File exists"),
        ("socket", "a" * 120, "AF_UNIX path too long"),
        ("socket", "", "cannot listen on {}: it is a folder, not a socket"),
        ("socket", "file", "cannot listen on {}: it is a file, not a socket"),
    ],
)
async def test_a_path_that_cannot_be_used_is_named_with_its_setting(
    host: FakeHost, setting: str, path: str, why: str
) -> None:
    (host.folder / "file").touch()
    wrong = replace(host.config, **{setting: str(host.folder / path)})
    found: list[BaseException] = []
    try:
        async with Agent(wrong, host.fake.machine).running():
            pass
    except* HostError as group:
        found = list(group.exceptions)
    assert [str(e) for e in found] == [
        f"{setting} = {str(host.folder / path)!r} cannot be used: {why.format(host.folder / path)}"
    ]
