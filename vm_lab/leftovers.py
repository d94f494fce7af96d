"""Searches for remains of a lab after `down`: every kind of object that a lab creates."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from vm_lab.cache import cache_root, is_locked
from vm_lab.sandbox import (
    BRIDGE,
    LIBVIRT_FOLDERS,
    network_namespaces_seeing,
    processes_in_namespace,
)
from vm_lab.state import LabPaths


@dataclass(frozen=True, slots=True)
class Check:
    """One kind of object, and those that were found."""

    kind: str
    found: tuple[str, ...]


def host_interfaces() -> list[str]:
    """Return the network interfaces of the host's own namespace."""
    return sorted(entry.name for entry in Path("/sys/class/net").iterdir())


def check_leftovers(
    paths: LabPaths, namespace_inode: int | None, interfaces_before: list[str] | None
) -> list[Check]:
    """Return one check for each kind; `found` is empty in all if the lab is removed."""
    checks = [
        Check("processes in its network namespace", _processes_in(namespace_inode)),
        Check("processes that see its mounts", _namespaces_with_mounts(paths.state)),
        Check("processes that name its folders", _processes_naming_folders(paths)),
        Check("mounts", mounts_below([str(paths.state), str(paths.run)])),
        Check("named network namespaces", _named_namespaces(paths.name)),
        Check("loop devices on the image cache", _loop_devices()),
        Check("files", tuple(str(p) for p in (paths.state, paths.run) if p.exists())),
    ]
    if interfaces_before is not None:
        new = set(host_interfaces()) - set(interfaces_before)
        new = {name for name in new if name == BRIDGE or name.startswith(("vnet", "virbr"))}
        checks.append(Check("interfaces on the host", tuple(sorted(new))))
    if not paths.state_root.exists():  # the last lab: its mount points must be gone too
        places = [str(place) for place in LIBVIRT_FOLDERS]
        checks.append(Check("mounts over libvirt's folders", mounts_below(places)))
    return checks


def mounts_below(
    places: list[str], mountinfo: Path = Path("/proc/self/mountinfo")
) -> tuple[str, ...]:
    """Return the mount points at or below the places."""
    points = [line.split()[4] for line in mountinfo.read_text().splitlines()]
    return tuple(p for p in points if any(p == q or p.startswith(f"{q}/") for q in places))


def _processes_in(inode: int | None) -> tuple[str, ...]:
    if inode is None:
        return ()
    inside = set(processes_in_namespace(inode))
    return tuple(f"{pid} ({words})" for pid, words in _commands() if pid in inside)


def _namespaces_with_mounts(folder: Path) -> tuple[str, ...]:
    return tuple(f"network namespace {inode}" for inode in network_namespaces_seeing(folder))


def _processes_naming_folders(paths: LabPaths) -> tuple[str, ...]:
    folders = f"{paths.state}/", f"{paths.run}/"
    return tuple(
        f"{pid} ({command})"
        for pid, command in _commands()
        if any(folder in command for folder in folders)
    )


def _commands() -> list[tuple[int, str]]:
    """Return the number and the command line of each process."""
    return [(p.pid, " ".join(p.info["cmdline"] or ())) for p in psutil.process_iter(["cmdline"])]


def _named_namespaces(name: str) -> tuple[str, ...]:
    folder = Path("/run/netns")
    if not folder.exists():
        return ()
    return tuple(e.name for e in folder.iterdir() if e.name == f"twine-lab-{name}")


def _loop_devices() -> tuple[str, ...]:
    """Return loop devices on files of the cache, unless a build is using them right now."""
    if is_locked(cache_root()):
        return ()
    done = subprocess.run(
        ["losetup", "--json", "--list", "--output", "NAME,BACK-FILE"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if not done.stdout.strip():
        return ()
    root = str(cache_root())
    devices = json.loads(done.stdout)["loopdevices"]
    return tuple(d["name"] for d in devices if str(d["back-file"]).startswith(root))
