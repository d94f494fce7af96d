"""The simulated fleet, small: real agents over TLS; `twine-lab fleet` runs hundreds."""

from __future__ import annotations

import json

from click.testing import CliRunner

from vm_lab.cli import main


def test_real_agents_join_are_given_tasks_updated_and_a_third_of_them_lost() -> None:
    """HC10, SC1: what ran on hosts that are gone runs on the others."""
    result = CliRunner().invoke(main, ["fleet", "--agents", "4", "--tasks", "6", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["agents"], found["tasks"]) == (4, 6)
    assert {"join_s", "deploy_s", "update_s", "recover_s", "rss_mb"} <= found.keys()
