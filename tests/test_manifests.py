"""Manifests and image: valid for the API, and consistent with what the program does and expects.

No cluster is asked: the published schemas, strictly, and rules of our own for what they cannot say.
"""

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zoneinfo import available_timezones

import kubernetes_validate
import pytest
import yaml

from sender.settings import RunSettings, all_names

ROOT = Path(__file__).parent.parent
OLDEST = "1.30"
MANIFESTS = sorted(
    path for path in (ROOT / "k8s").rglob("*.yaml") if path.name != "kustomization.yaml"
)

type Manifest = dict[str, Any]


def manifests() -> list[Manifest]:
    return [item for path in MANIFESTS for item in yaml.safe_load_all(path.read_text())]


def cronjob() -> Manifest:
    (found,) = (item for item in manifests() if item["kind"] == "CronJob")
    return found


@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_manifests_are_valid(path: Path, version: str) -> None:
    for item in yaml.safe_load_all(path.read_text()):
        kubernetes_validate.validate(item, version, strict=True)


# --- What the schemas cannot say -----------------------------------------------------------------


def wrong(job: Manifest) -> Iterator[str]:
    """Everything about the CronJob that the program would suffer from."""
    spec = job["spec"]
    once = spec["jobTemplate"]["spec"]
    pod = once["template"]["spec"]
    (container,) = pod["containers"]
    env = {item["name"]: str(item.get("value", "")) for item in container["env"]}
    yield from wrong_schedule(spec)
    yield from wrong_environment(env)
    yield from wrong_times(once, pod, env)
    yield from wrong_retries(once, pod, container)
    yield from wrong_rights(pod, container)


def wrong_schedule(spec: Manifest) -> Iterator[str]:
    if spec.get("timeZone") not in available_timezones():
        yield "time zone"
    if spec.get("concurrencyPolicy") not in ("Allow", "Forbid", "Replace"):
        yield "concurrency policy"
    if spec.get("concurrencyPolicy") == "Replace":
        yield "concurrency policy"  # kills a run that would have gone on
    if not spec.get("startingDeadlineSeconds", 0) >= 10:
        yield "starting deadline"  # without one, a hundred missed starts stop it for ever
    if len(spec["schedule"].split()) != 5:
        yield "schedule"


def wrong_environment(env: dict[str, str]) -> Iterator[str]:
    names = {name.removesuffix("_FILE") for name in env}
    if names - set(all_names()):
        yield "unknown setting"
    if not {"DB_DSN", "CAMPAIGN_ID", "MAIL_URL"} <= names:
        yield "missing setting"
    if {"DB_DSN", "MAIL_API_KEY"} & env.keys():
        yield "secret in a variable"


def wrong_times(once: Manifest, pod: Manifest, env: dict[str, str]) -> Iterator[str]:
    def seconds(name: str) -> float:
        return float(env.get(name, RunSettings.model_fields[name.lower()].default))

    grace = pod.get("terminationGracePeriodSeconds", 30)
    if not grace > seconds("SHUTDOWN_GRACE_S"):
        yield "grace"
    if not seconds("DEADLINE_S") + grace < once.get("activeDeadlineSeconds", 0):
        yield "deadline"


def wrong_retries(once: Manifest, pod: Manifest, container: Manifest) -> Iterator[str]:
    if pod.get("restartPolicy") != "Never":
        yield "restart policy"  # podFailurePolicy needs it
    rules = once["podFailurePolicy"]["rules"]
    final = {
        code
        for rule in rules
        if rule["action"] == "FailJob" and rule["onExitCodes"]["operator"] == "In"
        for code in rule["onExitCodes"]["values"]
    }
    if final != {2, 78}:
        yield "exit codes"
    if any(
        rule.get("onExitCodes", container).get("containerName") not in (container["name"], None)
        for rule in rules
    ):
        yield "container name"
    ignored = [rule for rule in rules if rule["action"] == "Ignore"]
    if [rule["onPodConditions"][0]["type"] for rule in ignored] != ["DisruptionTarget"]:
        yield "disruption"
    if not 1 <= once.get("backoffLimit", 6) <= 6:
        yield "backoff limit"


def wrong_rights(pod: Manifest, container: Manifest) -> Iterator[str]:
    if not pod["securityContext"].get("runAsNonRoot"):
        yield "root"
    if pod.get("automountServiceAccountToken") is not False:
        yield "token"
    if container["resources"]["limits"].get("memory") != "256Mi":
        yield "memory"
    mounted = {mount["name"] for mount in container["volumeMounts"] if mount.get("readOnly")}
    secrets = {volume["name"] for volume in pod["volumes"] if "secret" in volume}
    if not secrets <= mounted:
        yield "secret not mounted"


def test_the_cronjob_is_right() -> None:
    assert list(wrong(cronjob())) == []


def env_of(job: Manifest) -> list[dict[str, str]]:
    return pod_of(job)["containers"][0]["env"]


def once_of(job: Manifest) -> Manifest:
    return job["spec"]["jobTemplate"]["spec"]


def pod_of(job: Manifest) -> Manifest:
    return once_of(job)["template"]["spec"]


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda job: job["spec"].update(timeZone="Asia/Tokio"), "time zone"),
        (lambda job: job["spec"].pop("timeZone"), "time zone"),
        (lambda job: job["spec"].update(concurrencyPolicy="Nope"), "concurrency policy"),
        (lambda job: job["spec"].pop("startingDeadlineSeconds"), "starting deadline"),
        (lambda job: env_of(job)[0].update(name="CAMPAIN_ID"), "unknown setting"),
        (lambda job: env_of(job).pop(0), "missing setting"),
        (lambda job: env_of(job).append({"name": "DB_DSN", "value": "x"}), "secret in a variable"),
        (lambda job: pod_of(job).update(terminationGracePeriodSeconds=20), "grace"),
        (lambda job: once_of(job).update(activeDeadlineSeconds=3030), "deadline"),
        (lambda job: pod_of(job).update(restartPolicy="OnFailure"), "restart policy"),
        (lambda job: once_of(job)["podFailurePolicy"]["rules"].pop(0), "exit codes"),
        (lambda job: pod_of(job)["containers"][0].update(name="main"), "container name"),
        (lambda job: once_of(job)["podFailurePolicy"]["rules"].pop(1), "disruption"),
        (lambda job: once_of(job).update(backoffLimit=0), "backoff limit"),
        (lambda job: pod_of(job)["securityContext"].pop("runAsNonRoot"), "root"),
        (lambda job: pod_of(job).pop("automountServiceAccountToken"), "token"),
    ],
)
def test_each_rule_bites(damage: Callable[[Manifest], object], told: str) -> None:
    job = copy.deepcopy(cronjob())
    damage(job)
    assert told in set(wrong(job))


def test_the_settings_of_the_manifest_are_right_together(tmp_path: Path) -> None:
    env = {item["name"]: item["value"] for item in env_of(cronjob())}
    secrets = {"DB_DSN_FILE": "host=h dbname=d", "MAIL_API_KEY_FILE": "key"}
    for name, value in secrets.items():
        (tmp_path / name).write_text(f"{value}\n")
        env[name] = str(tmp_path / name)
    loaded = RunSettings.load(env)
    assert loaded.unknown == ()
    assert loaded.mail_rate_per_s == 500


def test_secrets_are_read_where_they_are_mounted() -> None:
    (container,) = pod_of(cronjob())["containers"]
    (mount,) = container["volumeMounts"]
    files = {item["value"] for item in container["env"] if item["name"].endswith("_FILE")}
    assert {str(Path(path).parent) for path in files} == {mount["mountPath"]}


# --- The image -----------------------------------------------------------------------------------


def test_the_image_runs_the_program_itself_and_not_as_root() -> None:
    last = (ROOT / "Dockerfile").read_text().rpartition("\nFROM ")[2]
    (user,) = re.findall(r"^USER (\d+):\d+$", last, re.MULTILINE)
    assert int(user) == pod_of(cronjob())["securityContext"]["runAsUser"] != 0
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", last, re.MULTILINE)
    assert json.loads(entry) == ["/app/.venv/bin/sender"]


def test_the_image_is_of_the_python_we_test_with() -> None:
    version = (ROOT / ".python-version").read_text().strip()
    bases = re.findall(r"^FROM (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert bases == [f"python:{version}-slim"] * 2
