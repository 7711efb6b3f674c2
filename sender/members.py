"""Which members a person names: `--member`, and lists of ids in a file.

Must never repeat a line of the file: it may hold addresses.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from sender.errors import SettingsError

LOWEST: Final = -(2**63)
HIGHEST: Final = 2**63 - 1
_HEADER: Final = "member_id"
_SEPARATOR: Final = re.compile("[,;\t]")
_NUMBER: Final = re.compile("[+-]?[0-9]{1,19}")
_FAULTS_SHOWN: Final = 10


def named(members: Sequence[int], file: str | None) -> list[int]:
    """The members that the arguments name, each once, by id.

    Args:
        members: ids given one by one.
        file: path of a file with an id in the first column of each line, `-` for standard input, or
            None. What `sender failures --csv` prints is such a file.

    Raises:
        SettingsError: an id is out of range, or the file cannot be read, holds no id, or holds
            lines that begin with something else; the first ten of those are named by number.
    """
    ids = set(members)
    faults = [f"--member: {id_} is too large" for id_ in ids if not LOWEST <= id_ <= HIGHEST]
    if faults:
        raise SettingsError(faults)
    if file is not None:
        ids |= _ids(_text(file).splitlines())
    return sorted(ids)


def _text(file: str) -> str:
    try:
        raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return raw.decode("utf-8-sig")
    except OSError as error:
        raise SettingsError([f"--file: cannot be read: {error.strerror}"]) from None
    except UnicodeDecodeError:
        raise SettingsError(["--file: is not UTF-8 text"]) from None
    except ValueError:
        raise SettingsError(["--file: cannot be read: the path is not valid"]) from None


def _ids(lines: Iterable[str]) -> set[int]:
    ids: set[int] = set()
    faults: list[str] = []
    for number, cell in _first_cells(lines):
        value = int(cell) if _NUMBER.fullmatch(cell) else None
        if value is not None and LOWEST <= value <= HIGHEST:
            ids.add(value)
        else:
            faults.append(f"--file: line {number} does not begin with a member id")
    if len(faults) > _FAULTS_SHOWN:
        faults[_FAULTS_SHOWN:] = [f"--file: and {len(faults) - _FAULTS_SHOWN} more such lines"]
    if not ids and not faults:
        faults = ["--file: holds no member id"]
    if faults:
        raise SettingsError(faults)
    return ids


def _first_cells(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """The first cell of each line that is neither empty nor a table's head, and its number."""
    for number, line in enumerate(lines, 1):
        cell = _SEPARATOR.split(line, maxsplit=1)[0].strip().strip('"').strip()
        if line.strip() and cell.lower() != _HEADER:
            yield number, cell
