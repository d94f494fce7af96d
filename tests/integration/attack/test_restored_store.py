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

from .target_process import USER, Target, running
from .test_authority_lost import again, ends, starts
from .test_authority_rotates import credential
from .test_cloned_host import joined, on
from .test_identity_ends import FACTS, ctl
from .test_revoked_agent import agent_in, answering

pytestmark = pytest.mark.behaviour("F-88")

T = TypeVar("T")
DATA = a_tar(app="code")


@pytest.fixture
def control_plane(tmp_path: Path) -> Iterator[Target]:
    """A control plane with its own hosts."""
    with running("control plane", tmp_path / "plane") as target:
        yield target


def call_api(target: Target, ask: Callable[[ControlPlaneClient], Awaitable[T]]) -> T:
    """Send a request to the control plane on its local socket."""

    async def call() -> T:
        async with ControlPlaneClient(f"unix:{target.socket}") as client:
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

    def __init__(self, target: Target, stack: ExitStack) -> None:
        self.target, self._stack = target, stack
        self.folders: list[Path] = []
        self._ports: dict[str, int] = {}

    def add(self, name: str) -> Path:
        """Let one more host join, and wait until its agent has reported."""
        folder, port = self.target.folder / f"runs-{name}", free_port(USER)
        self._ports[name] = port
        joined(self.target, name, port, folder)
        self._stack.enter_context(agent_in(folder, port, program="agent_accepting_profiles.py"))
        self.target.until(lambda: answering(self.target, name), f"{name} does not answer")
        self.folders.append(folder)
        return folder

    def join_again(self, name: str) -> None:
        """Let a host join that the control plane no longer knows; its agent keeps running."""
        joined(self.target, name, self._ports[name], self.target.folder / f"runs-{name}")
        self.target.until(lambda: answering(self.target, name), f"{name} does not answer again")

    def run(self, *names: str) -> None:
        """Wait until exactly these tasks run."""
        self.target.until(lambda: lives(*self.folders).keys() == set(names), f"not {names}")


@pytest.fixture
def hosts(control_plane: Target) -> Iterator[Hosts]:
    """Yield one host, and the means to run jobs there."""
    with ExitStack() as stack:
        found = Hosts(control_plane, stack)
        found.add("vm1")
        call_api(control_plane, _prepare)
        yield found


async def _prepare(client: ControlPlaneClient) -> None:
    await client.put_entitlement("front", EntitlementSpec(machines=1))
    await client.push_image(digest_of(DATA), ImageFormat.TAR, chunks_of(DATA))


def apply(target: Target, spec: JobSpec) -> None:
    """Apply a job."""
    call_api(target, lambda client: client.apply_job(spec))


def update(target: Target, hosts: Hosts) -> None:
    """Give job b another command, and wait until it runs."""
    old = lives(*hosts.folders)["b-0"]
    apply(target, job("b", environment={"NEW": "1"}))
    target.until(lambda: lives(*hosts.folders).get("b-0", old) != old, "b is not updated")


def copied(target: Target, into: Path) -> None:
    """Copy the files of the store while no process uses them."""
    shutil.copytree(target.folder / "state/store", into)


def restored(target: Target, copy: Path) -> None:
    """Restore the files of the store."""
    shutil.rmtree(target.folder / "state/store")
    shutil.copytree(copy, target.folder / "state/store")


@pytest.mark.behaviour("F-88")
def test_hosts_notice_a_store_restored_by_copying_an_old_file(
    control_plane: Target, hosts: Hosts
) -> None:
    """Regression: tasks newer than the copy would have been ended as unknown within a minute.

    The store was at rest when it was copied. So the next control plane begins the same term as the
    last one, and its commands would not be older than those of that one.
    """
    target = control_plane
    apply(target, job("a"))
    apply(target, job("b"))
    hosts.run("a-0", "b-0")
    ends(target)
    copied(target, target.folder / "copy")
    again(target)
    target.until(lambda: answering(target, "vm1"), "vm1 does not answer")
    apply(target, job("c"))
    hosts.run("a-0", "b-0", "c-0")
    update(target, hosts)
    before = lives(*hosts.folders)
    kept = hosts.folders[0] / "state/identity/last-term"
    target.until(kept.exists, "the host keeps nothing for the agent after this one")
    ends(target)

    newest = target.folder / "newest"
    copied(target, newest)
    for _ in range(2):  # a second start, as by systemd or a user
        restored(target, target.folder / "copy")
        refused = starts(target)
        assert refused.returncode == 78, refused.stderr
        assert (
            "1 of 1 hosts know (vm1: a control plane called this host at revision" in refused.stderr
        )
        assert "twine-control-plane restore-store" in refused.stderr
        assert lives(*hosts.folders) == before

    restored(target, newest)
    again(target)
    target.until(lambda: answering(target, "vm1"), "vm1 does not answer with the newest store")
    apply(target, job("d"))
    hosts.run("a-0", "b-0", "c-0", "d-0")
    assert before.items() <= lives(*hosts.folders).items()


def manages(target: Target, *arguments: str) -> str:
    """Run a command of the control plane's own program, and return its output."""
    result = CliRunner().invoke(daemon, [*arguments, "--state", str(target.folder / "state")])
    assert result.exit_code == 0, result.output
    return result.output


def jobs(target: Target) -> set[str]:
    """Return the jobs that there are."""
    listed = call_api(target, lambda client: client.list_jobs())
    return {status.record.name for status in listed.jobs}


def running_as_stored(target: Target, name: str) -> bool:
    """Return whether the only task of a job runs, as far as the control plane knows."""
    (task,) = call_api(target, lambda client: client.get_job(name)).record.tasks or [None]
    return task is not None and task.phase is TaskPhase.RUNNING


def whoami(file: Path) -> None:
    """Ask the control plane for the identity of this credential."""
    held = tls.load(file)

    async def ask() -> None:
        context = tls.client_context(held, tls.CONTROL_PLANE)
        async with ControlPlaneClient(held.url, context) as client:
            await client.get_current_user()

    asyncio.run(ask())


def join_with(target: Target, machine: str, token: dict[str, str]) -> None:
    """Let a host join with a token that was made before."""
    invited = Invitation(f"https://{USER}:{target.port}", token["token"], token["ca_hash"])
    candidate = CandidateIdentity(machine, f"{USER}:1", FACTS, Location(), "small")
    asyncio.run(HostIdentity(target.folder / "another").join(invited, candidate))


def shown(target: Target) -> dict[tuple[str, str], str]:
    """Return how the hosts differ from the restored store, by machine and task."""
    view = json.loads(ctl(target, "restored", "show", "--output", "json"))
    return {(t["machine"], t["task"]): t["difference"] for t in view["tasks"]}


@pytest.mark.behaviour("F-88")
def test_the_restore_drill_keeps_every_task_and_waits_for_an_operator(
    control_plane: Target, hosts: Hosts
) -> None:
    """The test adds, changes and removes a job after the copy; a host joins and gets a task.

    The processes of all jobs that were not removed stay the same, except those that an owner
    applies again. A simple start on the copy is refused without any host, because the copy is
    marked as one.
    """
    target = control_plane
    for name in "ab":
        apply(target, job(name))
    hosts.run("a-0", "b-0")
    held = credential(target, "ann")
    token = json.loads(ctl(target, "token", "create", "--host", "vm3", "--output", "json"))
    copy = Path(manages(target, "backup", "--to", str(target.folder / "copies")).strip())
    assert [path.name for path in copy.iterdir()] == ["main.db"]
    assert (copy / "main.db").stat().st_mode & 0o777 == 0o600

    apply(target, job("c"))
    hosts.run("a-0", "b-0", "c-0")
    update(target, hosts)
    call_api(target, lambda client: client.stop_job("a"))
    hosts.run("b-0", "c-0")
    vm2 = hosts.add("vm2")
    call_api(target, lambda client: client.put_entitlement("front", EntitlementSpec(machines=2)))
    apply(target, job("e", requires=["machine in (vm2)"]))
    hosts.run("b-0", "c-0", "e-0")
    before = lives(*hosts.folders)
    ends(target)

    state = target.folder / "state/store"
    newest = target.folder / "newest"
    copied(target, newest)
    shutil.rmtree(state)
    state.mkdir()
    shutil.copy(copy / "main.db", state / "twine.db")
    refused = starts(target)
    assert refused.returncode == 78, refused.stderr
    assert "is a copy, made at" in refused.stderr
    (state / "twine.db").write_bytes(b"a disk that was lost")

    restored_result = manages(target, "restore-store", "--from", str(copy), "--yes")
    assert "the credentials of ann" in restored_result
    again(target)
    target.until(lambda: answering(target, "vm1"), "vm1 does not answer")
    assert shown(target) == {
        ("vm1", "a-0"): "missing",
        ("vm1", "b-0"): "changed",
        ("vm1", "c-0"): "unknown-job",
    }
    ready = call_api(target, lambda client: client.readyz())
    assert "twinectl restored release" in ready.detail
    for _ in range(30):  # a control plane that acted would restart a-0 in the first round
        assert lives(*hosts.folders) == before
        time.sleep(0.1)
    with pytest.raises(Unauthenticated, match="was revoked"):
        whoami(held)
    with pytest.raises(Forbidden, match="the join token is refused"):
        join_with(target, "vm3", token)

    # owners correct the store before the control plane acts on it
    call_api(target, lambda client: client.stop_job("a"))
    ctl(target, "restored", "release", "--yes")
    target.until(lambda: "a" not in jobs(target), "a is not gone")
    hosts.run("b-0", "c-0", "e-0")
    assert lives(*hosts.folders) == before

    # the host that the copy does not know joins again, and its task is left alone
    hosts.join_again("vm2")
    assert shown(target)[("vm2", "e-0")] == "unknown-job"
    assert lives(*hosts.folders) == before

    # owners apply their files again: equal jobs continue, and the rest converges
    old = before["b-0"]
    apply(target, job("b", environment={"NEW": "2"}))
    target.until(lambda: lives(*hosts.folders).get("b-0", old) != old, "b does not converge")
    apply(target, job("c"))
    target.until(lambda: running_as_stored(target, "c"), "c is not known again")
    assert lives(*hosts.folders)["c-0"] == before["c-0"]

    # a task that would start elsewhere waits until the unknown objects are released
    vm1 = hosts.folders[0]
    apply(target, job("e"))
    wanted = "twinectl restored stop e-0 --machine vm2"
    target.until(
        lambda: wanted in call_api(target, lambda c: c.get_job("e")).detail, "e does not wait"
    )
    assert lives(vm2) == {"e-0": before["e-0"]}
    assert "e-0" not in lives(vm1)
    unconfirmed = CliRunner().invoke(
        twinectl,
        ["--endpoint", f"unix:{target.socket}", "restored", "let-go", "c-0", "--machine", "vm1"],
    )
    assert unconfirmed.exit_code == 3, unconfirmed.output
    ctl(target, "restored", "let-go", "e-0", "--machine", "vm2")
    target.until(lambda: "e-0" in lives(vm1), "e-0 does not start")
    assert lives(vm2) == {}
    assert shown(target) == {}
    assert "Traceback" not in target.log.read_text()


@pytest.mark.behaviour("F-88")
def test_a_host_with_a_restarted_agent_refuses_the_old_copy_too(
    control_plane: Target,
) -> None:
    """The host has the control plane's answer on its disk; only a new join removes it."""
    target, port = control_plane, free_port(USER)
    folder = target.folder / "host"
    joined(target, "vm1", port, folder)
    kept = folder / "state/identity/last-term"
    ends(target)
    copied(target, target.folder / "copy")
    again(target)
    with agent_in(folder, port, program="agent_accepting_profiles.py"):
        target.until(lambda: answering(target, "vm1"), "vm1 does not answer")
        call_api(target, _prepare)
        apply(target, job("a"))
        target.until(lambda: "a-0" in lives(folder), "a-0 does not run")
        target.until(kept.exists, "nothing is kept")
    ends(target)
    restored(target, target.folder / "copy")
    with agent_in(folder, port, program="agent_accepting_profiles.py"):
        refused = starts(target)
        assert refused.returncode == 78, refused.stderr
        assert "1 of 1 hosts know" in refused.stderr
