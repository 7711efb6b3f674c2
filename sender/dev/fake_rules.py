"""What a mail request must look like to the fake provider.

Owns the wire's rules. Must never know keys, time or faults.
"""

import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import cast

from sender.dev.fake_options import FakeOptions

_ALLOWED = frozenset({"to", "member_id", "template", "vars"})
_REQUIRED = frozenset({"to", "member_id", "template"})


@dataclass(slots=True)
class Request:
    """One HTTP request.

    Attributes:
        method: such as b"POST".
        target: path and query as sent.
        headers: by name in lower case; the last of equal names.
        body: all of it.
    """

    method: bytes
    target: bytes
    headers: dict[bytes, bytes]
    body: bytes


class Refusal(Exception):
    """A request that breaks a rule."""

    def __init__(self, status: int, error: str) -> None:
        """Refuse.

        Args:
            status: the answer's status.
            error: the answer's word.
        """
        super().__init__(f"{status} {error}")
        self.status: int = status
        self.error: str = error


def member_of(request: Request, options: FakeOptions) -> int:
    """Hold a request against the wire's rules.

    Args:
        request: the request.
        options: path and key that are asked for.

    Returns:
        The member the mail is for.

    Raises:
        Refusal: a rule is broken.
    """
    headers = request.headers
    if request.target.partition(b"?")[0] != options.path.encode():
        raise Refusal(HTTPStatus.NOT_FOUND, "not_found")
    if request.method != b"POST":
        raise Refusal(HTTPStatus.METHOD_NOT_ALLOWED, "method_not_allowed")
    if options.api_key is not None:
        expected = b"Bearer " + options.api_key.encode()
        if headers.get(b"authorization") != expected:
            raise Refusal(HTTPStatus.UNAUTHORIZED, "unauthorized")
    content_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if content_type != b"application/json":
        raise Refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type")
    template, member = _mail_of(request.body)
    if headers.get(b"idempotency-key") != f"{template}:{member}".encode(errors="replace"):
        raise Refusal(HTTPStatus.BAD_REQUEST, "idempotency_key_wrong")
    return member


def _mail_of(body: bytes) -> tuple[str, int]:
    try:
        parsed = cast("object", json.loads(body))
    except (ValueError, RecursionError):
        raise Refusal(HTTPStatus.BAD_REQUEST, "body_not_json") from None
    if not isinstance(parsed, dict):
        raise Refusal(HTTPStatus.BAD_REQUEST, "body_not_object")
    mail = cast("dict[str, object]", parsed)
    if not _REQUIRED <= mail.keys() <= _ALLOWED:
        raise Refusal(HTTPStatus.BAD_REQUEST, "body_fields_wrong")
    to, member, template = mail["to"], mail["member_id"], mail["template"]
    if not isinstance(to, str) or not to or not isinstance(template, str) or not template:
        raise Refusal(HTTPStatus.BAD_REQUEST, "body_types_wrong")
    if type(member) is not int or not isinstance(mail.get("vars", {}), dict):
        raise Refusal(HTTPStatus.BAD_REQUEST, "body_types_wrong")
    return template, member
