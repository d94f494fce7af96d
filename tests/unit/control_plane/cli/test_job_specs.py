"""The specification of a job as a file, and the differences between two versions."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.api import Disconnect, DisconnectPolicy, Limits
from control_plane.api.jobs import JobSpec
from control_plane.api.policy import Preference
from control_plane.api.updates import Canary, OnFailure, UpdatePolicy
from control_plane.cli.job_specs import as_file, differences
from control_plane.cli.jobfile import read_job
from wire.errors import InvalidInput

SPEC = JobSpec(name="web", entitlement="e", tasks=3, image="sha256:" + "1" * 64, command=["/x"])
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "tasks": st.integers(1, 9),
        "command": st.lists(st.text("ab\"': #\n-", min_size=1), min_size=1, max_size=3),
        "environment": st.dictionaries(st.sampled_from("AB"), st.text("yesno 01", max_size=5)),
        "limits": st.builds(Limits, memory_max_bytes=st.integers(4 << 20, 1 << 40)),
        "disconnect": st.builds(Disconnect, policy=st.sampled_from(DisconnectPolicy)),
        "preferences": st.none() | st.lists(st.just(Preference(property="rack")), max_size=2),
        "update": st.builds(
            UpdatePolicy,
            surge=st.integers(0, 3),
            canary=st.none() | st.builds(Canary, tasks=st.integers(1, 3)),
            on_failure=st.sampled_from(OnFailure),
        ),
    },
)


@pytest.mark.behaviour("BUG-UX6")
@given(changes=CHANGES)
def test_job_show_prints_a_file_that_reads_back_as_the_same_job(tmp_path_factory, changes):
    spec = replace(SPEC, **changes)
    path: Path = tmp_path_factory.getbasetemp() / "shown.yaml"
    path.write_text(as_file(spec))
    assert read_job(path, []) == spec


@pytest.mark.behaviour("BUG-UX6")
@given(one=CHANGES, other=CHANGES)
def test_differences_list_each_field_that_two_specifications_set_differently(one, other):
    before, after = replace(SPEC, **one), replace(SPEC, **other)
    assert bool(differences(before, after)) is (before != after)
    assert len(differences(before, after)) == len(differences(after, before))


@pytest.mark.behaviour("FE4", "BUG-UX3")
def test_an_unknown_image_name_is_reported_with_all_other_errors(tmp_path: Path) -> None:

    path = tmp_path / "bad.toml"
    path.write_text('name = "web"\nentitlement = "e"\ntasks = -1\nimage = "latest"\nreplicas = 3\n')
    with pytest.raises(InvalidInput) as refused:
        read_job(path, [], dict)
    reasons = {error.field: error.reason for error in refused.value.errors}
    assert {"tasks", "image", "replicas", "command"} <= reasons.keys()
    assert "the image store has no image with the name 'latest'" in reasons["image"]


@pytest.mark.behaviour("BUG-UX63")
def test_a_key_that_is_written_twice_is_refused_in_json_as_well(tmp_path: Path) -> None:
    """Formerly the last one won, and the job of another name was created."""
    file = tmp_path / "web.json"
    file.write_text('{"name": "web", "limits": {"name": "x"}, "name": "api"}')
    with pytest.raises(InvalidInput, match="'name' is written twice"):
        read_job(file, ())
