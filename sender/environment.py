"""Reads the process environment: NAME, or NAME_FILE for the path of a file that holds the value.

The only place that looks at `os.environ`. Never judges what a value means; that is `settings`.
"""

import difflib
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

_LARGEST_FILE = 65_536
_ALIKE = 0.82  # MAIL_RATE_PER_SEC is a slip of MAIL_RATE_PER_S; MAIL_PORT is somebody else's name


def read(
    names: Iterable[str], environ: Mapping[str, str] | None = None
) -> tuple[dict[str, str], dict[str, str]]:
    """Collect the values of `names`.

    Args:
        names: the settings wanted, upper case.
        environ: where to look; the process environment if None.

    Returns:
        The values found, and for each name that could not be read what is wrong with it. A name set
        to nothing appears in neither when a file is given for it.
    """
    source = os.environ if environ is None else environ
    values: dict[str, str] = {}
    faults: dict[str, str] = {}
    for name in names:
        value, path = source.get(name), source.get(f"{name}_FILE")
        if value and path:
            faults[name] = f"given twice, as {name} and as {name}_FILE; keep one"
        elif path:
            try:
                values[name] = _content(path)
            except _Unreadable as error:
                faults[name] = f"the file that {name}_FILE names {error}"
        elif value is not None:
            values[name] = value
    return values, faults


def slips(known: Iterable[str], environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Names in the environment that look like misspelt settings, one line each.

    Args:
        known: the settings' names, upper case.
        environ: where to look; the process environment if None.

    Returns:
        Lines such as `MAIL_RATE_PER_SEC is not a setting; did you mean MAIL_RATE_PER_S?`.
    """
    source = os.environ if environ is None else environ
    ours = {spelling for name in known for spelling in (name, f"{name}_FILE")}
    lines: list[str] = []
    for name in sorted(set(source) - ours):
        near = difflib.get_close_matches(name.upper(), ours, n=1, cutoff=_ALIKE)
        if near:
            lines.append(f"{name} is not a setting; did you mean {near[0]}?")
    return tuple(lines)


class _Unreadable(Exception):
    """What is wrong with a file, as the end of a sentence."""


def _content(path: str) -> str:
    try:
        # Opening a pipe that nobody writes to would never end.
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise _Unreadable("is no regular file")
        with Path(path).open("rb") as file:
            raw = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise _Unreadable(f"cannot be read: {error.strerror}") from None
    except ValueError:
        raise _Unreadable("cannot be read: the path is not valid") from None
    if len(raw) > _LARGEST_FILE:
        raise _Unreadable(f"is larger than {_LARGEST_FILE} bytes")
    try:
        text = raw.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise _Unreadable("is not UTF-8 text") from None
    if not text:
        raise _Unreadable("is empty")
    return text
