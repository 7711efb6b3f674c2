"""The fake provider's memory of keys and mails: which were accepted, when, with which body.

Owns the deliveries by key, in flat arrays made for millions. Must never decide what a request gets.
"""

from array import array

NO_KEY = -1
_NEVER = float("-inf")


class Ledger:
    """One slot for each idempotency key ever seen, in flat arrays.

    Attributes:
        once: keys with exactly one delivery.
        more: keys with more than one.
        total: deliveries.
    """

    def __init__(self) -> None:
        """Begin empty."""
        self.once: int = 0
        self.more: int = 0
        self.total: int = 0
        self._slots: dict[bytes, int] = {}
        self._accepted_at: array[float] = array("d")
        self._bodies: array[int] = array("q")
        self._delivered: array[int] = array("L")
        self._played: bytearray = bytearray()

    def __len__(self) -> int:
        """How many keys were seen."""
        return len(self._slots)

    def slot(self, key: bytes) -> int:
        """The slot of `key`, made when it is new."""
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = len(self._slots)
            self._accepted_at.append(_NEVER)
            self._bodies.append(0)
            self._delivered.append(0)
            self._played.append(0)
        return slot

    def deliver(self, slot: int, body: bytes, now: float) -> None:
        """Deliver one mail and remember its key and body from `now` on."""
        self._accepted_at[slot] = now
        self._bodies[slot] = hash(body)
        self._delivered[slot] += 1
        self.total += 1
        if self._delivered[slot] == 1:
            self.once += 1
        elif self._delivered[slot] == 2:
            self.once -= 1
            self.more += 1

    def remembers(self, slot: int, since: float) -> bool:
        """Whether the key was accepted after `since`."""
        return self._accepted_at[slot] > since

    def same_body(self, slot: int, body: bytes) -> bool:
        """Whether `body` is what was delivered, by a 64-bit fingerprint."""
        return self._bodies[slot] == hash(body)

    def mail_id(self, slot: int) -> bytes:
        """The name of the last mail delivered for the key."""
        return b"m%d-%d" % (slot, self._delivered[slot])

    def play_once(self, slot: int) -> bool:
        """True the first time it is asked about a key."""
        if self._played[slot]:
            return False
        self._played[slot] = 1
        return True

    def keys(self) -> dict[bytes, int]:
        """Every key with its slot, in order of slots. Not to be changed."""
        return self._slots

    def deliveries(self) -> dict[str, dict[int, int]]:
        """Deliveries by template and member, of those that have any."""
        found: dict[str, dict[int, int]] = {}
        for key, slot in self._slots.items():
            if count := self._delivered[slot]:
                template, _, member = key.decode().rpartition(":")
                found.setdefault(template, {})[int(member)] = count
        return found
