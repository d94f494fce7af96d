"""A control plane whose store is restored from an old copy: no newer task ends."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import pytest
from builders import a_tar, chunks_of, digest_of
from click.testing import CliRunner

from agent.api import ImageFormat, Location, TaskState, TaskStatus
from agent.identity.identity import CandidateIdentity, HostIdentity, Invitation
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobSpec, TaskPhase
from control_plane.cli.root import main as twinectl
from control_plane.client import ControlPlaneClient
from control_plane.daemon import main as daemon
from tests.ports import free_port
from wire import tls
from wire.errors import Forbidden, Unauthenticated

from .face import USER, Face, running
from .test_authority_lost import again, ends, starts
from .test_authority_rotates import credential
from .test_cloned_host import joined, on
from .test_identity_ends import FACTS, ctl
from .test_revoked_agent import agent_in, answering

pytestmark = pytest.mark.behaviour("F-88")

T = TypeVar("T")
DATA = a_tar(app="code")


@pytest.fixture
def control_plane(tmp_path: Path) -> Iterator[Face]:
    """A control plane with its own hosts."""
    with running("control plane", tmp_path / "plane") as face:
        yield face


def call_api(face: Face, ask: Callable[[ControlPlaneClient], Awaitable[T]]) -> T:
    """Send a request to the control plane on its local socket."""

    async def call() -> T:
        async with ControlPlaneClient(f"unix:{face.socket}") as client:
            return await ask(client)

    return asyncio.run(call())


def job(name: str, tasks: int = 1, **fields: object) -> JobSpec:
    """Return a job of the entitlement that has all machines."""
    job_spec = {"entitlement": "front", "image": digest_of(DATA), "command": ["/bin/server"]}
    return JobSpec(**{"name": name, "tasks": tasks, **job_spec, **fields})  # type: ignore[arg-type]


def tasks_on(*folders: Path) -> dict[str, TaskStatus]:
    """Return the tasks on some hosts, with what they run."""
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
    """Hosts that run tasks, each with a process of its agent."""

    def __init__(self, face: Face, stack: ExitStack) -> None:
        self.face, self._stack = face, stack
        self.folders: list[Path] = []
        self._ports: dict[str, int] = {}

    def add(self, name: str) -> Path:
        """Let one more host join, and wait until its agent has reported."""
        folder, port = self.face.folder / f"runs-{name}", free_port(USER)
        self._ports[name] = port
        joined(self.face, name, port, folder)
        self._stack.enter_context(agent_in(folder, port, program="a_host.py"))
        self.face.until(lambda: answering(self.face, name), f"{name} does not answer")
        self.folders.append(folder)
        return folder

    def join_again(self, name: str) -> None:
        """Let a host join that the control plane no longer knows; its agent keeps running."""
        joined(self.face, name, self._ports[name], self.face.folder / f"runs-{name}")
        self.face.until(lambda: answering(self.face, name), f"{name} does not answer again")

    def run(self, *names: str) -> None:
        """Wait until exactly these tasks run."""
        self.face.until(lambda: lives(*self.folders).keys() == set(names), f"not {names}")


@pytest.fixture
def hosts(control_plane: Face) -> Iterator[Hosts]:
    """Yield one host, and the means to run jobs there."""
    with ExitStack() as stack:
        found = Hosts(control_plane, stack)
        found.add("vm1")
        call_api(control_plane, _prepare)
        yield found


async def _prepare(client: ControlPlaneClient) -> None:
    await client.put_entitlement("front", EntitlementSpec(machines=1))
    await client.push_image(digest_of(DATA), ImageFormat.TAR, chunks_of(DATA))


def apply(face: Face, spec: JobSpec) -> None:
    """Apply a job."""
    call_api(face, lambda client: client.apply_job(spec))


def update(face: Face, hosts: Hosts) -> None:
    """Give job b another command, and wait until it runs."""
    old = lives(*hosts.folders)["b-0"]
    apply(face, job("b", environment={"NEW": "1"}))
    face.until(lambda: lives(*hosts.folders).get("b-0", old) != old, "b is not updated")


def copied(face: Face, into: Path) -> None:
    """Copy the files of the store while no process uses them."""
    shutil.copytree(face.folder / "state/store", into)


def restored(face: Face, copy: Path) -> None:
    """Restore the files of the store."""
    shutil.rmtree(face.folder / "state/store")
    shutil.copytree(copy, face.folder / "state/store")


@pytest.mark.behaviour("F-88")
def test_hosts_notice_a_store_restored_by_copying_an_old_file(
    control_plane: Face, hosts: Hosts
) -> None:
    """Regression: tasks newer than the copy would have been ended as unknown within a minute.

    The store was at rest when it was copied. So the next control plane begins the same term as the
    last one, and its commands would not be older than those of that one.
    """
    face = control_plane
    apply(face, job("a"))
    apply(face, job("b"))
    hosts.run("a-0", "b-0")
    ends(face)
    copied(face, face.folder / "copy")
    again(face)
    face.until(lambda: answering(face, "vm1"), "vm1 does not answer")
    apply(face, job("c"))
    hosts.run("a-0", "b-0", "c-0")
    update(face, hosts)
    before = lives(*hosts.folders)
    kept = hosts.folders[0] / "state/identity/last-term"
    face.until(kept.exists, "the host keeps nothing for the agent after this one")
    ends(face)

    newest = face.folder / "newest"
    copied(face, newest)
    for _ in range(2):  # a second start, as by systemd or a user
        restored(face, face.folder / "copy")
        refused = starts(face)
        assert refused.returncode == 78, refused.stderr
        assert (
            "1 of 1 hosts know (vm1: a control plane called this host at revision" in refused.stderr
        )
        assert "twine-control-plane restore-store" in refused.stderr
        assert lives(*hosts.folders) == before

    restored(face, newest)
    again(face)
    face.until(lambda: answering(face, "vm1"), "vm1 does not answer with the newest store")
    apply(face, job("d"))
    hosts.run("a-0", "b-0", "c-0", "d-0")
    assert before.items() <= lives(*hosts.folders).items()


def manages(face: Face, *arguments: str) -> str:
    """Run a command of the control plane's own program, and return its output."""
    result = CliRunner().invoke(daemon, [*arguments, "--state", str(face.folder / "state")])
    assert result.exit_code == 0, result.output
    return result.output


def jobs(face: Face) -> set[str]:
    """Return the jobs that there are."""
    listed = call_api(face, lambda client: client.list_jobs())
    return {status.record.name for status in listed.jobs}


def running_as_stored(face: Face, name: str) -> bool:
    """Return whether the only task of a job runs, as far as the control plane knows."""
    (task,) = call_api(face, lambda client: client.get_job(name)).record.tasks or [None]
    return task is not None and task.phase is TaskPhase.RUNNING


def whoami(file: Path) -> None:
    """Ask the control plane for the identity of this credential."""
    held = tls.load(file)

    async def ask() -> None:
        context = tls.client_context(held, tls.CONTROL_PLANE)
        async with ControlPlaneClient(held.url, context) as client:
            await client.get_current_user()

    asyncio.run(ask())


def join_with(face: Face, machine: str, token: dict[str, str]) -> None:
    """Let a host join with a token that was made before."""
    invited = Invitation(f"https://{USER}:{face.port}", token["token"], token["ca_hash"])
    candidate = CandidateIdentity(machine, f"{USER}:1", FACTS, Location(), "small")
    asyncio.run(HostIdentity(face.folder / "stranger").join(invited, candidate))


def shown(face: Face) -> dict[tuple[str, str], str]:
    """Return how the hosts differ from the restored store, by machine and task."""
    view = json.loads(ctl(face, "restored", "show", "--output", "json"))
    return {(t["machine"], t["task"]): t["difference"] for t in view["tasks"]}


@pytest.mark.behaviour("F-88")
def test_the_restore_drill_keeps_every_task_and_waits_for_an_operator(
    control_plane: Face, hosts: Hosts
) -> None:
    """The test adds, changes and removes a job after the copy; a host joins and gets a task.

    The processes of all jobs that were not removed stay the same, except those that an owner
    applies again. A simple start on the copy is refused without any host, because the copy is
    marked as one.
    """
    face = control_plane
    for name in "ab":
        apply(face, job(name))
    hosts.run("a-0", "b-0")
    held = credential(face, "ann")
    token = json.loads(ctl(face, "token", "create", "--host", "vm3", "--output", "json"))
    copy = Path(manages(face, "backup", "--to", str(face.folder / "copies")).strip())
    assert [path.name for path in copy.iterdir()] == ["main.db"]
    assert (copy / "main.db").stat().st_mode & 0o777 == 0o600

    apply(face, job("c"))
    hosts.run("a-0", "b-0", "c-0")
    update(face, hosts)
    call_api(face, lambda client: client.stop_job("a"))
    hosts.run("b-0", "c-0")
    vm2 = hosts.add("vm2")
    call_api(face, lambda client: client.put_entitlement("front", EntitlementSpec(machines=2)))
    apply(face, job("e", requires=["machine in (vm2)"]))
    hosts.run("b-0", "c-0", "e-0")
    before = lives(*hosts.folders)
    ends(face)

    state = face.folder / "state/store"
    newest = face.folder / "newest"
    copied(face, newest)
    shutil.rmtree(state)
    state.mkdir()
    shutil.copy(copy / "main.db", state / "twine.db")
    refused = starts(face)
    assert refused.returncode == 78, refused.stderr
    assert "is a copy, made at" in refused.stderr
    (state / "twine.db").write_bytes(b"a disk that was lost")

    restored_result = manages(face, "restore-store", "--from", str(copy), "--yes")
    assert "the credentials of ann" in restored_result
    again(face)
    face.until(lambda: answering(face, "vm1"), "vm1 does not answer")
    assert shown(face) == {
        ("vm1", "a-0"): "missing",
        ("vm1", "b-0"): "changed",
        ("vm1", "c-0"): "unknown-job",
    }
    ready = call_api(face, lambda client: client.readyz())
    assert "twinectl restored release" in ready.detail
    for _ in range(30):  # a control plane that acted would restart a-0 in the first round
        assert lives(*hosts.folders) == before
        time.sleep(0.1)
    with pytest.raises(Unauthenticated, match="was revoked"):
        whoami(held)
    with pytest.raises(Forbidden, match="the join token is refused"):
        join_with(face, "vm3", token)

    # owners correct the store before the control plane acts on it
    call_api(face, lambda client: client.stop_job("a"))
    ctl(face, "restored", "release", "--yes")
    face.until(lambda: "a" not in jobs(face), "a is not gone")
    hosts.run("b-0", "c-0", "e-0")
    assert lives(*hosts.folders) == before

    # the host that the copy does not know joins again, and its task is left alone
    hosts.join_again("vm2")
    assert shown(face)[("vm2", "e-0")] == "unknown-job"
    assert lives(*hosts.folders) == before

    # owners apply their files again: equal jobs continue, and the rest converges
    old = before["b-0"]
    apply(face, job("b", environment={"NEW": "2"}))
    face.until(lambda: lives(*hosts.folders).get("b-0", old) != old, "b does not converge")
    apply(face, job("c"))
    face.until(lambda: running_as_stored(face, "c"), "c is not known again")
    assert lives(*hosts.folders)["c-0"] == before["c-0"]

    # a task that would start elsewhere waits until the unknown objects are released
    vm1 = hosts.folders[0]
    apply(face, job("e"))
    wanted = "twinectl restored stop e-0 --machine vm2"
    face.until(lambda: wanted in call_api(face, lambda c: c.get_job("e")).detail, "e does not wait")
    assert lives(vm2) == {"e-0": before["e-0"]}
    assert "e-0" not in lives(vm1)
    unconfirmed = CliRunner().invoke(
        twinectl,
        ["--endpoint", f"unix:{face.socket}", "restored", "let-go", "c-0", "--machine", "vm1"],
    )
    assert unconfirmed.exit_code == 3, unconfirmed.output
    ctl(face, "restored", "let-go", "e-0", "--machine", "vm2")
    face.until(lambda: "e-0" in lives(vm1), "e-0 does not start")
    assert lives(vm2) == {}
    assert shown(face) == {}
    assert "Traceback" not in face.log.read_text()


@pytest.mark.behaviour("F-88")
def test_a_host_with_a_restarted_agent_refuses_the_old_copy_too(
    control_plane: Face,
) -> None:
    """The host has the control plane's answer on its disk; only a new join removes it."""
    face, port = control_plane, free_port(USER)
    folder = face.folder / "host"
    joined(face, "vm1", port, folder)
    kept = folder / "state/identity/last-term"
    ends(face)
    copied(face, face.folder / "copy")
    again(face)
    with agent_in(folder, port, program="a_host.py"):
        face.until(lambda: answering(face, "vm1"), "vm1 does not answer")
        call_api(face, _prepare)
        apply(face, job("a"))
        face.until(lambda: "a-0" in lives(folder), "a-0 does not run")
        face.until(kept.exists, "nothing is kept")
    ends(face)
    restored(face, face.folder / "copy")
    with agent_in(folder, port, program="a_host.py"):
        refused = starts(face)
        assert refused.returncode == 78, refused.stderr
        assert "1 of 1 hosts know" in refused.stderr
