"""The conveyor as a job of the region: its image, its files as the agent provides them, TLS.

The image's root runs here in a chroot with the environment of a task, against a control plane in a
separate process.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobSpec
from control_plane.cli.jobfile import read_job
from control_plane.client import ControlPlaneClient
from control_plane.identity.authority import CertificateSubject
from conveyor.api import StartRequest
from conveyor.client import ConveyorClient
from conveyor.pipeline_file import pipeline_spec
from conveyor.routes import IDENTITY
from tests.integration.attack.target_process import USER, Target, running
from tests.integration.conveyor.test_delivery import pushed, until
from tests.ports import free_port
from vm_lab.image.conveyor import build_conveyor
from wire import tls

pytestmark = [
    pytest.mark.long,
    pytest.mark.behaviour("CV1"),
]  # builds an image: Debian's Python, and wheels
JOB_FILE = Path(__file__).parents[2] / "vm_lab/jobs/conveyor.toml"
FILES = "/run/credentials"
"""The folder with the task's files: systemd's folder, which differs from task to task."""
_INSIDE = """mount --rbind /dev "$1/dev" && mount -t proc proc "$1/proc" && exec chroot "$@" """
"""Runs in a separate mount namespace, with what every task has; all of it is one process."""
PIPELINE = {"name": "web", "jobs": ["web"], "stages": [{"kind": "all"}]}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the image's root."""
    folder = tmp_path_factory.mktemp("root")
    subprocess.run(["tar", "-xf", build_conveyor(print), "-C", folder], check=True)
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    with running("control plane", tmp_path) as found:
        yield found


@contextmanager
def the_task(root: Path, spec: JobSpec, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run the job's command as its task does; kill it at the end of the block."""
    environment = {"PORT": str(port), "CREDENTIALS_DIRECTORY": FILES, "PATH": "/usr/sbin:/usr/bin"}
    with (root.parent / "log").open("ab") as log:
        process = subprocess.Popen(
            [
                "unshare",
                "--mount",
                "--propagation",
                "private",
                "sh",
                "-c",
                _INSIDE,
                "sh",
                root,
                *spec.command,
            ],
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


async def test_cv1_the_conveyor_runs_as_a_job_with_the_files_and_the_volume_of_its_task(
    root: Path, target: Target
) -> None:
    """Killed in between, as by a failing machine, it continues from its volume."""
    spec = read_job(JOB_FILE, ("image=sha256:" + "0" * 64,), {})
    port, url = free_port(), f"https://{USER}:{target.port}"
    names = {"user": ("user", "conveyor", ()), "server": ("controller", "conveyor", (USER,))}
    assert set(spec.credentials) == set(names)
    files = root / FILES.lstrip("/")
    files.mkdir(parents=True, exist_ok=True)
    for name, subject in names.items():
        held = target.authority.credential(CertificateSubject(*subject), url)
        tls.save(held, files / name)
    for name, text in spec.configuration.items():
        (files / name).write_text(text)
    async with ControlPlaneClient(f"unix:{target.socket}") as client:
        owned = EntitlementSpec(machines=1, owners=["user:conveyor"])
        await client.put_entitlement("demo", owned)
        one, two = [await pushed(client, version) for version in (1, 2)]
        job = JobSpec(name="web", entitlement="demo", tasks=0, image=one, command=["/bin/serve"])
        await client.apply_job(job)
        ann = target.authority.credential(CertificateSubject("user", "ann"), "")
        context = tls.client_context(ann, IDENTITY)
        async with ConveyorClient(f"https://{USER}:{port}", context) as service:

            async def answers() -> bool:
                try:
                    await service.list_pipelines()
                except Exception:
                    assert task.poll() is None, (root.parent / "log").read_text()
                    return False
                return True

            with the_task(root, spec, port) as task:
                await until(answers, bool)
                await service.apply_pipeline(pipeline_spec(PIPELINE, "the test's"))
                await service.start_run("web", StartRequest(image=two))
            with the_task(root, spec, port) as task:
                await until(answers, bool)
                view = await until(lambda: service.get_pipeline("web"), lambda v: v.last)
        assert (view.last.image, view.last.state.value, view.last.by) == (
            *(two, "done"),
            "spiffe://twine/user/ann",
        )
        status = await client.get_job("web")
        assert status.record.spec.image == two
        push = status.record.intents["push"]
        assert push.writer == "user:conveyor", "it writes with the identity of its credential"
