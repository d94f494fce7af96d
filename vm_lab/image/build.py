"""The guest's image in four cached layers, each named by the hash of its inputs.

base      Debian 13 on btrfs, kernel, initrd          packages and scripts in this folder
deps      virtual environment with the wheels needed   base + the project's requirements
project   the project's wheel, installed               deps + the wheel
image     disk for vagrant = base + deps + project
"""

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from vm_lab import wheel as wheels
from vm_lab.cache import (
    Say,
    is_cached,
    keep_newest,
    locked_cache,
    partial_file,
    partial_folder,
    recipe_key,
)
from vm_lab.errors import LabError
from vm_lab.image.initrd import build_initrd
from vm_lab.image.recipe import RECIPE, run_recipe

VARIANTS = ("base", "bench", "grub")
BUSYBOX = Path("/bin/busybox")
DISK_GIB = 8  # as in base.sh
GRUB_DISK_GIB = 9  # with the partition of its own for /boot (grub.sh)


@dataclass(frozen=True, slots=True)
class Image:
    """A built image: a vagrant box's content, with the kernel to boot it."""

    folder: Path
    deps_layer: Path | None
    """Tar of the virtual environment; None if the image is without the project."""
    project_layer: Path | None
    """Tar of the installed project; None if the image is without it."""

    @property
    def name(self) -> str:
        """Return the name of the vagrant box."""
        return self.folder.name

    @property
    def disk(self) -> Path:
        """Return the disk, a qcow2 file without a partition table."""
        return self.folder / "box.img"

    @property
    def kernel(self) -> Path:
        """Return the kernel, for direct boot."""
        return self.folder / "vmlinuz"

    @property
    def initrd(self) -> Path:
        """Return the initrd, for direct boot."""
        return self.folder / "initrd"


def guest_packages(variant: str) -> list[str]:
    """Return the Debian packages of a variant of the guest."""
    files = ["packages-base.txt"]
    if variant != "base":
        files.append(f"packages-{variant}.txt")
    lines = [line for name in files for line in (RECIPE / name).read_text().splitlines()]
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def build_image(
    variant: str,
    say: Say,
    *,
    project: bool = True,
    disk: bool = True,
    source: Path = wheels.REPOSITORY,
) -> Image:
    """Return the image of a tree, by default of this one; builds the layers that are not cached.

    Without `disk` only the layers are built, which is enough for a push.
    """
    if variant not in VARIANTS:
        raise LabError(f"no image variant {variant!r}", hint=f"variants are: {' '.join(VARIANTS)}")
    with locked_cache(say) as cache, tempfile.TemporaryDirectory(prefix="twine-lab-") as temporary:
        base = _base_layer(cache, variant, say)
        deps = project_layer = None
        if project:
            wheel = wheels.build_wheel(Path(temporary), source)
            deps = _deps_layer(cache, base, wheel, say)
            project_layer = _project_layer(cache, base, deps, wheel, say)
        layers = [layer for layer in (deps, project_layer) if layer is not None]
        folder = _disk(cache, variant, base, layers, say) if disk else base
        _prune(cache)
        return Image(folder, deps, project_layer)


def _base_layer(cache: Path, variant: str, say: Say) -> Path:
    names = ("base.sh", "customize.sh", "init.sh", "initrd.py", "packages-base.txt")
    files = [RECIPE / name for name in names]
    key = recipe_key(files, *guest_packages(variant))
    folder = cache / f"base-{variant}-{key}"
    if is_cached(folder):
        return folder
    with partial_folder(folder) as partial:
        say(f"image: building the {variant} layer, Debian 13 (about a minute)")
        run_recipe("base.sh", partial, RECIPE, ",".join(guest_packages(variant)), say=say)
        say("image: building the initrd")
        try:
            build_initrd(partial / "modules", RECIPE / "init.sh", BUSYBOX, partial / "initrd")
        except subprocess.CalledProcessError as e:
            raise LabError(f"cannot build the initrd: {e}") from e
        shutil.rmtree(partial / "modules")
    return folder


def _deps_layer(cache: Path, base: Path, wheel: Path, say: Say) -> Path:
    requirements = wheels.requirements_of(wheel, "host")
    key = recipe_key([RECIPE / "project.sh"], base.name, *requirements)
    layer = cache / f"deps-{key}.tar"
    if not is_cached(layer):
        say(f"image: fetching and installing what the agent needs: {', '.join(requirements)}")
        fetched = cache / f"wheels-{recipe_key([], *requirements)}"
        if not is_cached(fetched):
            with partial_folder(fetched) as partial:
                wheels.fetch_wheels(requirements, partial)
        run_recipe("project.sh", base / "base.raw", fetched, layer, say=say)
    return layer


def _project_layer(cache: Path, base: Path, deps: Path, wheel: Path, say: Say) -> Path:
    key = recipe_key([wheel, RECIPE / "project.sh"], deps.name)
    layer = cache / f"project-{key}.tar"
    if not is_cached(layer):
        say("image: installing the project's wheel")
        run_recipe("project.sh", base / "base.raw", wheel.parent, layer, deps, say=say)
    return layer


def _disk(cache: Path, variant: str, base: Path, layers: list[Path], say: Say) -> Path:
    """Return the folder of the bootable image made of the layers."""
    loader, gib = ("grub", GRUB_DISK_GIB) if variant == "grub" else ("none", DISK_GIB)
    recipes = [RECIPE / "disk.sh", *([RECIPE / "grub.sh"] if loader == "grub" else [])]
    key = recipe_key(recipes, base.name, *(layer.name for layer in layers))
    folder = cache / f"twine-{variant}-{key}"
    if not is_cached(folder):
        say("image: putting the layers together")
        with partial_folder(folder) as partial:
            run_recipe("disk.sh", base / "base.raw", partial / "box.img", loader, *layers, say=say)
            os.link(base / "vmlinuz", partial / "vmlinuz")
            os.link(base / "initrd", partial / "initrd")
            metadata = {"provider": "libvirt", "format": "qcow2", "virtual_size": gib}
            (partial / "metadata.json").write_bytes(msgspec.json.encode(metadata))
            (partial / "Vagrantfile").write_text("# settings are in vm_lab/Vagrantfile\n")
    current = cache / f"current-{variant}"
    current.unlink(missing_ok=True)
    current.symlink_to(folder.name)
    return folder


def pack_box(image: Image) -> Path:
    """Return the image as a `.box` file, for `vagrant up` by hand on an ordinary libvirt."""
    box = image.folder / "twine-lab.box"
    if not box.exists():
        names = ["metadata.json", "Vagrantfile", "box.img"]
        with partial_file(box) as partial:
            argv = ["tar", "-C", str(image.folder), "-cSf", str(partial), *names]
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
            if done.returncode:
                raise LabError(f"cannot pack {box}: {done.stderr.strip()}")
    return box


def _prune(cache: Path) -> None:
    """Keep the newest few of each kind; a running lab holds links to what it uses."""
    for variant in VARIANTS:
        keep_newest(cache, f"base-{variant}-*")
        keep_newest(cache, f"twine-{variant}-*")
    keep_newest(cache, "deps-*")
    keep_newest(cache, "wheels-*")
    keep_newest(cache, "project-*")
