"""Entry point of `twine-agent`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the agent (`serve`, called by systemd) or a command. `serve` imports no command line."""
    if sys.argv[1:] == ["serve"]:
        from agent.cli.serving import main as serve

        return serve()
    from agent.cli.root import main as run

    run()
