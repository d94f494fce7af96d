"""A host without a boot loader: a hypervisor or the network provides kernel and command line.

Only kexec can boot it with sidekick's line. The line is also written to a file, for the program
that boots the host.
"""

from __future__ import annotations

from msgspec.structs import replace

from sidekick.loaders.entry import Entry, check_staged
from sidekick.setting import Host
from wire.errors import HostError

FILE = "/etc/twine/boot-line"
_HEAD = "# Written by sidekick: the kernel command line of the host's profile."


class Direct:
    """A host without a known boot loader."""

    name = "none"

    def is_present(self, host: Host) -> bool:  # noqa: ARG002
        """Return True: every host has at least this."""
        return True

    def own_line(self, host: Host) -> str | None:  # noqa: ARG002
        """Return None: only the running line is known."""
        return None

    def read(self, host: Host) -> Entry | None:
        """Return the staged entry."""
        text = host.fs.find(FILE)
        if text is None:
            return None
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        version = next((x[11:] for x in text.splitlines() if x.startswith("# version: ")), "")
        return Entry(line=" ".join(lines), version=version, default=True)

    def as_read_back(self, host: Host, entry: Entry) -> Entry:  # noqa: ARG002
        """Return the entry as the default: it cannot be tried first."""
        return replace(entry, default=True)

    def stage(self, host: Host, entry: Entry) -> str:
        """Write the file."""
        version = f"# version: {entry.version}\n" if entry.version else ""
        host.disk.write(host.fs.path(FILE), f"{_HEAD}\n{version}{entry.line}\n")
        check_staged(self, host, self.as_read_back(host, entry), FILE)
        return f"staged in {FILE}; the host has no known boot loader"

    def clear(self, host: Host) -> None:
        """Remove the file."""
        if host.fs.exists(FILE):
            host.disk.remove(host.fs.path(FILE))

    def why_no_boot_once(self, host: Host) -> str:  # noqa: ARG002
        """Return the reason: there is no boot loader."""
        return "the host has no boot loader that sidekick knows"

    def boot_once(self, host: Host) -> None:
        """Raise `HostError`, with the reason of `why_no_boot_once`."""
        raise HostError(f"cannot boot a line once: {self.why_no_boot_once(host)}")
