"""How the specification of a task is filled in from its job's and its placement."""

from control_plane.api.jobs import JobProbe, JobSpec, Placement
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
