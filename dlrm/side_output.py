"""Side outputs: what tells of a run without being its result. None of them ends a run: where one
can't be written, a warning says so, and the run goes on."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def side_output(what_follows: str) -> Iterator[None]:
    """Within, an OSError ends what is done there with one warning.

    Args:
        what_follows: what the user will miss.
    """
    try:
        yield
    except OSError as error:
        warnings.warn(f"{describe_os_error(error)}; {what_follows}", stacklevel=4)


def describe_os_error(error: OSError) -> str:
    """`FILE: No space left on device`: the file, where it is known, and the reason."""
    reason = os.strerror(error.errno) if error.errno is not None else str(error)
    return reason if error.filename is None else f"{error.filename}: {reason}"
