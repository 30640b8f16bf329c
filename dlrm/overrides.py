"""Overrides as text: what Hydra reads back as just that value, and what a shell hands on to it."""

from __future__ import annotations

import re
import shlex

_PLAIN = re.compile(r"[A-Za-z_./][\w./-]*", re.ASCII)
# What Hydra reads as something else than text.
_OTHER_VALUES = {"null", "true", "false", "nan", "inf"}
# What means something to a shell within double quotes.
_SPECIAL_IN_QUOTES = set('"$`\\!\n')


def text_override(key: str, text: str) -> str:
    """`key=text`, with `text` in quotes where Hydra would read it otherwise, or not at all."""
    from hydra.core.override_parser.types import Quote, QuotedString

    if _PLAIN.fullmatch(text) and text.lower() not in _OTHER_VALUES:
        return f"{key}={text}"
    # An interpolation is one within quotes, too.
    literal = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
    return f"{key}={QuotedString(literal, Quote.single).with_quotes()}"


def for_shell(override: str) -> str:
    """An override as one types it: in double quotes where it needs any, so that Hydra's own stay
    readable within."""
    if shlex.quote(override) == override:
        return override
    return shlex.quote(override) if _SPECIAL_IN_QUOTES & set(override) else f'"{override}"'
