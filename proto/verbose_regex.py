"""remove_layout(): a regular expression with the flag x, as one without the flag.

With the flag x ("verbose"), white space and comments in a pattern are layout. llguidance writes a line break of a
pattern as an escape, which is no layout but a character to match. And where a pattern is put in parentheses, a comment
at its end would swallow the last one.
"""

import re
from typing import Final

_MAY_BE_VERBOSE: Final = re.compile(r"\(\?[A-Za-z]*x")
_PART: Final = re.compile(
    r"""(?P<escape>\\.)
    |(?P<flags>\(\?(?P<on>[a-zA-Z]*)(?P<off>-[a-zA-Z]+)?(?P<end>[:)]))
    |(?P<comment>\#[^\n]*)
    |(?P<space>\s+)
    |(?P<other>.)""",
    re.DOTALL | re.VERBOSE,
)


def remove_layout(pattern: str) -> str:
    """A pattern in the syntax of Rust's regex crate that matches the same texts and has no flag x. A pattern without
    the flag is returned as it is."""
    if _MAY_BE_VERBOSE.search(pattern) is None:
        return pattern
    made: list[str] = []
    is_verbose = False
    outside: list[bool] = []  # `is_verbose` outside of each open group
    class_depth = 0
    first_in_class = False  # a closing bracket here is a member of the class
    for part in _PART.finditer(pattern):
        kind, text = part.lastgroup, part[0]
        if part["flags"] is not None and not class_depth:
            if part["end"] == ":":
                outside.append(is_verbose)
            is_verbose = "x" in part["on"] or (is_verbose and "x" not in (part["off"] or ""))
            on, off = part["on"].replace("x", ""), (part["off"] or "").replace("x", "").removesuffix("-")
            made.append(f"(?{on}{off}{part['end']}" if on or off or part["end"] == ":" else "")
        elif is_verbose and kind in ("comment", "space"):
            continue  # layout, also in a class
        else:
            made.append(text)
            was_first, first_in_class = first_in_class, False
            if kind != "other":
                continue
            if text == "[":
                class_depth += 1
                first_in_class = True
            elif class_depth:
                if text == "]" and not was_first:
                    class_depth -= 1
                first_in_class = text == "^" and was_first
            elif text == "(":
                outside.append(is_verbose)
            elif text == ")" and outside:
                is_verbose = outside.pop()
    return "".join(made)
