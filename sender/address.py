"""Whether a stored address is one recipient. Pure.

Only what could make a second recipient, another header or no recipient at all is refused here. What
a mailbox may look like is for the provider to say: addresses such as `a..b@docomo.ne.jp` break the
standard, exist, and receive mail, which is why no strict validator is used.
"""

import re
from typing import Final
from unicodedata import category

# One @ between a local part and a host, nothing that separates or ends an address or a line.
_ONE_ADDRESS: Final = re.compile(
    r'(?:"[^"\\\x00-\x1f\x7f]+"|[^\s@,;:<>()\[\]"\\\x00-\x1f\x7f]+)'
    r"@[^\s@,;:<>()\[\]\"\\\x00-\x1f\x7f]+"
)
_LONGEST: Final = 320


def fault(email: str | None) -> str | None:
    """Why `email` cannot be mailed as one recipient, or None if it can.

    Returns:
        A reason without the address in it: `address_missing`, `address_too_long` or
        `address_invalid`.
    """
    if email is None or not email.strip():
        return "address_missing"
    if len(email) > _LONGEST:
        return "address_too_long"
    if not _ONE_ADDRESS.fullmatch(email):
        return "address_invalid"
    if not email.isascii() and any(category(c)[0] in "CZ" for c in email):
        return "address_invalid"  # invisible characters, and blanks of every script
    host = email.rpartition("@")[2]
    if host.startswith((".", "-")) or host.endswith("-") or ".." in host:
        return "address_invalid"
    return None
