"""README.md and RUNBOOK.md: their commands run, or fit the manifests; every end is explained.

`sender` and `psql` run in the order of the document against a campaign with a bit of everything;
what README.md says under `test_first_run.SECTION` runs there, as it is written.
"""

import asyncio
import json
import os
import re
import select
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from conftest import add_targets, as_role
from documents import DOCUMENTS, ROOT, Command, all_commands, commands
from kustomize import NAME, Manifest, of_kind, render
from manifest_rules import manifests_of, wrong
from psycopg import AsyncConnection
from test_first_run import SECTION, overlay

from sender import exit_code
from sender.dev.fake_provider import start_process, stop_process
from sender.dev.postgres import EmbeddedPostgres
from sender.domain import Counts
from sender.errors import ConfigurationError
from sender.pipeline import StopReason
from sender.settings import all_names

pytestmark = pytest.mark.slow

BASE = ROOT / "k8s" / "base"
# What else people are told to type: run by others, or by nobody but a person.
BY_OTHERS = {"pip", "pytest", "export", "kubectl", "docker", "python", "git", "uv"}
BY_OTHERS |= {".ci/run", ".ci/release.py"}
SERVERS = {"fake-provider"}
TRIED = {"sender", "psql", "curl"}


# --- What can run ---------------------------------------------------------------------------------


@pytest.fixture
def mail_url() -> Iterator[str]:
    process, url = start_process()
    yield url
    stop_process(process)


@pytest.fixture
async def ready(
    dsn: str, mail_url: str, postgres: EmbeddedPostgres, tmp_path: Path
) -> dict[str, str]:
    """An environment in which the documents' commands have something to work on."""
    await add_targets(dsn, "spring", 20)
    programs = (Path(sys.executable).parent, postgres.bin_dir)
    path = os.pathsep.join([*map(str, programs), os.environ["PATH"]])
    return {
        "PATH": path,
        "HOME": str(tmp_path),
        "USER": "oncall",
        "DB_DSN": dsn,
        "CAMPAIGN_ID": "spring",
        "MAIL_URL": mail_url,
    }


def run(command: Command, env: dict[str, str], cwd: Path) -> None:
    line = command.line.removeprefix("uv run ")
    line = line.replace("http://127.0.0.1:8025/", env["MAIL_URL"].removesuffix("mail"))
    if command.words[:2] == ("sender", "demo"):
        line = f"sender demo --targets 60 {' '.join(command.words[4:])}"  # the same, shorter
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", line],
        cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
    assert "warning:" not in ran.stderr, ran.stderr


async def after_a_bad_night(dsn: str) -> None:
    """Rows that failed, and rows in doubt."""
    key = {"state": "in_doubt", "reason": "key_too_old", "key_used_at": "2026-01-01"}
    await add_targets(dsn, "spring", 2, first=4711, **key)
    await add_targets(dsn, "spring", 1, first=30, state="failed", reason="http_422")


@pytest.mark.parametrize("document", DOCUMENTS)
async def test_commands_run(document: str, ready: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "sql").symlink_to(ROOT / "sql")
    if document == "RUNBOOK.md":
        await after_a_bad_night(ready["DB_DSN"])
    tried = 0
    for command in commands(document):
        if command.section == SECTION or SERVERS & set(command.words[1:2]):
            continue
        if command.program in TRIED:
            await asyncio.to_thread(run, command, ready, tmp_path)
            tried += 1
    assert tried >= 6


@pytest.mark.parametrize(
    "command", [c for c in all_commands("sender") if SERVERS & set(c.words[1:2])], ids=str
)
def test_servers_begin_to_serve(command: Command) -> None:
    words = [re.sub(r"^8025$", "0", word) for word in command.words[1:] if word != "&"]
    process = subprocess.Popen([sys.executable, "-m", "sender", *words], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 30)[0]
        assert process.stdout.readline()
    finally:
        stop_process(process)
        process.stdout.close()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_there_is_nothing_to_type_that_no_test_looks_at(document: str) -> None:
    seen = {command.program for command in commands(document) if command.section != SECTION}
    assert seen <= TRIED | BY_OTHERS


@pytest.mark.parametrize("command", all_commands("export"), ids=str)
def test_what_is_exported_is_a_setting(command: Command) -> None:
    names = {word.partition("=")[0].removesuffix("_FILE") for word in command.words[1:]}
    assert names <= {*all_names(), "PGHOST", "PGUSER"}


def inline_pytest() -> list[str]:
    """The files of tests that documents name in the middle of a text, and what of them to run."""
    texts = [(ROOT / document).read_text() for document in DOCUMENTS]
    found = {words for text in texts for words in re.findall(r"uv run pytest (tests/[^`]+)`", text)}
    return sorted(found)


@pytest.mark.parametrize("words", inline_pytest())
def test_tests_that_are_named_are_there(words: str) -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0"]
    ran = subprocess.run(
        [*command, *shlex.split(words)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stdout[-2000:]


# --- What is typed at a cluster -------------------------------------------------------------------

FLAGS = {
    "apply": {"-k"},
    "create": {"--from", "--from-file"},
    "delete": {"-l", "--grace-period", "--force"},
    "describe": {"-l"},
    "get": {"-l"},
    "logs": {"-l", "--tail"},
    "patch": {"-p"},
}
WITH_VALUE = {"-k", "-l", "-p"}
KINDS = {"cronjob", "job", "jobs", "pod", "secret"}
JOB_NAME = "batch.kubernetes.io/job-name"


def parsed(words: tuple[str, ...]) -> tuple[list[str], list[tuple[str, str]]]:
    """Plain words and flags with their values."""
    plain: list[str] = []
    flags: list[tuple[str, str]] = []
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            plain.append(word)
        elif word in WITH_VALUE:
            flags.append((word, next(rest)))
        else:
            name, _, value = word.partition("=")
            flags.append((name, value))
    return plain, flags


def patched(cronjob: Manifest, patch: str) -> Manifest:
    cronjob["spec"].update(json.loads(patch)["spec"])
    return cronjob


def check_flag(flag: str, value: str, made: set[str], keys: list[str]) -> None:
    found = manifests_of(render(BASE))
    match flag:
        case "-k":
            assert (ROOT / value / NAME).exists() or overlay().name.startswith(f"{value}/")
        case "-l":
            name, _, text = value.partition("=")
            labels = found.once["template"]["metadata"]["labels"]
            assert text in made if name == JOB_NAME else labels[name] == text
        case "-p":
            kubernetes_validate.validate(patched(found.cronjob, value), "1.30", strict=True)
            assert set(wrong(found)) <= {"suspended"}
        case "--from":
            assert value == f"cronjob/{found.cronjob['metadata']['name']}"
        case "--from-file":
            keys.append(value)
        case _:
            assert flag in {"--tail", "--grace-period", "--force"}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_kubectl_names_what_there_is(document: str) -> None:
    found = manifests_of(render(BASE))
    made: set[str] = set()
    for command in [c for c in commands(document) if c.program == "kubectl"]:
        (verb, *objects), flags = parsed(command.words[1:])
        assert {flag for flag, _ in flags} <= FLAGS[verb], command
        keys: list[str] = []
        if objects:
            kind, _, name = objects[0].partition("/")
            assert kind in KINDS, command
            assert name in ("", found.cronjob["metadata"]["name"]), command
            made |= {objects[1]} if (verb, kind) == ("create", "job") else set()
        for flag, value in flags:
            check_flag(flag, value, made, keys)
        if objects[:1] == ["secret"]:
            (volume,) = found.pod["volumes"]
            assert volume["secret"]["secretName"] == objects[-1]
            assert set(keys) == {Path(v).name for n, v in found.env.items() if n.endswith("_FILE")}


@pytest.mark.parametrize("command", all_commands("docker"), ids=str)
def test_an_image_is_built_as_the_manifests_name_it(command: Command) -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    for name in re.findall(r"--build-arg (\w+)=", command.line):
        assert re.search(rf"^ARG {name}\b", dockerfile, re.MULTILINE)
    tag = command.words[command.words.index("--tag") + 1]
    assert tag == manifests_of(render(BASE)).container["image"]


def test_the_overlay_shown_is_right(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    shown = overlay()
    place = shown.put_into(tmp_path)
    rendered = render(place.parent)
    assert list(wrong(manifests_of(rendered))) == []
    image = yaml.safe_load(shown.text)["images"][0]
    assert manifests_of(rendered).container["image"] == f"{image['newName']}:{image['newTag']}"
    assert of_kind(rendered, "ConfigMap")["data"]["CAMPAIGN_ID"] == "spring"


# --- Every end is explained -----------------------------------------------------------------------


@pytest.mark.parametrize("reason", StopReason, ids=lambda reason: reason.name)
def test_each_reason_to_end_is_in_the_runbook_with_its_code(reason: StopReason) -> None:
    done = reason is StopReason.DONE
    counts = Counts(sent=1, failed=0, in_doubt=0, skipped=0, pending=0 if done else 1, sending=0)
    code, _ = exit_code.decide(reason, counts, 0.01)
    assert f"| {reason.value} | {code} |" in (ROOT / "RUNBOOK.md").read_text()


@pytest.mark.parametrize("code", [0, 1, 2, ConfigurationError.exit_code, 137, 143])
def test_each_exit_code_is_in_the_runbook(code: int) -> None:
    assert f"\n| {code} | " in (ROOT / "RUNBOOK.md").read_text()


@pytest.mark.parametrize(
    "text",
    [
        "is at schema",
        "lacks rights",
        "missing in the database, though migrated once",
        "exists and is not of this program",
        "has no rows",
    ],
)
def test_what_is_told_of_78_is_what_the_program_says(text: str) -> None:
    assert text in (ROOT / "RUNBOOK.md").read_text()
    assert any(text in file.read_text() for file in (ROOT / "sender").glob("*.py"))


@pytest.mark.parametrize(
    "text",
    [
        "could not be reached within",
        "is locked by",
        "a signal asked to stop, and it could not be done in time: ended by force",
        "an error of the sender's own, told on standard error",
    ],
)
def test_the_other_reasons_to_end_with_1_are_what_the_program_says(text: str) -> None:
    assert re.search(rf"^\| .*{re.escape(text)}.* \| 1 \|", (ROOT / "RUNBOOK.md").read_text(), re.M)
    assert any(text in file.read_text() for file in (ROOT / "sender").glob("*.py"))


async def test_whoever_is_called_has_the_rights_of_the_sender(
    dsn: str, ready: dict[str, str]
) -> None:
    grant = re.search(r"`(GRANT sender TO oncall)`", (ROOT / "RUNBOOK.md").read_text())
    assert grant
    async with await AsyncConnection.connect(dsn, autocommit=True) as admin:
        await admin.execute("CREATE ROLE oncall LOGIN")
        try:
            await admin.execute(grant[1].encode())
            env = {**ready, "DB_DSN": as_role(dsn, "oncall")}
            for words in ("check", "pause --by me --why so", "resume --by me --why so", "failures"):
                command = [sys.executable, "-m", "sender", *words.split()]
                ran = await asyncio.to_thread(subprocess.run, command, env=env, timeout=60)
                assert ran.returncode == 0, words
        finally:
            await admin.execute("DROP ROLE oncall")
