"""The working tree as a wheel, and the other wheels that a host needs."""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

from vm_lab.errors import LabError

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = ("wire", "agent", "sidekick", "control_plane", "vm_lab", "profiles")
# Published as source only; the guest has Debian's packages of both (see packages-base.txt).
FROM_DEBIAN = frozenset({"pystemd", "btrfsutil"})
# Fixed, so that the same tree gives the same wheel, which the cache may have: 1980-01-02, the
# first day that a zip file can store in every time zone.
SOURCE_DATE_EPOCH = "315619200"

_BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


FOR_GUEST = (
    *("--only-binary=:all:", "--python-version", "3.13", "--implementation", "cp"),
    *("--platform", "manylinux2014_x86_64", "--platform", "manylinux_2_28_x86_64"),
)
"""Arguments that make pip choose wheels for the Python of a guest."""


def build_wheel(
    into: Path, repository: Path = REPOSITORY, packages: tuple[str, ...] = PACKAGES
) -> Path:
    """Return the wheel of the working tree, built from a copy of it.

    The copy keeps setuptools' `build/` out of the tree, where files of deleted modules
    would linger and two builds at once would disturb each other.
    """
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="twine-wheel-") as temporary:
        tree = Path(temporary)
        copy_tree(repository, packages, tree)
        done = subprocess.run(
            [sys.executable, "-c", _BUILD, str(into)],
            cwd=tree,
            env={**os.environ, "SOURCE_DATE_EPOCH": SOURCE_DATE_EPOCH},
            capture_output=True,
            text=True,
            check=False,
        )
    wheels = sorted(into.glob("twine_cluster-*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise LabError(
            f"cannot build the wheel of {repository}: {_last_lines(done.stderr)}",
            hint="try `pip wheel --no-build-isolation --no-deps .`; setuptools is in the dev extra",
        )
    return wheels[0]


def copy_tree(repository: Path, packages: tuple[str, ...], into: Path) -> None:
    """Copy the packages of a tree, and the files that the wheel is built from."""
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for package in packages:
        shutil.copytree(repository / package, into / package, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (repository / name).exists():
            shutil.copy2(repository / name, into / name)


def requirements_of(wheel: Path, extra: str) -> tuple[str, ...]:
    """Return what pip must fetch for a wheel with an extra."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    return select_requirements(metadata.get_all("Requires-Dist") or [], extra)


def select_requirements(requires_dist: list[str], extra: str) -> tuple[str, ...]:
    """Return the requirements of an extra, such as `host`, from `Requires-Dist` lines, sorted."""
    chosen = set()
    for line in requires_dist:
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        wanted = not marker or marker.replace("'", '"') == f'extra == "{extra}"'
        name = requirement.split("=")[0].split(">")[0].split("<")[0].split("[")[0].strip()
        if wanted and name.lower() not in FROM_DEBIAN:
            chosen.add(requirement)
    return tuple(sorted(chosen))


def fetch_wheels(requirements: tuple[str, ...], into: Path) -> None:
    """Download the requirements, and what they require, as wheels for the guest's Python."""
    into.mkdir(parents=True, exist_ok=True)
    argv = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
        *FOR_GUEST,
        *("--dest", str(into), *requirements),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LabError(f"cannot fetch the guest's wheels: {_last_lines(done.stderr)}")


def _last_lines(text: str, count: int = 5) -> str:
    return "\n".join(text.strip().splitlines()[-count:]) or "no message"
