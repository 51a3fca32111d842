"""The command blocks of a Markdown page, as a reader would type them.

They are fenced (```sh, ```console, ```python) or indented. This module does not know what runs them.
"""

import re
import shlex
from dataclasses import dataclass

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:(?<=\n\n)|\A)((?: {4}.*\n|\n(?= {4}))+)")


@dataclass(frozen=True)
class Command:
    """`text`: what is typed, over several lines where a line ends with a backslash. `output`: the lines that a console
    block shows below the command, where `...` stands for any lines; None in other blocks."""

    text: str
    output: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Block:
    """`language` is "" for an indented block."""

    language: str
    text: str

    def commands(self) -> list[Command]:
        """A python block is one command. Raises ValueError for a console block that does not begin with `$ `."""
        if self.language == "console":
            return _console(self.text)
        if self.language == "python":
            return [Command(f"python -c {shlex.quote(self.text)}")]
        joined = self.text.replace("\\\n", "\0")
        lines = [line.replace("\0", "\\\n") for line in joined.splitlines()]
        return [Command(_without_comment(line)) for line in lines if _without_comment(line)]


def code_blocks(page: str) -> list[Block]:
    """All of a page's, in order."""
    found = [(match.start(), Block(match[1], match[2])) for match in _FENCE.finditer(page)]
    outside = _FENCE.sub(lambda match: re.sub(r"[^\n]", "x", match[0]), page)  # of the same length
    found += [
        (match.start(), Block("", "".join(line[4:] or "\n" for line in match[1].splitlines(keepends=True))))
        for match in _INDENTED.finditer(outside)
    ]
    return [block for _, block in sorted(found, key=lambda pair: pair[0])]


def _without_comment(line: str) -> str:
    """Comments stand behind a space and outside of quotes."""
    quote = ""
    for at, letter in enumerate(line):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter == "#" and (at == 0 or line[at - 1].isspace()):
            return line[:at].strip()
    return line.strip()


def _console(text: str) -> list[Command]:
    commands: list[Command] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            commands.append(Command(line[2:], ()))
        elif commands:
            last = commands[-1]
            commands[-1] = Command(last.text, (*(last.output or ()), line.rstrip()))
        else:
            raise ValueError(f"a console block begins with {line!r}; begin it with `$ ` and a command")
    return commands


def shows(output: tuple[str, ...], printed: str) -> bool:
    """Whether `printed` has these lines, each `...` being any number of lines."""
    parts = "\n".join(output).split("\n...\n") if output else []
    text = "\n".join(line.rstrip() for line in printed.splitlines()) + "\n"
    at = 0
    for number, part in enumerate(parts):
        wanted = part.removesuffix("\n...")
        found = text.find(wanted, at)
        if found < 0 or (number == 0 and found != 0):
            return False
        at = found + len(wanted)
    return output[-1:] == ("...",) or not text[at:].strip()
