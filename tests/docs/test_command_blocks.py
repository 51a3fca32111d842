"""How command blocks are read from a page."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.command_blocks import Block, Command, code_blocks, shows

PAGE = """# Title

Text:

    make demo     # shows it
    make test

- an item
    that goes on, and is no code

```sh
export A=$PWD   # "quoted # or not"

curl http://x -H 'a: b' \\
  -d '{"a": "# no comment"}'
```

```console
$ coatcheck plan x
first
...
last
```
"""


def test_blocks_in_order() -> None:
    """Indented and fenced blocks are found, and nothing else."""
    assert [block.language for block in code_blocks(PAGE)] == ["", "sh", "console"]


def test_a_python_block_is_one_command() -> None:
    """Its lines reach Python as they are, quotes and comments among them."""
    (command,) = Block("python", "x = 'a'  # no comment of the shell's\nprint(x)\n").commands()
    # As in an activated virtual environment: a machine need not have a command `python`.
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-c", command.text], capture_output=True, text=True, env=environment)
    assert done.stdout == "a\n"


def test_commands_of_blocks() -> None:
    """A command is a line without its comment, with the lines that a backslash continues; a console's has an output."""
    made = [command for block in code_blocks(PAGE) for command in block.commands()]
    curl = "curl http://x -H 'a: b' \\\n  -d '{\"a\": \"# no comment\"}'"
    assert made == [
        Command("make demo"),
        Command("make test"),
        Command("export A=$PWD"),
        Command(curl),
        Command("coatcheck plan x", ("first", "...", "last")),
    ]
    with pytest.raises(ValueError, match="begin it with"):
        Block("console", "output\n").commands()


@pytest.mark.parametrize(
    ("output", "printed", "same"),
    [
        (("a", "b"), "a\nb\n", True),
        (("a", "b"), "a  \nb", True),
        (("a", "b"), "a\nc\nb\n", False),
        (("a", "...", "b"), "a\nc\nb\n", True),
        (("a", "...", "b"), "b\na\n", False),
        (("a", "..."), "a\nc\n", True),
        (("a",), "a\nc\n", False),
        (("b", "..."), "a\nb\n", False),
    ],
)
def test_output_is_compared_line_by_line(output: tuple[str, ...], printed: str, same: bool) -> None:
    """`...` stands for any number of lines; other lines must be equal except for trailing blanks."""
    assert shows(output, printed) is same
