"""`make compat`: builds the images, runs them in one guest, and writes docs/compatibility.md.

    python -m tests.compat.run [--name LAB] [--keep] [--rest] [NAME…]

Without names it runs all images. `--rest` selects the images without a fully successful result.
results.json keeps each result with the recipe that it belongs to, so the page can combine several
runs. A result of a changed recipe is dropped.
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
from tests.lab.lab_client import BIN
from tests.lab.one_guest import OneGuest
from vm_lab.cache import cache_root, recipe_key

REGISTRY = "10.77.0.1:5000"
"""An address in the lab's own network, where its machines reach it."""
RESULTS = Path(__file__).with_name("results.json")
_IN_GUEST = Path(__file__).with_name("in_guest.py")


def built(wanted: Sequence[Recipe], layouts: Path) -> dict[str, str]:
    """Build a layout for each recipe below a folder. Return the reasons of those that failed."""
    builder = Builder(lambda text: print(text, file=sys.stderr, flush=True))
    problems: dict[str, str] = {}
    for recipe in wanted:
        try:
            builder.image(recipe, layouts / recipe.name)
        except subprocess.CalledProcessError as e:
            problems[recipe.name] = f"it was not built: {e.cmd[0]} ended with {e.returncode}"
    return problems


@contextmanager
def registry(guest: OneGuest, layouts: Path) -> Iterator[None]:
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
            copy = ["skopeo", "--insecure-policy", "copy", "-q", "--preserve-digests"]
            copy += ["--retry-times=10", "--dest-tls-verify=false"]
            for layout in sorted(layouts.iterdir()):
                to = f"docker://{REGISTRY}/compat:{layout.name}"  # one repository: one base
                subprocess.run([*inside, *copy, f"oci:{layout}", to], check=True)
            yield
        finally:
            os.killpg(child.pid, signal.SIGTERM)
            child.wait()


def prepare(guest: OneGuest, wanted: Sequence[Recipe]) -> None:
    """Copy `in_guest.py` to the guest and start its agent."""
    conf = "/etc/twine/agent.toml"
    set_it = f"sed -i '1i registry_tls_verify = false' {conf} && systemctl stop twine-agent"
    start = "systemctl start twine-agent"
    guest.ssh(f"grep -q ^registry {conf} || {{ {set_it}; }}; {start}", timeout_s=900)
    guest.put("/root/compat.py", _IN_GUEST.read_text())
    guest.put("/root/recipes.json", msgspec.json.encode(wanted).decode())


def one_guest() -> OneGuest:
    """Return a guest that can run two images at a time."""
    return OneGuest(name="compat", cpus=2, memory_mib=2048)


def tried(
    guest: OneGuest, wanted: Sequence[Recipe], *, is_running: bool = False
) -> Iterator[dict[str, Any]]:
    """Build images and run them in a guest. Yield the result of each."""
    with tempfile.TemporaryDirectory(dir=cache_root()) as folder:
        problems = built(wanted, Path(folder))
        yield from ({"name": name, "problem": text} for name, text in problems.items())
        names = [r.name for r in wanted if r.name not in problems]
        if not names:
            return
        if not is_running:
            guest.up()
        with registry(guest, Path(folder)):
            prepare(guest, wanted)
            yield from run(guest, names)
        if not is_running:
            guest.down()


def run(guest: OneGuest, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Run images and yield the result of each."""
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


def known(table: Sequence[Recipe]) -> dict[str, Any]:
    """Return the results of the recipes in their present form."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return {r.name: kept[r.name] for r in table if kept.get(r.name, {}).get("of") == of(r)}


def of(recipe: Recipe) -> str:
    """Return a value that changes with the recipe."""
    return recipe_key((), msgspec.json.encode(recipe).decode())


def keep(results: dict[str, Any], recipe: Recipe, found: dict[str, Any]) -> None:
    """Add the result of an image to the results, in memory and on disk."""
    today = time.strftime("%Y-%m-%d", time.gmtime())
    results[recipe.name] = {**found, "of": of(recipe), "date": today}
    lines = (f'"{name}": {json.dumps(results[name])}' for name in sorted(results))
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main(words: Sequence[str]) -> int:
    """Run the command line. Return 1 if an image did not meet all its expectations."""
    parser = argparse.ArgumentParser(prog="make compat")
    parser.add_argument("--name", default="compat", help="of the lab")
    parser.add_argument("--keep", action="store_true", help="use a guest that stands, and leave it")
    parser.add_argument("--rest", action="store_true", help="only what is not known to be fine")
    parser.add_argument("names", nargs="*")
    given = parser.parse_args(words)
    table = {r.name: r for r in recipes()}
    if unknown := set(given.names) - set(table):
        parser.error(f"no such recipe: {', '.join(sorted(unknown))}")
    results = known([*table.values()])
    fine = {name for name, found in results.items() if given.rest and "problem" not in found}
    wanted = [table[name] for name in given.names or table if name not in fine]
    guest = one_guest()
    guest.name = given.name
    failed = 0
    for found in tried(guest, wanted, is_running=given.keep):
        failed += "problem" in found
        print(json.dumps(found), flush=True)
        keep(results, table[found["name"]], found)
    write_page([*table.values()], results)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
