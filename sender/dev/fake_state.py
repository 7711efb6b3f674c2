"""The strict provider itself, without a network: a request goes in, what to answer comes out.

Owns the order of judging: the door, the rules, the script, keys and bodies, the shares. Time comes
from a callable. Must never do I/O or wait.
"""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from http import HTTPStatus

from sender.dev.fake_faults import (
    FAULTS,
    OK,
    SHARES,
    Answer,
    Fault,
    error_body,
    error_word,
)
from sender.dev.fake_ledger import NO_KEY, Ledger
from sender.dev.fake_options import FakeOptions, normalised
from sender.dev.fake_rules import Refusal, Request, member_of
from sender.dev.fake_stats import Stats
from sender.dev.fake_traffic import Traffic, Wire
from sender.errors import SettingsError

CONTROLS = (
    "outage", "throttle", "retry_after", "latency_s", "limit_per_s", "headroom", "always",
    "by_member",
)  # fmt: skip
_OUTAGES = {"503": "503", "reset": "cut_before", "refuse": "cut_before", "hang": "hang"}


class FakeState:
    """Everything the provider knows.

    Attributes:
        options: how it behaves now; changed by `control`.
        ledger: keys and deliveries.
        traffic: counters.
        wire: counters of the connections, kept by whoever serves them.
    """

    def __init__(
        self,
        options: FakeOptions,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Begin with nothing delivered.

        Args:
            options: how to behave.
            clock: monotonic seconds.
            wall: Unix time.
        """
        self.options: FakeOptions = options
        self.ledger: Ledger = Ledger()
        self.wire: Wire = Wire()
        self.traffic: Traffic = Traffic(clock(), wall(), options.max_recorded)
        self._clock: Callable[[], float] = clock
        self._wall: Callable[[], float] = wall
        self._random: random.Random = random.Random(options.seed)
        self._used: dict[int, int] = {}
        self._adopt(options)

    def _adopt(self, options: FakeOptions) -> None:
        self.options = options
        # Asked at each request, so worked out once.
        self._allowed: int | None = options.allowed
        self._has_shares: bool = options.has_shares
        self._latency: tuple[float, float] = options.latency_range

    def control(self, changes: Mapping[str, object]) -> None:
        """Change how the provider behaves from now on.

        Args:
            changes: option names of `CONTROLS` with new values, and `reset_stats`: true.

        Raises:
            SettingsError: a name is unknown or a value is wrong; then nothing is changed.
        """
        wanted = dict(normalised(changes))
        reset = wanted.pop("reset_stats", False)
        if unknown := sorted(wanted.keys() - set(CONTROLS)):
            raise SettingsError(
                [f"{name}: not to be changed by a control call" for name in unknown]
            )
        self._adopt(replace(self.options, **wanted))
        if "by_member" in wanted:
            self._used.clear()
        if reset:
            self.traffic = Traffic(self._clock(), self._wall(), self.options.max_recorded)
            self.wire.reset()

    def decide(self, request: Request) -> Answer:
        """Judge one mail request, deliver if it is to be, and count.

        Args:
            request: the request, complete.

        Returns:
            What to answer, and when.
        """
        now = self._clock()
        self.traffic.receive(now)
        key = request.headers.get(b"idempotency-key")
        slot = NO_KEY if key is None else self.ledger.slot(key)
        answer = self._at_the_door(now)
        if answer is None:
            try:
                answer = self._judge(request, member_of(request, self.options), slot, now)
            except Refusal as refusal:
                answer = self._answer(FAULTS[str(refusal.status)], error_body(refusal.error))
        self.traffic.answer(now, slot, answer.status)
        return answer

    def _at_the_door(self, now: float) -> Answer | None:
        """Outage, throttle and limit, in that order; None lets the request in."""
        if self.options.outage is not None:
            fault = FAULTS[_OUTAGES[self.options.outage]]
            return fault.answer(error_body("service_unavailable"))
        if self.options.throttle:
            self.traffic.throttled += 1
        elif self._allowed is not None and self.traffic.let_through.count(now) >= self._allowed:
            self.traffic.limited += 1
        else:
            self.traffic.let_through.add(now)
            return None
        return FAULTS["429"].answer(error_body("too_many_requests"), self._retry_after())

    def _judge(self, request: Request, member: int, slot: int, now: float) -> Answer:
        scripted = self._scripted(member)
        if scripted is not None and not scripted.accepts:
            return self._refuse(scripted)
        if self.ledger.remembers(slot, now - self.options.window_s):
            if not self.ledger.same_body(slot, request.body):
                self.traffic.mismatches += 1
                return self._answer(FAULTS["422"], error_body("idempotency_body_mismatch"))
            self.traffic.repeats += 1
            return self._accept(scripted or OK, slot)
        fault = scripted or self._by_share(request.headers[b"idempotency-key"], slot)
        if not fault.accepts:
            return self._refuse(fault)
        self.ledger.deliver(slot, request.body, now)
        self.traffic.deliver(now)
        return self._accept(fault, slot)

    def _scripted(self, member: int) -> Fault | None:
        script = self.options.by_member.get(member)
        if isinstance(script, tuple):
            used = self._used.get(member, 0)
            self._used[member] = used + 1
            script = script[used] if used < len(script) else None
        kind = script or self.options.always
        return None if kind is None else FAULTS[kind]

    def _by_share(self, key: bytes, slot: int) -> Fault:
        share = self.options.share_of(key.decode()) if self._has_shares else None
        if share is None or (share != "permanent_422" and not self.ledger.play_once(slot)):
            return OK
        return SHARES[share]

    def _accept(self, fault: Fault, slot: int) -> Answer:
        if fault is not OK:
            self.traffic.play(fault.name)
        return self._answer(fault, b'{"id":"%s"}' % self.ledger.mail_id(slot))

    def _refuse(self, fault: Fault) -> Answer:
        self.traffic.play(fault.name)
        return self._answer(fault, error_body(error_word(fault.status)))

    def _answer(self, fault: Fault, body: bytes) -> Answer:
        headers = b""
        if fault.status == HTTPStatus.TOO_MANY_REQUESTS:
            headers = self._retry_after()
        elif fault.status == HTTPStatus.METHOD_NOT_ALLOWED:
            headers = b"Allow: POST\r\n"
        elif 300 <= fault.status < 400:
            headers = b"Location: %s\r\n" % self.options.path.encode()
        least, most = self._latency
        delay = least if least == most else self._random.uniform(least, most)
        return fault.answer(body, headers, delay)

    def _retry_after(self) -> bytes:
        return f"Retry-After: {self.options.retry_after}\r\n".encode()

    def stats(self) -> Stats:
        """The statistics now."""
        return self.traffic.stats(self.ledger, self.wire)

    def requests(self, member_id: int | None = None) -> list[tuple[float, str | None, int]]:
        """The requests kept, oldest first, whatever they were answered.

        Args:
            member_id: only requests whose key ends in this member, or None for all.

        Returns:
            Monotonic time, key (None without one), status (0 for none on purpose).
        """
        names = {slot: key.decode(errors="replace") for key, slot in self.ledger.keys().items()}
        slots = None
        if member_id is not None:
            slots = {slot for slot, name in names.items() if name.endswith(f":{member_id}")}
        kept = self.traffic.recorded(slots)
        return [(at, names.get(slot), status) for at, slot, status in kept]
