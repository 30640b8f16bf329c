"""Errors that are the user's to mend: one plain message, no traceback, exit status 2."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake in input, configuration or files, told with what to do about it."""


class RawDataError(UserError):
    """A raw file that can't be read as its schema says; the message names file and line."""

    def __init__(self, file: str, line: int | None, message: str) -> None:
        where = file if line is None else f"{file}, line {line:,}"
        super().__init__(f"{where}: {message}")
        self.file = file
        self.line = line
        self._message = message

    def __reduce__(self) -> tuple[type[RawDataError], tuple[str, int | None, str]]:
        """Pickles: one rank tells it to the others."""
        return type(self), (self.file, self.line, self._message)


class SchemaMismatch(UserError):
    """A prepared dataset that was made under another schema; the message lists what differs."""
