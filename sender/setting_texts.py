"""How settings are told to people: wrong ones as one line each, all of them for a log, as a table.

Must never let a secret through, not even one put into the wrong variable: a wrong value is repeated
only if it is a short number where one is wanted, or a short plain text where a name is.
"""

import re
from collections.abc import Mapping
from typing import cast
from urllib.parse import quote, unquote

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from sender import setting_checks

_PLAIN = re.compile(r"[\w.+\- ]{0,40}", re.ASCII)
_NUMBER = re.compile(r"([+-]?\d{0,12}\.?\d{0,9}(e[+-]?\d{1,3})?|[+-]?inf|nan)", re.I | re.ASCII)
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most"}


def faults(
    error: ValidationError, fields: Mapping[str, FieldInfo], values: Mapping[str, str]
) -> dict[str, str]:
    """What is wrong with each setting.

    Args:
        error: all that pydantic found.
        fields: the model's fields.
        values: the texts that were given, by upper-case name.

    Returns:
        By upper-case name, the end of a sentence that begins with the name.
    """
    told: dict[str, str] = {}
    for item in error.errors(include_url=False, include_input=False):
        name = str(item["loc"][0])
        field, key = fields[name], name.upper()
        if item["type"] == "missing":
            told[key] = "is required"
        elif item["type"] == "value_error":
            told[key] = item["msg"].removeprefix("Value error, ")
        else:
            told[key] = f"must be {expected(field)}, got {_quoted(values.get(key), field)}"
    return told


def expected(field: FieldInfo) -> str:
    """What a field takes, such as `between 0.1 and 100000`."""
    if text := note(field, "expected"):
        return text
    if choices := getattr(field.annotation, "__args__", ()):
        return " or ".join(map(str, choices))
    bound = {
        name: f"{getattr(item, name):.12g}"
        for item in field.metadata
        for name in _BOUNDS
        if hasattr(item, name)
    }
    kind = "a whole number " if field.annotation is int else ""
    if {"ge", "le"} <= bound.keys():
        return f"{kind}between {bound['ge']} and {bound['le']}"
    return kind + " and ".join(f"{_BOUNDS[name]} {value}" for name, value in bound.items())


def note(field: FieldInfo, name: str) -> str:
    """A text kept with the field: what is `expected`, or how its `derived` default comes about."""
    extra = field.json_schema_extra
    return str(cast("dict[str, object]", extra).get(name, "")) if isinstance(extra, dict) else ""


def told_default(field: FieldInfo) -> str:
    """The default of a field in words: `required`, `default 500`, or how it comes about."""
    if field.is_required():
        return "required"
    if derived := note(field, "derived"):
        return f"default: {derived}"
    default: object = field.default
    if isinstance(default, int | float):
        return f"default {default:.12g}"
    return "not set by default" if default is None else f"default {default}"


def secrets(settings: BaseModel) -> tuple[str, ...]:
    """Every text in `settings` that no output may hold."""
    found: list[str | None] = []
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if not isinstance(value, SecretStr):
            continue
        text = value.get_secret_value()
        if name == "db_dsn":
            parts = setting_checks.dsn_parts(text)
            found += [parts.get(part) for part in ("password", "sslpassword")]
        elif name == "mail_url":
            url = setting_checks.url_parts(text)
            found += [url.username, url.password, url.query]
        else:
            found.append(text)
    plain = [text for text in found if text]
    return tuple(dict.fromkeys([*plain, *map(unquote, plain), *map(quote, plain)]))


def shown(settings: BaseModel) -> dict[str, object]:
    """Every setting by upper-case name, fit for a log."""
    fields = type(settings).model_fields
    return {n.upper(): _harmless(n, getattr(settings, n)) for n in fields if n != "unknown"}


def _harmless(name: str, value: object) -> object:
    if value is None:
        return "not set"
    if not isinstance(value, SecretStr):
        return value
    text = value.get_secret_value()
    if name == "db_dsn":
        return setting_checks.dsn_shown(text)
    return setting_checks.url_shown(text) if name == "mail_url" else "set"


def _quoted(value: str | None, field: FieldInfo) -> str:
    form = _PLAIN if field.annotation is str else _NUMBER
    if value is None or field.annotation is SecretStr or not form.fullmatch(value):
        return "something else"
    return repr(value)
