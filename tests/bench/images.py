"""What does an image cost: a second one on a base, compared with podman, and an increment?

Boots a guest (or uses the lab named by --lab) and a registry next to it. Measured inside:

    held_ratio      how much more the file system holds after the second image on a base, over the
                    size of that image's own layer (bound: 1.1)
    written_ratio   the bytes written to the disk for it, over the same
    pull_s          fetching and applying the first image, and the second
    podman_s        `podman pull` of the same two from the same registry, where podman is there
    layers_s        an image of 100 layers of one file each: the agent, and podman
    layers_cpu_ms   CPU of the whole guest for each of these layers, in milliseconds
    full, increment a stream of `btrfs send` and one on top of it: bytes sent, seconds to receive

--json for programs.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import hashlib
import io
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve()
NEEDS_GUEST = True
STATE = Path("/var/lib/twine")
REGISTRY = "10.77.0.1:5000"
MIB = 1 << 20
LAYERS = 100
BASE_MIB, OWN_MIB = 24, 6
"""Layers of random bytes, so that compression does not make them smaller. A second image has the
same fixed cost in addition to its own layer of any size; `--own-mib` shows the share of it.
"""
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"


# ── inside the guest ────────────────────────────────────────────────────────────────────


def held() -> int:
    """Return the bytes that the file system holds, after deleted data is freed."""
    subprocess.run(["btrfs", "subvolume", "sync", str(STATE)], check=True, capture_output=True)
    subprocess.run(["sync", "-f", str(STATE)], check=True)
    command = ["btrfs", "filesystem", "usage", "--raw", str(STATE)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(next(line for line in output.splitlines() if "Used:" in line).split()[1])


def written() -> int:
    """Return the bytes written to the disk since the boot (block/stat.rst, field 7)."""
    subprocess.run(["sync", "-f", str(STATE)], check=True)
    return int(Path("/sys/block/vda/stat").read_text().split()[6]) * 512


async def measure(own_mib: int) -> dict[str, object]:
    """Return all figures."""
    from agent.client import AgentClient

    async with AgentClient("unix:/run/twine/agent.sock") as client:
        figures: dict[str, object] = {"own_mib": own_mib}
        for name in ("first", "second"):
            before, wrote, began = held(), written(), time.perf_counter()
            info = await client.fetch_oci_image(f"{REGISTRY}/bench/{name}:1")
            figures[f"{name}_pull_s"] = round(time.perf_counter() - began, 2)
            own = own_mib * MIB
            if name == "second":
                figures["written_ratio"] = round((written() - wrote) / own, 2)
                figures["held_ratio"] = round((held() - before) / own, 2)
            assert len(info.layers) == 2
        began, busy = time.perf_counter(), cpu_s()
        info = await client.fetch_oci_image(f"{REGISTRY}/bench/layers:1")
        assert len(info.layers) == LAYERS
        figures |= of_layers("layers", began, busy)
        return figures | podman() | await streams(client)


def cpu_s() -> float:
    """Return how long the guest's CPUs were busy since the boot (proc_stat(5))."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    user, nice, system, _, _, irq, soft, *_ = map(int, words[1:])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def of_layers(name: str, began: float, busy: float) -> dict[str, object]:
    """Return the cost of the image of many layers since then."""
    return {
        f"{name}_s": round(time.perf_counter() - began, 2),
        f"{name}_cpu_ms": round((cpu_s() - busy) * 1000 / LAYERS, 1),
    }


def podman() -> dict[str, object]:
    """Return how long podman takes for the same images; None where it is not installed."""
    found: dict[str, object] = {}
    for name in ("first", "second", "layers"):
        found[f"{name}_podman_s"] = None
        if shutil.which("podman"):
            began, busy = time.perf_counter(), cpu_s()
            image = f"{REGISTRY}/bench/{name}:1"
            subprocess.run(
                ["podman", "pull", "-q", "--tls-verify=false", image],
                check=True,
                capture_output=True,
            )
            found[f"{name}_podman_s"] = round(time.perf_counter() - began, 2)
            if name == "layers":
                found |= of_layers("layers_podman", began, busy)
    return found


async def streams(client: object) -> dict[str, object]:
    """Return the cost of a full stream, and of an increment on it."""
    from agent.api import ImageFormat
    from agent.client import AgentClient
    from agent.machine.btrfs import HostBtrfs

    assert isinstance(client, AgentClient)
    btrfs, top, found = HostBtrfs(), STATE / "bench-send", {}
    btrfs.delete(top)
    btrfs.create(top)
    try:
        btrfs.create(top / "work")
        (top / "work" / "base").write_bytes(os.urandom(BASE_MIB * MIB))
        btrfs.snapshot(top / "work", top / "v1", read_only=True)
        (top / "work" / "own").write_bytes(os.urandom(MIB))
        btrfs.snapshot(top / "work", top / "v2", read_only=True)
        for name, parent in (("full", []), ("increment", ["-p", str(top / "v1")])):
            stream, source = top / f"{name}.stream", "v1" if name == "full" else "v2"
            subprocess.run(
                ["btrfs", "send", "-q", *parent, "-f", str(stream), str(top / source)], check=True
            )
            data = stream.read_bytes()
            digest = "sha256:" + hashlib.sha256(data).hexdigest()

            async def chunks(data: bytes = data) -> AsyncIterator[bytes]:
                yield data

            began = time.perf_counter()
            await client.put_image(digest, ImageFormat.BTRFS, chunks())
            found[f"{name}_s"] = round(time.perf_counter() - began, 2)
            found[f"{name}_bytes"] = len(data)
    finally:
        btrfs.delete(top)
    return found


# ── outside ─────────────────────────────────────────────────────────────────────────────


def layout(folder: Path, *layers: bytes) -> None:
    """Write an image of some layers as an OCI layout."""
    (folder / "blobs" / "sha256").mkdir(parents=True)
    (folder / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')

    def blob(kind: str, data: bytes) -> dict[str, object]:
        name = hashlib.sha256(data).hexdigest()
        (folder / "blobs" / "sha256" / name).write_bytes(data)
        return {"mediaType": kind, "digest": f"sha256:{name}", "size": len(data)}

    machine = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    ids = ["sha256:" + hashlib.sha256(data).hexdigest() for data in layers]
    config = {"architecture": machine, "os": "linux", "config": {"Cmd": ["/x"]}}
    config["rootfs"] = {"type": "layers", "diff_ids": ids}
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": blob(CONFIG, json.dumps(config).encode()),
        "layers": [blob(LAYER, gzip.compress(data, 1, mtime=0)) for data in layers],
    }
    index = {"schemaVersion": 2, "manifests": [blob(MANIFEST, json.dumps(manifest).encode())]}
    (folder / "index.json").write_text(json.dumps(index))


def random_layer(name: str, size: int) -> bytes:
    """Return a layer with one file of `size` random bytes."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        entry = tarfile.TarInfo(name)
        entry.size = size
        tar.addfile(entry, io.BytesIO(os.urandom(entry.size)))
    return out.getvalue()


@contextmanager
def registry(name: str, folder: Path, own_mib: int) -> Iterator[None]:
    """Run a registry in the lab's network, with the images in it."""
    (folder / "config.yml").write_text(
        "version: 0.1\nlog: {level: error, accesslog: {disabled: true}}\n"
        f"storage: {{filesystem: {{rootdirectory: {folder}/data}}}}\n"
        f"http: {{addr: '{REGISTRY}'}}\n"
    )
    inside = [sys.executable, "-m", "vm_lab.cli", "exec", "--name", name, "--"]
    command = [*inside, "docker-registry", "serve", str(folder / "config.yml")]
    quiet = subprocess.DEVNULL
    child = subprocess.Popen(command, stdout=quiet, stderr=quiet, start_new_session=True)
    try:
        base = random_layer("base", BASE_MIB * MIB)
        for image in ("first", "second", "layers"):
            if image == "layers":
                layout(folder / image, *(random_layer(f"file-{n}", 1024) for n in range(LAYERS)))
            else:
                layout(folder / image, base, random_layer("own", own_mib * MIB))
            copy = ["skopeo", "--insecure-policy", "copy", "-q", "--preserve-digests"]
            copy += ["--retry-times=10", "--dest-tls-verify=false", f"oci:{folder / image}"]
            subprocess.run([*inside, *copy, f"docker://{REGISTRY}/bench/{image}:1"], check=True)
        yield
    finally:
        os.killpg(child.pid, signal.SIGTERM)  # the lab's command, and the registry that it runs
        child.wait()


def in_guest(name: str, own_mib: int) -> dict[str, object]:
    """Return the figures that the guest measured."""
    from tests.bench.guest import PYTHON, lab, put

    script = put(name, "images.py", HERE.read_bytes())
    trust = "grep -qs ^registry_tls_verify /etc/twine/agent.toml || "
    trust += (
        "{ mkdir -p /etc/twine; sed -i '1i registry_tls_verify = false' /etc/twine/agent.toml; }"
    )
    lab(name, "ssh", "m1", "--", f"{trust}; systemctl restart twine-agent.service")
    with tempfile.TemporaryDirectory() as folder, registry(name, Path(folder), own_mib):
        output = lab(name, "ssh", "m1", "--", f"{PYTHON} {script} --inside --own-mib {own_mib}")
    figures: dict[str, object] = json.loads(output.strip().splitlines()[-1])
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lab", default="", help="use this lab instead of booting one")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--own-mib", type=int, default=OWN_MIB, help="the second image's own layer")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(asyncio.run(measure(options.own_mib))))
        return
    from tests.bench.guest import lab

    name = options.lab or "bench"
    if not options.lab:
        lab(name, "up", "--bare", "--count", "1", "--variant", "bench")
    try:
        figures = in_guest(name, options.own_mib)
    finally:
        if not options.lab:
            lab(name, "down")
    if options.json:
        print(json.dumps(figures))
    else:
        print("\n".join(f"{key:18} {value}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
