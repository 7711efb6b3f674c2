"""Manifests: valid for the API, and consistent with what the program does and expects.

No cluster is asked: the published schemas, strictly, and `manifest_rules` for what they cannot say.
"""

import copy
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from kustomize import NAME, Manifest, NotRenderable, render, unlisted
from manifest_rules import HELP, Manifests, explained, manifests_of, wrong

from sender.settings import RunSettings

ROOT = Path(__file__).parent.parent
K8S = ROOT / "k8s"
BASE = K8S / "base"
PARALLEL = K8S / "overlays" / "parallel"
FOLDERS = sorted(path.parent for path in K8S.rglob(NAME))
OLDEST = "1.30"

folders = pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)


@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
@folders
def test_manifests_are_valid(folder: Path, version: str) -> None:
    for item in render(folder):
        kubernetes_validate.validate(item, version, strict=True)


@folders
def test_manifests_are_right(folder: Path) -> None:
    assert [explained(fault) for fault in wrong(manifests_of(render(folder)))] == []


@folders
def test_every_file_is_listed(folder: Path) -> None:
    assert unlisted(folder) == set()


@pytest.mark.slow
@folders
def test_rendered_as_kubectl_does(folder: Path) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not to be found")
    ran = subprocess.run(
        [kubectl, "kustomize", folder], capture_output=True, text=True, timeout=60, check=False
    )
    if "unknown" in ran.stderr:
        pytest.skip("this kubectl has no kustomize")
    assert ran.returncode == 0, ran.stderr
    order = itemgetter("kind")
    assert sorted(yaml.safe_load_all(ran.stdout), key=order) == sorted(render(folder), key=order)


def test_a_fault_comes_with_what_to_do() -> None:
    assert "IANA list, such as Asia/Tokyo" in explained("time zone")
    assert HELP.keys() <= {fault for _, fault in DAMAGES}


# --- Each rule bites ------------------------------------------------------------------------------


def spec_of(found: Manifests) -> Manifest:
    return found.cronjob["spec"]


def rules_of(found: Manifests) -> list[Manifest]:
    return found.once["podFailurePolicy"]["rules"]


def data_of(found: Manifests) -> dict[str, str]:
    return found.settings["data"]


def own_env(found: Manifests) -> list[dict[str, str]]:
    return found.container["env"]


def safety(found: Manifests) -> Manifest:
    return found.container["securityContext"]


def egress(found: Manifests) -> list[Manifest]:
    return found.network["spec"]["egress"]


type Damage = Callable[[Manifests], object]

DAMAGES: list[tuple[Damage, str]] = [
    (lambda m: spec_of(m).update(timeZone="Asia/Tokio"), "time zone"),
    (lambda m: spec_of(m).pop("timeZone"), "time zone"),
    (lambda m: spec_of(m).update(concurrencyPolicy="Nope"), "concurrency policy"),
    (lambda m: spec_of(m).update(concurrencyPolicy="Replace"), "concurrency policy"),
    (lambda m: spec_of(m).pop("startingDeadlineSeconds"), "starting deadline"),
    (lambda m: spec_of(m).update(schedule="0 2 * *"), "schedule"),
    (lambda m: spec_of(m).update(schedule="TZ=Asia/Tokyo 0 2 * *"), "schedule"),
    (lambda m: spec_of(m).update(suspend=True), "suspended"),
    (lambda m: data_of(m).update(CAMPAIN_ID="x"), "unknown setting"),
    (lambda m: data_of(m).pop("CAMPAIGN_ID"), "missing setting"),
    (lambda m: data_of(m).pop("MAIL_URL"), "missing setting"),
    (lambda m: data_of(m).update(DB_DSN="x"), "secret in a variable"),
    (lambda m: data_of(m).update(DEADLINE_S=3000), "not a text"),
    (lambda m: m.settings["metadata"].update(name="settings"), "no such ConfigMap"),
    (lambda m: data_of(m).update(MAIL_RATE_PER_S="0"), "setting MAIL_RATE_PER_S"),
    (lambda m: data_of(m).update(SHUTDOWN_GRACE_S="7"), "setting SHUTDOWN_GRACE_S"),
    (lambda m: data_of(m).update(MAIL_READ_TIMEOUT_S="30"), "setting SHUTDOWN_GRACE_S"),
    (lambda m: data_of(m).update(LEASE_S="8"), "setting LEASE_S"),
    (lambda m: m.pod.update(terminationGracePeriodSeconds=20), "grace"),
    (lambda m: data_of(m).update(SHUTDOWN_GRACE_S="30"), "grace"),
    (lambda m: m.once.update(activeDeadlineSeconds=3030), "deadline"),
    (lambda m: m.once.pop("activeDeadlineSeconds"), "deadline"),
    (lambda m: data_of(m).update(DEADLINE_S="4200"), "deadline"),
    (lambda m: m.once.update(ttlSecondsAfterFinished=60), "gone before anyone looked"),
    (lambda m: m.pod.update(restartPolicy="OnFailure"), "restart policy"),
    (lambda m: rules_of(m)[0].update(action="Fail"), "action"),
    (lambda m: rules_of(m)[0].update(action="Ignore"), "exit codes"),
    (lambda m: rules_of(m)[0]["onExitCodes"].update(values=[1, 2, 78]), "exit codes"),
    (lambda m: rules_of(m)[0]["onExitCodes"].update(operator="NotIn"), "exit codes"),
    (lambda m: rules_of(m).pop(0), "exit codes"),
    (lambda m: rules_of(m).reverse(), "order"),
    (lambda m: m.container.update(name="main"), "container name"),
    (lambda m: rules_of(m).pop(1), "disruption"),
    (lambda m: rules_of(m)[1].update(action="FailJob"), "disruption"),
    (lambda m: rules_of(m)[1]["onPodConditions"][0].update(status="False"), "disruption"),
    (lambda m: m.once.update(backoffLimit=0), "backoff limit"),
    (lambda m: m.once.pop("backoffLimit"), "backoff limit"),
    (lambda m: m.once.update(podReplacementPolicy="TerminatingOrFailed"), "replacement"),
    (lambda m: m.once.update(parallelism=2), "completions"),
    (lambda m: m.once.update(parallelism=2, completions=2), "completions"),
    (lambda m: m.pod["securityContext"].pop("runAsNonRoot"), "root"),
    (lambda m: m.pod["securityContext"].update(runAsUser=0), "root"),
    (lambda m: m.pod["securityContext"].pop("seccompProfile"), "seccomp"),
    (lambda m: m.pod.pop("automountServiceAccountToken"), "token"),
    (lambda m: safety(m).pop("allowPrivilegeEscalation"), "escalation"),
    (lambda m: safety(m)["capabilities"].update(add=["NET_ADMIN"]), "capabilities"),
    (lambda m: safety(m)["capabilities"].update(drop=["NET_RAW"]), "capabilities"),
    (lambda m: safety(m).pop("readOnlyRootFilesystem"), "file system"),
    (lambda m: m.pod.pop("enableServiceLinks"), "service links"),
    (lambda m: m.container["resources"]["limits"].update(memory="128Mi"), "memory"),
    (lambda m: m.container["resources"]["limits"].update(cpu="250m"), "cpu limit"),
    (lambda m: m.container["resources"]["requests"].pop("cpu"), "requests"),
    (lambda m: data_of(m).pop("SEND_CONCURRENCY"), "connections"),
    (lambda m: m.pod["volumes"].pop(), "secret not mounted"),
    (lambda m: m.container["volumeMounts"][0].update(mountPath="/secrets"), "secret not mounted"),
    (lambda m: m.container["volumeMounts"][0].update(readOnly=False), "secret not mounted"),
    (lambda m: own_env(m)[0].update(value="/etc/dsn"), "secret not mounted"),
    (lambda m: m.pod["volumes"][0]["secret"].pop("defaultMode"), "secret for everyone"),
    (lambda m: m.pod["volumes"][0]["secret"].update(defaultMode=0o400), "secret not readable"),
    (lambda m: m.pod["securityContext"].pop("fsGroup"), "secret not readable"),
    (lambda m: m.once["template"]["metadata"].update(labels={"app": "sender"}), "selector"),
    (lambda m: m.network["spec"].update(policyTypes=["Egress"]), "open to others"),
    (lambda m: m.network["spec"].update(ingress=[{}]), "open to others"),
    (lambda m: egress(m)[1].pop("to"), "everywhere"),
    (lambda m: egress(m)[2].pop("ports"), "everywhere"),
    (lambda m: egress(m).pop(0), "no names"),
    (lambda m: egress(m).pop(1), "not reachable"),
    (lambda m: data_of(m).update(MAIL_URL="https://mail.invalid:8443/"), "not reachable"),
    (lambda m: egress(m)[2]["ports"].append({"protocol": "TCP", "port": 80}), "more than needed"),
]


@pytest.mark.parametrize(("damage", "told"), DAMAGES, ids=[told for _, told in DAMAGES])
def test_each_rule_bites(damage: Damage, told: str) -> None:
    found = manifests_of(copy.deepcopy(render(BASE)))
    damage(found)
    assert told in set(wrong(found))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("namePrefix: my-\nresources: []", "namePrefix"),
        ("resources: []\npatches: [{patch: '{kind: Job, metadata: {name: x}}'}]", "there are 0"),
    ],
)
def test_a_kustomization_that_is_not_understood_is_refused(
    tmp_path: Path, text: str, told: str
) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(NotRenderable, match=told):
        render(tmp_path)


def test_a_file_that_is_not_listed_is_found(tmp_path: Path) -> None:
    shutil.copytree(BASE, tmp_path / "base")
    (tmp_path / "base" / "job.yaml").touch()
    assert unlisted(tmp_path / "base") == {"job.yaml"}


# --- What the numbers are -------------------------------------------------------------------------


def test_the_nightly_run_is_the_one_that_was_asked_for() -> None:
    found = manifests_of(render(BASE))
    spec, once, loaded = spec_of(found), found.once, found.loaded()
    assert (spec["schedule"], spec["timeZone"]) == ("0 2 * * *", "Asia/Tokyo")
    assert (spec["concurrencyPolicy"], spec["startingDeadlineSeconds"]) == ("Forbid", 1800)
    assert (spec["successfulJobsHistoryLimit"], spec["failedJobsHistoryLimit"]) == (3, 5)
    assert (once["backoffLimit"], once["activeDeadlineSeconds"]) == (2, 4200)
    assert once["ttlSecondsAfterFinished"] == 604_800
    assert (loaded.deadline_s, loaded.mail_rate_per_s, loaded.unknown) == (3000, 500, ())


def test_several_pods_share_one_account_and_so_one_rate() -> None:
    one, several = manifests_of(render(BASE)), manifests_of(render(PARALLEL))
    assert several.once["parallelism"] > 1
    assert one.loaded().mail_account == several.loaded().mail_account
    assert one.loaded().mail_rate_per_s == several.loaded().mail_rate_per_s


def test_secrets_are_read_where_they_are_mounted(tmp_path: Path) -> None:
    env = manifests_of(render(BASE)).env
    for name in [name for name in env if name.endswith("_FILE")]:
        path = tmp_path / Path(env[name]).name
        path.write_text("host=h\n")
        env[name] = str(path)
    loaded = RunSettings.load(env)
    assert loaded.mail_api_key is not None
    assert (loaded.mail_api_key.get_secret_value(), loaded.unknown) == ("host=h", ())


def test_the_image_is_of_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert manifests_of(render(BASE)).container["image"] == f"sender:{version}"
