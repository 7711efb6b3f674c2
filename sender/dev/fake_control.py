"""The fake provider's control calls over HTTP, on the same port as the mails.

Owns their paths and their JSON. An outage never touches them.
"""

import json
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import cast
from urllib.parse import parse_qs

from sender.dev.fake_checks import CONTROL_PATHS
from sender.dev.fake_faults import FAULTS, OK, Answer
from sender.dev.fake_rules import Request
from sender.dev.fake_state import FakeState
from sender.errors import SettingsError

type Control = Callable[[Mapping[str, object]], None]


def is_control(request: Request) -> bool:
    """Whether the request is a control call and no mail.

    Args:
        request: the request.

    Returns:
        True for one of `CONTROL_PATHS`.
    """
    return request.target.partition(b"?")[0].decode("latin-1") in CONTROL_PATHS


def answer_control(request: Request, state: FakeState, control: Control) -> Answer:
    """Answer a control call.

    Args:
        request: a request for which `is_control` holds.
        state: what the answer is about.
        control: makes the changes of `POST /control`.

    Returns:
        The answer.
    """
    path, _, query = request.target.decode("latin-1").partition("?")
    if request.method != (b"POST" if path == "/control" else b"GET"):
        return _json({"error": "method_not_allowed"}, HTTPStatus.METHOD_NOT_ALLOWED)
    asked = {name: values[-1] for name, values in parse_qs(query).items()}
    match path:
        case "/control":
            return _changed(request.body, state, control)
        case "/deliveries":
            found = state.ledger.deliveries()
            return _json(found.get(asked["template"], {}) if "template" in asked else found)
        case "/requests":
            member = asked.get("member_id")
            if member is not None and not member.removeprefix("-").isdecimal():
                return _json({"error": "member_id_wrong"}, HTTPStatus.BAD_REQUEST)
            return _json(state.requests(None if member is None else int(member)))
        case "/health":
            return _json({"status": "ok"})
        case _:
            return _json(state.stats())


def _changed(body: bytes, state: FakeState, control: Control) -> Answer:
    try:
        changes = cast("object", json.loads(body))
    except ValueError:
        return _json({"errors": ["the body is not JSON"]}, HTTPStatus.BAD_REQUEST)
    if not isinstance(changes, dict):
        return _json({"errors": ["the body is not a JSON object"]}, HTTPStatus.BAD_REQUEST)
    try:
        control(cast("dict[str, object]", changes))
    except SettingsError as error:
        return _json({"errors": error.faults}, HTTPStatus.BAD_REQUEST)
    return _json(state.options.to_json())


def _json(value: object, status: int = HTTPStatus.OK) -> Answer:
    fault = OK if status == HTTPStatus.OK else FAULTS[str(int(status))]
    return fault.answer(json.dumps(value).encode())
