"""Python source text found on this machine, as training text and as chat conversations.

Only the standard library and installed distributions under permissive licences are read; what a
distribution vendors from elsewhere is left out, since its own licence may differ. The held-out
split is made of whole packages, so that nothing of a held-out package was ever trained on.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import random
import re
import sys
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

PERMISSIVE_IDS = frozenset(
    ("mit", "mit-0", "bsd", "0bsd", "bsd-2-clause", "bsd-3-clause")
    + ("apache-2.0", "psf-2.0", "python-2.0", "isc")
)
PERMISSIVE_NAMES = re.compile(
    r"\b(MIT|BSD|Apache|ISC|PSF|Python Software Foundation)\b", re.IGNORECASE
)
OTHER_NAMES = re.compile(
    r"GPL|GNU|MPL|Mozilla|Propriet|Commercial|NVIDIA|EULA|CeCILL|Public Domain|CMU|HPND|Unlicense",
    re.IGNORECASE,
)
VENDORED = re.compile(r"vendor|third_party|thirdparty|extern", re.IGNORECASE)

HELD_OUT_SHARE = 0.015
HELD_OUT_BYTES = (20_000, 3_000_000)  # a held-out package has a size between these
HELD_OUT_SHARED_LINES = 0.1


@dataclass
class Package:
    """One distribution (or the standard library) and the texts taken from it."""

    name: str
    version: str
    licence: str
    paths: list[Path]
    texts: list[str] = field(default_factory=list)
    held_out: bool = False

    @property
    def size(self) -> int:
        """Characters of text taken."""
        return sum(map(len, self.texts))


def permissive_licence(dist: Distribution) -> str | None:
    """The licence a distribution declares, or None unless every part of it is permissive.

    The SPDX expression decides where there is one, then the classifiers, then the free-text field.
    """
    meta = dist.metadata
    for expression in meta.get_all("License-Expression") or []:
        plain = re.sub(r"\s+WITH\s+\S+", "", expression, flags=re.IGNORECASE)
        alternatives = re.split(r"\s+OR\s+", plain.replace("(", " ").replace(")", " "))
        for alternative in alternatives:
            ids = [part.strip().lower() for part in re.split(r"\s+AND\s+", alternative)]
            if all(part in PERMISSIVE_IDS for part in ids):
                return str(expression)
        return None
    free_text = "".join(meta.get_all("License") or []).strip()
    names = [
        c.split("::")[-1].strip()
        for c in meta.get_all("Classifier") or []
        if c.startswith("License ::") and not c.endswith("OSI Approved")
    ]
    if not names and free_text:
        names = [free_text.splitlines()[0][:100]]
    if any(OTHER_NAMES.search(name) for name in [*names, free_text[:200]]):
        return None
    if names and all(PERMISSIVE_NAMES.search(name) for name in names):
        return ", ".join(names)
    return None


def find_packages() -> list[Package]:
    """Every permissive distribution on this machine and the standard library, in a fixed order."""
    library = Path(os.__file__).parent
    inside = (
        p for p in library.rglob("*.py") if not {"site-packages", "dist-packages"} & set(p.parts)
    )
    version = ".".join(map(str, sys.version_info[:3]))
    found = [Package("python-standard-library", version, "PSF-2.0", sorted(inside))]
    seen: set[str] = set()
    for dist in sorted(distributions(), key=lambda d: str(d.metadata["Name"]).lower()):
        name, licence = str(dist.metadata["Name"]).lower(), permissive_licence(dist)
        if licence is None or name in seen:
            continue
        seen.add(name)
        paths = [Path(str(dist.locate_file(f))) for f in dist.files or [] if f.suffix == ".py"]
        if paths:
            found.append(Package(name, dist.version, licence, sorted(paths)))
    return found


def is_prose_of_code(text: str) -> bool:
    """Whether a file looks written by people: no tables of numbers, no minified or huge lines."""
    if not 200 < len(text) < 200_000:
        return False
    lines = text.count("\n") + 1
    digits = sum(text.count(d) for d in "0123456789")
    return len(text) / lines < 90 and digits / len(text) < 0.12 and "\0" not in text


def read_text(path: Path) -> str | None:
    """A file's text if it is worth training on."""
    if VENDORED.search(str(path.parent)):
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return text if is_prose_of_code(text) else None


def load_packages(files_per_package: int | None, workers: int) -> list[Package]:
    """Read the texts, drop repeated files, mark whole packages as held out.

    Args:
        files_per_package: read no more than this of each; for quick trials.
    """
    packages = find_packages()
    seen: set[bytes] = set()
    with ThreadPoolExecutor(max_workers=workers) as pool:
        for package in packages:
            for text in pool.map(read_text, package.paths[:files_per_package]):
                if text is None:
                    continue
                digest = hashlib.sha1(text.encode()).digest()
                if digest not in seen:
                    seen.add(digest)
                    package.texts.append(text)
    packages = [p for p in packages if p.texts]
    mark_held_out(packages, int(sum(p.size for p in packages) * HELD_OUT_SHARE))
    return packages


def shared_lines(packages: list[Package]) -> dict[str, float]:
    """For each package, the share of its distinct long lines that another package has too."""
    lines = [
        {hash(line) for text in p.texts for line in text.splitlines() if len(line) > 40}
        for p in packages
    ]
    owners = Counter(line for own in lines for line in own)
    return {
        p.name: sum(owners[line] > 1 for line in own) / max(1, len(own))
        for p, own in zip(packages, lines, strict=True)
    }


def mark_held_out(packages: list[Package], wanted: int) -> None:
    """Hold out packages, in the order of a hash of their names, until `wanted` characters are.

    A package that shares much text with another is never held out: some are published under two
    names, and the other copy would be trained on.
    """
    held, shared = 0, shared_lines(packages)
    for package in sorted(packages, key=lambda p: hashlib.md5(p.name.encode()).digest()):
        low, high = HELD_OUT_BYTES
        if shared[package.name] > HELD_OUT_SHARED_LINES or not low <= package.size <= high:
            continue
        if held < wanted:
            package.held_out = True
            held += package.size


def sources(packages: Iterable[Package]) -> list[dict[str, Any]]:
    """What `sources.json` says: name, version, licence, files, bytes, split."""
    return [
        {
            "name": p.name,
            "version": p.version,
            "licence": p.licence,
            "files": len(p.texts),
            "bytes": sum(len(t.encode()) for t in p.texts),
            "split": "held out" if p.held_out else "train",
        }
        for p in packages
    ]


# Conversations. A user asks for a function in words taken from its name or docstring, the assistant
# answers with its source. Small shares carry a system message, a thought before the answer, a tool
# call, or a second turn.

SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You write Python.",
    "Answer with code.",
    "You are a careful programmer. Answer with one function.",
)
ARGUMENT_VALUES: tuple[Any, ...] = (
    0,
    1,
    2,
    3,
    10,
    100,
    True,
    False,
    None,
    "a",
    "x",
    "name",
    "data",
    0.5,
)


@dataclass(frozen=True)
class Function:
    """A function found in a source file."""

    name: str
    arguments: tuple[str, ...]
    summary: str  # first line of the docstring, or ""
    source: str  # dedented, with the docstring


def functions(text: str) -> Iterator[Function]:
    """The functions and methods of a file that are short enough to be an answer."""
    try:
        with warnings.catch_warnings():  # other people's invalid escapes
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = text.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])).strip()
        if not 80 <= len(source) <= 2500 or not source.startswith(("def ", "async def ")):
            continue
        doc = (ast.get_docstring(node) or "").strip().split("\n\n")[0]
        arguments = tuple(a.arg for a in node.args.args if a.arg not in ("self", "cls"))
        yield Function(node.name, arguments, " ".join(doc.split())[:300], source)


def ask(function: Function, rng: random.Random) -> str:
    """A user's message that asks for this function."""
    name, signature = function.name, f"{function.name}({', '.join(function.arguments)})"
    choices = [
        f"Write a function {name}.",
        f"Write a Python function {name}.",
        f"Write the function {signature}.",
        f"Implement {signature} in Python.",
    ]
    if function.summary:
        summary = function.summary
        lowered = summary[0].lower() + summary[1:].rstrip(".")
        choices += [
            summary,
            f"Write a function {name}. {summary}",
            f"Write a function {name}: {lowered}.",
            f"Write a Python function to {lowered}.",
        ]
    return rng.choice(choices)


def answer(function: Function, rng: random.Random) -> dict[str, Any]:
    """The assistant's message, sometimes with a thought before the source."""
    message: dict[str, Any] = {"role": "assistant", "content": function.source}
    if rng.random() < 0.1:
        takes = ", ".join(function.arguments) or "no arguments"
        thought = f"The function {function.name} takes {takes}. {function.summary}".strip()
        message["reasoning_content"] = thought
    return message


def tool_conversation(function: Function, rng: random.Random) -> dict[str, Any]:
    """A conversation in which the function is offered as a tool and called."""
    types = {int: "integer", float: "number", bool: "boolean", str: "string", type(None): "null"}
    values = {a: rng.choice(ARGUMENT_VALUES) for a in function.arguments[:4]}
    properties = {a: {"type": types[type(v)]} for a, v in values.items()}
    tool = {
        "type": "function",
        "function": {
            "name": function.name,
            "description": function.summary,
            "parameters": {"type": "object", "properties": properties, "required": list(values)},
        },
    }
    told = ", ".join(f"{a} = {json.dumps(v)}" for a, v in values.items()) or "no arguments"
    call = {"type": "function", "function": {"name": function.name, "arguments": values}}
    messages = [
        {"role": "user", "content": f"Call {function.name} with {told}."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    return {"messages": messages, "tools": [tool]}


def conversations(texts: list[str], seed: int) -> list[dict[str, Any]]:
    """Arguments of the chat template (`messages`, perhaps `tools`), one for each conversation."""
    rng, made = random.Random(seed), []
    for text in texts:
        found = list(functions(text))
        rng.shuffle(found)
        while found:
            function = found.pop()
            if function.arguments and rng.random() < 0.05:
                made.append(tool_conversation(function, rng))
                continue
            messages: list[dict[str, Any]] = []
            if rng.random() < 0.25:
                messages.append({"role": "system", "content": rng.choice(SYSTEM_MESSAGES)})
            messages += [{"role": "user", "content": ask(function, rng)}, answer(function, rng)]
            if found and rng.random() < 0.15:
                second = found.pop()
                messages += [{"role": "user", "content": ask(second, rng)}, answer(second, rng)]
            made.append({"messages": messages})
    return made


def conversations_parallel(texts: list[str], seed: int, workers: int) -> list[dict[str, Any]]:
    """`conversations` over many files, in processes; the result does not depend on their number."""
    parts = [texts[i : i + 50] for i in range(0, len(texts), 50)]
    seeds = [seed + i for i in range(len(parts))]
    with ProcessPoolExecutor(max_workers=workers) as pool:
        return [c for made in pool.map(conversations, parts, seeds) for c in made]


def held_out_prompts(
    packages: list[Package], cut: Callable[[str, int], str], seed: int = 0
) -> list[dict[str, Any]]:
    """Prompts from held-out packages: 64 short texts, 8 long ones, 28 conversations.

    Args:
        cut: the first n tokens of a text, as text.
    """
    rng = random.Random(seed)
    held = [p for p in packages if p.held_out]
    made: list[dict[str, Any]] = []

    def add(
        kind: str, count: int, least: int, take: Callable[[str], dict[str, Any] | None]
    ) -> None:
        pairs = [(p, t) for p in held for t in p.texts if len(t) >= least]
        rng.shuffle(pairs)
        # One text of each package before a second of any.
        seen: dict[str, int] = {}
        order = []
        for package, text in pairs:
            seen[package.name] = seen.get(package.name, 0) + 1
            order.append((seen[package.name], package, text))
        for _, package, text in sorted(order, key=lambda entry: entry[0]):
            found = take(text) if count else None
            if found is not None and "\ufffd" not in json.dumps(found, ensure_ascii=False):
                origin = f"{package.name} {package.version}"
                made.append({"kind": kind, "source": origin, "licence": package.licence, **found})
                count -= 1

    def short(text: str) -> dict[str, Any]:
        lines = text.splitlines(keepends=True)
        first = rng.randrange(max(1, len(lines) * 2 // 3))
        return {"text": cut("".join(lines[first:]), 63)}

    def conversation(text: str) -> dict[str, Any] | None:
        found = [c for c in conversations([text], rng.randrange(1 << 30)) if "tools" not in c]
        return {"messages": found[0]["messages"][:-1]} if found else None

    add("text", 64, 2500, short)
    add("long", 8, 9000, lambda text: {"text": cut(text, 1499)})
    add("chat", 28, 1000, conversation)
    return made
