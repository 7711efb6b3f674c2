"""What the rendered base manifest asks of its Jobs, all durations divided by one factor."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from kustomize import render
from manifest_rules import Manifests, manifests_of

from sender.settings import RunSettings

BASE = Path(__file__).parents[2] / "k8s" / "base"
DAY_S = 86_400.0
# The Job controller's own: ten seconds, doubled for each failure, six minutes at most.
FIRST_DELAY_S, LONGEST_DELAY_S = 10.0, 360.0

# No faster than this; a night is at least so many seconds and starts of a process long: as many as
# its pods begin one after another, and what they do in between.
FASTEST, WORK_S, STARTS_IN_A_NIGHT = 400.0, 4.0, 4

# The program's own margins of a second or two do not shrink with the factor, and a busy machine
# does not answer faster: no shorter than this, whatever the factor.
LEAST = {
    "MAIL_CONNECT_TIMEOUT_S": 0.3,
    "MAIL_READ_TIMEOUT_S": 0.6,
    "LEASE_S": 3.0,
    "SHUTDOWN_GRACE_S": 1.9,
}

type Action = Literal["FailJob", "Ignore", "Count"]


@dataclass(frozen=True, slots=True)
class Policy:
    """How the Jobs of a CronJob are run; all seconds are scaled.

    Attributes:
        grace_s: from SIGTERM to SIGKILL.
        rules: podFailurePolicy, first match wins.
        env: the container's settings.
        factor: what durations were divided by.
    """

    forbid: bool
    backoff_limit: int
    active_deadline_s: float
    grace_s: float
    rules: tuple[Mapping[str, Any], ...]
    env: Mapping[str, str]
    factor: float

    @classmethod
    def of_base(cls, factor: float) -> Self:
        """Read the base manifest."""
        found = manifests_of(render(BASE))
        spec, once = found.cronjob["spec"], found.once
        env = _scaled(found, factor)
        # In proportion to the time the program takes for itself.
        grace = found.pod["terminationGracePeriodSeconds"] / found.loaded().shutdown_grace_s
        return cls(
            forbid=spec["concurrencyPolicy"] == "Forbid",
            backoff_limit=once["backoffLimit"],
            active_deadline_s=once["activeDeadlineSeconds"] / factor,
            grace_s=grace * float(env["SHUTDOWN_GRACE_S"]),
            rules=tuple(once["podFailurePolicy"]["rules"]),
            env=env,
            factor=factor,
        )

    @property
    def day_s(self) -> float:
        return DAY_S / self.factor

    @property
    def usable_window_s(self) -> float:
        """How long the program may use a key again."""
        return RunSettings.load({**self.env, "DB_DSN": "host=h"}).usable_window_s

    def judge(self, exit_code: int, *, disrupted: bool) -> Action:
        """What a failed pod means to its Job."""
        for rule in self.rules:
            if (codes := rule.get("onExitCodes")) and (
                (exit_code in codes["values"]) == (codes["operator"] == "In")
            ):
                return rule["action"]
            conditions = [found["type"] for found in rule.get("onPodConditions", ())]
            if disrupted and "DisruptionTarget" in conditions:
                return rule["action"]
        return "Count"

    def delay_s(self, failures: int) -> float:
        """How long after its nth failure a pod is replaced."""
        return min(FIRST_DELAY_S * 2 ** max(0, failures - 1), LONGEST_DELAY_S) / self.factor


def _scaled(found: Manifests, factor: float) -> dict[str, str]:
    """The settings, durations divided, rates and numbers as they are, secrets left out."""
    loaded = found.loaded()
    env = {name: text for name, text in found.env.items() if not name.endswith("_FILE")}
    for field, value in loaded:
        name = field.upper()
        if name.endswith("_S") and name != "MAIL_RATE_PER_S":
            env[name] = str(max(value / factor, LEAST.get(name, 0.0)))
    return env
