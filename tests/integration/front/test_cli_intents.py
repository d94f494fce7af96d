"""`twinectl job intents` and the commands that write one dimension each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner, Result

from control_plane.api.intent_changes import (
    CanaryChange,
    HoldChange,
    InfrastructureChange,
    IntentChange,
    PushChange,
    SizeChange,
)
from control_plane.api.intents import INSTEAD_OF_OVERRIDES, INSTEAD_OF_TASKS, StoredIntent
from control_plane.cli import main

from .conftest import Region

Ctl = Callable[..., Result]
IMAGE = "sha256:" + "a" * 64


@pytest.fixture
def ctl(region: Region) -> Ctl:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(main, arguments, env={"TWINE_ENDPOINT": f"unix:{region.socket}"})

    return run


@pytest.mark.behaviour("JC8")
def test_each_dimension_is_shown_with_its_writer_and_wait(ctl: Ctl) -> None:
    found = ctl("job", "intents", "web")
    assert found.exit_code == 0, found.output
    for text in ("size", "user:ann", "4 tasks", "the job is held", "evening"):
        assert text in found.output


@pytest.mark.behaviour("FE6")
def test_each_command_writes_its_dimension_as_its_caller(ctl: Ctl, region: Region) -> None:
    meta = ("--reason", "why", "--expect", "3", "--take-over")
    fields = {"reason": "why", "expect": 3, "take_over": True}
    written = region.control_plane.intents.written
    for arguments, expected in (
        (
            ("push", "--image", IMAGE, "--share", "0.5"),
            PushChange(image=IMAGE, share=0.5, **fields),
        ),
        (("scale", "--tasks", "9", "--maximum", "20"), SizeChange(tasks=9, maximum=20, **fields)),
        (
            ("canary", "--tasks", "2", "--env", "A=b=c", "--machine-type", "t1", "--for", "30m"),
            CanaryChange(
                tasks=2, environment={"A": "b=c"}, machine_type="t1", lasts_s=1800, **fields
            ),
        ),
        (
            ("canary", "--env", "A=1", "--traffic", "0.05", "--for", "1h"),
            CanaryChange(environment={"A": "1"}, traffic=0.05, lasts_s=3600, **fields),
        ),
        (("hold", "--for", "2h"), HoldChange(lasts_s=7200, **fields)),
        (("runtime", "--to", "r2"), InfrastructureChange(runtime="r2", **fields)),
    ):
        verb, *rest = arguments
        found = ctl("job", verb, "web", *rest, *meta)
        assert found.exit_code == 0, found.output
        dimension = {"scale": "size", "runtime": "infrastructure"}.get(verb, verb)
        assert written[-1][:3] == (dimension, "web", expected)
        assert written[-1][3].startswith("local:")
    count = len(written)
    for arguments in (("push",), ("canary", "--for", "1h")):
        found = ctl("job", *arguments, "web", "--share", "0.5", "--tasks", "2")
        assert found.exit_code == 64, found.output
        assert "tasks: a share is given as well: give one of them" in found.output
    assert len(written) == count
    for option in ("--share", "--traffic"):
        found = ctl("job", "canary", "web", option, "nan", "--for", "1h")
        assert found.exit_code == 64, found.output
        assert "'nan' is not a number from 0 to 1" in found.output
    for verb in ("canary", "hold"):
        assert ctl("job", verb, "web", "--end", *meta).exit_code == 0
        assert written[-1][:4] == ("withdraw", "web", verb, IntentChange(**fields))


def test_an_automatic_end_needs_a_time(ctl: Ctl) -> None:
    for verb in ("canary", "hold"):
        found = ctl("job", verb, "web")
        assert found.exit_code == 64, found.output
        assert "--for DURATION is missing" in found.output


@pytest.mark.behaviour("BUG-UX94")
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("hold", "web", "--end", "--for", "8h"), "--for"),
        (("canary", "web", "--tasks", "2", "--image", IMAGE, "--end"), "--tasks, --image"),
    ],
)
def test_an_end_option_cannot_be_combined_with_a_start_option(
    ctl: Ctl, region: Region, arguments: tuple[str, ...], named: str
) -> None:
    """Regression: the other options were ignored, and the hold or the canary ended."""
    refused = ctl("job", *arguments)
    assert refused.exit_code != 0
    assert f"--end cannot be given with {named}" in refused.output
    assert region.control_plane.intents.written == []


@pytest.mark.behaviour("BUG-UX104")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--tasks", "1", "--share", "0.5"), "--tasks: a share is given as well"),
        (("--env", "A=1", "--env", "A=2"), "--env A is given twice"),
        (("--config", f"a={__file__}", "--config", f"a={__file__}"), "--config a is given twice"),
    ],
)
def test_a_canary_drops_no_option(
    ctl: Ctl, region: Region, options: tuple[str, ...], words: str
) -> None:
    """Regression: `--tasks` next to `--share`, and the first of two equal keys, were dropped."""
    refused = ctl("job", "canary", "web", *options, "--for", "1m")
    assert refused.exit_code == 64, refused.output
    assert words in refused.output
    assert region.control_plane.intents.written == []


def test_a_job_file_is_pushed_without_its_size(ctl: Ctl, region: Region, tmp_path: Path) -> None:
    path = tmp_path / "web.toml"
    path.write_text(f'name="web"\nentitlement="front"\ntasks=7\nimage="{IMAGE}"\ncommand=["/x"]\n')
    found = ctl("job", "push", "web", "--file", str(path), "--share", "0.1")
    assert found.exit_code == 0, found.output
    change = region.control_plane.intents.written[-1][2]
    assert (change.spec.name, change.share) == ("web", 0.1)


@pytest.mark.behaviour("JC4", "FE9")
@pytest.mark.parametrize("key", sorted(INSTEAD_OF_OVERRIDES))
def test_a_job_file_cannot_set_a_dimension_of_an_intent(ctl: Ctl, tmp_path: Path, key: str) -> None:
    """Task overrides are refused with a pointer to the intent (table 1)."""
    path = tmp_path / "web.toml"
    text = f'name="web"\nentitlement="front"\ntasks=7\nimage="{IMAGE}"\ncommand=["/x"]\n{key}=1\n'
    path.write_text(text)
    for command in (("apply",), ("push", "web", "--file")):
        found = ctl("job", *command, str(path))
        assert found.exit_code != 0
        assert "twinectl job " in found.output


@pytest.mark.behaviour("JC4", "FE9")
@pytest.mark.parametrize("key", sorted(INSTEAD_OF_TASKS))
def test_every_row_of_table_1_names_its_replacement(region: Region, key: str) -> None:
    """Rows: gradual rollout, canary, canary by hardware, shards. API clients get them, too."""

    async def put(dimension: str, fields: dict[str, object]) -> tuple[int, str]:
        connector = aiohttp.UnixConnector(str(region.socket))
        async with aiohttp.ClientSession(connector=connector) as session:
            url = f"http://front/v1/jobs/web/intents/{dimension}"
            async with session.put(url, json=fields) as answer:
                return answer.status, await answer.text()

    for dimension, more in (("push", {}), ("canary", {"lasts_s": 60})):
        status, text = asyncio.run(put(dimension, more | {key: {"2": {"image": IMAGE}}}))
        assert status == 400, text
        for pointer in ("push --share", "canary --tasks", "--machine-type", "job shards"):
            assert pointer in text
    assert region.control_plane.intents.written == []


@pytest.mark.behaviour("JC13")
def test_a_job_is_adopted_as_it_is(ctl: Ctl, region: Region) -> None:
    """Both intents are written with their present values, on the revision that was read."""
    found = ctl("job", "adopt", "web")
    assert found.exit_code == 0, found.output
    fields = {"reason": "adopted", "take_over": False}
    assert [written[:3] for written in region.control_plane.intents.written] == [
        ("push", "web", PushChange(share=1.0, expect=0, **fields)),
        ("size", "web", SizeChange(tasks=4, expect=3, **fields)),
    ]


@pytest.mark.behaviour("JC13")
@pytest.mark.parametrize(
    ("value", "part"), [({"tasks": 1}, {"tasks": 1}), ({"share": 0.25}, {"share": 0.25}), ({}, {})]
)
def test_adopting_does_not_continue_a_push(
    ctl: Ctl, region: Region, value: dict[str, object], part: dict[str, Any]
) -> None:
    """A push to a part of the tasks keeps that part, whether it is a share or a number."""
    region.control_plane.intents.pushed = StoredIntent(version=7, value={"version": 3, **value})
    found = ctl("job", "adopt", "web", "--take-over", "--reason", "mine")
    assert found.exit_code == 0, found.output
    change = PushChange(expect=7, take_over=True, reason="mine", **part)
    assert region.control_plane.intents.written[0][:3] == ("push", "web", change)


def test_intents_are_in_the_audit(ctl: Ctl) -> None:
    assert ctl("job", "push", "web", "--share", "0.5", "--reason", "stage 2").exit_code == 0
    found = ctl("audit")
    assert "put_push" in found.output
    assert "share=0.5" in found.output
