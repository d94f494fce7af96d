"""`twine-agent`: serve, and drive the agent of this host without any control plane."""

from agent.cli.root import main

__all__ = ["main"]
