"""Output of commands about one object, and about files that they cannot use."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from control_plane.api.endpoints import Endpoint, Endpoints
from control_plane.api.jobs import JobPhase, JobRecord, JobSpec, JobStatus
from control_plane.api.people import CurrentUser, Role
from control_plane.api.plans import JobPlan
from control_plane.cli import main
from control_plane.cli.job_specs import as_file, job_show
from control_plane.cli.jobfile import read_document
from control_plane.cli.jobs import endpoints
from control_plane.cli.people import whoami
from control_plane.cli.plans import plan
from wire.errors import InvalidInput

SPEC = JobSpec(name="web", entitlement="front", tasks=1, image="sha256:" + "1" * 64, command=["/x"])


@pytest.mark.behaviour("BUG-UX65")
def test_a_name_keeps_its_case() -> None:
    """Formerly names were in the table's header, which is in capitals: LOCAL:0, FRONT."""
    target = SimpleNamespace(ask=lambda _: CurrentUser(name="local:0", role=Role.OPERATOR))
    lines = CliRunner().invoke(whoami, [], obj=target).output.splitlines()
    assert [line.split() for line in lines[:2]] == [["WHAT", "VALUE"], ["name", "local:0"]]


@pytest.mark.behaviour("BUG-UX71")
def test_a_folder_in_place_of_a_file_is_not_reported_as_missing(tmp_path: Path) -> None:
    """Formerly `image push FOLDER` reported that there is no such file."""
    found = CliRunner().invoke(main, ["image", "push", str(tmp_path)])
    assert found.exit_code == 64
    assert "it is not a file" in found.output


@pytest.mark.behaviour("BUG-AG82")
def test_an_argument_with_bytes_of_another_encoding_is_refused() -> None:
    found = CliRunner().invoke(main, ["--endpoint", "unix:/none", "job", "show", "caf\udce9"])
    assert found.exit_code == 64
    assert "is not UTF-8 text" in found.output


@pytest.mark.behaviour("BUG-UX89")
@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (
            b"root:x:0:0:root:/root:/bin/bash\n" * 40,
            (),
            "it is not a tar, a stream of `btrfs send`",
        ),
        (b"", (), "it is not a tar, a stream of `btrfs send` or an OCI archive"),
        (
            b"btrfs-stream\0" + b"x" * 600,
            ("--format", "tar"),
            "not an image in the format tar",
        ),
        (b"\x7fELF" + b"x" * 600, ("--format", "oci"), "not an image in the format oci"),
    ],
)
def test_a_file_that_is_no_image_is_refused(
    tmp_path: Path, content: bytes, options: tuple[str, ...], message: str
) -> None:
    """Formerly `image push /etc/passwd` was accepted, and each host refused it later."""
    file = tmp_path / "file"
    file.write_bytes(content)
    target = ["--endpoint", "unix:/nowhere"]
    found = CliRunner().invoke(main, [*target, "image", "push", str(file), *options])
    assert found.exit_code == 64
    assert message in found.output


@pytest.mark.behaviour("BUG-UX75")
def test_a_task_without_ports_has_an_address_without_a_port() -> None:
    """Formerly the address was shown with port 0."""
    entry = Endpoint(task="web-0", machine="m1", host="10.0.0.1", ports={}, version=1)
    target = SimpleNamespace(ask=lambda _: Endpoints(job="web", revision=1, endpoints=[entry]))
    lines = CliRunner().invoke(endpoints, ["web"], obj=target).output.splitlines()
    assert lines[1].split() == ["web-0", "-", "10.0.0.1", "m1", "1", "100"]


@pytest.mark.behaviour("BUG-UX83")
@pytest.mark.parametrize(
    "arguments",
    [
        ("task", "move", "web-0", "--reason", "r", "--to", ""),
        ("machine", "lend", "m1", "--to", "ads", "--from", " "),
        ("pipeline", "approve", "web", "--gate", ""),
    ],
)
def test_an_empty_name_is_refused_and_not_treated_as_absent(arguments: tuple[str, ...]) -> None:
    """Formerly `task move --to ''` moved the task to any machine."""
    found = CliRunner().invoke(main, ["--endpoint", "unix:/nowhere", *arguments])
    assert found.exit_code == 64
    assert "it is empty; leave the option out for its default" in found.output


@pytest.mark.behaviour("BUG-UX86")
@pytest.mark.parametrize(
    ("version", "message"),
    [(2, "no longer has version 2"), (8, "no longer has version 8"), (9, "has never had a")],
)
def test_a_version_that_never_existed_is_not_reported_as_dropped(
    version: int, message: str
) -> None:
    """Formerly version 9 of a job with 4 versions was reported as not there "any more"."""
    record = JobRecord(name="web", spec=SPEC, version=4, specs={4: SPEC}, highest=8)
    status = JobStatus(
        record=record, phase=JobPhase.STABLE, wanted=1, running=1, healthy=1, updated=1
    )
    target = SimpleNamespace(ask=lambda _: status)
    found = CliRunner().invoke(job_show, ["web", "--version", str(version)], obj=target)
    assert message in str(found.exception)


@pytest.mark.behaviour("BUG-UX87")
@pytest.mark.parametrize(
    ("before", "changed"),
    [
        (None, None),
        (SPEC, []),
        (replace(SPEC, tasks=3), [{"field": "tasks", "before": 3, "after": 1}]),
        (replace(SPEC, ports=["a"]), [{"field": "ports", "before": ["a"], "after": None}]),
    ],
)
def test_a_plan_as_json_has_the_fields_that_change(
    tmp_path: Path, before: JobSpec | None, changed: object
) -> None:
    """Formerly only the table had them."""
    file = tmp_path / "web.yaml"
    file.write_text(as_file(SPEC))
    target = SimpleNamespace(ask=lambda _: (JobPlan(job="web", wanted=1), before))
    found = CliRunner().invoke(plan, [str(file), "-o", "json"], obj=target)
    assert found.exit_code == 0, found.output
    assert json.loads(found.output)["changed"] == changed


@pytest.mark.behaviour("BUG-UX131")
def test_a_key_that_is_twice_in_a_yaml_file_is_reported_with_its_place(tmp_path: Path) -> None:
    """Formerly the error had line 1 and `in "<unicode string>"`."""
    file = tmp_path / "web.yaml"
    file.write_text("name: web\ntasks: 1\ntasks: 2\n")
    with pytest.raises(InvalidInput) as refusal:
        read_document(file)
    assert "'tasks' is written twice, or is not a name at line 3, column 1" in str(refusal.value)


@pytest.mark.behaviour("BUG-UX179")
@pytest.mark.parametrize("arguments", [("job", "logs", "web", "0"), ("task", "logs", "web-0")])
def test_the_log_of_an_ended_run_cannot_be_followed(arguments: tuple[str, ...]) -> None:
    """Formerly only `task logs` refused it."""
    options = ["--endpoint", "unix:/nowhere"]
    found = CliRunner().invoke(main, [*options, *arguments, "--follow", "--previous"])
    assert found.exit_code == 64
    assert "--follow and --previous exclude each other" in found.output
