"""How a task runs from an image: its command, variables and unit properties. Pure."""

from __future__ import annotations

import posixpath

from msgspec.structs import replace

from agent.api import OciConfig, TaskSpec
from agent.images.core.oci import SIGNALS

USUAL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""PATH of an image without one, as in container engines: some programs are only in /bin.

systemd's default has no /bin if /bin is a link on the host."""
PATH_MAX, NAME_MAX = 4096, 255
"""The kernel's limits in bytes: of a path with its final NUL, and of a name (limits.h)."""


def as_run(spec: TaskSpec, config: OciConfig | None) -> TaskSpec:
    """Return the specification, completed with the image's configuration.

    A command replaces entry point and command of the image; variables override the image's.
    """
    if config is None:
        return spec
    command = spec.command or [*config.entrypoint, *config.command]
    folder = config.working_dir.rstrip("/")
    if command and "/" in command[0] and not command[0].startswith("/"):
        command = [f"{folder}/{command[0].removeprefix('./')}", *command[1:]]
    return replace(spec, command=command, environment={**config.environment, **spec.environment})


def image_properties(spec: TaskSpec, config: OciConfig | None) -> dict[str, object]:
    """Return the unit properties that follow from an image's configuration.

    `spec` is the result of `as_run`.
    """
    properties: dict[str, object] = {"ExecSearchPath": folders_of(spec.environment.get("PATH", ""))}
    if config is None:
        return properties
    properties["KillMode"] = "mixed"  # the main process ends the others (docs/adr/0222)
    if config.working_dir.rstrip("/"):
        properties["WorkingDirectory"] = config.working_dir
    if config.stop_signal:
        properties["KillSignal"] = SIGNALS[config.stop_signal]
    return properties


def folders_of(path: str) -> list[str]:
    """Return the folders of a PATH, each once; those of `USUAL_PATH` for an empty one.

    systemd refuses a unit with a relative folder, a folder that is not normalized (`//`, `/./`,
    `/../`), or one that is too long (`path_is_normalized`, src/basic/path-util.c). Folders with
    control characters are left out (`machine/unit_properties.py`).
    """
    given = (folder for folder in (path or USUAL_PATH).split(":") if folder.startswith("/"))
    folders = ("/" + posixpath.normpath(folder).lstrip("/") for folder in given)
    return [folder for folder in dict.fromkeys(folders) if _is_possible(folder)]


def _is_possible(folder: str) -> bool:
    data = folder.encode()
    fits = len(data) < PATH_MAX and all(len(name) <= NAME_MAX for name in data.split(b"/"))
    return fits and folder.isprintable()
