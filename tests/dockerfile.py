"""Builds what a Dockerfile says in a plain folder: its own steps, without an engine.

Each stage begins as an empty root with a Python of its own in place of the base image, and ends as
the folder that later stages copy from. Knows the instructions that ours uses and refuses others.
"""

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_ENDS = {"FROM", "RUN", "COPY", "WORKDIR", "ENV", "ARG", "LABEL", "USER", "ENTRYPOINT", "CMD"}


@dataclass(slots=True)
class Stage:
    """What a stage of the image came to.

    Attributes:
        base: the image it begins with.
        root: its file system, without that of the base.
        env: set by ENV, for the steps and the program.
        command: ENTRYPOINT and CMD.
    """

    base: str
    root: Path
    args: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0"
    entrypoint: list[str] = field(default_factory=list)
    cmd: list[str] = field(default_factory=list)

    @property
    def command(self) -> list[str]:
        return self.entrypoint + self.cmd


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Each instruction and its arguments."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        name, _, rest = line.partition(" ")
        if name not in _ENDS:
            raise NotImplementedError(name)
        yield name, rest.strip()


def allowed(context: Path, path: Path) -> bool:
    """Whether .dockerignore lets a file into the build; the last pattern that fits decides."""
    verdict = True
    name = str(path.relative_to(context))
    parts = [name, *map(str, Path(name).parents)]
    for line in (context / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        anywhere = pattern.removeprefix("**/")
        fits = any(
            fnmatch.fnmatch(part, pattern) or (anywhere != pattern and Path(part).name == anywhere)
            for part in parts
        )
        if line and not line.startswith("#") and fits:
            verdict = line.startswith("!")
    return verdict


class Build:
    """Runs the steps; `root` is the file system of the stage at work, the same path for all."""

    def __init__(self, context: Path, scratch: Path, environ: Mapping[str, str]) -> None:
        self.context = context
        self.root = scratch / "root"
        self._scratch = scratch
        self._environ = environ
        self._stages: dict[str, Stage] = {}

    def run(self) -> Stage:
        """Run all stages; returns the last, still in place."""
        stage = Stage("", self.root)
        name = ""
        for instruction, rest in instructions((self.context / "Dockerfile").read_text()):
            if instruction == "FROM":
                self._put_away(name, stage)
                stage, name = self._begin(rest)
            else:
                self._step(stage, instruction, rest)
        return stage

    def _put_away(self, name: str, stage: Stage) -> None:
        if stage.base:
            stage.root = self._scratch / name
            self.root.rename(stage.root)
            self._stages[name] = stage

    def _begin(self, rest: str) -> tuple[Stage, str]:
        base, _, name = rest.partition(" AS ")
        python = self.root / "usr" / "local"
        subprocess.run([sys.executable, "-m", "venv", python], check=True, timeout=120)
        return Stage(base, self.root), name or "last"

    def _step(self, stage: Stage, instruction: str, rest: str) -> None:
        match instruction:
            case "RUN":
                self._shell(stage, rest)
            case "COPY":
                self._copy(stage, shlex.split(rest))
            case "WORKDIR":
                stage.workdir = rest
                self._inside(rest).mkdir(parents=True, exist_ok=True)
            case "ENV":
                stage.env |= self._assigned(stage, rest)
            case "ARG":
                stage.args |= self._assigned(stage, rest)
            case "LABEL":
                stage.labels |= self._assigned(stage, rest)
            case "USER":
                stage.user = rest
            case "ENTRYPOINT":
                stage.entrypoint = json.loads(rest)
            case _:
                stage.cmd = json.loads(rest)

    def _inside(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def _assigned(self, stage: Stage, rest: str) -> dict[str, str]:
        known = {"PATH": self._path(stage)} | stage.args | stage.env
        pairs = [word.partition("=") for word in shlex.split(rest)]
        return {
            name: re.sub(r"\$(\w+)", lambda found: known[found[1]], value)
            for name, _, value in pairs
        }

    def _path(self, stage: Stage) -> str:
        return stage.env.get(
            "PATH", f"{self.root}/usr/local/bin{os.pathsep}/usr/bin{os.pathsep}/bin"
        )

    def environ(self, stage: Stage) -> dict[str, str]:
        """The environment of a step or of the program."""
        inside = stage.env.get("PATH", "").replace("/app/", f"{self.root}/app/")
        path = inside or self._path(stage)
        return {**self._environ, **stage.env, "PATH": path, "HOME": str(self._scratch / "home")}

    def _shell(self, stage: Stage, line: str) -> None:
        ran = subprocess.run(
            ["/bin/sh", "-ec", line],
            cwd=self._inside(stage.workdir),
            env=self.environ(stage) | stage.args,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert ran.returncode == 0, f"RUN {line}\n{ran.stdout}\n{ran.stderr}"

    def _copy(self, stage: Stage, words: list[str]) -> None:
        source = None
        if words[0].startswith("--from="):
            source = self._stages[words.pop(0).partition("=")[2]]
        *names, target = words
        to = self._inside(target if target.startswith("/") else f"{stage.workdir}/{target}")
        for name in names:
            origin = source.root / name.lstrip("/") if source else self.context / name
            place = to / origin.name if target.endswith("/") else to
            if origin.is_dir():
                shutil.copytree(
                    origin, place, symlinks=True, ignore=None if source else self._ignored
                )
            else:
                assert source or allowed(self.context, origin), f"{name} is in .dockerignore"
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(origin, place)

    def _ignored(self, folder: str, names: list[str]) -> list[str]:
        return [n for n in names if not allowed(self.context, Path(folder) / n)]
