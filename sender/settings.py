"""Every setting: its unit, default, bounds and reason, checked once and frozen.

Owns what a value may be and how a wrong one is told: all wrong ones in one go, never with a secret
in the text. Must never act on a value. `environment` reads, `setting_checks` looks closer.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
)

from sender import environment, setting_checks, setting_texts
from sender.errors import SettingsError

_CENTURY_S = 3_155_760_000.0
_EMPTY_IS_NOT_SET = BeforeValidator(setting_checks.none_if_empty)


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
        raw: dict[str, Any] = {"unknown": environment.slips(all_names(), environ)}
        for name, field in cls.model_fields.items():
            text = values.get(name.upper())
            if text or (text is not None and not field.is_required()):
                raw[name] = text
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

    db_dsn: Annotated[SecretStr, AfterValidator(setting_checks.dsn)] = Field(
        description="libpq URI or conninfo of the database that holds the campaign"
    )

    def describe(self) -> dict[str, object]:
        """All settings by name, for a log: no password, no key, no user of a URL."""
        return setting_texts.shown(self)

    @property
    def secrets(self) -> tuple[str, ...]:
        """Texts that no output may hold, for the log's last guard."""
        return setting_texts.secrets(self)


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

    mail_provider: Annotated[str, AfterValidator(setting_checks.provider)] = Field(
        default="http",
        description="who sends: http, or an installed entry point of group sender.providers",
    )
    mail_api_key: Annotated[
        SecretStr | None, AfterValidator(setting_checks.api_key), _EMPTY_IS_NOT_SET
    ] = Field(default=None, description="sent as Authorization: Bearer; never logged")
    mail_url: Annotated[SecretStr | None, AfterValidator(setting_checks.url), _EMPTY_IS_NOT_SET] = (
        Field(
            default=None,
            description="where each mail is posted; required for MAIL_PROVIDER=http",
        )
    )
    mail_account: Annotated[
        str,
        AfterValidator(setting_checks.account),
        BeforeValidator(setting_checks.account_from_url_and_key),
    ] = Field(
        default=None,
        validate_default=True,
        description="whose limit it is: all running processes of one account share MAIL_RATE_PER_S;"
        " a name that logs and the database show, never a secret",
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
    send_concurrency: Annotated[int, BeforeValidator(setting_checks.concurrency_from_rate)] = Field(
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
    lease_s: Annotated[float, AfterValidator(setting_checks.outlasts_a_request(spare_s=2))] = Field(
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
    retry_backoff_cap_s: Annotated[float, AfterValidator(setting_checks.cap_above_base)] = Field(
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
    shutdown_grace_s: Annotated[
        float, AfterValidator(setting_checks.outlasts_a_request(spare_s=1))
    ] = Field(
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
    log_format: Annotated[
        Literal["json", "console"], BeforeValidator(setting_checks.format_for_this_output)
    ] = Field(
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
