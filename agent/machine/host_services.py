"""Services of the host that have unit files, over D-Bus."""

from __future__ import annotations

from agent.machine import ServiceUnit
from agent.machine.systemd import HostSystemd
from agent.machine.systemd_calls import SYSTEMD, string_tokens, translating_errors


class HostServices(HostSystemd):
    """Starts, stops and reads services by any of their names. Needs root."""

    def start(self, unit: str) -> None:
        """Queue the start of a service."""
        with translating_errors(f"cannot start {unit}"):
            self._manager("StartUnit", [*string_tokens("ss", unit, "replace")])

    def load(self, unit: str) -> ServiceUnit | None:
        """Return a service, after reading its files if needed; None if it has no files."""
        about, service = SYSTEMD + b".Unit", SYSTEMD + b".Service"
        with translating_errors(f"cannot look at {unit}"):
            path = self._manager("LoadUnit", [*string_tokens("s", unit)])
            if self._get(path, about, "LoadState") == b"not-found":
                return None
            name = self._get(path, about, "Id").decode()
            group = self._get(path, service, "ControlGroup").decode()
            return ServiceUnit(
                name=name,
                active=self._get(path, about, "ActiveState").decode(),
                sub=self._get(path, about, "SubState").decode(),
                kind=self._get(path, service, "Type").decode(),
                result=self._get(path, service, "Result").decode(),
                has_job=bool(self._get(path, about, "Job")[0]),
                invocation_id=bytes(self._get(path, about, "InvocationID")).hex(),
                control_group=group or f"{folder_of(self._get(path, service, 'Slice'))}/{name}",
                triggered=bool(self._get(path, about, "TriggeredBy")),
            )


def folder_of(slice_name: bytes) -> str:
    """Return the cgroup of a slice: `a-b.slice` lies in `a.slice` (systemd.slice(5))."""
    parts = slice_name.decode().removesuffix(".slice").split("-")
    if not any(parts):  # the root slice, `-.slice`
        return ""
    return "".join(f"/{'-'.join(parts[:n])}.slice" for n in range(1, len(parts) + 1))
