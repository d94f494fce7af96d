"""Regional and global shards through the real front end, by `twinectl`.

The control plane is the real one on the in-memory store. It has two regions: four machines have
joined in each, and no agent answers.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from agent.api import ImageFormat, ImageInfo, Location
from agent.api.joining import JoinRequest
from control_plane.agents.polled import PolledAgent, PollPatience
from control_plane.api.machines import MachineRecord
from control_plane.api.settings import SchedulerSettings
from control_plane.cli import main
from control_plane.front_end.access import Access
from control_plane.front_end.frontend import FrontEnd
from control_plane.front_end.trail import Trail
from control_plane.identity.authority import OwnIdentity, open_authority
from control_plane.identity.people import People
from control_plane.identity.registrar import Registrar
from control_plane.images.store import ImageStore
from control_plane.roles import ControlPlane
from control_plane.runtime.runtime import Runtime
from control_plane.store.memory import MemoryStore
from wire.listen import serving, tcp_socket, unix_socket

from .conftest import FACTS

pytestmark = pytest.mark.behaviour("SH13")

DIGEST = "sha256:" + "a" * 64
Ctl = Callable[..., Result]


async def find(digest: str) -> ImageInfo | None:
    return ImageInfo(digest=digest, format=ImageFormat.TAR, stream_bytes=1, created_at=0.0)


def no_agent(_: MachineRecord) -> PolledAgent:
    return PolledAgent("https://127.0.0.1:9", None, Runtime(), PollPatience(3.0, 5.5))


async def join(control_plane: ControlPlane) -> None:
    for region, datacenter in (("west", "dc1"), ("east", "dc2")):
        for number in range(4):
            request = JoinRequest(
                token="twn1.a.b",
                machine=f"{region}{number}",
                csr_pem="",
                address="127.0.0.1:9",
                location=Location(region=region, datacenter=datacenter),
                facts=FACTS,
            )
            await control_plane.joined(request)


@contextmanager
def serve(
    folder: Path, store: MemoryStore, regions: dict[str, str], number: int = 4
) -> Iterator[Ctl]:
    """Run a control plane with this number of shards; yield a runner of `twinectl`."""
    path, ready, stop = folder / "cp.sock", threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def work() -> None:
        authority = open_authority(folder / "a.pem", "twine")
        own = OwnIdentity(authority, ["127.0.0.1"])
        settings = SchedulerSettings(shards=number, shard_regions=regions)
        control_plane = ControlPlane(store, no_agent, Runtime(), settings, find)
        registrar = Registrar(store, authority, control_plane, "https://x", Runtime())
        images = ImageStore(folder / "images", time.time, 1 << 20)
        people, trail = People(store, Runtime()), Trail(store, Runtime())
        front_end = FrontEnd(control_plane, registrar, images, people, trail)
        app = front_end.app(Access(os.getuid()), "0")
        sockets = tcp_socket("127.0.0.1", 0), unix_socket(path)
        async with (
            store,
            control_plane,
            serving(app, sockets[0], own.server_context(), sockets[1]),
        ):
            await join(control_plane)
            ready.set()
            await stop.wait()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(work())

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(30)
    try:
        env = {"TWINE_ENDPOINT": f"unix:{path}"}
        yield lambda *arguments: CliRunner().invoke(main, arguments, env=env)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(15)


@pytest.fixture
def ctl(tmp_path: Path) -> Iterator[Ctl]:
    with serve(tmp_path, MemoryStore(), {"1": "west", "2": "east"}) as run:
        yield run


def deploy(ctl: Ctl, folder: Path, name: str, *options: str, requires: str = "cpus >= 1") -> None:
    """Create an entitlement of two machines and apply a job to it."""
    made = ctl("entitlement", "create", name, "--machines", "2", *options)
    assert made.exit_code == 0, made.output
    file = folder / f"{name}.toml"
    file.write_text(
        f'name = "job-{name}"\nentitlement = "{name}"\ntasks = 1\nimage = "{DIGEST}"\n'
        f'command = ["/bin/true"]\nrequires = ["{requires}"]\n'
    )
    applied = ctl("job", "apply", str(file))
    assert applied.exit_code == 0, applied.output


def until(what: Callable[[], object]) -> None:
    ends = time.monotonic() + 120.0
    while not what():
        assert time.monotonic() < ends
        time.sleep(0.05)


def shards(ctl: Ctl) -> dict[int, tuple[str, dict[str, str]]]:
    """Return the region of each shard, and its entitlements with their regions."""
    found: dict[str, Any] = json.loads(ctl("shard", "list", "-o", "json").stdout)
    return {
        of["shard"]: (of["region"], {e: of["pinned"].get(e, "") for e in of["entitlements"]})
        for of in found["shards"]
    }


@pytest.mark.behaviour("SH13")
def test_entitlements_are_given_shown_moved_and_drained_by_scope(ctl: Ctl, tmp_path: Path) -> None:
    deploy(ctl, tmp_path, "ads")
    deploy(ctl, tmp_path, "pay", "--region", "west")
    deploy(ctl, tmp_path, "log", "--region", "east", "--datacenter", "dc2")
    assert shards(ctl) == {
        0: ("", {"ads": ""}),
        1: ("west", {"pay": "west"}),
        2: ("east", {"log": "east"}),
        3: ("", {}),
    }
    listed = [line.split()[:2] for line in ctl("shard", "list").stdout.splitlines()[1:3]]
    assert listed == [["0", "global"], ["1", "region"]]
    shown = ctl("shard", "show", "1").stdout.splitlines()
    assert (shown[0], shown[2].split()) == ("shard 1: region west", ["pay", "west"])
    assert "east/dc2" in ctl("entitlement", "list").stdout

    refused = ctl("shard", "move", "ads", "--to", "1")
    assert refused.exit_code == 5
    assert refused.stderr.splitlines() == [
        "error: cannot give entitlement 'ads' to shard 1: that shard is for region west, and the"
        " entitlement is not pinned to a region",
        "try:   pin it first: twinectl entitlement update ads --region west; or move it to a shard"
        " that `twinectl shard list` shows as global",
    ]
    changed = ctl("entitlement", "update", "pay", "--unset", "region")
    assert changed.exit_code == 5
    assert "shard 1 owns it, which is for region west" in changed.stderr

    drained = ctl("shard", "drain", "1")
    assert drained.stdout.splitlines()[0].startswith("entitlement pay moved from shard 1 to 3")
    assert ctl("shard", "drain", "3").stdout.startswith("entitlement pay moved from shard 3 to 1")
    assert ctl("shard", "drain", "0").stdout.startswith("entitlement ads moved from shard 0 to 3")
    assert ctl("entitlement", "create", "web", "--machines", "1").exit_code == 0
    assert ctl("shard", "move", "web", "--to", "1").exit_code == 5
    assert ctl("entitlement", "update", "web", "--region", "west").exit_code == 0
    assert ctl("shard", "move", "web", "--to", "1").exit_code == 0
    assert set(shards(ctl)[1][1]) == {"pay", "web"}


@pytest.mark.behaviour("SH13")
def test_a_shard_is_not_drained_if_no_other_may_own_its_entitlements(tmp_path: Path) -> None:
    """None of its entitlements has moved by then either."""
    regions = {"1": "west", "2": "east", "3": "east"}
    with serve(tmp_path, MemoryStore(), regions) as ctl:
        deploy(ctl, tmp_path, "ads")
        deploy(ctl, tmp_path, "pay", "--region", "west")
        assert ctl("shard", "move", "pay", "--to", "0").exit_code == 0
        refused = ctl("shard", "drain", "0")
        assert refused.exit_code == 5
        assert "cannot drain shard 0: no other shard may own ads;" in refused.stderr
        assert set(shards(ctl)[0][1]) == {"ads", "pay"}


@pytest.mark.behaviour("BUG-UX98", "BUG-UX101")
def test_the_only_shard_is_not_drained_and_a_job_is_created_once(tmp_path: Path) -> None:
    """`job apply --new` is refused if the job exists."""
    with serve(tmp_path, MemoryStore(), {}, number=1) as ctl:
        deploy(ctl, tmp_path, "ads")
        file = str(tmp_path / "ads.toml")
        again = ctl("job", "apply", file, "--new")
        assert again.exit_code == 5
        assert "there is a job 'job-ads' already, in entitlement ads" in again.stderr
        assert ctl("job", "apply", file).exit_code == 0
        assert ctl("job", "apply", file, "--new", "--set", "name=other").exit_code == 0
        refused = ctl("shard", "drain", "0")
        assert refused.exit_code == 5
        assert "cannot drain shard 0: it is the only one" in refused.stderr


@pytest.mark.behaviour("SH13")
def test_entitlements_with_machines_of_another_region_are_drained_into_a_global_shard(
    ctl: Ctl, tmp_path: Path
) -> None:
    """A regional shard gets no machine of another region by a move."""
    deploy(ctl, tmp_path, "pay", requires="region = east")
    until(lambda: json.loads(ctl("entitlement", "show", "pay", "-o", "json").stdout)["held"])
    changed = ctl("entitlement", "update", "pay", "--region", "west")
    assert changed.exit_code == 0, changed.output
    refused = ctl("shard", "move", "pay", "--to", "1", "--plan")
    assert refused.exit_code == 5
    assert "the entitlement still holds 1 machines elsewhere: east" in refused.stderr
    assert ctl("shard", "drain", "0").stdout.startswith("entitlement pay moved from shard 0 to 3")
