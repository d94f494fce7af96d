"""A standard output that can be opened by name: a pipe in front of the journal (docs/adr/0177).

Pure. The journal's end is a socket, and no socket can be opened by a path: opening `/dev/stdout`
fails with ENXIO. So a shell of the image's makes a pipe, leaves a `cat` behind that copies it to
the journal, and becomes the program.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent.api import OciConfig, Stdout, TaskSpec
from agent.runtime.core.records import has_own_init

SHELL = "bin/sh"
"""Where an image has its shell."""
_SCRIPT = (
    "at=/tmp/.twine-stdout.$$; "
    'if command -v cat >/dev/null && mkfifo -m 600 "$at" 2>/dev/null; then '
    'exec 3<>"$at" 4<"$at" 5>"$at"; rm -f "$at"; '
    "(trap '' TERM INT HUP; cat <&4 3>&- 4<&- 5>&- &); exec >&5 2>&5; exec 3>&- 4<&- 5>&-; fi; "
    'unset at; exec "$@"'
)
"""The pipe has no name once both ends are open. `cat` heeds no signal that ends a task: it ends
after the last word, once no process has the pipe open. It is a child of a shell that has ended, so
that the program has no unknown child. Without `mkfifo` or `cat` nothing is changed."""


def is_piped(spec: TaskSpec, config: OciConfig | None, *, has_shell: bool) -> bool:
    """Return whether a task's output goes through a pipe; without a word, an OCI image's does."""
    if has_own_init(spec) or not has_shell:
        return False
    if spec.stdout is None:
        return config is not None
    return spec.stdout is Stdout.PIPE


def piped(command: Sequence[str]) -> list[str]:
    """Return the command that runs another with a pipe as its output."""
    return [f"/{SHELL}", "-c", _SCRIPT, "sh", *command]
