"""The commands that README.md and RUNBOOK.md tell people to type."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", "RUNBOOK.md")

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Command:
    """A line after a `$` in a fenced block.

    Attributes:
        line: as it is typed.
        words: as the shell splits it, without `uv run` in front and comments behind.
    """

    document: str
    line: str
    words: tuple[str, ...]

    @property
    def program(self) -> str:
        return self.words[0]

    def __str__(self) -> str:
        return f"{self.document}: {self.line}"


def blocks(document: str, language: str) -> Iterator[str]:
    """Fenced blocks of a language."""
    for found, text in _FENCE.findall((ROOT / document).read_text()):
        if found == language:
            yield text


def commands(document: str) -> Iterator[Command]:
    """Every command, in the document's order."""
    for block in blocks(document, "console"):
        for line in block.splitlines():
            if line.startswith("$ "):
                words = shlex.split(line[2:], comments=True)
                own = words[2:] if words[:2] == ["uv", "run"] else words
                yield Command(document, line[2:], tuple(own))


def all_commands(*programs: str) -> list[Command]:
    """The commands of all documents that begin with one of these programs."""
    found = [command for document in DOCUMENTS for command in commands(document)]
    return [command for command in found if command.program in programs]
