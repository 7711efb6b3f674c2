"""Providers by name. The only folder that knows an HTTP library.

A package of somebody else offers a provider by an entry point of group `sender.providers` that
names a callable with the keywords of `ProviderFactory`.
"""

import sys
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Protocol, cast

from sender.errors import SettingsError
from sender.ports import Provider

if TYPE_CHECKING:
    from types import ModuleType

GROUP = "sender.providers"


class ProviderFactory(Protocol):
    """Makes a provider. Raises `SettingsError` for what it cannot use; opens nothing."""

    def __call__(
        self,
        *,
        url: str | None,
        api_key: str | None,
        campaign_id: str,
        connect_timeout_s: float,
        read_timeout_s: float,
        concurrency: int,
    ) -> Provider:
        """Make the provider; the keywords are the settings of the same names."""
        ...


def open_provider(
    name: str,
    *,
    url: str | None,
    api_key: str | None,
    campaign_id: str,
    connect_timeout_s: float,
    read_timeout_s: float,
    concurrency: int,
) -> Provider:
    """Make the provider that `MAIL_PROVIDER` names.

    Call it inside the running loop and `aclose` what it returns.

    Args:
        name: `http`, or the name of an entry point.
        url: MAIL_URL.
        api_key: MAIL_API_KEY.
        campaign_id: CAMPAIGN_ID.
        connect_timeout_s: MAIL_CONNECT_TIMEOUT_S.
        read_timeout_s: MAIL_READ_TIMEOUT_S.
        concurrency: SEND_CONCURRENCY.

    Returns:
        The provider.

    Raises:
        SettingsError: there is no such provider, or it cannot use these settings.
    """
    return _factory(name)(
        url=url,
        api_key=api_key,
        campaign_id=campaign_id,
        connect_timeout_s=connect_timeout_s,
        read_timeout_s=read_timeout_s,
        concurrency=concurrency,
    )


def provider_names() -> list[str]:
    """Every name that `open_provider` knows, sorted."""
    return sorted({"http", *entry_points(group=GROUP).names})


def _factory(name: str) -> ProviderFactory:
    if name == "http":
        # Wherever httpx finds click, rich and pygments it loads them for a command of its own (4 MB
        # and a third of the start of a pod, for nothing); where this import fails it does without.
        cast("dict[str, ModuleType | None]", sys.modules).setdefault("httpx._main", None)
        # Imported late: other providers need neither httpx nor aiohttp.
        from sender.providers.http import HttpProvider

        return HttpProvider
    for entry in entry_points(group=GROUP, name=name):
        return cast("ProviderFactory", entry.load())
    known = ", ".join(provider_names())
    raise SettingsError([f"MAIL_PROVIDER: no provider is named {name!r}; known: {known}"])
