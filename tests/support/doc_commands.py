"""The shell commands of README and docs, found in the pages themselves."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "docker" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(
    r"`((?:make|python -m|\.venv/bin/\w+|docker compose|flwr|pip|ssh-keygen|\./[\w.-]+\.sh) [^`]+)`"
)


@dataclass(frozen=True)
class Command:
    """A command of a page, and what its block sets up for it."""

    page: str
    text: str
    setup: str = ""

    @property
    def words(self) -> list[str]:
        """The command's words, without leading assignments."""
        words = shlex.split(self.text.replace("$PWD", "/checkout"), comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        return words


def code_blocks(page: str, language: str = "sh") -> list[str]:
    """Return the blocks of code in a page, which is named by its path in the repository."""
    return re.findall(rf"```(?:{language})\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def commands() -> list[Command]:
    """Return every command once, in the order of the pages."""
    found: dict[str, Command] = {}
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        text = page.read_text()
        for language, block in _FENCE.findall(text):
            if language in ("bash", "sh"):
                for command in _of_block(name, block):
                    found.setdefault(command.text, command)
        for inline in _INLINE.findall(_FENCE.sub("", text)):
            found.setdefault(inline, Command(name, inline))
    return list(found.values())


def _of_block(page: str, block: str) -> list[Command]:
    found, setup = [], ""
    for line in re.sub(r"\\\n\s*", "", block).splitlines():
        text = line.split("  #")[0].strip()
        if text.startswith(("export ", "umask ")):  # for all that comes after it in the block
            setup += text.split(" #")[0].strip() + "\n"
        elif text and not text.startswith("#"):
            found.append(Command(page, text, setup))
    return found
