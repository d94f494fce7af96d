"""The authority's root is exchanged while users and agents continue."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from control_plane.api.authority import AuthorityView, Step
from control_plane.cli.root import main
from control_plane.client import ControlPlaneClient
from control_plane.daemon import main as daemon
from control_plane.identity.authority import open_authority
from tests.ports import free_port
from wire import pins, tls
from wire.errors import TwineError

from .target_process import USER, Target, running
from .test_identity_ends import ctl, joins
from .test_revoked_agent import agent, answering

pytestmark = pytest.mark.behaviour("BUG-AG5")


@pytest.fixture(scope="module")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A control plane with its own hosts."""
    with running("control plane", tmp_path_factory.mktemp("rotates")) as target:
        yield target


def credential(target: Target, name: str, ttl: str = "8h") -> Path:
    """Write a credential file as users do."""
    out = target.folder / f"{name}.json"
    given = ["--state", str(target.folder / "state"), "--url", f"https://{USER}:{target.port}"]
    made = CliRunner().invoke(
        daemon, ["user", "add", name, "--out", str(out), "--ttl", ttl, *given]
    )
    assert made.exit_code == 0, made.output
    return out


class Load:
    """A user who sends requests constantly, on old connections and on new ones."""

    def __init__(self, file: Path) -> None:
        self.held, self.answers, self.failures = tls.load(file), 0, list[str]()
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._ask()))

    async def _ask(self) -> None:
        context = tls.client_context(self.held, tls.CONTROL_PLANE)
        async with ControlPlaneClient(self.held.url, context) as kept:
            while not self._over.is_set():
                try:
                    await kept.list_jobs()
                    async with ControlPlaneClient(self.held.url, context) as new:
                        await new.list_jobs()
                    self.answers += 2
                except TwineError as e:
                    self.failures.append(str(e))

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join()


def shown(target: Target) -> AuthorityView:
    async def ask() -> AuthorityView:
        async with ControlPlaneClient(f"unix:{target.socket}") as client:
            return await client.get_roots()

    return asyncio.run(ask())


@pytest.mark.behaviour("BUG-AG5")
def test_the_root_certificate_is_exchanged_under_load_without_errors(
    control_plane: Target,
) -> None:
    """Regression: `ca_pem` of a renewal was ignored, so the authority could never change.

    Two agents and a user on kept and on new connections run while an operator takes each step. No
    request fails, and no host joins again. The caller that would be locked out is named first.
    """
    target, ports = control_plane, {"vm1": free_port(USER), "vm2": free_port(USER)}
    credential(target, "old")
    for machine, port in ports.items():
        joins(target, machine, f"{USER}:{port}")
    first = shown(target).roots[0].ca_hash
    with agent(target, "vm1", ports["vm1"]), agent(target, "vm2", ports["vm2"]):
        target.until(
            lambda: all(answering(target, machine) for machine in ports), "an agent does not answer"
        )
        assert "next: twinectl authority activate" in ctl(target, "authority", "prepare")
        load = Load(credential(target, "new"))
        with load.running():
            target.until(lambda: not any("hosts" in line for line in shown(target).hinders))
            refused = CliRunner().invoke(
                main, ["--endpoint", f"unix:{target.socket}", "authority", "activate"]
            )
            assert refused.exit_code == 5, refused.output
            assert "the credential of user old was created before it" in refused.output
            ctl(target, "authority", "activate", "--force")
            last = credential(target, "last")
            target.until(lambda: not shown(target).behind, "a host is behind")
            assert "user new was issued by it" in " ".join(shown(target).hinders)
            answers = load.answers
            target.until(lambda: load.answers >= answers + 20)
        assert load.failures == []
        with (later := Load(last)).running():
            ctl(target, "authority", "retire", "--force")
            target.until(lambda: not shown(target).behind, "a host still trusts the former root")
            target.until(lambda: later.answers >= 20)
        assert later.failures == []
        assert all(answering(target, machine) for machine in ports)
    view = json.loads(ctl(target, "authority", "show", "--output", "json"))
    assert [(r["state"], r["trusted_by"], r["used_by"]) for r in view["roots"]] == [
        ("active", 2, 2)
    ]
    assert view["roots"][0]["ca_hash"] != first
    held = tls.load(target.folder / "vm1-runs/state/identity/identity.json")
    assert pins.ca_hashes(held.ca_pem) == [view["roots"][0]["ca_hash"]]
    assert open_authority(target.folder / "state/authority.pem", "twine").ca_hash != first
    assert "Traceback" not in target.log.read_text()


@pytest.mark.behaviour("BUG-AG5")
def test_a_credential_of_a_retired_root_is_refused(control_plane: Target) -> None:
    """A retired root is rejected at once, by the running process too."""
    target = control_plane
    held = credential(target, "gone")
    for step in (Step.PREPARE, Step.ACTIVATE, Step.RETIRE):
        ctl(target, "authority", step.value, "--force")
    load = Load(held)
    with load.running():
        target.until(lambda: len(load.failures) >= 2)
    assert load.answers == 0


@pytest.mark.behaviour("BUG-AG5")
def test_a_new_root_may_be_abandoned(control_plane: Target) -> None:
    """A new root can be abandoned while it has issued nothing; everything is audited."""
    before = shown(control_plane).roots
    ctl(control_plane, "authority", "prepare")
    ctl(control_plane, "authority", "abandon")
    assert [r.ca_hash for r in shown(control_plane).roots] == [r.ca_hash for r in before]
    assert "step_roots" in ctl(control_plane, "audit")
