"""The commands that README.md and RUNBOOK.md tell people to type."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", "RUNBOOK.md")

_FENCE = re.compile(r"^## ([^\n]+)$|^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Command:
    """A line after a `$` in a fenced block.

    Attributes:
        section: the heading it stands under.
        line: as it is typed.
        words: as the shell splits it, without `uv run` in front and comments behind.
    """

    document: str
    section: str
    line: str
    words: tuple[str, ...]

    @property
    def program(self) -> str:
        return self.words[0]

    def __str__(self) -> str:
        return f"{self.document}: {self.line}"


def blocks(document: str, language: str) -> Iterator[tuple[str, str]]:
    """Fenced blocks of a language, each with the heading it stands under."""
    section = ""
    for heading, found, text in _FENCE.findall((ROOT / document).read_text()):
        section = heading or section
        if text and found == language:
            yield section, text


def commands(document: str) -> Iterator[Command]:
    """Every command, in the document's order."""
    for section, block in blocks(document, "console"):
        for line in block.splitlines():
            if line.startswith("$ "):
                words = shlex.split(line[2:], comments=True)
                own = words[2:] if words[:2] == ["uv", "run"] else words
                yield Command(document, section, line[2:], tuple(own))


def all_commands(*programs: str) -> list[Command]:
    """The commands of all documents that begin with one of these programs."""
    found = [command for document in DOCUMENTS for command in commands(document)]
    return [command for command in found if command.program in programs]
