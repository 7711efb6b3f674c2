"""The fake provider's options: all faults at once, JSON both ways, shares from the seed."""

import json

import pytest

from sender.dev.fake_options import FakeOptions
from sender.errors import SettingsError


def test_shares_depend_on_the_seed_alone() -> None:
    keys = [f"spring:{n}" for n in range(200)]
    one, same, other = (FakeOptions(seed=seed, first_503=0.5) for seed in (1, 1, 2))
    assert [one.share_of(k) for k in keys] == [same.share_of(k) for k in keys]
    assert [one.share_of(k) for k in keys] != [other.share_of(k) for k in keys]


def test_headroom_is_exact_at_whole_numbers() -> None:
    allowed = [FakeOptions(limit_per_s=n, headroom=0.1).allowed for n in (1, 10, 100, 1000)]
    assert allowed == [1, 11, 110, 1100]
    assert FakeOptions(limit_per_s=0.1).allowed == 1


def test_all_wrong_options_are_named_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        FakeOptions(
            path="mail",
            api_key="",
            window_s=-1,
            limit_per_s=0,
            retry_after="a\r\nb",
            latency_s=(2, 1),
            seed="x",  # pyright: ignore[reportArgumentType]
            first_503=1.5,
            always="nonsense",
            by_member={7: ("ok", "other")},
            outage="flood",
            throttle=1,  # pyright: ignore[reportArgumentType]
        )
    named = {fault.partition(":")[0] for fault in caught.value.faults}
    wrong = "path api_key window_s limit_per_s retry_after latency_s seed first_503 always"
    assert named == {*wrong.split(), "by_member", "outage", "throttle"}


@pytest.mark.parametrize(
    "values",
    [
        {"nonsense": 1},
        {"first_503": 0.6, "drip": 0.6},
        {"path": "/stats"},
        {"by_member": [7]},
        {"by_member": {"seven": "ok"}},
        {"latency_s": [1]},
        {"keep_alive_s": True},
        {"requests_per_connection": 1.5},
    ],
)
def test_wrong_json_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(SettingsError):
        FakeOptions.from_json(values)


def test_options_survive_json() -> None:
    options = FakeOptions(latency_s=(0.1, 0.2), by_member={7: ("503", "cut"), 8: "413"}, drip=0.1)
    assert FakeOptions.from_json(json.loads(json.dumps(options.to_json()))) == options
