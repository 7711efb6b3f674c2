"""The error tree: every error a command may end with, and the exit code it means.

::

    SenderError
    ├── ConfigurationError        78  settings, schema or campaign are wrong; retrying is useless
    │   ├── SettingsError             one line for each wrong setting
    │   ├── ConnectionRefused         the server knows not this role, password or database
    │   ├── SchemaError               the database is not at the version this program needs
    │   ├── RightsError               the role may not do what the command does
    │   └── CampaignError             the campaign has no rows
    ├── DatabaseUnavailable        1  the database did not answer in time; a later start goes on
    │   └── TableLocked               somebody holds a table as a whole
    └── MigrationError             1  a migration step lost against the application or failed
"""

from collections.abc import Sequence


class SenderError(Exception):
    """Base of all errors that end a command with one clear line and no traceback."""

    exit_code = 1


class ConfigurationError(SenderError):
    """Something a person must correct before any retry can help."""

    exit_code = 78


class SettingsError(ConfigurationError):
    """One or more settings are wrong.

    Attributes:
        faults: one line for each wrong setting, naming it, never holding a secret value.
    """

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = tuple(faults)


class ConnectionRefused(ConfigurationError):
    """The database server answered and refuses the role, its password or the database's name."""


class SchemaError(ConfigurationError):
    """The database does not have the schema this program needs."""


class RightsError(ConfigurationError):
    """The role of DB_DSN may not do what the command does."""


class CampaignError(ConfigurationError):
    """The campaign does not exist or has no rows."""


class DatabaseUnavailable(SenderError):
    """The database could not be reached within the time allowed; nothing was sent meanwhile."""


class TableLocked(DatabaseUnavailable):
    """A table was locked as a whole, and stayed so for longer than a command waits."""


class MigrationError(SenderError):
    """A migration step failed; steps before it are recorded and a repeat goes on from there."""
