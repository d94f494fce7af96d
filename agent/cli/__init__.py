"""`twine-agent`: serve, and drive the agent of this host without any control plane."""

from agent.cli.entry import main

__all__ = ["main"]
