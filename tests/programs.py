"""Programs that tests run in a process of their own: what they measure or may kill is theirs alone.

While a program runs, glibc raises the size from which freed memory is returned at once;
MALLOC_MMAP_THRESHOLD_ pins it. Without it figures of memory say little.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]


def run_python(program: str, *arguments: str | Path) -> Any:
    """What a program prints, as JSON; it must end with success."""
    result = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=CHECKOUT,
        env={
            **os.environ,
            "PYTHONPATH": str(CHECKOUT),
            "MALLOC_MMAP_THRESHOLD_": "131072",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)
