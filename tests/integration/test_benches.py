"""Benches run by hand, so a moved or renamed module would break one unnoticed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_bench_can_be_imported() -> None:
    files = sorted((ROOT / "tests/bench").glob("[a-z]*.py"))
    modules = [f"tests.bench.{file.stem}" for file in files]
    assert len(modules) > 20
    program = f"import importlib\nfor name in {modules}: importlib.import_module(name)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)
