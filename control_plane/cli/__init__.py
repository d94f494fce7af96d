"""`twinectl`: the command line of the control plane.

`program` is the root with its options and exit codes, `jobs`, `inventory` and `images` hold
the commands, `jobfile` reads what people write, `follow` waits and watches, `show` prints.
Nothing heavy is imported before a command needs it: `twinectl --help` answers at once.
"""

from control_plane.cli.root import main

__all__ = ["main"]
