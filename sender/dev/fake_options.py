"""How the fake provider behaves: one frozen model, all faults of it named at once, JSON both ways.

Owns the names that options files and control calls use. Must never hold state of a run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from hashlib import blake2b
from typing import Self, cast

from sender.dev.fake_checks import faults_of
from sender.dev.fake_faults import SHARES
from sender.errors import SettingsError

type Script = str | tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeOptions:
    """Everything about one fake provider.

    Attributes:
        path: where mails are posted; every other path but the control paths is 404.
        api_key: what `Authorization: Bearer` must carry, or None for no check.
        window_s: seconds an accepted key is remembered.
        limit_per_s: requests allowed in any sliding second, or None. At least one is let through.
        headroom: share above the limit that is still let through.
        retry_after: `Retry-After` of a 429: seconds, or any text such as an HTTP date.
        latency_s: seconds before an answer, or (least, most), drawn evenly. Not before the 429 of
            the limit or the throttle, nor the 503 of an outage: those come from the front door.
        seed: chooses keys for the shares and draws latencies.
        first_503: share of keys whose first request gets 503.
        permanent_422: share of keys that get 422 every time.
        accept_then_cut: share of keys whose first request is accepted and the connection reset.
        accept_then_silent: share of keys whose first request is accepted and never answered.
        drip: share of keys whose first request is accepted and answered byte by byte.
        always: the kind that every mail gets, or None.
        by_member: kinds for single members, before `always`: a name counts for every request, a
            tuple is used up one name a request and then over.
        outage: None, or what everybody gets: `503`, `reset`, `hang`, or `refuse` (nobody listens).
        throttle: everybody gets 429.
        keep_alive_s: seconds an idle connection stays open.
        requests_per_connection: answers after which a connection is closed, or None.
        drip_interval_s: seconds between two bytes of a drip.
        max_recorded: requests that are kept for `/requests`; 0 for none.
    """

    path: str = "/mail"
    api_key: str | None = None
    window_s: float = 86_400.0
    limit_per_s: float | None = None
    headroom: float = 0.05
    retry_after: float | str = 1
    latency_s: float | tuple[float, float] = 0.0
    seed: int = 0
    first_503: float = 0.0
    permanent_422: float = 0.0
    accept_then_cut: float = 0.0
    accept_then_silent: float = 0.0
    drip: float = 0.0
    always: str | None = None
    by_member: Mapping[int, Script] = field(default_factory=dict[int, Script])
    outage: str | None = None
    throttle: bool = False
    keep_alive_s: float = 75.0
    requests_per_connection: int | None = None
    drip_interval_s: float = 0.2
    max_recorded: int = 2_000_000

    def __post_init__(self) -> None:
        """Refuse wrong values, all of them in one error."""
        values = {f.name: cast("object", getattr(self, f.name)) for f in fields(self)}
        if faults := tuple(faults_of(values)):
            raise SettingsError(faults)

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> Self:
        """The options that `values`, parsed JSON, describe.

        Args:
            values: option names and values; what is missing has its default.

        Returns:
            The options.

        Raises:
            SettingsError: a name is unknown or a value is wrong.
        """
        known = {f.name for f in fields(cls)}
        if unknown := sorted(values.keys() - known):
            raise SettingsError([f"{name}: no such option" for name in unknown])
        return cls(**dict(normalised(values)))  # pyright: ignore[reportArgumentType]

    def to_json(self) -> dict[str, object]:
        """The options as JSON can hold them; `from_json` takes them back."""
        return cast("dict[str, object]", asdict(self))

    def share_of(self, key: str) -> str | None:
        """Which share a key falls into, the same for equal seeds.

        Args:
            key: the idempotency key.

        Returns:
            A name of `SHARES`, or None.
        """
        digest = blake2b(f"{self.seed}:{key}".encode(), digest_size=8).digest()
        point = int.from_bytes(digest) / 2**64
        for name in SHARES:
            point -= cast("float", getattr(self, name))
            if point < 0:
                return name
        return None

    @property
    def has_shares(self) -> bool:
        """Whether any fault is chosen by share."""
        return any(getattr(self, name) for name in SHARES)

    @property
    def allowed(self) -> int | None:
        """Requests let through in any sliding second, or None for no limit."""
        if self.limit_per_s is None:
            return None
        # A hair more, so that 100 * 1.1 is 110 and 3 * 1.1 is 3.
        return max(1, int(self.limit_per_s * (1 + self.headroom) + 1e-9))

    @property
    def latency_range(self) -> tuple[float, float]:
        """Least and most latency."""
        if isinstance(self.latency_s, tuple):
            return self.latency_s
        return (self.latency_s, self.latency_s)


def normalised(values: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Turn what JSON can hold into what `FakeOptions` holds.

    Args:
        values: names and values out of JSON.

    Yields:
        Name and value.
    """
    for name, value in values.items():
        if name == "outage" and isinstance(value, bool):
            yield name, "503" if value else None
        elif name == "by_member" and isinstance(value, Mapping):
            scripts = cast("Mapping[object, object]", value)
            yield name, {_number_of(k): _tuple_of(v) for k, v in scripts.items()}
        else:
            yield name, _tuple_of(value)


def _tuple_of(value: object) -> object:
    return tuple(cast("list[object]", value)) if isinstance(value, list) else value


def _number_of(value: object) -> object:
    return int(value) if isinstance(value, str) and value.isdecimal() else value
