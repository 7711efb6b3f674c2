"""How a command ends: a wrong setting, a database that is away, a closed pipe, Ctrl-C.

One clear line each on standard error, the exit code that says whether a retry can help, and no
traceback and no secret.
"""

import logging
import os
import sys
import traceback
from collections.abc import Callable
from typing import Final

from sender.errors import SenderError, SettingsError
from sender.telemetry.redaction import without_secrets

INTERRUPTED: Final = 130
INTERNAL_ERROR: Final = 1


def ending(command: Callable[[], int | None]) -> int:
    """Run a command and turn however it ends into an exit code.

    Args:
        command: does the work; its answer is the exit code, None for 0.

    Returns:
        The exit code.
    """
    # What psycopg warns of is that a statement was cancelled: by Ctrl-C, or told in our own words.
    logging.getLogger("psycopg").setLevel(logging.ERROR)
    try:
        code = command() or 0
        sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001 - told, or raised again
        return _told(_only(error))
    return code


def _told(error: BaseException) -> int:
    """Say what ended the command; what is neither an error nor ours to end goes on its way."""
    match error:
        case SettingsError():
            _tell(str(error))  # made without secrets; the guard would take its examples out
            return error.exit_code
        case SenderError():
            _tell(without_secrets(str(error)))
            return error.exit_code
        case BrokenPipeError():
            # Whoever read has gone (`| head`): nothing is wrong. The interpreter flushes once more.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        case KeyboardInterrupt():
            return INTERRUPTED
        case Exception():
            for part in traceback.format_exception(error):
                _tell("\n".join(map(without_secrets, part.splitlines())))
            _tell("this is a bug of sender, please report it with the lines above")
            return INTERNAL_ERROR
        case _:
            raise error


def _only(error: BaseException) -> BaseException:
    """The one error inside groups of one."""
    while len(inside := getattr(error, "exceptions", ())) == 1:
        error = inside[0]
    return error


def _tell(text: str) -> None:
    for line in text.splitlines():
        print(line, file=sys.stderr)
