"""The root command and its global options."""

from __future__ import annotations

import click

from control_plane.cli import intents as intents  # adds its commands to `job`, like others here
from control_plane.cli import job_specs as job_specs
from control_plane.cli import machine_care as machine_care
from control_plane.cli import plans as plans
from control_plane.cli import task_inside as task_inside
from control_plane.cli import updates as updates
from control_plane.cli.audit import audit
from control_plane.cli.authority import authority
from control_plane.cli.autoscale import autoscale
from control_plane.cli.capacity import capacity
from control_plane.cli.entitlements import entitlement
from control_plane.cli.events import task
from control_plane.cli.images import image
from control_plane.cli.jobs import job
from control_plane.cli.machines import machine, token
from control_plane.cli.maintenance import maintenance
from control_plane.cli.offline import plan_offline
from control_plane.cli.people import group, role, user, whoami
from control_plane.cli.pipeline import pipeline
from control_plane.cli.profiles import profile
from control_plane.cli.program import Program, target_options
from control_plane.cli.rebalance import rebalance
from control_plane.cli.safety import limit, restored
from control_plane.cli.shards import shard
from control_plane.cli.status import status
from control_plane.cli.ui import ui
from control_plane.cli.work import work


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="twine-cluster", prog_name="twinectl")
@target_options
def main() -> None:
    """Deploy jobs on a region's machines and show their state.

    Exit codes: 0 done, 1 failed, 3 not found, 5 refused, 64 wrong usage or file, 69 front end
    unreachable, 75 busy (try again), 77 not permitted, 78 configuration unusable.
    """


for _command in (
    *(job, pipeline, task, plan_offline, machine, maintenance, rebalance, limit, profile),
    *(entitlement, capacity, autoscale, work, shard, image, token),
    *(role, user, group, whoami, audit, authority, restored, status, ui),
):
    main.add_command(_command)


@main.command("manual")
def manual_() -> None:
    """Print the manual page: `twinectl manual | man -l -`."""
    from wire.manual import manual

    click.echo(manual(main, "twinectl", "twine-agent(1), sidekick(1)"), nl=False)


@main.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_(shell: str) -> None:
    """Print the shell's completion script: `source <(twinectl completion bash)`."""
    from wire.manual import completion

    click.echo(completion(main, "twinectl", shell))
