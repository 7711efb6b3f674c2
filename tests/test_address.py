"""One recipient or none: what may not be mailed, and what must not be refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sender.address import fault

BROKEN = {
    None: "address_missing",
    "": "address_missing",
    " ": "address_missing",
    "\r\n": "address_missing",
    ".": "address_invalid",
    "0": "address_invalid",
    "@": "address_invalid",
    "a@": "address_invalid",
    "@example.com": "address_invalid",
    "a@@example.com": "address_invalid",
    "a@b@example.com": "address_invalid",
    "a@example.com,b@example.com": "address_invalid",
    "a@example.com;b@example.com": "address_invalid",
    "a@example.com b@example.com": "address_invalid",
    "a@example.com\nb@example.com": "address_invalid",
    "Ann\r\nBcc: x@example.com": "address_invalid",
    "a@example.com\n": "address_invalid",
    " a@example.com": "address_invalid",
    "Ann <a@example.com>": "address_invalid",
    "a\x00@example.com": "address_invalid",
    "a@exa mple.com": "address_invalid",
    "a@.example.com": "address_invalid",
    "a@example..com": "address_invalid",
    "a@-example.com": "address_invalid",
    "a@example.com\u200b": "address_invalid",
    "\ufeffa@example.com": "address_invalid",
    "a\u202e@example.com": "address_invalid",
    "a\u3000b@example.com": "address_invalid",
    "a" * 400 + "@example.com": "address_too_long",
}
WHOLE = [
    "a@example.com",
    "A@EXAMPLE.com",
    "a+tag@example.com",
    "a..b@docomo.ne.jp",
    ".a@docomo.ne.jp",
    "a.@docomo.ne.jp",
    '"a..b"@docomo.ne.jp',
    "o'hara/x?y@example.com",
    "taro@日本語.jp",
    "a@localhost",
]


@pytest.mark.parametrize(("email", "reason"), BROKEN.items())
def test_what_is_not_one_recipient_is_refused(email, reason):
    assert fault(email) == reason


@pytest.mark.parametrize("email", WHOLE)
def test_what_exists_is_not_refused(email):
    assert fault(email) is None


@given(st.text(max_size=60) | st.from_regex(r".*@.*", fullmatch=True))
def test_what_passes_cannot_become_another_recipient_or_a_line(email):
    if fault(email) is None:
        assert email == email.strip()
        assert not any(c.isspace() and email[0] != '"' for c in email)
        assert not set(email) & set("\r\n\x00<>()[]\\")
        host = email.rpartition("@")[2]
        assert not set(host) & set('@,;: "')
        if not email.startswith('"'):
            assert email.count("@") == 1
            assert not set(email) & set(",;: ")


@given(st.text(max_size=400))
def test_a_reason_never_holds_the_address(email):
    assert fault(email) in {None, "address_missing", "address_invalid", "address_too_long"}
