"""A control plane whose store is put back from an old copy: nothing newer than it ends (F-88)."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import pytest
from builders import a_tar, chunks_of, digest_of

from agent.api import ImageFormat, TaskState, TaskStatus
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobSpec
from control_plane.client import ControlPlaneClient

from .face import Face, running
from .test_authority_lost import again, ends, starts
from .test_cloned_host import joined, on
from .test_revoked_agent import agent_in, answering, unused_port

T = TypeVar("T")
DATA = a_tar(app="code")


@pytest.fixture
def control_plane(tmp_path: Path) -> Iterator[Face]:
    """A control plane with hosts of its own."""
    with running("control plane", tmp_path / "plane") as face:
        yield face


def asks(face: Face, ask: Callable[[ControlPlaneClient], Awaitable[T]]) -> T:
    """Ask the control plane on its own socket."""

    async def call() -> T:
        async with ControlPlaneClient(f"unix:{face.socket}") as client:
            return await ask(client)

    return asyncio.run(call())


def job(name: str, tasks: int = 1, **fields: object) -> JobSpec:
    """Return a job of the entitlement that all of this has."""
    wish = {"entitlement": "front", "image": digest_of(DATA), "command": ["/bin/server"]}
    return JobSpec(**{"name": name, "tasks": tasks, **wish, **fields})  # type: ignore[arg-type]


def tasks_on(*folders: Path) -> dict[str, TaskStatus]:
    """Return what runs on some hosts, by task."""
    found = {}
    for folder in folders:
        for status in on(folder, lambda client: client.list_tasks()).tasks:
            if status.state is TaskState.RUNNING:
                found[status.task_id] = status
    return found


def lives(*folders: Path) -> dict[str, str]:
    """Return the lives of the processes on some hosts, by task."""
    return {name: status.invocation_id for name, status in tasks_on(*folders).items()}


class Hosts:
    """Hosts that run tasks, each with its agent as a process."""

    def __init__(self, face: Face, stack: ExitStack) -> None:
        self.face, self._stack = face, stack
        self.folders: list[Path] = []

    def add(self, name: str) -> Path:
        """Let one more host join, and wait until it is heard."""
        folder, port = self.face.folder / f"runs-{name}", unused_port()
        joined(self.face, name, port, folder)
        self._stack.enter_context(agent_in(folder, port, program="a_host.py"))
        self.face.until(lambda: answering(self.face, name), f"{name} is not heard")
        self.folders.append(folder)
        return folder

    def run(self, *names: str) -> None:
        """Wait until exactly these tasks run."""
        self.face.until(lambda: lives(*self.folders).keys() == set(names), f"not {names}")


@pytest.fixture
def hosts(control_plane: Face) -> Iterator[Hosts]:
    """A host, and the means to run jobs there."""
    with ExitStack() as stack:
        found = Hosts(control_plane, stack)
        found.add("vm1")
        asks(control_plane, _prepare)
        yield found


async def _prepare(client: ControlPlaneClient) -> None:
    await client.put_entitlement("front", EntitlementSpec(machines=1))
    await client.push_image(digest_of(DATA), ImageFormat.TAR, chunks_of(DATA))


def apply(face: Face, spec: JobSpec) -> None:
    """Apply a job."""
    asks(face, lambda client: client.apply_job(spec))


def update(face: Face, hosts: Hosts) -> None:
    """Have job b run something else, and wait until it does."""
    old = lives(*hosts.folders)["b-0"]
    apply(face, job("b", environment={"NEW": "1"}))
    face.until(lambda: lives(*hosts.folders).get("b-0", old) != old, "b is not updated")


def copied(face: Face, into: Path) -> None:
    """Copy the store as any program does that copies files, with nobody at it."""
    shutil.copytree(face.folder / "state/store", into)


def put_back(face: Face, copy: Path) -> None:
    """Put the files of the store back as they were."""
    shutil.rmtree(face.folder / "state/store")
    shutil.copytree(copy, face.folder / "state/store")


def test_an_old_copy_that_is_simply_put_back_is_noticed_by_the_hosts(
    control_plane: Face, hosts: Hosts
) -> None:
    """F-88: it would have taken the tasks since for strays, and ended them within a minute.

    The copy was taken of a store at rest: the control plane that finds it begins the very term
    that the last one had, so that its commands would not be older than theirs.
    """
    face = control_plane
    apply(face, job("a"))
    apply(face, job("b"))
    hosts.run("a-0", "b-0")
    ends(face)
    copied(face, face.folder / "copy")
    again(face)
    face.until(lambda: answering(face, "vm1"), "vm1 is not heard")
    apply(face, job("c"))
    hosts.run("a-0", "b-0", "c-0")
    update(face, hosts)
    before = lives(*hosts.folders)
    ends(face)

    newest = face.folder / "newest"
    copied(face, newest)
    for _ in range(2):  # and again, as systemd or a person would try
        put_back(face, face.folder / "copy")
        refused = starts(face)
        assert refused.returncode == 78, refused.stderr
        assert "1 of 1 hosts were told (vm1: this host was told at revision" in refused.stderr
        assert "twine-control-plane restore-store" in refused.stderr
        assert lives(*hosts.folders) == before

    put_back(face, newest)
    again(face)
    face.until(lambda: answering(face, "vm1"), "vm1 is not heard with the newest store")
    apply(face, job("d"))
    hosts.run("a-0", "b-0", "c-0", "d-0")
    assert before.items() <= lives(*hosts.folders).items()
