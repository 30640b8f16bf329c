"""What Hydra and OmegaConf refuse, in words of ours: the key, what it must be, what to type."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

import yaml
from hydra.errors import MissingConfigException, OverrideParseException

from data.errors import UserError
from dlrm.config import RUN_CONFIGS, known_keys
from dlrm.overrides import for_shell, text_override

_KINDS = {"Integer": "a whole number", "Float": "a number"}
_NO_NAME = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9]*)?(e[-+]?[0-9]+)?|true|false", re.IGNORECASE)
_GROUPS = ("data", "model", "optim", "sharding", "train", "launch")


def explain_yaml(error: yaml.YAMLError) -> str:
    """One line for a configuration file that isn't YAML."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    mark = error.problem_mark or error.context_mark
    place = "a configuration file" if mark is None else f"{mark.name}, line {mark.line + 1}"
    problem = error.problem or error.context or "not YAML"
    if "\\t" in problem:
        problem = "a tab; indent with spaces"
    return f"{place}: {problem}"


def check_groups(overrides: Sequence[str]) -> None:
    """Refuses a number or a bool for a group of keys, which Hydra answers with a traceback.

    Raises:
        UserError: naming the override, and what to type.
    """
    for override in overrides:
        group, equals, value = override.lstrip("+").partition("=")
        if equals and group in _GROUPS and _NO_NAME.fullmatch(value):
            raise UserError(
                f"{override}: {group}= chooses a file of conf/{group}/ by its name; a single value "
                f"is set by its key, {group}.KEY={value}"
            )


def explain(verb: str, error: Exception) -> str:
    """What is wrong with a key or a file, and what to do.

    Args:
        verb: the command's.
        error: of Hydra or OmegaConf.
    """
    cause = error.__cause__
    text = str(error)
    if isinstance(error, MissingConfigException):
        return _missing_file(error)
    if isinstance(error, OverrideParseException):
        reason = text.splitlines()[0]
        return (
            f"can't read {error.override!r}: {reason}\nan override is key=value; "
            + _how_to_quote(error.override)
        )
    if ambiguous := re.match(r"Ambiguous value for argument '(.*)'\n", text):
        return (
            f"{ambiguous[1]}: several values; a list is key=[a,b], several jobs are -m key=a,b; "
            + _how_to_quote(ambiguous[1])
        )
    if cause is not None and str(cause) and str(cause) not in text:
        text = f"{text}\n{cause}"
    # Of `train.epochs` where all of `train` is unknown, the whole key.
    key = re.search(r"Could not override '([^']+)'", text) or re.search(r"full_key: (\S+)", text)
    file = re.search(r"In '([^']+)'", text)
    where = f"{file[1]}: " if file else ""
    if key:
        for pattern, say in _RULES:
            if found := re.search(pattern, text):
                return where + say(verb, key[1], found)
    return _cleaned(verb, text)


def _missing_file(error: MissingConfigException) -> str:
    """One line with the files that there are, of which Hydra writes a line each."""
    message = str(error).splitlines()[0].rstrip(".")
    if not error.options or error.missing_cfg_file is None:
        return message
    group, _, name = error.missing_cfg_file.rpartition("/")
    near = difflib.get_close_matches(name, error.options, n=1)
    message += f"; the files of {group} are {', '.join(error.options)}"
    return f"{message}; did you mean {group}={near[0]}?" if near else message


def _how_to_quote(override: str) -> str:
    key, equals, text = override.partition("=")
    if not equals or not text or text[0] in "'\"[{":
        return "put quotes around a value with special characters: \"key='a=b'\""
    # As typed, in a shell that hands on the inner quotes.
    return f"for that text as it is, put quotes around it: {for_shell(text_override(key, text))}"


def _cleaned(verb: str, text: str) -> str:
    """Their words without internals and, for an unknown key, the keys that look like it."""
    internal = ("object_type=", "reference_type=")
    lines = [line for line in text.splitlines() if not line.strip().startswith(internal)]
    lines = [line for line in lines if "To append to your config" not in line]
    if "Config search path:" in lines:
        lines = lines[: lines.index("Config search path:")]
    message = "\n".join(line.rstrip() for line in lines if line.strip())
    unknown = re.search(r"Could not override '([^']+)'", text)
    if unknown:
        near = difflib.get_close_matches(unknown[1], known_keys(RUN_CONFIGS[verb]), n=3)
        if near:
            message += f"\ndid you mean {', '.join(near)}?"
    return message


def _unknown_key(verb: str, key: str, found: re.Match[str]) -> str:
    """`found`: (the last part of the key, the class that lacks it)."""
    group = key.rpartition(".")[0]
    config = _classes(RUN_CONFIGS[verb]).get(found[2])
    names = [f.name for f in fields(config)] if config else []
    siblings = [f"{group}.{name}" if group else name for name in names]
    if not key.endswith(f".{found[1]}"):
        siblings = []  # A part further up is unknown.
    near = difflib.get_close_matches(key, [*siblings, *known_keys(RUN_CONFIGS[verb])], n=3)
    message = f"{key}: there is no such key"
    if near:
        return f"{message}; did you mean {', '.join(dict.fromkeys(near))}?"
    return f"{message}; the keys of {group or verb} are {', '.join(names)}" if names else message


def _wrong_number(verb: str, key: str, found: re.Match[str]) -> str:
    """`found`: (value, kind)."""
    message = f"{key}={found[1]}: must be {_KINDS[found[2]]}"
    share = re.fullmatch(r"(optim\.schedule\.\w+)_steps", key)
    if share and share[1].endswith(("warmup", "decay")) and re.fullmatch(r"0?\.\d+", found[1]):
        message += f" of steps; as a share of the run it is {share[1]}_share={found[1]}"
    return message


def _nothing(verb: str, key: str, found: re.Match[str]) -> str:
    if re.match(r"data\.schema\.(dense|sparse)\.", key):
        name = key.rpartition(".")[2]
        return f"{key}: nothing is said of this column; write `{name}: {{}}` to have it as it is"
    return f"{key}: must have a value, null is none"


def _not_keys(verb: str, key: str, found: re.Match[str]) -> str:
    known = [name for name in known_keys(RUN_CONFIGS[verb]) if name.startswith(f"{key}.")]
    message = f"{key}: must be keys with values, KEY: VALUE"
    direct = [name for name in known if "." not in name.removeprefix(f"{key}.")]
    if f"{key}.name" in direct:
        message += f"; to choose one, set {key}.name"
    elif direct:
        message += f"; its keys are {', '.join(direct)}"
    return message


def _missing(verb: str, key: str, found: re.Match[str]) -> str:
    message = f"{key}: has no value"
    group = key.split(".")[0]
    if group in _GROUPS:
        message += (
            f"; a file of {group}/ gets the values that all have by beginning with "
            "`defaults: [base, _self_]`"
            if group == "data"
            else f"; set {key}=…"
        )
    return message


_RULES: list[tuple[str, Callable[[str, str, re.Match[str]], str]]] = [
    (r"Key '([^']+)' not in '(\w+)'", _unknown_key),
    (r"Value '(.*)' of type '\w+' could not be converted to (Integer|Float)", _wrong_number),
    (
        r"Value '(.*)' is not a valid bool",
        lambda verb, key, found: f"{key}={found[1]}: must be true or false",
    ),
    (r"is not Optional", _nothing),
    (
        r"is not a ListConfig, list or tuple",
        lambda verb, key, found: f"{key}: must be a list, {key}=[A,B]",
    ),
    (r"Cannot (assign|merge)|Invalid type assigned|Merge error", _not_keys),
    (r"missing mandatory value", _missing),
    (
        r"does not support deletion",
        lambda verb, key, found: f"{key} can't be removed; set it to another value",
    ),
]


def _classes(config: Any) -> dict[str, Any]:
    """Every dataclass of a configuration, by name."""
    found: dict[str, Any] = {}
    todo = [config]
    while todo:
        kind = todo.pop()
        if is_dataclass(kind) and isinstance(kind, type) and kind.__name__ not in found:
            found[kind.__name__] = kind
            todo += get_type_hints(kind).values()
        else:
            todo += get_args(kind)
    return found
