"""How a task's specification is built from its job and its placement."""

import msgspec
import pytest

from control_plane.api.jobs import JobProbe, JobSpec, Placement
from control_plane.api.validate import job_errors
from control_plane.scheduler.core.job_check import _check_text
from control_plane.scheduler.core.task_spec import task_spec, unknown_templates


def test_templates_are_filled_and_dollars_escaped():
    spec = JobSpec(
        name="web",
        entitlement="e",
        tasks=1,
        image="sha256:" + "1" * 64,
        command=["/x", "-p${port:http}", "$${HOME} $HOME", "${task}@${machine}"],
        environment={"A": "${port:http}"},
        ports=["http"],
        probe=JobProbe(port="http", path="/ok"),
    )
    placement = Placement(machine="m1", ports={"http": 20_007})
    made = task_spec(spec, 3, placement, generation=7, epoch=2)
    assert made.command == ["/x", "-p20007", "${HOME} $HOME", "web-3@m1"]
    assert made.environment == {
        "A": "20007",
        "TWINE_JOB": "web",
        "TWINE_TASK": "web-3",
        "TWINE_MACHINE": "m1",
        "TWINE_PORT_HTTP": "20007",
    }
    assert (made.probe.port, made.probe.path) == (20_007, "/ok")
    assert (made.generation, made.epoch, made.job) == (7, 2, "web")
    assert unknown_templates("${port:admin} $${x} ${task} ${}", ["http"]) == ["port:admin", ""]


@pytest.mark.behaviour("SC17")
def test_only_its_job_decides_what_a_task_runs():
    """Restart policy, environment, command and image are the same for all tasks of a job."""
    spec = a_job(
        environment={"A": "1"}, restart={"when": "never"}, stop_timeout_s=7, ports=[], tasks=3
    )
    made = [task_spec(spec, i, Placement(machine=f"m{i}"), generation=i, epoch=1) for i in range(3)]
    own = {"TWINE_TASK", "TWINE_MACHINE"}
    for one in made:
        assert (one.image, one.command, one.restart) == (spec.image, spec.command, spec.restart)
        assert one.stop_timeout_s == spec.stop_timeout_s
        assert {k: v for k, v in one.environment.items() if k not in own} == {
            "A": "1",
            "TWINE_JOB": "web",
        }


def a_job(**fields):
    given = {"name": "web", "entitlement": "e", "tasks": 1, "image": "sha256:" + "1" * 64}
    return msgspec.convert({**given, "command": ["/x"], "ports": ["http"], **fields}, JobSpec)


LIFE = {
    "init": [{"name": "migrate", "command": ["/m", "${task}"], "timeout_s": 5}],
    "pre_stop": {"command": ["/drain", "${port:http}"]},
    "max_run_s": 60,
    "startup": {"port": "http"},
    "liveness": {"kind": "exec", "command": ["/alive", "${machine}"]},
}


@pytest.mark.behaviour("AG10")
def test_the_life_of_a_job_reaches_the_task_with_its_ports_and_names_filled_in():
    placement = Placement(machine="m1", ports={"http": 20_007})
    life = task_spec(a_job(life=LIFE), 3, placement, generation=7, epoch=2).life
    assert (life.init[0].command, life.init[0].timeout_s) == (["/m", "web-3"], 5)
    assert life.pre_stop.command == ["/drain", "20007"]
    assert (life.startup.port, life.max_run_s) == (20_007, 60)
    assert life.liveness.command == ["/alive", "m1"]


def test_ports_and_placeholders_of_its_life_are_checked_with_everything_else():
    life = {
        "pre_stop": {"command": ["${port:admin}"]},
        "startup": {"port": "admin"},
        "liveness": {"kind": "tcp", "command": ["/x"]},
        "health_gate_s": 5,
    }
    plain = msgspec.to_builtins(a_job()) | {"life": life}
    assert {e.field for e in job_errors(plain)} == {
        "life.startup.port",
        "life.liveness",
        "life.health_gate_s",
        "life.pre_stop.command[0]",
    }
    found = _check_text(a_job(life={**LIFE, "pre_stop": {"command": ["${port:admin}", "${no}"]}}))
    assert [e.field for e in found] == ["life.pre_stop.command[0]", "life.pre_stop.command[1]"]


@pytest.mark.behaviour("AG9")
def test_the_volumes_of_a_job_reach_its_tasks():
    """Volumes that are not available are reported together with all other errors of the file."""
    data = {"kind": "persistent", "path": "/data", "max_bytes": 64 << 20}
    spec = a_job(volumes={"data": data})
    made = task_spec(spec, 0, Placement(machine="m1", ports={"http": 1}), generation=1, epoch=1)
    assert made.volumes == spec.volumes
    bad = {"data": data, "b": {"path": "/data/b"}, "c": {"path": "/c", "kind": "tmpfs"}}
    document = {**msgspec.to_builtins(spec), "volumes": bad, "tasks": -1}
    assert [e.field for e in job_errors(document)] == ["tasks", "volumes.b.path"]
