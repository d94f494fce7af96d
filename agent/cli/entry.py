"""Where `twine-agent` begins."""

from __future__ import annotations

import sys


def main() -> None:
    """Serve, as systemd calls it, or run a command. Serving does not import the command line."""
    if sys.argv[1:] == ["serve"]:
        from agent.cli.serving import main as serve

        return serve()
    from agent.cli.root import main as run

    run()
