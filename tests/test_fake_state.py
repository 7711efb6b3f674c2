"""The strict provider's rules, without a network and with a clock of the test's own."""

import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sender.dev.fake_faults import FAULTS, SHARES, Answer
from sender.dev.fake_options import FakeOptions
from sender.dev.fake_rules import Request
from sender.dev.fake_state import FakeState
from sender.errors import SettingsError


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Lab:
    options: FakeOptions
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.state = FakeState(self.options, self.clock, lambda: 1_700_000_000.0)

    def post(self, member: int = 7, *, to: str = "a@example.com", **changes: object) -> Answer:
        mail = {"to": to, "member_id": member, "template": "spring"}
        return self.state.decide(request(mail, **changes))  # pyright: ignore[reportArgumentType]

    def delivered(self) -> dict[int, int]:
        return self.state.ledger.deliveries().get("spring", {})


def request(
    mail: object,
    *,
    key: str | None = None,
    method: str = "POST",
    target: str = "/mail",
    headers: dict[str, str] | None = None,
    body: bytes | None = None,
) -> Request:
    if key is None and isinstance(mail, dict):
        key = f"{mail.get('template')}:{mail.get('member_id')}"
    fields = {"content-type": "application/json", "idempotency-key": key or "", **(headers or {})}
    text = json.dumps(mail).encode() if body is None else body
    encoded = {name.encode(): value.encode() for name, value in fields.items()}
    return Request(method.encode(), target.encode(), encoded, text)


def error(answer: Answer) -> tuple[int, str]:
    return answer.status, json.loads(answer.body)["error"]


def lab(**options: object) -> Lab:
    return Lab(FakeOptions(**options))  # pyright: ignore[reportArgumentType]


MAIL = {"to": "a@example.com", "member_id": 7, "template": "spring"}


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (request(MAIL, method="GET"), (405, "method_not_allowed")),
        (request(MAIL, target="/other"), (404, "not_found")),
        (request(MAIL, headers={"authorization": "Bearer no"}), (401, "unauthorized")),
        (request(MAIL, headers={"authorization": ""}), (401, "unauthorized")),
        (request(MAIL, headers={"content-type": "text/json"}), (415, "unsupported_media_type")),
        (request(MAIL, key="spring:8"), (400, "idempotency_key_wrong")),
        (request(MAIL, key="spring:07"), (400, "idempotency_key_wrong")),
        (request(MAIL, key=""), (400, "idempotency_key_wrong")),
        (request(MAIL, body=b"{"), (400, "body_not_json")),
        (request(MAIL, body=b"\xff"), (400, "body_not_json")),
        (request(MAIL, body=b"[" * 100_000), (400, "body_not_json")),
        (request([MAIL], key="spring:7"), (400, "body_not_object")),
        (request({**MAIL, "subject": "x"}), (400, "body_fields_wrong")),
        (request({"to": "a@example.com", "template": "spring"}), (400, "body_fields_wrong")),
        (request({**MAIL, "to": None}), (400, "body_types_wrong")),
        (request({**MAIL, "to": ["a@example.com"]}), (400, "body_types_wrong")),
        (request({**MAIL, "member_id": "7"}), (400, "body_types_wrong")),
        (request({**MAIL, "member_id": True}), (400, "body_types_wrong")),
        (request({**MAIL, "vars": []}), (400, "body_types_wrong")),
        (request({**MAIL, "template": ""}), (400, "body_types_wrong")),
    ],
)
def test_a_request_that_breaks_a_rule_is_refused_and_delivers_nothing(
    wrong: Request, expected: tuple[int, str]
) -> None:
    strict = lab(api_key="secret")
    wrong.headers.setdefault(b"authorization", b"Bearer secret")
    assert error(strict.state.decide(wrong)) == expected
    assert strict.delivered() == {}
    assert strict.state.stats()["by_status"] == {str(expected[0]): 1}


def test_a_right_request_is_delivered() -> None:
    strict = lab(api_key="secret")
    headers = {"authorization": "Bearer secret", "content-type": "Application/JSON; charset=utf-8"}
    right = request({**MAIL, "vars": {"name": "山"}}, headers=headers, target="/mail?trace=1")
    assert strict.state.decide(right).status == 200
    assert strict.delivered() == {7: 1}


def test_a_repeat_inside_the_window_gets_the_first_answer_and_delivers_nothing() -> None:
    it = lab(window_s=60)
    first = it.post()
    it.clock.now += 59.9
    assert it.post() == first
    stats = it.state.stats()
    assert (stats["repeats_absorbed"], stats["accepted"], stats["deliveries"]) == (1, 2, 1)
    assert (stats["delivered_once"], stats["delivered_twice"]) == (1, 0)


def test_a_repeat_after_the_window_is_a_second_mail() -> None:
    it = lab(window_s=60)
    first = it.post()
    it.clock.now += 60
    assert it.post() != first
    it.clock.now += 60
    it.post()
    stats = it.state.stats()
    assert it.delivered() == {7: 3}
    assert (stats["deliveries"], stats["members_delivered"]) == (3, 1)
    assert (stats["delivered_once"], stats["delivered_twice"]) == (0, 1)


def test_the_window_is_counted_from_the_delivery_and_not_from_a_repeat() -> None:
    it = lab(window_s=60)
    for _ in range(3):
        it.post()
        it.clock.now += 30
    assert it.delivered() == {7: 2}


def test_a_key_with_another_body_is_refused() -> None:
    it = lab()
    it.post()
    assert error(it.post(to="b@example.com")) == (422, "idempotency_body_mismatch")
    spaced = it.post(body=json.dumps(MAIL, indent=1).encode())
    assert error(spaced) == (422, "idempotency_body_mismatch")
    assert it.state.stats()["body_mismatch"] == 2
    assert it.delivered() == {7: 1}


@pytest.mark.parametrize("kind", [name for name, fault in FAULTS.items() if not fault.accepts])
def test_a_refusal_leaves_the_key_free_for_another_body(kind: str) -> None:
    it = lab(by_member={7: (kind,)})
    assert it.post().status == FAULTS[kind].status
    assert it.post(to="b@example.com").status == 200
    assert it.delivered() == {7: 1}


@pytest.mark.parametrize("kind", [name for name, fault in FAULTS.items() if fault.accepts])
def test_an_accepted_mail_is_remembered_however_it_was_answered(kind: str) -> None:
    it = lab(by_member={7: (kind,)})
    assert it.post().status == FAULTS[kind].status
    assert error(it.post(to="b@example.com")) == (422, "idempotency_body_mismatch")
    assert it.post().status == 200
    assert it.delivered() == {7: 1}


def test_a_script_for_one_member_goes_before_always_and_a_tuple_is_used_up() -> None:
    it = lab(always="500", by_member={7: ("503", "ok"), 8: "413"})
    assert [it.post(7).status for _ in range(3)] == [503, 200, 500]
    assert [it.post(8).status for _ in range(2)] == [413, 413]
    assert it.post(9).status == 500
    assert it.state.stats()["by_fault"] == {"413": 2, "500": 2, "503": 1}


def test_control_changes_scripts_and_begins_them_anew() -> None:
    it = lab(by_member={7: ("503",)})
    it.post()
    it.state.control({"by_member": {"7": ["500", "410"]}, "always": "401"})
    assert [it.post().status for _ in range(3)] == [500, 410, 401]
    it.state.control({"always": None})
    assert it.post().status == 200


def test_each_share_falls_on_the_keys_it_says_and_once_but_for_permanent() -> None:
    it = lab(seed=3, first_503=0.2, permanent_422=0.2, accept_then_cut=0.2, drip=0.2)
    expected = {name: (SHARES[name].status, 200) for name in SHARES}
    expected["permanent_422"] = (422, 422)
    seen: dict[str | None, int] = {}
    for member in range(500):
        share = it.options.share_of(f"spring:{member}")
        seen[share] = seen.get(share, 0) + 1
        answers = (it.post(member).status, it.post(member).status)
        assert answers == (expected[share] if share else (200, 200))
    assert set(seen) == {None, "first_503", "permanent_422", "accept_then_cut", "drip"}
    assert all(60 < count < 140 for count in seen.values())
    assert it.state.stats()["delivered_once"] == 500 - seen["permanent_422"]


def test_an_outage_or_throttle_answers_before_the_rules_and_frees_the_limit() -> None:
    it = lab(limit_per_s=1, headroom=0, retry_after="Wed, 21 Oct 2026 07:28:00 GMT")
    it.state.control({"outage": True})
    assert [it.post().status for _ in range(3)] == [503, 503, 503]
    it.state.control({"outage": False, "throttle": True})
    throttled = it.post()
    assert throttled.status == 429
    assert b"\r\nRetry-After: Wed, 21 Oct 2026 07:28:00 GMT\r\n" in throttled.head
    it.state.control({"throttle": False, "retry_after": 2})
    assert it.post().status == 200
    limited = it.post()
    assert b"\r\nRetry-After: 2\r\n" in limited.head
    assert (it.state.stats()["throttled"], it.state.stats()["rate_limited"]) == (1, 1)


@given(
    limit=st.integers(1, 12),
    headroom=st.sampled_from([0.0, 0.05, 0.5]),
    gaps=st.lists(st.sampled_from([0.0, 0.0, 0.01, 0.1, 0.25, 0.5, 0.999, 1.0]), max_size=80),
)
def test_never_more_than_the_limit_in_any_sliding_second_and_never_fewer_than_could_be(
    limit: int, headroom: float, gaps: list[float]
) -> None:
    it = lab(limit_per_s=limit, headroom=headroom)
    allowed = max(1, int(limit * (1 + headroom) + 1e-9))
    let_through: list[float] = []
    received: list[float] = []
    for member, gap in enumerate(gaps):
        it.clock.now += gap
        now = it.clock.now
        received.append(now)
        before = sum(now - 1 < t <= now for t in let_through)
        answer = it.post(member)
        assert answer.status == (200 if before < allowed else 429)
        if answer.status == 200:
            let_through.append(now)
    stats = it.state.stats()
    assert stats["rate_limited"] == len(gaps) - len(let_through)
    assert stats["let_through_max_in_any_second"] == _densest(let_through)
    assert stats["max_in_any_second"] == _densest(received)
    assert stats["accepted_max_in_any_second"] == _densest(let_through)


def _densest(times: list[float]) -> int:
    return max((sum(end - 1 < t <= end for t in times) for end in times), default=0)


def test_latency_is_drawn_evenly_and_the_door_has_none() -> None:
    it = lab(latency_s=(0.1, 0.3), seed=5)
    delays = [it.post(member).delay_s for member in range(200)]
    assert 0.1 <= min(delays) < 0.12
    assert 0.28 < max(delays) <= 0.3
    again = lab(latency_s=(0.1, 0.3), seed=5)
    assert [again.post(member).delay_s for member in range(200)] == delays
    it.state.control({"throttle": True, "latency_s": 0.5})
    assert it.post().delay_s == 0


def test_the_steady_rate_leaves_out_start_and_tail() -> None:
    it = lab()
    for member in range(101):
        it.post(member)
        it.clock.now += 0.01 if 10 <= member < 90 else 5.0
    assert it.state.stats()["steady_rate_per_s"] == pytest.approx(100)


def test_too_few_deliveries_have_no_steady_rate() -> None:
    it = lab()
    for member in range(19):
        it.post(member)
        it.clock.now += 1
    assert it.state.stats()["steady_rate_per_s"] is None
    it.post(19)
    assert it.state.stats()["steady_rate_per_s"] == pytest.approx(1)


def test_times_are_told_as_unix_time_and_as_seconds() -> None:
    it = lab()
    assert it.state.stats()["first_request_at"] is None
    it.clock.now += 2
    it.post(1)
    it.clock.now += 3
    it.post(1)
    stats = it.state.stats()
    assert (stats["first_request_s"], stats["last_request_s"]) == (2, 5)
    assert (stats["first_request_at"], stats["last_request_at"]) == (1_700_000_002, 1_700_000_005)
    assert (stats["first_delivery_s"], stats["last_delivery_s"]) == (2, 2)


def test_every_request_is_kept_by_key_up_to_the_bound() -> None:
    it = lab(by_member={7: ("503",)}, max_recorded=4)
    for member in (7, 77, 7):
        it.post(member)
        it.clock.now += 1
    it.state.decide(Request(b"GET", b"/mail", {}, b""))
    it.post(7)
    assert it.state.requests(7) == [(1000, "spring:7", 503), (1002, "spring:7", 200)]
    assert it.state.requests()[1:] == [
        (1001, "spring:77", 200),
        (1002, "spring:7", 200),
        (1003, None, 405),
    ]


def test_reset_stats_forgets_traffic_and_no_delivery() -> None:
    it = lab()
    it.post()
    it.state.control({"reset_stats": True})
    assert it.state.stats()["requests"] == 0
    assert it.state.requests() == []
    it.post()
    stats = it.state.stats()
    assert (stats["repeats_absorbed"], stats["deliveries"]) == (1, 1)


def test_a_wrong_control_call_changes_nothing() -> None:
    it = lab(limit_per_s=5)
    for wrong in ({"limit_per_s": -1, "throttle": True}, {"throttle": True, "path": "/x"}):
        with pytest.raises(SettingsError):
            it.state.control(wrong)
    assert it.state.options == FakeOptions(limit_per_s=5)
