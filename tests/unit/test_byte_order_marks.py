"""Files that people write may begin with a byte-order mark, which some editors add."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import agent.config
import control_plane.config
import conveyor.config
from agent.cli.task_options import _read as read_task
from control_plane.autoscaler.daemon import AutoscalerConfig
from control_plane.cli import main
from control_plane.cli.jobfile import read_document
from control_plane.cli.offline import read_machines
from control_plane.cli.profiles import _read as read_profile
from control_plane.cli.shards import _shard_map
from sidekick.profile import Library
from taskcontrol.config import load as load_controller
from wire.config_file import read_config

TOML = 'name = "web"\n'
PLACE = {"datacenter": "d", "msb": "b", "row": "r", "rack": "k"}
MACHINES = json.dumps([{"machine": "m1", "machine_type": "small", **PLACE}])
CONTROLLER = 'job = "web"\ncredential = "/c"\n[quorum]\nmembers = ["http://127.0.0.1:1"]\n'


def read_plane(path: Path) -> Any:
    """Return the configuration of a control plane."""
    return control_plane.config.load(path, {})


def read_host_profile(path: Path) -> Any:
    """Return the text of a profile on a host."""
    return Library(folders=[path.parent], settings={})._text_of(path.stem, None)


def explain_model(path: Path) -> Any:
    """Return the description of a model of the ReBalancer as text."""
    found = CliRunner().invoke(main, ["rebalance", "explain", "--model", str(path)])
    assert found.exit_code == 0, found.output
    return found.output


@pytest.mark.behaviour("BUG-UX117")
@pytest.mark.parametrize(
    ("name", "text", "read"),
    [
        ("job.toml", TOML, read_document),
        ("job.yaml", "name: web\n", read_document),
        ("job.json", '{"name": "web"}', read_document),
        ("task.toml", 'image = "web"\n', read_task),
        ("map.json", '{"a": [0]}', _shard_map),
        ("profile.toml", TOML, read_profile),
        ("agent.toml", 'listen = "127.0.0.1:0"\n', agent.config.load),
        ("plane.toml", 'listen = "127.0.0.1:0"\n', read_plane),
        ("autoscaler.toml", "every_s = 20\n", lambda path: read_config(path, AutoscalerConfig)),
        ("conveyor.toml", "# defaults\n", conveyor.config.load),
        ("machines.json", MACHINES, read_machines),
        ("own.toml", "", read_host_profile),
        ("controller.toml", CONTROLLER, load_controller),
        ("model.toml", "", explain_model),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value[:15] else "",
)
def test_a_file_with_a_byte_order_mark_is_read_as_without_it(
    tmp_path: Path, name: str, text: str, read: Callable[[Path], Any]
) -> None:
    """Formerly a job file with the mark was refused with "Invalid statement"."""
    file = tmp_path / name
    file.write_text(text)
    expected = read(file)
    file.write_bytes(codecs.BOM_UTF8 + text.encode())
    assert read(file) == expected
