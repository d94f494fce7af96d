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

from .face import USER, Face, running
from .test_identity_ends import ctl, joins
from .test_revoked_agent import agent, answering

pytestmark = pytest.mark.behaviour("BUG-AG5")


@pytest.fixture(scope="module")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Face]:
    """A control plane with its own hosts."""
    with running("control plane", tmp_path_factory.mktemp("rotates")) as face:
        yield face


def credential(face: Face, name: str, ttl: str = "8h") -> Path:
    """Write a credential file as users do."""
    out = face.folder / f"{name}.json"
    given = ["--state", str(face.folder / "state"), "--url", f"https://{USER}:{face.port}"]
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


def shown(face: Face) -> AuthorityView:
    async def ask() -> AuthorityView:
        async with ControlPlaneClient(f"unix:{face.socket}") as client:
            return await client.get_roots()

    return asyncio.run(ask())


@pytest.mark.behaviour("BUG-AG5")
def test_the_root_certificate_is_exchanged_under_load_without_errors(control_plane: Face) -> None:
    """Regression: `ca_pem` of a renewal was ignored, so the authority could never change.

    Two agents and a user on kept and on new connections run while an operator takes each step. No
    request fails, and no host joins again. The caller that would be locked out is named first.
    """
    face, ports = control_plane, {"vm1": free_port(USER), "vm2": free_port(USER)}
    credential(face, "old")
    for machine, port in ports.items():
        joins(face, machine, f"{USER}:{port}")
    first = shown(face).roots[0].ca_hash
    with agent(face, "vm1", ports["vm1"]), agent(face, "vm2", ports["vm2"]):
        face.until(
            lambda: all(answering(face, machine) for machine in ports), "an agent does not answer"
        )
        assert "next: twinectl authority activate" in ctl(face, "authority", "prepare")
        load = Load(credential(face, "new"))
        with load.running():
            face.until(lambda: not any("hosts" in line for line in shown(face).hinders))
            refused = CliRunner().invoke(
                main, ["--endpoint", f"unix:{face.socket}", "authority", "activate"]
            )
            assert refused.exit_code == 5, refused.output
            assert "the credential of user old was created before it" in refused.output
            ctl(face, "authority", "activate", "--force")
            last = credential(face, "last")
            face.until(lambda: not shown(face).behind, "a host is behind")
            assert "user new was issued by it" in " ".join(shown(face).hinders)
            answers = load.answers
            face.until(lambda: load.answers >= answers + 20)
        assert load.failures == []
        with (later := Load(last)).running():
            ctl(face, "authority", "retire", "--force")
            face.until(lambda: not shown(face).behind, "a host still trusts the former root")
            face.until(lambda: later.answers >= 20)
        assert later.failures == []
        assert all(answering(face, machine) for machine in ports)
    view = json.loads(ctl(face, "authority", "show", "--output", "json"))
    assert [(r["state"], r["trusted_by"], r["used_by"]) for r in view["roots"]] == [
        ("active", 2, 2)
    ]
    assert view["roots"][0]["ca_hash"] != first
    held = tls.load(face.folder / "vm1-runs/state/identity/identity.json")
    assert pins.ca_hashes(held.ca_pem) == [view["roots"][0]["ca_hash"]]
    assert open_authority(face.folder / "state/authority.pem", "twine").ca_hash != first
    assert "Traceback" not in face.log.read_text()


@pytest.mark.behaviour("BUG-AG5")
def test_a_credential_of_a_retired_root_is_refused(control_plane: Face) -> None:
    """A retired root is rejected at once, by the running process too."""
    face = control_plane
    held = credential(face, "gone")
    for step in (Step.PREPARE, Step.ACTIVATE, Step.RETIRE):
        ctl(face, "authority", step.value, "--force")
    load = Load(held)
    with load.running():
        face.until(lambda: len(load.failures) >= 2)
    assert load.answers == 0


@pytest.mark.behaviour("BUG-AG5")
def test_a_new_root_may_be_abandoned(control_plane: Face) -> None:
    """A new root can be abandoned while it has issued nothing; everything is audited."""
    before = shown(control_plane).roots
    ctl(control_plane, "authority", "prepare")
    ctl(control_plane, "authority", "abandon")
    assert [r.ca_hash for r in shown(control_plane).roots] == [r.ca_hash for r in before]
    assert "step_roots" in ctl(control_plane, "audit")
