"""`make compat`: builds the images, runs them on one guest, and writes docs/compatibility.md.

    python -m tests.compat.run [--name LAB] [--keep] [NAME…]

Without names all are run; the page is written then, or with `--page` from what was run before.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from tests.compat.build import Builder
from tests.compat.page import write_page
from tests.compat.recipes import Recipe, recipes
from tests.lab.one_guest import OneGuest
from tests.lab.the_lab import BIN
from vm_lab.cache import cache_root

REGISTRY = "10.77.0.1:5000"
"""In the lab's own network, where its machines reach it."""
RESULTS = cache_root() / "compat" / "results.json"
_IN_GUEST = Path(__file__).with_name("in_guest.py")


@contextmanager
def registry(guest: OneGuest, wanted: Sequence[Recipe]) -> Iterator[None]:
    """Serve images to the guests of a lab."""
    inside = [str(BIN / "twine-lab"), "exec", "--name", guest.name, "--"]
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        (top / "config.yml").write_text(
            "version: 0.1\nlog: {level: error, accesslog: {disabled: true}}\n"
            f"storage: {{filesystem: {{rootdirectory: {top}/data}}}}\n"
            f"http: {{addr: '{REGISTRY}'}}\n"
        )
        serve = ["docker-registry", "serve", str(top / "config.yml")]
        with (top / "log").open("wb") as log:
            child = subprocess.Popen(
                [*inside, *serve], stdout=log, stderr=log, start_new_session=True
            )
        try:
            builder = Builder(lambda text: print(text, file=sys.stderr, flush=True))
            copy = ["skopeo", "--insecure-policy", "copy", "-q", "--preserve-digests"]
            copy += ["--retry-times=10", "--dest-tls-verify=false"]
            with tempfile.TemporaryDirectory(dir=cache_root() / "compat") as layouts:
                for recipe in wanted:
                    layout = Path(layouts, recipe.name)
                    builder.image(recipe, layout)
                    to = f"docker://{REGISTRY}/compat/{recipe.name}:1"
                    subprocess.run([*inside, *copy, f"oci:{layout}", to], check=True)
            yield
        finally:
            os.killpg(child.pid, signal.SIGTERM)
            child.wait()


def prepare(guest: OneGuest, wanted: Sequence[Recipe]) -> None:
    """Bring the guest's half of the suite there, and start its agent."""
    conf = "/etc/twine/agent.toml"
    set_it = f"sed -i '1i registry_tls_verify = false' {conf} && systemctl stop twine-agent"
    start = "systemctl start twine-agent"
    guest.ssh(f"grep -q ^registry {conf} || {{ {set_it}; }}; {start}", timeout_s=900)
    guest.put("/root/compat.py", _IN_GUEST.read_text())
    guest.put("/root/recipes.json", msgspec.json.encode(wanted).decode())


def run(guest: OneGuest, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Run images one after the other, and yield what became of each."""
    argv = [str(BIN / "twine-lab"), "ssh", "--name", guest.name, "m1", "--"]
    words = f"/opt/twine/bin/python /root/compat.py {REGISTRY} /root/recipes.json"
    with subprocess.Popen(
        [*argv, f"{words} {' '.join(names)}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield json.loads(line)


def main(words: Sequence[str]) -> int:
    """Run what the command line says; 1 where an image did not do all it should."""
    parser = argparse.ArgumentParser(prog="make compat")
    parser.add_argument("--name", default="compat", help="of the lab")
    parser.add_argument("--keep", action="store_true", help="use a guest that stands, and leave it")
    parser.add_argument("--page", action="store_true", help="write the page from what is known")
    parser.add_argument("names", nargs="*")
    given = parser.parse_args(words)
    table = recipes()
    wanted = [r for r in table if not given.names or r.name in given.names]
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    guest = OneGuest(name=given.name)
    guest.name = given.name
    if not given.keep:
        guest.up()
    began = time.monotonic()
    failed = 0
    with registry(guest, wanted):
        print(f"images are there after {time.monotonic() - began:.0f} s", file=sys.stderr)
        prepare(guest, wanted)
        for found in run(guest, [r.name for r in wanted]):
            results[found["name"]] = found
            failed += "problem" in found
            print(json.dumps(found), flush=True)
            RESULTS.write_text(json.dumps(results))
    if not given.keep:
        guest.down()
    if given.page or not given.names:
        write_page(table, results)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
