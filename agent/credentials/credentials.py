"""Holds credentials in memory and passes them only to systemd (docs/adr/0082)."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from agent.api import TaskSpec
from agent.api.credentials import CredentialInfo
from agent.credentials.core import credential_properties, missing, requested_credential, why_missing
from agent.machine.memory_file import MemoryFile
from agent.runtime.core.records import TaskRecord
from agent.runtime.stage import TaskStage
from wire.errors import HostError, InvalidInput, NotFound
from wire.peers import local_user

log = logging.getLogger(__name__)

CREDENTIAL_MAX_BYTES = 64 << 10
"""Largest credential; systemd accepts 1 MiB for all credentials of a unit (systemd.exec(5))."""
CREDENTIALS_MAX = 1000
"""Most credentials of a host."""


class _StoredCredential(msgspec.Struct, frozen=True, array_like=True):
    entitlement: str
    name: str
    value: bytes
    put_at: float

    def __repr__(self) -> str:
        """Leave out the value, because the text may end in a log."""
        return f"_Held({self.entitlement}/{self.name})"


class CredentialHolder(TaskStage):
    """The credentials of this host, by entitlement and name."""

    def __init__(self, path: Path) -> None:
        """`path` is the path of the socket for systemd; `serving` opens it."""
        self._path = path
        self._file: MemoryFile | None = None
        self._held: dict[tuple[str, str], _StoredCredential] = {}

    @asynccontextmanager
    async def serving(self, spec_of: Callable[[str], TaskSpec | None]) -> AsyncIterator[None]:
        """Load the previous agent's credentials, and serve systemd until the block ends.

        `spec_of` returns the specification of a task, None for an unknown task.
        """
        self._file = MemoryFile("credentials")
        try:
            if data := self._file.read():
                stored = msgspec.msgpack.decode(data, type=list[_StoredCredential])
                self._held = {(h.entitlement, h.name): h for h in stored}
            self._path.unlink(missing_ok=True)
            before = os.umask(0o177)
            try:
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                listener.bind(str(self._path))
            finally:
                os.umask(before)

            async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await self._answer(writer, spec_of)

            async with await asyncio.start_unix_server(answer, sock=listener):
                yield
        finally:
            self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None

    def properties(self, task: TaskRecord, unit: dict[str, object]) -> dict[str, object]:
        """Return the unit with the properties by which systemd fetches the task's credentials."""
        return unit | credential_properties(task.spec, str(self._path))

    def check(self, task: TaskRecord) -> None:
        """Raise `HostError` if a credential of a task is missing; the task starts once it comes."""
        if names := missing(task.spec, self._held):
            entitlement = task.spec.entitlement
            hint = f"twine-agent credential create {names[0]} --entitlement {entitlement} <FILE"
            raise HostError(why_missing(task.task_id, task.spec, names), hint=hint)

    def put(self, entitlement: str, name: str, value: bytes) -> CredentialInfo:
        """Store a credential. Running units keep the old value; the next start gets the new one."""
        if not value or len(value) > CREDENTIAL_MAX_BYTES:
            raise InvalidInput(
                f"credential {name} has {len(value)} bytes, not 1 to {CREDENTIAL_MAX_BYTES}"
            )
        held = self._held | {
            (entitlement, name): _StoredCredential(entitlement, name, value, round(time.time(), 3))
        }
        if len(held) > CREDENTIALS_MAX:
            raise InvalidInput(
                f"this host holds {CREDENTIALS_MAX} credentials already",
                hint="twine-agent credential delete",
            )
        self._replace_all(held)
        return _info(held[entitlement, name])

    def remove(self, entitlement: str, name: str) -> None:
        """Forget a credential, or raise `NotFound`."""
        if (entitlement, name) not in self._held:
            raise NotFound(
                f"this host holds no credential {name} of entitlement {entitlement}",
                hint="twine-agent credential list",
            )
        self._replace_all(
            {key: held for key, held in self._held.items() if key != (entitlement, name)}
        )

    def all(self) -> list[CredentialInfo]:
        """Return all credentials without values, sorted."""
        return [_info(self._held[key]) for key in sorted(self._held)]

    def _replace_all(self, held: dict[tuple[str, str], _StoredCredential]) -> None:
        assert self._file is not None
        self._file.write(msgspec.msgpack.encode(list(held.values())))
        self._held = held

    async def _answer(
        self, writer: asyncio.StreamWriter, spec_of: Callable[[str], TaskSpec | None]
    ) -> None:
        """Send one credential to systemd; the caller's address names the unit."""
        address = writer.get_extra_info("peername")
        user = local_user(writer.transport)
        try:
            request = requested_credential(address if isinstance(address, bytes) else b"")
            is_root = user is not None and user[0] == 0
            held = self._find(request, spec_of) if request is not None and is_root else None
            if held is None:
                log.warning("unit asked for an unknown credential", extra={"by": user})
            else:
                writer.write(held.value)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    def _find(
        self, request: tuple[str, str], spec_of: Callable[[str], TaskSpec | None]
    ) -> _StoredCredential | None:
        task_id, name = request
        spec = spec_of(task_id)
        if spec is None or name not in spec.credentials:
            return None
        return self._held.get((spec.entitlement, spec.credentials[name]))


def _info(held: _StoredCredential) -> CredentialInfo:
    return CredentialInfo(
        entitlement=held.entitlement,
        name=held.name,
        size_bytes=len(held.value),
        put_at=held.put_at,
    )
