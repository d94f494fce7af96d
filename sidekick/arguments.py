"""Arguments that many commands take, and what a shell completes them with."""

from __future__ import annotations

import click

from sidekick.profile import Library
from sidekick.settings import SETTINGS

COMPLETE = "_SIDEKICK_COMPLETE"
"""The variable by which a shell asks for what could come next."""


class ProfileName(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """The name of a profile; completed from those of the host."""

    name = "profile"

    def shell_complete(
        self,
        ctx: click.Context,
        param: click.Parameter,  # noqa: ARG002
        incomplete: str,
    ) -> list[click.shell_completion.CompletionItem]:
        """Return the profiles that begin so."""
        options = ctx.find_root().params
        library = Library(
            options.get("profiles") or ctx.meta.get("sidekick.profiles", ()), SETTINGS
        )
        return [
            click.shell_completion.CompletionItem(name)
            for name in library.names()
            if name.startswith(incomplete)
        ]


output = click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json"]),
    default="table",
    help="Form of the result.",
)
profile_argument = click.argument("profile", type=ProfileName())
