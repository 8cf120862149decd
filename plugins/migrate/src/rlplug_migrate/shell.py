"""Arguments of a program in a shell script, which is read and not run.

Assignments outside of ``if``, ``case`` and loops are followed: ``NAME=value``, ``NAME=${OTHER:-value}``,
``NAME=$((2 * 1024))`` and arrays. Words that need anything else, such as what a branch assigns or ``$(date)``, keep a
note of it.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

KEPT: Final = ("HOME", "USER")
"""Variables that our configurations read from the environment, as the script would."""

_ASSIGNMENT: Final = re.compile(
    r"\s*(?:export\s+|readonly\s+|declare\s+(?:-\w+\s+)?)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL
)
_OPENS: Final = re.compile(r"^\s*(?:if|case|for|while|until|function)\b|^\s*[\w-]+\s*\(\)\s*\{|^\s*\{\s*$")
_CLOSES: Final = re.compile(r"(?:^|;)\s*(?:fi|esac|done|\})\s*(?:;|$|\|)")
_NAME: Final = re.compile(r"[A-Za-z_]\w*")
_OPERATIONS: Final[Mapping[type, Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
}


@dataclass(frozen=True)
class Word:
    """A word of a command: its text, and what in it is not known, or an empty text."""

    text: str
    unknown: str = ""


@dataclass
class _Shell:
    variables: dict[str, Word] = field(default_factory=dict)
    arrays: dict[str, list[Word]] = field(default_factory=dict)
    in_branches: set[str] = field(default_factory=set)
    """Variables that a branch or loop assigns."""
    doubts: dict[str, str] = field(default_factory=dict)
    """What a branch may have changed, by variable that was used."""


def arguments_of(script: str, program: str) -> tuple[list[Word], dict[str, str]] | None:
    """Return the words behind the first command whose text has the pattern ``program``, or ``None`` without one.

    With them comes, by variable, what a branch of the script may change.
    """
    shell, depth = _Shell(), 0
    for line in _statements(script):
        if re.search(program, line) and not _ASSIGNMENT.fullmatch(line):
            return list(_words(re.split(program, line, maxsplit=1)[-1], shell)), shell.doubts
        opens = _OPENS.search(line) is not None
        depth += opens
        if (found := _ASSIGNMENT.fullmatch(line)) is not None:
            if depth:
                shell.in_branches.add(found[1])
            else:
                _assign(shell, found[1], bool(found[2]), found[3])
        depth = max(0, depth - (_CLOSES.search(line) is not None))
    return None


def _statements(script: str) -> Iterator[str]:
    """Yield the script's lines, those that go on in the next one as one, without comments; an array is one."""
    open_array = ""
    for line in re.sub(r"\\\r?\n", " ", script).splitlines():
        plain = re.sub(r"(^|\s)#.*$", "", line)
        if open_array:
            open_array += f"\n{plain}"
        elif re.match(r"\s*\w+\+?=\(", plain):
            open_array = plain
        else:
            yield plain
            continue
        if open_array.count("(") == open_array.count(")"):
            yield open_array
            open_array = ""


def _assign(shell: _Shell, name: str, appends: bool, text: str) -> None:
    if text.startswith("("):
        words = list(_words(text.strip()[1:-1], shell))
        shell.arrays[name] = [*shell.arrays.get(name, ()), *words] if appends else words
    else:
        words = list(_words(text, shell))
        before = shell.variables.get(name, Word("")).text if appends else ""
        first = words[0] if words else Word("")
        shell.variables[name] = Word(before + first.text, first.unknown)


# ---- words ----------------------------------------------------------------------------------------------------------


def _words(text: str, shell: _Shell) -> Iterator[Word]:
    """Yield the words of a command up to its end, with quotes and variables replaced as a shell does."""
    parts: list[str] = []
    unknown: list[str] = []
    quote, begun, is_array, i = "", False, False, 0
    while i < len(text):
        char = text[i]
        if quote == "'" and char != "'":
            parts.append(char)
        elif char in "'\"" and quote in ("", char):
            quote, begun = ("" if quote else char), True
        elif char == "\\" and i + 1 < len(text):
            parts.append(text[i + 1])
            i += 1
        elif char == "$":
            expression, i = _expression(text, i)
            if (array := re.fullmatch(r"\{(\w+)\[[@*]\]\}|[@*]", expression)) is not None:
                name = array[1] or ""
                yield from shell.arrays.get(name, ())
                if name in shell.in_branches:
                    shell.doubts[f"${name}"] = "a branch of the script may add to it; what it adds is left out"
                is_array = True
            else:
                value, problem = _expand(expression, shell)
                parts.append(value)
                unknown += [problem] if problem else []
                begun = begun or bool(value) or bool(problem)
            continue
        elif char.isspace() and not quote:
            if parts or (begun and not is_array):
                yield Word("".join(parts), "; ".join(unknown))
            parts, unknown, begun, is_array = [], [], False, False
        elif not quote and (char in "|;&" or re.match(r"\d?[<>]", text[i:])) and not parts:
            return
        else:
            parts.append(char)
        i += 1
    if parts or (begun and not is_array):
        yield Word("".join(parts), "; ".join(unknown))


def _expression(text: str, start: int) -> tuple[str, int]:
    """Return the expression behind the ``$`` at ``start``, and where the text goes on."""
    opening = text[start + 1 : start + 2]
    if opening in ("{", "("):
        closing, depth = {"{": "}", "(": ")"}[opening], 0
        for end in range(start + 1, len(text)):
            depth += (text[end] == opening) - (text[end] == closing)
            if not depth:
                return text[start + 1 : end + 1], end + 1
        return text[start + 1 :], len(text)
    found = _NAME.match(text, start + 1)
    end = found.end() if found else start + 2
    return text[start + 1 : end], end


def _expand(expression: str, shell: _Shell) -> tuple[str, str]:
    """Return what an expression becomes, and what of it is not known, or an empty text."""
    if expression.startswith("(("):
        return _arithmetic(expression[2:-2], shell)
    if expression.startswith("("):
        return f"${expression}", f"${expression} is what a program prints"
    name, default = expression, None
    if expression.startswith("{"):
        found = re.fullmatch(r"\{([A-Za-z_]\w*)(?::?-(.*))?\}", expression, re.DOTALL)
        if found is None:
            return f"${expression}", f"${expression} is more than a variable with a default"
        name, default = found[1], found[2]
    known = shell.variables.get(name)
    if known is not None and (known.text or known.unknown):
        if name in shell.in_branches:
            shell.doubts[f"${name}"] = f"a branch of the script may set it; taken as {known.text}"
        return known.text, known.unknown
    if name in shell.in_branches:
        return f"${{{name}}}", f"${name} is assigned in a branch of the script"
    if default is not None:
        words = list(_words(default, shell))
        return " ".join(word.text for word in words), "; ".join(word.unknown for word in words if word.unknown)
    if known is not None:
        return "", ""
    return f"${{{name}}}", "" if name in KEPT else f"the script does not set ${name}"


def _arithmetic(text: str, shell: _Shell) -> tuple[str, str]:
    """Return the whole number that ``$((text))`` is."""
    plain = text.replace("$", "").replace("{", "").replace("}", "")
    try:
        return str(_number(ast.parse(plain.strip(), mode="eval").body, shell)), ""
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError):
        return f"$(({text}))", f"$(({text})) cannot be computed from the script"


def _number(node: ast.expr, shell: _Shell) -> int:
    if isinstance(node, ast.Constant):
        return int(node.value)  # type: ignore[arg-type]  # a ValueError is handled above
    if isinstance(node, ast.Name):
        return int(shell.variables[node.id].text)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_number(node.left, shell), _number(node.right, shell))
    raise ValueError(ast.dump(node))
