"""The statistics of the fake provider, as `/stats` answers them."""

from typing import TypedDict


class Stats(TypedDict):
    """What `/stats` answers. Counters begin anew at `reset_stats`; deliveries and keys never do.

    Attributes:
        requests: mail requests received, whatever became of them.
        accepted: requests accepted: new mails and repeats absorbed.
        deliveries: mails delivered since the start.
        members_delivered: keys with at least one mail.
        delivered_once: keys with exactly one mail.
        delivered_twice: keys with more than one mail; anything but 0 is somebody mailed again.
        keys_seen: different keys received since the start.
        repeats_absorbed: repeats of an accepted key inside the window; nothing was delivered.
        body_mismatch: accepted keys that came again with another body.
        rate_limited: 429 by the limit.
        throttled: 429 by the switch.
        by_status: answers by status; `none` for requests left without an answer on purpose.
        by_fault: faults played, by kind.
        max_in_any_second: most requests received in any sliding second, refused ones too.
        let_through_max_in_any_second: the same for requests the limit was asked about and let by.
        accepted_max_in_any_second: most mails delivered in any sliding second.
        steady_rate_per_s: see `Traffic.steady_rate`.
        started_at: Unix time of the start or of the last `reset_stats`.
        first_request_at: Unix time of the first mail request, or None.
        last_request_at: Unix time of the last mail request, or None.
        first_request_s: seconds from `started_at` to the first mail request, or None.
        last_request_s: seconds from `started_at` to the last mail request, or None.
        first_delivery_s: seconds from `started_at` to the first mail delivered, or None.
        last_delivery_s: seconds from `started_at` to the last mail delivered, or None.
        connections_opened: TCP connections accepted, control calls included.
        open_connections: TCP connections open now, that of this call included.
        in_flight: mail requests received and not yet answered.
        max_in_flight: most of them at one time.
        abandoned: requests whose client left before the answer was complete.
        malformed: requests that were no HTTP.
        cpu_s: CPU seconds of the serving process since it began.
    """

    requests: int
    accepted: int
    deliveries: int
    members_delivered: int
    delivered_once: int
    delivered_twice: int
    keys_seen: int
    repeats_absorbed: int
    body_mismatch: int
    rate_limited: int
    throttled: int
    by_status: dict[str, int]
    by_fault: dict[str, int]
    max_in_any_second: int
    let_through_max_in_any_second: int
    accepted_max_in_any_second: int
    steady_rate_per_s: float | None
    started_at: float
    first_request_at: float | None
    last_request_at: float | None
    first_request_s: float | None
    last_request_s: float | None
    first_delivery_s: float | None
    last_delivery_s: float | None
    connections_opened: int
    open_connections: int
    in_flight: int
    max_in_flight: int
    abandoned: int
    malformed: int
    cpu_s: float
