"""The parts of `sender --help` that are not about one command."""

import textwrap
from typing import Final

_WIDTH: Final = 98
_INDENT: Final = 26

EXIT_CODES: Final = """\
Exit codes of `sender run`, and what the Job does:
   0  done; or paused, cancelled or outside the send window          succeeds
   1  rows remain: deadline, SIGTERM, database or provider away      start it again, it goes on
   2  a person must look: the provider refuses the account, too
      many failures, or rows in doubt (sender failures)              must not be retried
  78  settings, schema or campaign are wrong, each named             must not be retried"""


def environment_table() -> str:
    """Every setting with its default and meaning, made from the settings themselves."""
    from sender.setting_texts import told_default
    from sender.settings import RunSettings

    lines = ["Environment (each also as NAME_FILE: the path of a file that holds the value):"]
    for name, field in RunSettings.model_fields.items():
        if name != "unknown":
            about = f"{field.description} [{told_default(field)}]"
            lines += textwrap.wrap(
                about,
                _WIDTH,
                initial_indent=f"  {name.upper():<{_INDENT - 2}}",
                subsequent_indent=" " * _INDENT,
                break_on_hyphens=False,
            )
    return "\n".join(lines)
