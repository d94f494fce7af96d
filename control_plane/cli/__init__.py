"""`twinectl`: the command line of the control plane.

`root` and `program` have the options and exit codes, `jobs`, `machines`, `images` and others the
commands. `jobfile` reads job files, `follow` waits and watches, `show` prints. Large modules are
imported only when a command needs them: `twinectl --help` answers at once.
"""

from control_plane.cli.root import main

__all__ = ["main"]
