"""The conveyor as the image of a job: Python from Debian's packages, and Twine as a wheel.

`vm_lab/jobs/conveyor.toml` runs it. Its configuration and its credentials are files that the agent
gives the task, its store is a volume, and users call it over TLS at the port of the task.
"""

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from vm_lab.cache import Say, is_cached, keep_newest, locked_cache, partial_file, recipe_key
from vm_lab.errors import LabError
from vm_lab.image.recipe import RECIPE, run_program_recipe
from vm_lab.wheel import FOR_GUEST, PACKAGES, build_wheel, fetch_wheels, requirements_of

DEBIAN = ("python3", "tzdata")
LIBRARIES = ("libpthread.so.0", "libdl.so.2", "librt.so.1", "libm.so.6", "libgcc_s.so.1")
"""What wheels of the manylinux platforms link to."""
PATHS = (
    *("/usr/bin/python3.13", "/usr/lib/python3.13", "/usr/share/zoneinfo"),
    *(f"/usr/lib/x86_64-linux-gnu/{name}" for name in LIBRARIES),
)
SITE = "opt/twine"
START = f"""#!/bin/sh
# Starts the conveyor with the configuration and the credentials of its job, at $PORT.
set -eu
cd "$CREDENTIALS_DIRECTORY"
sed "s/\\$PORT/$PORT/" conveyor.toml >/tmp/conveyor.toml
export PYTHONPATH=/{SITE} PYTHONDONTWRITEBYTECODE=1
exec /usr/bin/python3.13 -m conveyor.cli serve --config /tmp/conveyor.toml
"""


def build_conveyor(say: Say) -> Path:
    """Return the tar of the root file system; its entry point is `/usr/bin/start`."""
    with (
        locked_cache(say) as cache,
        tempfile.TemporaryDirectory(prefix="twine-conveyor-") as temporary,
    ):
        wheel = build_wheel(Path(temporary), packages=(*PACKAGES, "conveyor", "taskcontrol"))
        key = recipe_key([RECIPE / "program.sh", wheel], START, *DEBIAN, *PATHS)
        tar = cache / f"conveyor-{key}.tar"
        if not is_cached(tar):
            python = _python(cache, say)
            site = Path(temporary) / SITE
            _install(wheel, site, say)
            with partial_file(tar) as partial:
                partial.write_bytes(python.read_bytes())
                with tarfile.open(partial, "a") as archive:
                    archive.add(site, f"./{SITE}", filter=_owned_by_root)
        keep_newest(cache, "conveyor-*.tar")
        return tar


def _python(cache: Path, say: Say) -> Path:
    """Return a tar with Python, its libraries and the start script."""
    key = recipe_key([RECIPE / "program.sh"], START, *DEBIAN, *PATHS)
    tar = cache / f"python-{key}.tar"
    if not is_cached(tar):
        say("image: building Python from Debian's packages")
        run_program_recipe(tar, START, DEBIAN, PATHS, say)
    return tar


def _install(wheel: Path, into: Path, say: Say) -> None:
    """Install the wheel and what a client of the front end needs, for the image's Python."""
    say("image: installing the conveyor's wheel")
    needed = requirements_of(wheel, "control")
    fetch_wheels(needed, wheel.parent)
    argv = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *("--no-index", "--find-links", str(wheel.parent), "--no-compile", *FOR_GUEST),
        *("--target", str(into), str(wheel), *needed),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"cannot install the conveyor: {done.stderr.strip()[-2000:]}")


def _owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry
