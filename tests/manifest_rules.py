"""What schemas cannot say about the manifests: they must fit the program and each other.

Each rule yields a word when it is broken; test_manifests.py breaks each one.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import urlsplit
from zoneinfo import available_timezones

from kustomize import Manifest, of_kind

from sender import exit_code
from sender.errors import ConfigurationError, SettingsError
from sender.pipeline import StopReason
from sender.settings import RunSettings, all_names

# Mounted as files and never in a variable or a ConfigMap.
SECRETS = {"DB_DSN", "MAIL_API_KEY"}
MEMORY_LIMIT = "256Mi"
LIMIT_MB = 268
# At rest with everything loaded, and of one TLS connection under uvloop; rounded up.
PROGRAM_MB, CONNECTION_MB = 90, 0.102
ROOM = 0.8


@dataclass(frozen=True, slots=True)
class Manifests:
    """The parts that rules are about."""

    cronjob: Manifest
    settings: Manifest
    network: Manifest

    @property
    def once(self) -> Manifest:
        return self.cronjob["spec"]["jobTemplate"]["spec"]

    @property
    def pod(self) -> Manifest:
        return self.once["template"]["spec"]

    @property
    def container(self) -> Manifest:
        (container,) = self.pod["containers"]
        return container

    @property
    def env(self) -> dict[str, str]:
        """The variables of the container, those of the ConfigMap included."""
        own = {item["name"]: item["value"] for item in self.container["env"]}
        return self.settings["data"] | own

    def loaded(self) -> RunSettings:
        """The settings as the program takes them, with secrets made up."""
        made_up = {"DB_DSN": "host=h dbname=d", "MAIL_API_KEY": "key"}
        plain = {k: v for k, v in self.env.items() if k.removesuffix("_FILE") not in SECRETS}
        return RunSettings.load(plain | made_up)


def manifests_of(rendered: list[Manifest]) -> Manifests:
    kinds = ("CronJob", "ConfigMap", "NetworkPolicy")
    return Manifests(*(of_kind(rendered, kind) for kind in kinds))


# What to do, where the name of a fault does not say it.
HELP = {
    "time zone": "spec.timeZone is no name of the IANA list, such as Asia/Tokyo",
    "schedule": "spec.schedule takes five fields, and the zone belongs into spec.timeZone",
    "grace": "terminationGracePeriodSeconds must be above SHUTDOWN_GRACE_S",
    "deadline": "DEADLINE_S and terminationGracePeriodSeconds together must be below"
    " activeDeadlineSeconds",
    "unknown setting": "a name in the ConfigMap is no setting; sender --help has all",
    "missing setting": "CAMPAIGN_ID and MAIL_URL are needed in the ConfigMap, DB_DSN as a file",
    "connections": "SEND_CONCURRENCY takes more memory than the limit leaves",
    "exit codes": "podFailurePolicy must fail the Job on exactly the codes no retry can help",
}


def explained(fault: str) -> str:
    """A fault with what to do about it."""
    return f"{fault}: {HELP[fault]}" if fault in HELP else fault


def wrong(found: Manifests) -> Iterator[str]:
    """Everything the program, or whoever is on call, would suffer from."""
    yield from wrong_schedule(found.cronjob["spec"])
    yield from wrong_environment(found)
    yield from wrong_times(found)
    yield from wrong_retries(found)
    yield from wrong_completions(found.once)
    yield from wrong_rights(found)
    yield from wrong_memory(found)
    yield from wrong_secrets(found)
    yield from wrong_network(found)


def wrong_schedule(spec: Manifest) -> Iterator[str]:
    if spec.get("timeZone") not in available_timezones():
        yield "time zone"
    if spec.get("concurrencyPolicy") not in ("Allow", "Forbid"):
        yield "concurrency policy"  # Replace would kill a run that goes on
    if not spec.get("startingDeadlineSeconds", 0) >= 10:
        yield "starting deadline"  # without one, a hundred missed starts stop it for ever
    if not re.fullmatch(r"\S+( \S+){4}", spec["schedule"]) or "TZ=" in spec["schedule"]:
        yield "schedule"
    if spec.get("suspend"):
        yield "suspended"


def wrong_environment(found: Manifests) -> Iterator[str]:
    names = {name.removesuffix("_FILE") for name in found.env}
    if names - set(all_names()):
        yield "unknown setting"
    if not {"DB_DSN", "CAMPAIGN_ID", "MAIL_URL"} <= names:
        yield "missing setting"
    if SECRETS & found.env.keys():
        yield "secret in a variable"
    if not all(isinstance(value, str) for value in found.env.values()):
        yield "not a text"  # the API refuses a number here
    (source,) = found.container["envFrom"]
    if source["configMapRef"]["name"] != found.settings["metadata"]["name"]:
        yield "no such ConfigMap"
    try:
        found.loaded()
    except SettingsError as error:
        yield from (f"setting {fault.partition(':')[0]}" for fault in error.faults)


def wrong_times(found: Manifests) -> Iterator[str]:
    def seconds(name: str) -> float:
        return float(found.env.get(name, RunSettings.model_fields[name.lower()].default))

    grace = found.pod.get("terminationGracePeriodSeconds", 30)
    if not grace > seconds("SHUTDOWN_GRACE_S"):
        yield "grace"
    if not seconds("DEADLINE_S") + grace < found.once.get("activeDeadlineSeconds", 0):
        yield "deadline"
    if not found.once.get("ttlSecondsAfterFinished", 0) >= 86_400:
        yield "gone before anyone looked"


def wrong_retries(found: Manifests) -> Iterator[str]:
    once, container = found.once, found.container["name"]
    if found.pod.get("restartPolicy") != "Never":
        yield "restart policy"  # podFailurePolicy needs it
    rules = once["podFailurePolicy"]["rules"]
    if {rule["action"] for rule in rules} - {"FailJob", "Ignore"}:
        yield "action"
    by_code = [rule for rule in rules if "onExitCodes" in rule]
    if any(rule["onExitCodes"].get("containerName") not in (container, None) for rule in by_code):
        yield "container name"
    if [(rule["action"], _codes(rule)) for rule in by_code] != [("FailJob", _final_codes())]:
        yield "exit codes"
    if "onExitCodes" not in rules[0]:
        yield "order"  # an evicted pod that ended with 2 needs a person all the same
    others = [rule for rule in rules if rule not in by_code]
    disruption = [{"type": "DisruptionTarget", "status": "True"}]
    if [(r["action"], r["onPodConditions"]) for r in others] != [("Ignore", disruption)]:
        yield "disruption"
    if not 1 <= once.get("backoffLimit", 0) <= 3 * once.get("completions", 1):
        yield "backoff limit"
    if once.get("podReplacementPolicy", "Failed") != "Failed":
        yield "replacement"  # the only value that podFailurePolicy allows


def _codes(rule: Manifest) -> list[int]:
    found = rule["onExitCodes"]
    return found["values"] if found["operator"] == "In" else []


def _final_codes() -> list[int]:
    """The exit codes after which a retry is of no use, from the code that makes them."""
    stops = (StopReason.ACCOUNT_STOPPED, StopReason.REFUSED)
    codes = {exit_code.decide(reason, None, 0.0)[0] for reason in stops}
    assert exit_code.decide(StopReason.DEADLINE, None, 0.0)[0] not in codes
    return sorted(codes | {ConfigurationError.exit_code})


def wrong_completions(once: Manifest) -> Iterator[str]:
    pods = once.get("parallelism", 1), once.get("completions", 1)
    if pods[0] != pods[1]:
        yield "completions"  # a pod that starts later finds nothing to do, or the end of the time
    if pods != (1, 1) and once.get("completionMode") != "Indexed":
        yield "completions"


def wrong_rights(found: Manifests) -> Iterator[str]:
    pod, own = found.pod["securityContext"], found.container["securityContext"]
    if not (pod.get("runAsNonRoot") and pod.get("runAsUser")):
        yield "root"
    if pod.get("seccompProfile") != {"type": "RuntimeDefault"}:
        yield "seccomp"
    if found.pod.get("automountServiceAccountToken") is not False:
        yield "token"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "escalation"
    if own.get("capabilities", {}).get("drop") != ["ALL"] or "add" in own["capabilities"]:
        yield "capabilities"
    if own.get("readOnlyRootFilesystem") is not True:
        yield "file system"
    if found.pod.get("enableServiceLinks") is not False:
        yield "service links"  # a Service named "metrics" would set METRICS_PORT


def wrong_memory(found: Manifests) -> Iterator[str]:
    resources = found.container["resources"]
    if resources["limits"].get("memory") != MEMORY_LIMIT:
        yield "memory"
    if resources["requests"] != {"cpu": "250m", "memory": "128Mi"}:
        yield "requests"
    if "cpu" in resources["limits"]:
        yield "cpu limit"  # a throttled process misses its slots
    rate = float(found.env["MAIL_RATE_PER_S"])
    default = min(2_000, max(16, 2.5 * rate))
    connections = float(found.env.get("SEND_CONCURRENCY", default))
    if PROGRAM_MB + connections * CONNECTION_MB > ROOM * LIMIT_MB:
        yield "connections"


def wrong_secrets(found: Manifests) -> Iterator[str]:
    mounts = {m["name"]: m["mountPath"] for m in found.container["volumeMounts"] if m["readOnly"]}
    secrets = [volume["name"] for volume in found.pod["volumes"] if "secret" in volume]
    folders = {mounts.get(name) for name in secrets}
    files = {value for name, value in found.env.items() if name.endswith("_FILE")}
    if {str(PurePosixPath(path).parent) for path in files} != folders:
        yield "secret not mounted"
    modes = [v["secret"].get("defaultMode", 0o644) for v in found.pod["volumes"] if "secret" in v]
    if any(mode & 0o007 for mode in modes):
        yield "secret for everyone"
    if not all(mode & 0o040 for mode in modes) or not found.pod["securityContext"].get("fsGroup"):
        yield "secret not readable"  # files are root's; the group is how the program reads them


def wrong_network(found: Manifests) -> Iterator[str]:
    spec = found.network["spec"]
    labels = found.once["template"]["metadata"]["labels"]
    if not spec["podSelector"].get("matchLabels", {}).items() <= labels.items():
        yield "selector"
    if set(spec.get("policyTypes", ())) != {"Ingress", "Egress"} or spec.get("ingress"):
        yield "open to others"
    if not all(rule.get("to") and rule.get("ports") for rule in spec["egress"]):
        yield "everywhere"
    open_ports = {
        (port["protocol"], port["port"])
        for rule in spec["egress"]
        for port in rule.get("ports", ())
    }
    if not {("UDP", 53), ("TCP", 53)} <= open_ports:
        yield "no names"
    url = urlsplit(found.env.get("MAIL_URL", "https://missing"))
    provider = url.port or {"http": 80, "https": 443}[url.scheme]
    if not {("TCP", 5432), ("TCP", provider)} <= open_ports:
        yield "not reachable"
    if len(open_ports) != 4:
        yield "more than needed"
