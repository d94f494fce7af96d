"""Images for the lab tests: busybox, one C program, or systemd as init."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

from oci import entry, folder, layer

from tests.lab.one_guest import OneGuest
from tests.lab.one_machine import OneMachine

HERE = Path(__file__).parent
BUSYBOX = Path("/bin/busybox")
FOLDERS = ("bin", "proc", "sys", "dev", "tmp", "run", "var", "var/tmp", "etc", "root")
BUSYBOX_FILES = (
    *(folder(name) for name in FOLDERS),
    entry("bin/busybox", data=BUSYBOX.read_bytes(), mode=0o755),
)
"""The files of an image whose only program is busybox."""
SHELL = entry("bin/sh", tarfile.SYMTYPE, linkname="busybox")
SYSTEMD_TAR = "/root/systemd.tar"


def busybox_image(*links: str) -> bytes:
    """Return an image with busybox, its shell, and links to /etc."""
    to_etc = (entry(link, tarfile.SYMTYPE, linkname="/etc") for link in links)
    return layer(*BUSYBOX_FILES, SHELL, *to_etc)


def program_image(source: str, name: str, build: Path) -> bytes:
    """Return an image whose only file is a C program of this folder; `build` gets the program."""
    program = build / name
    subprocess.run(["cc", "-static", "-O1", "-Wall", "-o", program, HERE / source], check=True)
    return layer(
        *(folder(name) for name in FOLDERS), entry(name, data=program.read_bytes(), mode=0o755)
    )


def make_systemd_image(guest: OneGuest, podman: str = "") -> None:
    """Make `SYSTEMD_TAR` on a guest, of its own packages and of a tar with podman."""
    guest.put("/root/systemd_image.sh", (HERE / "systemd_image.sh").read_text())
    make = f"bash /root/systemd_image.sh {SYSTEMD_TAR} {podman}"
    guest.ssh(f"[ -e {SYSTEMD_TAR} ] || {make}", timeout_s=900)


def systemd_image(lab: OneMachine) -> bytes:
    """Return an image with systemd as init, made of the packages of the lab's machine."""
    script = (HERE / "systemd_image.sh").read_text()
    make = f"cat >/root/make <<'END'\n{script}END\n"
    lab.ssh("m1", f"{make} [ -e {SYSTEMD_TAR} ] || bash /root/make {SYSTEMD_TAR}", 900)
    return lab.read(SYSTEMD_TAR)
