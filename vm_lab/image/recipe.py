"""Runs the shell scripts of this folder, each in a mount namespace of its own."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from vm_lab.cache import Say
from vm_lab.errors import FREE_SPACE, LabError, why_unwritable

RECIPE = Path(__file__).resolve().parent


def run_recipe(script: str, *args: Path | str, say: Say) -> None:
    """Run a recipe in a mount namespace of its own, reporting its "step:" lines.

    Its mounts end with it, also after a failure.
    """
    argv = ["unshare", "--mount", "--propagation", "private", "bash", str(RECIPE / script)]
    argv += [str(arg) for arg in args]
    tail: list[str] = []
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step: "):
                say(f"image: {line.removeprefix('step: ').strip()}")
            tail = [*tail[-30:], line]
    if process.returncode != 0:
        for path in (arg for arg in args if isinstance(arg, Path)):
            path.with_name(f"{path.name}.partial").unlink(missing_ok=True)
        raise LabError(
            f"{script} failed with status {process.returncode}:\n{''.join(tail)}",
            hint=hint_of("".join(tail)),
        )


def run_program_recipe(
    tar: Path, start: str, packages: Sequence[str], paths: Sequence[str], say: Say
) -> None:
    """Make the tar of a root with files of Debian packages, and a script that starts a program."""
    script = tar.with_suffix(".start")
    script.write_text(start)
    try:
        run_recipe("program.sh", tar, script, ",".join(packages), *paths, say=say)
    finally:
        script.unlink()


def hint_of(output: str) -> str:
    """Return what to try after a recipe that failed with this output."""
    if why_unwritable(output):
        return FREE_SPACE
    return "needs root, the packages of vm_lab/packages.txt and a Debian mirror"
