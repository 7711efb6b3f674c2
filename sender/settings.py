"""Every setting: its unit, default, bounds and reason, checked once and frozen.

Owns what a value may be and how a wrong one is told: all wrong ones in one go, never with a secret
in the text. Must never act on a value. `environment` reads, `setting_checks` looks closer.
"""

import sys
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from sender import environment, setting_checks, setting_texts
from sender.errors import SettingsError

_CENTURY_S = 3_155_760_000.0


class _Settings(BaseModel):
    """What all sets of settings share.

    Attributes:
        unknown: names in the environment that look like misspelt settings, one line each.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,  # a default may be wrong beside another setting
        allow_inf_nan=False,
        hide_input_in_errors=True,
    )

    unknown: tuple[str, ...] = Field(default=(), repr=False)

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read and check these settings.

        Args:
            environ: where to look; the process environment if None.

        Returns:
            The frozen settings.

        Raises:
            SettingsError: with one line for each wrong setting.
        """
        names = [name.upper() for name in cls.model_fields if name != "unknown"]
        values, faults = environment.read(names, environ)
        raw: dict[str, Any] = {name.lower(): text for name, text in values.items()}
        raw["unknown"] = environment.slips(all_names(), environ)
        try:
            settings = cls.model_validate(raw)
        except ValidationError as error:
            faults = {**setting_texts.faults(error, cls.model_fields, values), **faults}
        else:
            if not faults:
                return settings
        raise SettingsError([f"{name}: {faults[name]}" for name in names if name in faults])


class DatabaseSettings(_Settings):
    """What `sender migrate` needs."""

    db_dsn: SecretStr = Field(
        description="libpq URI or conninfo of the database that holds the campaign"
    )

    @field_validator("db_dsn")
    @classmethod
    def _dsn_parses(cls, value: SecretStr) -> SecretStr:
        setting_checks.dsn_parts(value.get_secret_value())
        return value

    def describe(self) -> dict[str, object]:
        """All settings by name, for a log: no password, no key, no user of a URL."""
        return setting_texts.shown(self)


class CampaignSettings(DatabaseSettings):
    """What the commands that look at one campaign need."""

    campaign_id: str = Field(
        pattern=r"^[A-Za-z0-9._-]{1,80}$",
        description="the campaign to mail; part of every key and of the provider's template name",
        json_schema_extra={"expected": "1 to 80 of A-Z a-z 0-9 . _ -"},
    )


class RunSettings(CampaignSettings):
    """What `sender run` needs: everything.

    Fields stand after those they are compared with: a validator sees the ones above it.
    """

    mail_provider: str = Field(
        default="http",
        description="who sends: http, or an installed entry point of group sender.providers",
    )
    mail_api_key: SecretStr | None = Field(
        default=None, description="sent as Authorization: Bearer; never logged"
    )
    mail_url: SecretStr | None = Field(
        default=None,
        description="where each mail is posted; required for MAIL_PROVIDER=http",
    )
    mail_account: str = Field(
        default=None,
        validate_default=True,
        description="whose limit it is: all running processes of one account share MAIL_RATE_PER_S",
        json_schema_extra={"derived": "hash of URL host and key"},
    )
    mail_rate_per_s: float = Field(
        default=500,
        ge=0.1,
        le=100_000,
        description="messages/s of the account, by all processes and campaigns together",
    )
    mail_connect_timeout_s: float = Field(
        default=2,
        ge=0.01,
        le=300,
        description="s; a provider that cannot be reached is told from a slow one",
    )
    mail_read_timeout_s: float = Field(
        default=5,
        ge=0.01,
        le=600,
        description="s for the whole answer, dripping or not; after it the outcome is unknown",
    )
    send_concurrency: int = Field(
        default=None,
        validate_default=True,
        ge=1,
        le=10_000,
        description="requests in flight in one process; enough for the rate at 2.5 s latency",
        json_schema_extra={"derived": "rate x 2.5 s, 16 to 2,000"},
    )
    batch_size: int = Field(
        default=200,
        ge=1,
        le=10_000,
        description="rows a claim at most; bounds what a killed process repeats",
    )
    lease_s: float = Field(
        default=90,
        gt=0,
        le=86_400,
        description="s until another process may take a dead one's rows;"
        " at least both time-outs + 2, extended while a claimed row waits",
    )
    max_attempts: int = Field(
        default=5, ge=1, le=1_000, description="charged attempts before a row is given up"
    )
    retry_backoff_base_s: float = Field(
        default=30,
        ge=0.001,
        le=86_400,
        description="s before the second attempt, doubled for each further one, jittered",
    )
    retry_backoff_cap_s: float = Field(
        default=600,
        ge=0.001,
        le=604_800,
        description="s between two attempts at most; at least RETRY_BACKOFF_BASE_S",
    )
    idempotency_window_s: float = Field(
        default=86_400,
        gt=0,
        description="s the provider remembers a key; nothing is repeated after it, less a margin",
    )
    deadline_s: float = Field(
        default=3_000,
        gt=0,
        le=604_800,
        description="s after which no new row is claimed; keep it inside activeDeadlineSeconds",
    )
    shutdown_grace_s: float = Field(
        default=20,
        gt=0,
        le=3_600,
        description="s from SIGTERM to exit at the latest; at least both time-outs + 1",
    )
    failed_ratio_limit: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="failed / total above which a person must look (exit 2)",
    )
    log_format: Literal["json", "console"] = Field(
        default=None,
        validate_default=True,
        description="json for machines, console for people",
        json_schema_extra={"derived": "json if not a terminal"},
    )

    @property
    def usable_window_s(self) -> float:
        """Seconds after a key's first use in which a repeat is safe; negative if never.

        The margin: a request that begins at the last moment still takes both time-outs, and the
        provider's clock may have begun earlier than ours.
        """
        window = min(self.idempotency_window_s, _CENTURY_S)  # the database adds it to a date
        return window - self._timeouts_s - min(60.0, 0.05 * window)

    @property
    def _timeouts_s(self) -> float:
        return self.mail_connect_timeout_s + self.mail_read_timeout_s

    @field_validator("mail_provider")
    @classmethod
    def _provider_known(cls, value: str) -> str:
        setting_checks.check_provider(value)
        return value

    @field_validator("mail_api_key", "mail_url", "mail_account", "log_format", mode="before")
    @classmethod
    def _nothing_is_not_set(cls, value: object) -> object:
        return None if value == "" else value

    @field_validator("mail_api_key")
    @classmethod
    def _key_fits_a_header(cls, value: SecretStr | None) -> SecretStr | None:
        if value:
            setting_checks.check_header_value(value.get_secret_value())
        return value

    @field_validator("mail_url")
    @classmethod
    def _url_is_one(cls, value: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        if value is None:
            if info.data.get("mail_provider") == "http":
                raise ValueError("is required for MAIL_PROVIDER=http")
            return None
        parts = setting_checks.check_url(value.get_secret_value())
        if "@" in parts.netloc and info.data.get("mail_api_key"):
            raise ValueError(
                "must not hold a user when MAIL_API_KEY is set: one header, two logins"
            )
        return value

    @field_validator("mail_account", mode="before")
    @classmethod
    def _account_from_url_and_key(cls, value: object, info: ValidationInfo) -> object:
        if value is not None:
            return value
        url, key = info.data.get("mail_url"), info.data.get("mail_api_key")
        return setting_checks.account_of(
            str(info.data.get("mail_provider")),
            url.get_secret_value() if url else None,
            key.get_secret_value() if key else None,
        )

    @field_validator("mail_account")
    @classmethod
    def _account_is_a_name(cls, value: str) -> str:
        if not (value.isprintable() and len(value) <= 200):
            raise ValueError("must be 1 to 200 printable characters")
        return value

    @field_validator("send_concurrency", mode="before")
    @classmethod
    def _concurrency_from_rate(cls, value: object, info: ValidationInfo) -> object:
        if value is not None:
            return value
        return round(min(2_000, max(16, 2.5 * info.data.get("mail_rate_per_s", 0))))

    @field_validator("lease_s", "shutdown_grace_s")
    @classmethod
    def _outlasts_a_request(cls, value: float, info: ValidationInfo) -> float:
        names = ("mail_connect_timeout_s", "mail_read_timeout_s")
        if not all(name in info.data for name in names):
            return value  # those are told themselves
        spare = 2 if info.field_name == "lease_s" else 1
        least = sum(info.data[name] for name in names) + spare
        if value < least:
            raise ValueError(
                f"must be at least {least:g} (both time-outs + {spare} s), is {value:g}"
            )
        return value

    @field_validator("retry_backoff_cap_s")
    @classmethod
    def _cap_above_base(cls, value: float, info: ValidationInfo) -> float:
        base = info.data.get("retry_backoff_base_s", 0)
        if value < base:
            raise ValueError(f"must be at least RETRY_BACKOFF_BASE_S ({base:g}), is {value:g}")
        return value

    @field_validator("log_format", mode="before")
    @classmethod
    def _format_for_this_output(cls, value: object) -> object:
        if value is not None:
            return value
        return "console" if sys.stdout.isatty() else "json"


def all_names() -> tuple[str, ...]:
    """Every setting's name as the environment spells it, in the order of the help."""
    return tuple(name.upper() for name in RunSettings.model_fields if name != "unknown")


def load_database() -> DatabaseSettings:
    """Settings of a command that needs the database only. Raises `SettingsError`."""
    return DatabaseSettings.load()


def load_campaign() -> CampaignSettings:
    """Settings of a command that looks at one campaign. Raises `SettingsError`."""
    return CampaignSettings.load()


def load_run() -> RunSettings:
    """All settings. Raises `SettingsError`."""
    return RunSettings.load()
