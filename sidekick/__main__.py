"""Starts the command `sidekick`, with a fast start and a fast exit.

A run is short, so garbage collection is off, and `os._exit` leaves freeing the memory to the
kernel. The import of `typing_extensions` is blocked while msgspec is imported: `typing` has all
names that msgspec needs, and the import would double msgspec's own time.
Measured in docs/adr/0110-sidekick-imports-only-what-a-run-needs.md.
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
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed by the caller (`2>&-`)
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
