"""Starts the command `sidekick`; here lies what makes a start and an end cheap.

A run is over in a moment: what it leaves in circles is never worth looking for, and the kernel
takes all of its memory back at once, where the interpreter would free it piece by piece.
msgspec takes from `typing_extensions`, if that is installed, what `typing` has just as well, and
would wait for it as long as for all the rest of itself.
Measured in docs/adr/0110-sidekick-starts-with-what-a-run-needs.md.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command of this process and leave."""
    gc.disable()
    sys.modules["typing_extensions"] = None  # type: ignore[assignment]
    import msgspec  # noqa: F401

    del sys.modules["typing_extensions"]
    from sidekick.cli import main as run

    code = run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
