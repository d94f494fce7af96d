"""`twinectl authority`: replace the root of all certificates while everything runs."""

from __future__ import annotations

import time

import click

from control_plane.api.authority import AuthorityView, Step
from control_plane.cli import show
from control_plane.cli.program import Target, shows_answer
from control_plane.cli.show import output_option


@click.group()
def authority() -> None:
    """The certificate authority: show it, or replace its root.

    Steps: prepare, activate, retire. Take each once `show` names no holder that it locks out.
    """


def _print(found: AuthorityView) -> None:
    rows = [
        (
            root.state.value,
            root.ca_hash,
            f"in {show.duration(root.ends_at - time.time())}",
            f"{root.trusted_by} of {found.hosts}",
            f"{root.used_by} of {found.hosts}",
        )
        for root in found.roots
    ]
    show.table(("root", "pin", "ends", "hosts trust it", "hosts use it"), rows)
    if len(found.roots) == 1:
        return
    click.echo(f"\nnext: twinectl authority {found.next.value}")
    for line in found.hinders:
        show.lines(f"  would be locked out: {line}")


@authority.command("show")
@shows_answer
def authority_show(target: Target, output: str) -> None:
    """Show the roots, the number of hosts that trust them, and obstacles to the next step."""
    target.show(output, lambda client: client.get_roots(), _print)


def _command(step: Step, text: str) -> None:
    @authority.command(step.value, help=text)
    @click.option("--force", is_flag=True, help="Proceed even if hosts or users are locked out.")
    @output_option
    @click.pass_obj
    def take(target: Target, output: str, force: bool) -> None:
        found = target.ask(lambda client: client.step_roots(step, force=force))
        show.emit(output, found, lambda: _print(found))


_command(
    Step.PREPARE,
    "Create a new root. It is trusted from now on, and does not issue certificates yet.",
)
_command(Step.ACTIVATE, "Have the new root issue all certificates; the old one is still trusted.")
_command(Step.RETIRE, "Remove the trust in the former root.")
_command(Step.ABANDON, "Remove a new root before it has issued certificates.")
