"""Warns of keys that were given although a kind of benchmark takes no notice of them."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Mapping

_OF_EVERY_KIND = {
    "kind": True,
    "hydra": True,
    "experiment": True,
    "seed": True,
    "launch": True,
    "train.overwrite": True,
    "bench.sides": True,
    "bench.repeats": True,
    "bench.network": True,
}


def warn_of_ignored(kind: str, read: Mapping[str, bool], command: str) -> None:
    """Warns of keys without a meaning, by what the user typed.

    Args:
        kind: of benchmark.
        read: whether the kind reads a key and all below it; the longest that fits counts, and what
            isn't named is not read.
        command: as in result.json, `dlrm bench train key=value …`.
    """
    typed = [text.partition("=") for text in shlex.split(command)]
    keys = [key.lstrip("+~").partition("@")[0] for key, equals, _ in typed if equals]
    ignored = [key for key in keys if not _is_read(key, {**_OF_EVERY_KIND, **read})]
    if ignored:
        warnings.warn(
            f"`dlrm bench {kind}` takes no notice of {', '.join(ignored)}: it is measured the same "
            "way without",
            stacklevel=2,
        )


def _is_read(key: str, read: Mapping[str, bool]) -> bool:
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        known = read.get(".".join(parts[:length]))
        if known is not None:
            return known
    return False
