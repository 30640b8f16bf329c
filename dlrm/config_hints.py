"""What to mend in a configuration file, where the libraries' own words don't say it."""

from __future__ import annotations

import dataclasses
import difflib
import re

import yaml  # type: ignore[import-untyped]


def yaml_problem(error: Exception) -> str | None:
    """Of a file that isn't YAML, one line: file, line, what is wrong. None for other errors."""
    if not isinstance(error, yaml.YAMLError):
        return None
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    mark, problem = error.problem_mark, error.problem or "not YAML"
    if r"'\t'" in problem:
        problem = "a tab; YAML is indented with blanks only"
    elif "duplicate key" in problem:
        problem += " (a key may stand once)"
    return f"{mark.name}, line {mark.line + 1}: {problem}"


def config_hint(text: str) -> str:
    """What to do about a message of the configuration library, a line to add to it, or nothing."""
    key = re.search(r"full_key: (\S+)", text)
    unknown = re.search(r"Key '([^']+)' not in '(\w+)'", text)
    if unknown:
        near = difflib.get_close_matches(unknown[1], _fields_of(unknown[2]), n=3)
        return f"\ndid you mean {', '.join(near)}?" if near else ""
    if key is None:
        return ""
    column = re.fullmatch(r"data\.schema\.(dense|sparse)\.(.+)", key[1])
    if column and "is not Optional" in text:
        return (
            f"\nno value stands behind the column: write `{column[2]}: {{}}` for one that leaves "
            "everything to the defaults"
        )
    if "missing mandatory value" in text and key[1].startswith("data."):
        return (
            "\ndoes the file of this dataset lack `base`? It begins with\n"
            "  defaults:\n    - base\n    - _self_"
        )
    return ""


def _fields_of(name: str) -> list[str]:
    """The keys of one of the configuration's classes."""
    import data.schema
    import dlrm.config

    found = getattr(data.schema, name, None) or getattr(dlrm.config, name, None)
    return [f.name for f in dataclasses.fields(found)] if dataclasses.is_dataclass(found) else []
