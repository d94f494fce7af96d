"""Three ordinary images resolve one another by name: the files of docs/compose.md, applied."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.compat.build import Builder
from tests.compat.recipes import Recipe, recipes
from tests.lab.lab_client import BIN, ROOT, WAIT_S, Failed, LabClient

pytestmark = [pytest.mark.lab, pytest.mark.long]
PAGE = ROOT / "docs" / "compose.md"
RESOLVER = "10.77.0.1"
POSTGRES = """#!/bin/bash
set -e
mkdir -p "$PGDATA"; chmod 700 "$PGDATA"
if [ ! -s "$PGDATA/PG_VERSION" ]; then
    echo "$POSTGRES_PASSWORD" >/tmp/password
    ways="--auth-local=trust --auth-host=scram-sha-256 --pwfile=/tmp/password"
    initdb -U postgres $ways --no-sync -D "$PGDATA"
    echo "host all all all scram-sha-256" >>"$PGDATA/pg_hba.conf"
fi
exec "$@" -c listen_addresses='*'
"""


def of_suite(name: str, **fields: Any) -> Recipe:
    """Return the recipe of an image of the compatibility suite."""
    return replace(next(r for r in recipes() if r.name == name), **fields)


IMAGES = {
    "postgres:17": of_suite("postgres", files={"/usr/local/bin/docker-entrypoint.sh": POSTGRES}),
    "nginx:1": of_suite("nginx"),
    "python-postgres:3": Recipe(
        name="python-postgres",
        like="python with psycopg2",
        packages=["python3-minimal", "python3", "python3-psycopg2"],
        expect="",
        logs="",
    ),
}


def job_files(folder: Path) -> dict[str, Path]:
    """Write the job files of the page; return their paths by job, in the page's order."""
    found = {}
    for name, text in re.findall(r"```toml\n# (\w+)\.toml\n(.*?)```", PAGE.read_text(), re.DOTALL):
        found[name] = folder / f"{name}.toml"
        found[name].write_text(text)
    return found


def archive(builder: Builder, recipe: Recipe, folder: Path) -> Path:
    """Return a recipe's image as an OCI archive."""
    layout, out = folder / recipe.name, folder / f"{recipe.name}.tar"
    builder.image(recipe, layout)
    with tarfile.open(out, "w") as tar:
        tar.add(layout, arcname=".")
    shutil.rmtree(layout)
    return out


@pytest.fixture
def resolver(the_lab: LabClient) -> Iterator[None]:
    """Run `twine-resolver dns` where all machines of the lab reach it."""
    words = ("exec", "--name", the_lab.name, "--", str(BIN / "twine-resolver"))
    argv = [str(BIN / "twine-lab"), *words, "dns", "--listen", f"{RESOLVER}:53", "--zone", "twine"]
    ours = {**os.environ, "TWINE_ENDPOINT": the_lab.endpoint, "TWINE_LAB_NAME": the_lab.name}
    with subprocess.Popen(
        argv, env=ours, stdin=subprocess.DEVNULL, start_new_session=True
    ) as found:
        try:
            yield
        finally:
            os.killpg(found.pid, signal.SIGTERM)  # the lab's command, and the resolver that it runs


@pytest.fixture
def jobs(the_lab: LabClient, tmp_path: Path) -> Iterator[dict[str, Path]]:
    the_lab.ctl("entitlement", "create", "shop", "--machines", "3", "--host-profile", "web")
    builder = Builder(print)
    for name, recipe in IMAGES.items():
        file = archive(builder, recipe, tmp_path)
        the_lab.ctl("image", "push", "--format", "oci", "--name", name, str(file))
        file.unlink()
    yield (found := job_files(tmp_path))
    for name in found:
        the_lab.run("twinectl", "job", "stop", name, "--wait", timeout_s=1800)


@pytest.mark.behaviour("BUG-AG31")
def test_web_app_and_database_find_one_another_by_name(
    the_lab: LabClient, jobs: dict[str, Path], resolver: None
) -> None:
    """Tasks resolve names across machines, and after a task has moved."""
    assert list(jobs) == ["db", "app", "web"]
    for name, file in jobs.items():
        words = ("job", "apply", str(file), "--wait", "--timeout", "1200s")
        try:
            the_lab.run("twinectl", *words, timeout_s=1800)
        except Failed as e:
            pytest.fail(f"{e}\n{the_lab.run('twinectl', 'job', 'logs', name, '0')}")
    tasks = [task for name in jobs for task in the_lab.tasks(name).values()]
    machines = {task["placement"]["machine"] for task in tasks}
    assert len(machines) > 1, "they are on several machines"
    received: set[str] = set()

    def page() -> str:
        [at] = the_lab.ctl("job", "endpoints", "web")["endpoints"]
        url = f"http://[{at['host']}]:{at['ports']['http']}/"
        ask = f"curl -s --max-time 100 '{url}' || true"
        return the_lab.ssh(at["machine"], ask).strip()

    def both() -> bool:
        received.add(page().rpartition(" ")[2])
        return {"app-0", "app-1"} <= received

    the_lab.until("both tasks of app send the page", both, WAIT_S)
    visits = int(re.findall(r"visit (\d+),", page())[0])
    assert visits >= 3, "what one task of app wrote the other one reads"
    assert '"GET / HTTP/1.1" 200' in the_lab.run("twinectl", "task", "logs", "web-0")

    before = the_lab.tasks("db")[0]["invocation_id"]
    the_lab.run("twinectl", "task", "restart", "db-0")

    def again() -> bool:
        return the_lab.tasks("db")[0]["invocation_id"] not in ("", before)

    the_lab.until("the database is started again", again, WAIT_S)
    later = 0

    def kept() -> bool:
        nonlocal later
        later = int((re.findall(r"visit (\d+),", page()) or ["0"])[0])
        return later > visits

    the_lab.until("the database is back with its data", kept, WAIT_S)
