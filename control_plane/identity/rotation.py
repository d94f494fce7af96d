"""Replaces a root of the authority while everything runs (docs/adr/0088).

Operators take the steps. In between, each host that does not trust the present roots is asked to
renew; its renewal names the roots that it trusts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from control_plane.api.authority import AuthorityView, HostTrust, RootState, RootView, Step
from control_plane.api.people import IssuedCredential
from control_plane.identity.authority import CertificateAuthority
from control_plane.identity.core.roots import is_behind, lockouts, new_root, roots_after, roots_file
from control_plane.identity.stored import decode_if_intact, delete_all
from control_plane.runtime.runtime import Runtime
from control_plane.store import Put, Store
from control_plane.store.bounds import ROWS_MAX
from wire import durable
from wire.errors import Conflict, TwineError

log = logging.getLogger(__name__)

TRUST = "host-trust/"
CHECK_S = 2.0
ASK_AGAIN_S = 60.0
ASK_EACH_S = 0.02
"""50 hosts a second: 10,000 within four minutes, each with some milliseconds of computing."""
_SHOWN = 20


async def _nothing_issued() -> list[IssuedCredential]:
    return []


async def _ask_no_host(_machine: str) -> None:
    return None


class Rotation:
    """The only writer of the roots. `load` comes before everything else."""

    def __init__(self, store: Store, authority: CertificateAuthority, runtime: Runtime) -> None:
        self._store, self._authority, self._runtime = store, authority, runtime
        self._trust: dict[str, HostTrust] = {}
        self._asked: dict[str, float] = {}
        self._has_stepped = False
        """Whether hosts may still trust a root that was retired or abandoned since this process
        started. Hosts renew each day, so earlier steps have reached them."""
        self._lock = asyncio.Lock()
        self.file: Path | None = None
        """Where the roots are kept; None: in memory."""
        self.hosts: Callable[[], Sequence[str]] = list
        """Returns the machines that have joined."""
        self.issued: Callable[[], Awaitable[list[IssuedCredential]]] = _nothing_issued
        """Returns the credentials that were written to files and have not expired."""
        self.on_step: Callable[[], None] = lambda: None
        """Called after each step, so that this process uses the new roots, too."""
        self.ask: Callable[[str], Awaitable[None]] = _ask_no_host
        """Asks the agent of a machine to renew."""

    async def load(self) -> None:
        """Read the reports of hosts; hosts send unreadable ones again."""
        for entry in (await self._store.list_prefix(TRUST)).entries:
            machine = entry.key.removeprefix(TRUST)
            if (known := decode_if_intact(entry, HostTrust)) is not None:
                self._trust[machine] = known

    async def record_trust(self, machine: str, trusts: Sequence[str]) -> None:
        """Record the roots that a host trusts, after the active root issued it a certificate."""
        trust = HostTrust(trusts=list(trusts), issuer=self._authority.ca_hash)
        if self._trust.get(machine) == trust:
            return
        key = TRUST + machine
        entry = await self._store.get(key)  # an earlier write may have been made without an answer
        compare = {key: entry.revision if entry is not None else 0}
        try:
            await self._store.txn(compare, [Put(key, msgspec.json.encode(trust))])
        except Conflict:  # two renewals of one host at once: it is asked again
            return
        self._trust[machine] = trust

    async def view(self) -> AuthorityView:
        """Return the roots, the hosts' progress, and what the next step would lock out."""
        roots, hosts = self._authority.roots, self._trust_by_host()
        step = Step.ACTIVATE if roots.coming else Step.RETIRE if roots.former else Step.PREPARE
        states = {RootState.ACTIVE: roots.active, RootState.COMING: roots.coming}
        states[RootState.FORMER] = roots.former
        views = [
            RootView(
                ca_hash=root.ca_hash,
                state=state,
                ends_at=root.ends_at,
                trusted_by=sum(t is not None and root.ca_hash in t.trusts for t in hosts.values()),
                used_by=sum(t is not None and root.ca_hash == t.issuer for t in hosts.values()),
            )
            for state, root in states.items()
            if root is not None
        ]
        return AuthorityView(
            roots=views,
            hosts=len(hosts),
            behind=list(islice(self._hosts_behind(), _SHOWN)),
            next=step,
            hinders=lockouts(roots, step, hosts, await self.issued()),
        )

    async def take_step(self, step: Step, *, force: bool) -> AuthorityView:
        """Take a step, or raise `Conflict` with all that it would lock out."""
        async with self._lock:
            authority = self._authority
            new = new_root(authority.cluster, time.time())
            roots = roots_after(authority.roots, step, new)
            found = lockouts(authority.roots, step, self._trust_by_host(), await self.issued())
            if found and not force:
                raise Conflict(
                    f"to {step.value} locks out: {'; '.join(found)}",
                    hint="hosts renew within minutes; credentials expire or are created again; "
                    "--force proceeds anyway, and hosts and users that are locked out "
                    "have to join again",
                )
            if self.file is not None:
                await self._runtime.offload(durable.write, self.file, roots_file(roots))
            authority.roots = roots
            self.on_step()
            self._asked.clear()
            self._has_stepped = True
            await self._forget_removed_hosts()
        fields = {"step": step.value, "ca_hash": authority.ca_hash, "locked_out": len(found)}
        log.warning("the authority took a step", extra=fields)
        return await self.view()

    async def run(self) -> None:
        """Ask hosts that do not trust the present roots to renew, forever."""
        while True:
            await self._runtime.sleep(CHECK_S)
            behind = self._hosts_behind()
            self._has_stepped = self._has_stepped and bool(behind)
            for machine in behind:
                now = self._runtime.now()
                if now - self._asked.get(machine, float("-inf")) < ASK_AGAIN_S:
                    continue
                self._asked[machine] = now
                try:
                    await self.ask(machine)
                except TwineError as e:
                    log.info("not renewed yet", extra={"machine": machine, "reason": str(e)})
                await self._runtime.sleep(ASK_EACH_S)

    def _trust_by_host(self) -> dict[str, HostTrust | None]:
        return {machine: self._trust.get(machine) for machine in self.hosts()}

    def _hosts_behind(self) -> list[str]:
        roots = self._authority.roots
        if roots.coming is None and roots.former is None and not self._has_stepped:
            return []
        return [
            machine for machine, trust in self._trust_by_host().items() if is_behind(roots, trust)
        ]

    async def _forget_removed_hosts(self) -> None:
        gone = sorted(self._trust.keys() - set(self.hosts()))
        for first in range(0, len(gone), ROWS_MAX):
            some = gone[first : first + ROWS_MAX]
            await delete_all(self._store, [TRUST + machine for machine in some])
            for machine in some:
                self._trust.pop(machine, None)
