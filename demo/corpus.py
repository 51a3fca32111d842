"""The text that the demo model learns from: Python's own standard library, as plain text and as conversations.

Chooses the files of this interpreter's library, holds some of them out, and turns functions and docstrings into
questions with answers.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib
import inspect
import random
import re
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HELD_OUT_PERCENT = 3
HELD_OUT_BYTES = 200_000
HELD_OUT_CHARACTERS_PER_FILE = 16_000
LONGEST_SOURCE = 2_500  # characters of a function that is worth asking for
LONGEST_PROSE = 1_200
SYSTEM = "You answer from the Python standard library."

# Tests would crowd the library out (20 MB against 11), code-page tables teach nothing, and the build's own record
# (_sysconfigdata) holds the paths of the machine that built it.
LEFT_OUT = re.compile(
    r"(^|/)(site-packages|test|tests|idle_test|__pycache__|config-[^/]*)/"
    r"|^encodings/(cp|iso|mac|koi|kz|ptcp|hp_|big5|gb|euc|shift|johab|hz|tis)|^_sysconfigdata|^pydoc_data/"
)

Message = dict[str, str]


class Corpus(NamedTuple):
    """`texts` and `chats` are for training; `held_out` is one text that no training document was cut from."""

    texts: list[str]
    chats: list[list[Message]]
    held_out: str


def is_held_out(name: str) -> bool:
    """Whether a file is kept from training: by a hash of its name, so that every machine holds out the same files."""
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % 100 < HELD_OUT_PERCENT


def sources() -> Iterator[tuple[str, str]]:
    """Every file of the library that is neither a test nor a table, by its name relative to the library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if LEFT_OUT.search(name):
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            yield name, text


def topics() -> Iterator[tuple[str, str]]:
    """The language reference that `help()` shows: nearly the only long prose in every interpreter."""
    from pydoc_data.topics import topics as pages

    for name, text in sorted(pages.items()):
        yield f"pydoc_data/topics/{name}", text.strip() + "\n"


def _opening(docstring: str, limit: int = LONGEST_PROSE) -> str:
    """As many whole paragraphs of a docstring as fit, and never half of one."""
    kept: list[str] = []
    for paragraph in inspect.cleandoc(docstring).split("\n\n"):
        if kept and sum(map(len, kept)) + len(paragraph) > limit:
            break
        kept.append(paragraph)
    text = "\n\n".join(kept).strip()
    return text if len(text) <= limit else ""


def _first_line(docstring: str) -> str:
    return inspect.cleandoc(docstring).split("\n", 1)[0].strip()


def _turn(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _fenced(source: str) -> str:
    return f"```python\n{source.strip()}\n```"


def _without_docstring(node: ast.FunctionDef, source: str) -> str:
    """The function's source minus its docstring; empty when nothing but the docstring was there."""
    if len(node.body) < 2 or node.body[0].end_lineno is None:
        return ""
    lines = source.split("\n")
    first, last = node.body[0].lineno - node.lineno, node.body[0].end_lineno - node.lineno
    return "\n".join(lines[:first] + lines[last + 1 :]) if first > 0 else ""


def _function_turns(node: ast.FunctionDef, where: str, lines: list[str], draw: random.Random) -> list[Message]:
    docstring = ast.get_docstring(node) or ""
    # Not ast.get_source_segment: it splits the whole file again for every function.
    source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
    line = _first_line(docstring) if docstring else ""
    if not 15 <= len(line) <= 200 or len(source) > LONGEST_SOURCE:
        return []
    prose = _opening(docstring, 500)
    bare = _without_docstring(node, source)
    write = _turn(f"Write a function `{node.name}`: {line}", _fenced(source))
    choices = [write, write]
    if prose:
        choices.append(_turn(f"What does `{where}.{node.name}` do?", prose))
        choices.append(_turn(prose, _fenced(source)))
    if bare and prose:
        choices.append(_turn(f"Write a docstring for this function:\n\n{_fenced(bare)}", prose))
    return draw.choice(choices)


def turns(name: str, file: str) -> Iterator[list[Message]]:
    """Question and answer pairs about one file, in the order of the file. The same file always gives the same."""
    draw = random.Random(name)
    module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    lines = file.split("\n")
    try:
        tree = ast.parse(file)
    except SyntaxError:  # lib2to3 ships files written for Python 2
        return
    if prose := _opening(ast.get_docstring(tree) or ""):
        yield _turn(f"What does the module `{module}` do?", prose)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and (pair := _function_turns(node, module, lines, draw)):
            yield pair
        if not isinstance(node, ast.ClassDef):
            continue
        if prose := _opening(ast.get_docstring(node) or "", 600):
            yield _turn(f"What is the class `{module}.{node.name}` for?", prose)
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and (
                pair := _function_turns(method, f"{module}.{node.name}", lines, draw)
            ):
                yield pair


def built_in_turns() -> Iterator[tuple[str, list[Message]]]:
    """Questions about objects written in C, answered by their docstrings: `len`, `str.split`, `math.sin`."""
    names = sorted({"math", "itertools", "_struct", "_json"} | {n for n in sys.builtin_module_names if n != "__main__"})
    things: list[tuple[str, object]] = [(n, getattr(builtins, n)) for n in sorted(dir(builtins)) if n[0] != "_"]
    for kind in (str, bytes, list, dict, set, int, float, tuple):
        things += [(f"{kind.__name__}.{n}", getattr(kind, n)) for n in sorted(dir(kind)) if n[0] != "_"]
    for name in names:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        things += [(f"{name}.{n}", getattr(module, n)) for n in sorted(dir(module)) if n[0] != "_"]
    for where, thing in things:
        # The hooks in `sys` may be the user's own, which would change the corpus.
        if where.endswith("hook"):
            continue
        # An instance shows its class's docstring; only things that can be called have one of their own.
        if callable(thing) and (prose := _opening(inspect.getdoc(thing) or "", 600)) and len(prose) > 20:
            yield where, _turn(f"What does `{where}` do?", prose)


def _conversations(pairs: list[list[Message]], draw: random.Random) -> Iterator[list[Message]]:
    """Join neighbouring pairs into chats of one to four turns, so that the model learns from second questions."""
    at = 0
    while at < len(pairs):
        count = draw.choice((1, 1, 2, 4))
        chat = [message for pair in pairs[at : at + count] for message in pair]
        yield [{"role": "system", "content": SYSTEM}, *chat] if draw.random() < 0.1 else chat
        at += count


def load() -> Corpus:
    """Read the corpus. The held-out text is the start of each held-out file, in the order of names."""
    draw = random.Random(0)
    texts: list[str] = []
    chats: list[list[Message]] = []
    held_out: list[str] = []
    for name, text in [*sources(), *topics()]:
        if is_held_out(name):
            held_out.append(text[:HELD_OUT_CHARACTERS_PER_FILE])
            continue
        texts.append(text)
        pairs = list(turns(name, text)) if name.endswith(".py") else []
        if name.startswith("pydoc_data") and (prose := _opening(text.split("*\n\n", 1)[-1])):
            pairs.append(_turn(f"What does the language reference say about `{name.rsplit('/', 1)[1]}`?", prose))
        chats += _conversations(pairs, draw)
    chats += _conversations([pair for name, pair in built_in_turns() if not is_held_out(name)], draw)
    kept = "\n\n".join(held_out).encode()[:HELD_OUT_BYTES].decode(errors="ignore")
    return Corpus(texts, chats, kept)
