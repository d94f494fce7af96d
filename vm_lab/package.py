"""The agent and sidekick as a Debian package: `twine-agent_VERSION_amd64.deb`.

Its content is what the guests have: the layers `deps` and `project` of the image, made by the
Python of a Debian 13, so nothing is compiled on a host. What `twine-agent install` writes to `/etc`
is in `/usr/lib` here and belongs to dpkg: each version has the units that it came with, whichever
version was there before. Why, and why the agent is not stopped while its files change:
docs/adr/0091-the-agent-comes-as-a-debian-package.md.
"""

import shutil
import subprocess
import tempfile
from email.parser import HeaderParser
from pathlib import Path

from vm_lab.cache import Say, partial_file
from vm_lab.errors import LabError
from vm_lab.image.build import Image, build_image
from vm_lab.wheel import REPOSITORY

NAME = "twine-agent"
ARCHITECTURE = "amd64"
RECIPE = Path(__file__).resolve().parent / "debian"
SCRIPTS = ("postinst", "prerm", "postrm")
WANTED = (
    *("./opt/twine", "./etc/systemd", "./etc/sysusers.d", "./etc/twine", "./etc/udev/rules.d"),
    "./usr/local/bin",
)
"""The parts of the layers that belong into the package; others, such as users, are the guest's."""
MOVED = {
    "etc/systemd": "usr/lib/systemd",
    "etc/sysusers.d": "usr/lib/sysusers.d",
    "etc/udev/rules.d": "usr/lib/udev/rules.d",
    "usr/local/bin": "usr/bin",
}
"""Where a package may put what an installation by hand has in the places of the operator."""
MARKS = ("opt/twine/deps-layer", "opt/twine/project-layer")


def build_package(into: Path, say: Say, source: Path = REPOSITORY) -> Path:
    """Build the package of a tree and return its path in `into`; its version is the tree's.

    Raises `LabError` where the tree cannot be built or dpkg-deb refuses what came out.
    """
    layers = build_image("base", say, disk=False, source=source)
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="twine-package-") as temporary:
        root = Path(temporary) / "root"
        root.mkdir(mode=0o755)
        _unpack(layers, root)
        replaced = move_files(root)
        version = version_of(root)
        write_metadata(root, version, replaced)
        package = into / f"{NAME}_{version}_{ARCHITECTURE}.deb"
        say(f"package: {package.name}")
        with partial_file(package) as partial:
            _run("dpkg-deb", "--root-owner-group", "-Zzstd", "--build", str(root), str(partial))
    return package


def _unpack(layers: Image, root: Path) -> None:
    """Put the parts of both layers that a host needs below `root`."""
    for layer in (layers.deps_layer, layers.project_layer):
        assert layer is not None  # an image with the project has both
        members = _run("tar", "-tf", str(layer)).splitlines()
        parts = [part for part in WANTED if f"{part}/" in members]
        _run("tar", "-xf", str(layer), "-C", str(root), *parts)


def move_files(root: Path) -> list[str]:
    """Move files of an installation by hand to a package's folders; return their old paths.

    Links that enable units are left out: each host decides which units are enabled.
    """
    for mark in MARKS:
        (root / mark).unlink(missing_ok=True)
    for link in (p for p in (root / "etc/systemd").rglob("*") if p.is_symlink()):
        link.unlink()
    replaced = [
        str(path.relative_to(root))
        for old in MOVED
        for path in sorted((root / old).rglob("*"))
        if path.is_symlink() or path.is_file()
    ]
    for old, new in MOVED.items():
        (root / new).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(root / old, root / new)
    for emptied in ("usr/local", "etc/systemd", "etc/udev"):
        if (root / emptied).is_dir():
            (root / emptied).rmdir()
    for folder in sorted((root / "usr/lib/systemd").rglob("*"), reverse=True):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()  # of the links above
    return replaced


def version_of(root: Path) -> str:
    """Return the version of the distribution below a root."""
    files = list(root.glob("opt/twine/lib/python3*/site-packages/twine_cluster-*/METADATA"))
    if len(files) != 1:
        raise LabError(f"the layers have {len(files)} distributions of twine-cluster, not one")
    return str(HeaderParser().parsestr(files[0].read_text())["Version"])


def write_metadata(root: Path, version: str, replaced: list[str]) -> None:
    """Write the package's metadata: fields, configuration files, maintainer scripts."""
    debian = root / "DEBIAN"
    debian.mkdir(mode=0o755)
    size = sum(p.lstat().st_size for p in root.rglob("*") if p.is_file()) // 1024
    control = (RECIPE / "control").read_text()
    (debian / "control").write_text(
        control.replace("@VERSION@", version).replace("@SIZE_KIB@", str(size))
    )
    (debian / "conffiles").write_text("/etc/twine/agent.toml\n")
    names = " ".join(replaced)
    for name in SCRIPTS:
        script = debian / name
        script.write_text((RECIPE / name).read_text().replace("@REPLACED@", names))
        script.chmod(0o755)


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"{argv[0]} failed with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout
