"""Removes the installed files from a host, and with `purge` also the agent's data."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from agent.host.install import targets
from agent.machine import HostAccess
from agent.machine.hardware import KEPT
from agent.netplan import GATES
from agent.network.core.firewall import TABLE
from agent.runtime.core.records import TASK_UNITS
from wire.errors import Conflict

SERVICES = (
    "sidekick-verify.timer",
    "sidekick-verify.service",
    "sidekick-resume.service",
    "twine-leave.service",
    "twine-agent.service",
    "twine-fence.service",
    "twine-network.socket",
    "twine-network.service",
    "twine-output.service",
)
SLICES = ("workload.slice", "hostcritical.slice")
JOURNALS = ("systemd-journald@twine-*", "systemd-journald-varlink@twine-*")
"""Journals of entitlements, with their sockets: `stop` accepts globs, `disable` does not."""
SUBVOLUMES = ("tasks", "staging", "images", "layers", "scratch", "volumes")
_DROP_INS = (".scope.d", ".slice.d", ".socket.d", ".service.d", ".conf.d")
STOP_S = 300.0
"""How long a service may take to end."""


def uninstall(
    root: Path, state: Path, run: Path, machine: HostAccess, sidekick: str, *, purge: bool
) -> list[str]:
    """Remove units, group and firewall; with `purge` state, identity and configuration, too.

    Settings of a host profile are undone first. Returns the removed paths in order. Raises
    `Conflict` while the host has tasks, before anything is changed.
    """
    processes = machine.processes
    if tasks := [u.unit for u in machine.systemd.units(TASK_UNITS)]:
        raise Conflict(
            f"{len(tasks)} tasks are on this host: {', '.join(tasks[:5])}",
            hint="drain the machine (twinectl machine drain), or `twine-agent stop NAME`",
        )
    if (state / "sidekick" / "state.json").exists():  # first, because the rollback needs it
        processes.run([sidekick, "rollback"], timeout_s=STOP_S)
    removed = []
    for unit in (*SERVICES, *SLICES):
        argv = ["systemctl", "disable", "--quiet", "--now", unit]
        processes.run(argv, timeout_s=STOP_S, check=False)
    processes.run(["systemctl", "stop", *JOURNALS], timeout_s=STOP_S, check=False)
    processes.run(["nft", "delete", "table", "inet", TABLE], check=False)
    removed += _remove(root / GATES.lstrip("/"))
    for path in (root / target for _, _, target in targets()):
        removed += _remove(path)
        if path.parent.name.endswith(_DROP_INS):
            with contextlib.suppress(OSError):  # others have drop-ins there, too
                path.parent.rmdir()
    if purge:
        removed += _purge(root, state, run, machine)
    processes.run(["systemctl", "daemon-reload"])
    processes.run(["systemctl", "reset-failed", "twine-*", "sidekick-*"], check=False)
    return removed


def _purge(root: Path, state: Path, run: Path, machine: HostAccess) -> list[str]:
    removed = []
    for folder in (state / name for name in SUBVOLUMES):
        removed += _delete_subvolumes(folder, machine) if folder.exists() else []
    journals = (root / "var/log/journal").glob("*.twine-*")
    kept = state.iterdir() if state.exists() else ()
    for path in (*kept, *journals, root / "etc/twine", run, root / KEPT.lstrip("/")):
        removed += _remove(path)
    machine.processes.run(["groupdel", "twine"], check=False)
    return removed


def _delete_subvolumes(folder: Path, machine: HostAccess) -> list[str]:
    """Delete the subvolumes below a folder, including those in its subfolders."""
    there, removed = machine.btrfs.children(folder), []
    for name in there:
        machine.btrfs.delete(folder / name)
        removed.append(str(folder / name))
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            removed += _delete_subvolumes(path, machine)
    return removed


def _remove(path: Path) -> list[str]:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.exists() or path.is_symlink():
        path.unlink()
    else:
        return []
    return [str(path)]
