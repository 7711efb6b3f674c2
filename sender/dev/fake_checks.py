"""What is wrong with the fake provider's options, one line each.

Owns the bounds. Takes raw values, since they may come from JSON and be of any type.
"""

from collections.abc import Iterator, Mapping
from typing import cast

from sender.dev.fake_faults import FAULTS, SHARES

OUTAGES = ("503", "reset", "hang", "refuse")
CONTROL_PATHS = ("/stats", "/control", "/deliveries", "/requests", "/health")

_AT_LEAST = {"window_s": 0, "headroom": 0, "seed": 0, "max_recorded": 0}
_ABOVE_ZERO = ("limit_per_s", "keep_alive_s", "requests_per_connection", "drip_interval_s")
_OPTIONAL = ("limit_per_s", "requests_per_connection")
_WHOLE = ("seed", "requests_per_connection", "max_recorded")


def is_number(value: object) -> bool:
    """Whether `value` is an int or a float, and no bool.

    Args:
        value: anything.

    Returns:
        True for a number.
    """
    return isinstance(value, int | float) and not isinstance(value, bool)


def faults_of(values: Mapping[str, object]) -> Iterator[str]:
    """What is wrong with `values`.

    Args:
        values: every option by name.

    Yields:
        One line for each fault, beginning with the option's name.
    """
    yield from _wrong_numbers(values)
    yield from _wrong_shares(values)
    yield from _wrong_texts(values)
    yield from _wrong_kinds(values)
    if not _is_latency(values["latency_s"]):
        yield "latency_s: must be seconds, at least 0, or (least, most)"


def _wrong_numbers(values: Mapping[str, object]) -> Iterator[str]:
    for name in (*_AT_LEAST, *_ABOVE_ZERO):
        value = values[name]
        if value is None and name in _OPTIONAL:
            continue
        if not is_number(value) or (name in _WHOLE and not isinstance(value, int)):
            yield f"{name}: must be a {'whole ' if name in _WHOLE else ''}number, not {value!r}"
        elif name in _ABOVE_ZERO and cast("float", value) <= 0:
            yield f"{name}: must be above 0, not {value!r}"
        elif cast("float", value) < _AT_LEAST.get(name, 0):
            yield f"{name}: must be at least {_AT_LEAST[name]}, not {value!r}"


def _wrong_shares(values: Mapping[str, object]) -> Iterator[str]:
    shares = {name: values[name] for name in SHARES}
    wrong = [n for n, v in shares.items() if not is_number(v) or not 0 <= cast("float", v) <= 1]
    yield from (f"{name}: must be a share from 0 to 1, not {shares[name]!r}" for name in wrong)
    if not wrong and sum(cast("dict[str, float]", shares).values()) > 1 + 1e-9:
        yield f"{', '.join(SHARES)}: together more than 1"


def _wrong_texts(values: Mapping[str, object]) -> Iterator[str]:
    path, key, retry_after = values["path"], values["api_key"], values["retry_after"]
    if not isinstance(path, str) or not path.startswith("/") or not path.isascii():
        yield f"path: must be ASCII and begin with /, not {path!r}"
    elif path in CONTROL_PATHS:
        yield f"path: {path} is a control path"
    if key is not None and (not isinstance(key, str) or not key.isascii() or not key):
        yield "api_key: must be ASCII text or null"
    if isinstance(retry_after, str):
        if not retry_after.isascii() or not retry_after.isprintable():
            yield f"retry_after: must be one line of ASCII, not {retry_after!r}"
    elif not is_number(retry_after) or cast("float", retry_after) < 0:
        yield f"retry_after: must be seconds or a date as text, not {retry_after!r}"


def _wrong_kinds(values: Mapping[str, object]) -> Iterator[str]:
    always, outage, throttle = values["always"], values["outage"], values["throttle"]
    if always is not None and not _is_kind(always):
        yield f"always: no such kind: {always!r}; kinds: {', '.join(FAULTS)}"
    if outage is not None and outage not in OUTAGES:
        yield f"outage: must be one of {', '.join(OUTAGES)} or null, not {outage!r}"
    if not isinstance(throttle, bool):
        yield f"throttle: must be true or false, not {throttle!r}"
    scripts = values["by_member"]
    if not isinstance(scripts, Mapping):
        yield f"by_member: must be an object of member ids and kinds, not {scripts!r}"
        return
    for member, script in cast("Mapping[object, object]", scripts).items():
        if not isinstance(member, int):
            yield f"by_member: {member!r} is no member id"
        names = cast("tuple[object, ...]", script) if isinstance(script, tuple) else (script,)
        if wrong := [name for name in names if not _is_kind(name)]:
            yield f"by_member: {member}: no such kind: {wrong}"


def _is_kind(value: object) -> bool:
    return isinstance(value, str) and value in FAULTS


def _is_latency(value: object) -> bool:
    ends = cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value, value)
    if len(ends) != 2 or not all(map(is_number, ends)):
        return False
    least, most = cast("tuple[float, float]", ends)
    return 0 <= least <= most < float("inf")
