"""Certificates are renewed, and their root is exchanged, while requests run."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from agent.api.presence import Presence
from agent.identity.identity import HostIdentity
from agent.routes import JOIN_ROUTES
from tests.ports import free_port
from wire import pins, tls
from wire.client import WireClient
from wire.errors import TwineError
from wire.routes import Route

from .target_process import USER, running
from .test_authority_rotates import Load, credential, shown
from .test_identity_ends import ctl, joins
from .test_revoked_agent import agent, answering

pytestmark = pytest.mark.behaviour("F-87")

ASK: Route = next(route for route in JOIN_ROUTES if route.name == "show_presence")
STEP, REQUESTS = 300, 1000
"""Least number of requests of hosts, in each step and in total."""
HOSTS = ("vm3", "vm4", "vm5")


class HostLoad:
    """A host that renews constantly and sends requests meanwhile, on kept and new connections."""

    def __init__(self, host: HostIdentity) -> None:
        self.host, self.url = host, ""
        self.answers, self.renewals, self.failures = 0, 0, list[str]()
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._work()))

    async def _work(self) -> None:
        found = self.host.find()
        assert found is not None
        self.url = found.control_plane_url
        await asyncio.gather(self._renew(), self._kept(), self._new())

    async def _renew(self) -> None:
        while not self._over.is_set():
            try:
                await self.host.renew()
                self.renewals += 1
            except TwineError as e:
                self.failures.append(f"renew: {e}")
            await asyncio.sleep(0.05)

    async def _ask(self, client: WireClient) -> None:
        try:
            await client.call(ASK, Presence())
            self.answers += 1
        except TwineError as e:
            if "checked already" not in str(e):  # the other connection is for the same machine
                self.failures.append(str(e))
            await asyncio.sleep(0.01)

    async def _kept(self) -> None:
        async with WireClient(self.url, self.host.client_context()) as client:
            while not self._over.is_set():
                await self._ask(client)

    async def _new(self) -> None:
        while not self._over.is_set():
            async with WireClient(self.url, self.host.client_context()) as client:
                await self._ask(client)

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join()


async def refused(held: tls.Credential) -> str:
    """Return why a host is refused, or does not trust the control plane."""
    async with WireClient(held.url, tls.client_context(held, tls.CONTROL_PLANE)) as client:
        with pytest.raises(TwineError) as why:
            await client.call(ASK, Presence())
    return str(why.value)


@pytest.mark.behaviour("F-87")
def test_no_request_fails_while_leaves_are_renewed_and_the_root_is_exchanged(
    tmp_path: Path,
) -> None:
    """Three hosts renew several times a second; two agents are called, and a user sends requests.

    Hosts send a thousand requests, some in each step. Both roots are trusted in between. After the
    old root is retired, its certificates are refused.
    """
    with running("control plane", tmp_path / "plane") as target, ExitStack() as stack:
        ports = {"vm1": free_port(USER), "vm2": free_port(USER)}
        for machine, port in ports.items():
            joins(target, machine, f"{USER}:{port}")
            stack.enter_context(agent(target, machine, port))
        loads = [HostLoad(joins(target, host)) for host in HOSTS]
        target.until(
            lambda: all(answering(target, machine) for machine in ports), "an agent does not answer"
        )
        for load in loads:
            stack.enter_context(load.running())

        def some_hundred_more() -> None:
            before = sum(load.answers for load in loads)
            renewed = [load.renewals for load in loads]
            target.until(lambda: sum(load.answers for load in loads) >= before + STEP)
            target.until(
                lambda: all(x.renewals > n for x, n in zip(loads, renewed, strict=True)),
                "a host does not renew",
            )
            assert [load.failures for load in loads] == [[], [], []]
            assert all(answering(target, machine) for machine in ports)

        some_hundred_more()
        old = target.folder / "vm3-of-the-former-root"
        # The host renews meanwhile, so its staged files appear and disappear.
        shutil.copytree(target.folder / "vm3", old, ignore=shutil.ignore_patterns(".*"))
        first = shown(target).roots[0].ca_hash
        ctl(target, "authority", "prepare")
        target.until(lambda: not any("hosts" in line for line in shown(target).hinders))
        user = Load(credential(target, "ann"))
        with user.running():
            some_hundred_more()
            ctl(target, "authority", "activate")
            target.until(lambda: not shown(target).behind, "a host is behind")
            some_hundred_more()
        assert user.failures == []
        assert user.answers > 0
        both = {root.ca_hash for root in shown(target).roots}
        for host in HOSTS:
            held = tls.load(target.folder / host / "identity.json")
            assert set(pins.ca_hashes(held.ca_pem)) == both
        kept = tls.load(old / "identity.json")
        later = Load(credential(target, "bob"))
        with later.running():
            ctl(target, "authority", "retire", "--force")  # ann's file is of the former root
            target.until(lambda: not shown(target).behind, "a host still trusts the former root")
            some_hundred_more()
        assert later.failures == []
        assert later.answers > 0

        newest = shown(target).roots[0].ca_hash
        assert both == {first, newest}
        assert "certificate" in asyncio.run(refused(kept)).lower()
        for credential_ in (kept, tls.load(target.folder / "ann.json")):
            trusting = tls.load(target.folder / "vm4" / "identity.json").ca_pem
            deceived = replace(credential_, ca_pem=trusting)
            assert asyncio.run(refused(deceived)), "also by one who believes the new root"
        answers, renewals = (sum(getattr(x, n) for x in loads) for n in ("answers", "renewals"))
        print(f"{answers} requests and {renewals} renewals of hosts, none failed")
        assert answers >= REQUESTS
        view = json.loads(ctl(target, "authority", "show", "--output", "json"))
        assert [r["trusted_by"] for r in view["roots"]] == [len(ports) + len(HOSTS)]
        assert "Traceback" not in target.log.read_text()
