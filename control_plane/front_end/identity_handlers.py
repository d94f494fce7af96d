"""Handlers about certificates: of the authority, of hosts, of tasks, and of cloned hosts."""

from __future__ import annotations

from agent.api import Ack
from agent.api.joining import Authority, Certificate
from agent.api.presence import PresenceAnswer
from agent.api.task_identity import TaskCertificate
from control_plane.api.authority import AuthorityView
from control_plane.api.duplicates import Duplicates
from control_plane.api.machines import Token
from control_plane.api.people import Revocation
from control_plane.front_end.guard import Guard
from control_plane.front_end.handlers import PlaneHandlers
from control_plane.identity.registrar import Registrar
from wire.peers import principal
from wire.server import Call


class IdentityHandlers(PlaneHandlers):
    """A handler for each row about the identity of hosts and tasks."""

    _registrar: Registrar
    _guard: Guard

    async def get_authority(self, _: Call) -> Authority:
        """Return the authority's certificate, which is no secret."""
        return Authority(ca_pem=self._registrar.ca_pem)

    async def get_roots(self, _: Call) -> AuthorityView:
        """Return the roots, and how many hosts trust each."""
        return await self._registrar.rotation.view()

    async def step_roots(self, call: Call) -> AuthorityView:
        """Take a step of a rotation."""
        return await self._registrar.rotation.take_step(call.body.step, force=call.body.force)

    async def create_token(self, call: Call) -> Token:
        """Make a join token."""
        return await self._registrar.create_token(call.body)

    async def join(self, call: Call) -> Certificate:
        """Return the first certificate of a host with a valid token."""
        return await self._registrar.join(call.body, call.peer.address)

    async def renew(self, call: Call) -> Certificate:
        """Return a host's next certificate: for the name in its present one, no other."""
        return await self._registrar.renew(principal(call.peer), call.body)

    async def certify_task(self, call: Call) -> TaskCertificate:
        """Return the next certificate of a task that is assigned to the calling host."""
        tasks = self._plane.task_service
        subject = tasks.identity_for(principal(call.peer), call.path["task"])
        return self._registrar.certify_task(subject, call.body.csr_pem)

    async def revoke_machine_identity(self, call: Call) -> Revocation:
        """Revoke a host's certificates, and close the connections that were made with them."""
        machine = self._plane.inventory.get(call.path["machine"]).record.machine
        revocation = await self._guard.people.revoke_identity("host", machine, principal(call.peer))
        await self._plane.disconnect(machine)
        return revocation

    async def show_presence(self, call: Call) -> PresenceAnswer:
        """Return whether another host has the identity of the calling one."""
        return await self._registrar.duplicates.check(
            principal(call.peer), call.body, call.peer.address
        )

    async def list_duplicates(self, _: Call) -> Duplicates:
        """Return the clones that were found."""
        return self._registrar.duplicates.all()

    async def forget_duplicate(self, call: Call) -> Ack:
        """Check the hosts with a machine's identity again."""
        await self._registrar.duplicates.forget(call.path["machine"])
        return Ack(detail="they are checked again")
