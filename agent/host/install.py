"""Installs the agent's unit files, group and configuration on a host."""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path

import msgspec

from agent.config import AgentConfig
from wire.errors import Conflict, Unprocessable

_PREFIX = "/opt/twine"
_UNITS = "etc/systemd/system"
PACKAGED = "usr/lib/systemd/system/twine-agent.service"
"""Unit file of the Debian package (docs/adr/0091): units in /etc would hide it."""
_JOURNALS = (
    "systemd-journald@.socket",
    "systemd-journald-varlink@.socket",
    "systemd-journald-sync@.service",
)
"""systemd's units of a journal namespace (docs/adr/0081)."""
_TARGETS = {
    ("agent", "twine-agent.service"): "etc/systemd/system/twine-agent.service",
    ("agent", "twine-fence.service"): "etc/systemd/system/twine-fence.service",
    ("agent", "twine-leave.service"): "etc/systemd/system/twine-leave.service",
    ("agent", "logind.conf"): "etc/systemd/logind.conf.d/twine.conf",
    ("agent", "twine-network.service"): "etc/systemd/system/twine-network.service",
    ("agent", "twine-network.socket"): "etc/systemd/system/twine-network.socket",
    ("agent", "twine-output.service"): "etc/systemd/system/twine-output.service",
    ("agent", "hostcritical.slice"): "etc/systemd/system/hostcritical.slice",
    ("agent", "init.scope.conf"): "etc/systemd/system/init.scope.d/twine.conf",
    ("agent", "system.slice.conf"): "etc/systemd/system/system.slice.d/twine.conf",
    ("agent", "workload.slice"): "etc/systemd/system/workload.slice",
    ("agent", "twine.sysusers.conf"): "etc/sysusers.d/twine.conf",
    ("sidekick", "sidekick-resume.service"): "etc/systemd/system/sidekick-resume.service",
    ("sidekick", "sidekick-verify.service"): "etc/systemd/system/sidekick-verify.service",
    ("sidekick", "sidekick-verify.timer"): "etc/systemd/system/sidekick-verify.timer",
    ("sidekick", "twine-sidekick.rules"): "etc/udev/rules.d/90-twine-sidekick.rules",
}
"""File of a package → its path below the root."""


def targets() -> list[tuple[str, str, str]]:
    """Return package, file and path below the root of each installed file."""
    drop_ins = [
        ("agent", "journal-namespace.conf", f"{_UNITS}/{u}.d/twine.conf") for u in _JOURNALS
    ]
    journald = f"{_UNITS}/systemd-journald@.service.d/twine.conf"
    drop_ins.append(("agent", "journald-namespace.conf", journald))
    return [*((package, name, target) for (package, name), target in _TARGETS.items()), *drop_ins]


def install(root: Path) -> list[str]:
    """Write all files below `root` (`/` on a host); return their paths in order.

    Unit files contain the folder from which this program runs. An existing /etc/twine/agent.toml
    stays. Raises `Conflict` if the agent was installed from a package.
    """
    if (root / PACKAGED).exists():
        raise Conflict(
            f"the agent of this host was installed from a package: /{PACKAGED} exists",
            hint="upgrade with `apt install ./twine-agent_VERSION_amd64.deb`",
        )
    written = []
    for package, name, target in targets():
        source = files(package) / "units" / name
        if not source.is_file():
            raise Unprocessable(f"{package}/units/{name} is missing from this installation")
        text = source.read_text().replace(_PREFIX + "/", sys.prefix.rstrip("/") + "/")
        written.append(_write(root / target, text))
    config = root / "etc/twine/agent.toml"
    if not config.exists():
        written.append(_write(config, default_config()))
    return written


def _write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def default_config() -> str:
    """Return an agent.toml that shows every field with its default, commented out."""
    lines = ["# Configuration of the Twine agent. Each line shows a default.", ""]
    defaults = msgspec.to_builtins(AgentConfig(sidekick=f"{sys.prefix}/bin/sidekick"))
    for name, value in defaults.items():
        shown = msgspec.json.encode(value).decode()  # TOML has the same syntax for these
        comment = "" if name == "sidekick" else "# "
        lines.append(f"{comment}{name} = {shown}")
    return "\n".join(lines) + "\n"
