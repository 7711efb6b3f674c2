"""The last guard before a line leaves: addresses, keys and passwords are taken out of every value.

The events hold none; this is for the day on which an error's text, a library or a new event does.
Too much taken out is no harm, so anything around an at sign is an address.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, cast

_LONGEST = 4_000
_AT = re.compile("[@\uff20\ufe6b]|%40", re.IGNORECASE)
_QUOTED_LOCAL_PART = re.compile(r'"[^"]*"(?=[@\uff20\ufe6b]|%40)', re.IGNORECASE)
_WORDS = re.compile(r"(\s+)")
_SECRET = re.compile(
    r"""(?ix) (?P<name> \b (?: bearer | basic ) \s
        | (?: passw(?:or)?d | pwd | passphrase | api[-_]?key | secret | token ) \w* ["']? \s* [=:] )
    \s* (?: ' (?:[^'\\]|\\.)* ' | " (?:[^"\\]|\\.)* " | \S+ )"""
)
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
# One cheap look that lets nearly every value pass: what any of the above could find in it.
_SUSPECT = (
    "[@\uff20\ufe6b\x00-\x1f\x7f-\x9f\u2028\u2029]"
    "|%40|bearer|basic|passw|pwd|passphrase|api[-_]?key|secret|token"
)

type Redactor = Callable[[Any], Any]


def redactor(secrets: Iterable[str] = ()) -> Redactor:
    """Build the function that cleans a value.

    Args:
        secrets: texts known to be secret; those of four characters or more are taken out literally.

    Returns:
        A function that gives a value back clean: texts redacted and on one line, also inside
        mappings and sequences; other values as they are.
    """
    known = sorted({text for text in secrets if len(text) > 3}, key=len, reverse=True)
    literal = "|".join(map(re.escape, known)) or r"(?!)"
    suspect = re.compile(f"{literal}|{_SUSPECT}", re.IGNORECASE)

    @lru_cache(maxsize=512)  # campaigns, states and reasons come again and again
    def clean_text(text: str) -> str:
        text = text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
        if not suspect.search(text):
            return text
        return _one_line(without_secrets(re.sub(literal, "[secret]", text)))

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return clean_text(value)
        if value is None or isinstance(value, int | float):
            return value
        if isinstance(value, Mapping):
            pairs = cast("Mapping[object, object]", value).items()
            return {clean(key): clean(item) for key, item in pairs}
        if isinstance(value, list | tuple | set | frozenset):
            return [clean(item) for item in cast("Iterable[object]", value)]
        return clean_text(str(value))

    return clean


def without_secrets(text: str) -> str:
    """Take addresses, passwords and keys out of `text`."""
    if _AT.search(text):
        text = _QUOTED_LOCAL_PART.sub("", text)
        words = _WORDS.split(text)
        text = "".join("[address]" if _AT.search(word) else word for word in words)
    return _SECRET.sub(r"\g<name>[secret]", text)


def _one_line(text: str) -> str:
    """Make control characters visible: a value must neither begin a line nor move a cursor."""
    if _CONTROL.search(text):
        return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)
    return text
