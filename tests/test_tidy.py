"""The rules of the code base, checked automatically. Every message names the file, the line and the rule."""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.prose import breaches, files

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "holdfast"
CHANGE_LENGTH_MAX = 110
KINDS_OF_CHANGE = {"added", "changed", "fixed"}
ATTRIBUTES_MAX = 15
PARAMETERS_MAX = 6
# (attributes, constructor parameters) of the classes that are wider.
WIDE = {
    # Facts of a whole job, run or process that its parts share.
    "Job": (33, 6), "Recovery": (18, 6), "World": (31, 6), "SimWorker": (16, 6), "SimTraining": (24, 6),
    "Session": (31, 6), "RunHistory": (28, 6), "TorchAdapter": (40, 6), "CommState": (26, 6),
    # Daemons that own one object per line or process.
    "WorkerClient": (38, 12), "Peers": (20, 6), "Processes": (17, 6), "Watcher": (19, 6),
    "AgentDaemon": (19, 6), "Agent": (20, 6), "Zygote": (16, 6),
    # The session's half of the protocol, as far as it is not a table yet.
    "StepParticipant": (17, 6), "Loops": (31, 6), "Checkpointer": (24, 13), "Step": (24, 6), "MemoryTier": (15, 7),
    "ExitWatch": (19, 6),
    # Arguments that a user or a framework gives.
    "SessionSettings": (15, 15), "GuardedWork": (15, 8), "_Share": (15, 9),
}  # fmt: skip
FUNCTION_LINES_MAX = 70

# core/ is pure: a module that is not in this list is an effect, a clock, a framework or chance.
CORE_MAY_IMPORT = {
    "__future__", "abc", "bisect", "collections", "copy", "dataclasses", "enum", "fractions", "functools",
    "hashlib", "heapq", "itertools", "json", "math", "operator", "re", "statistics", "string", "struct",
    "textwrap", "types", "typing", "zlib", "msgspec", "numpy", "holdfast",
}  # fmt: skip

# A bare quantity hides its unit; "timeout_s" and "size_bytes" do not. None of these may end a name.
UNITLESS = re.compile(
    r"(^|_)(timeout|duration|interval|delay|period|deadline|grace|age|size|seconds|sec|secs|ms)$"
)
PUBLIC_DOCS = ("core", "store", "session")


@pytest.fixture(autouse=True, scope="module")
def no_collections() -> Iterator[None]:
    """Collect no garbage: the trees are millions of objects that stay, and each collection visits all of them."""
    gc.disable()
    yield
    gc.enable()


@cache
def python_files(*folders: str) -> tuple[Path, ...]:
    """Return all Python files below the given folders of the repository, sorted."""
    return tuple(sorted(p for f in folders for p in (ROOT / f).rglob("*.py") if "__pycache__" not in p.parts))


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(), str(path))


def where(path: Path, node: ast.AST | int = 1) -> str:
    """Return ``file:line`` in the form that an editor opens."""
    line = node if isinstance(node, int) else getattr(node, "lineno", 1)
    return f"{path.relative_to(ROOT)}:{line}"


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function and method, including nested ones."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def refuse(found: list[str], rule: str) -> None:
    """Fail with one line per breach."""
    if found:
        pytest.fail(f"{rule}:\n  " + "\n  ".join(found), pytrace=False)


def width_of(node: ast.ClassDef) -> tuple[int, int]:
    """Return how many attributes the methods of a class assign, and how many parameters its constructor has."""
    attributes = {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute)
        and isinstance(inner.ctx, ast.Store)
        and isinstance(inner.value, ast.Name)
        and inner.value.id == "self"
    }
    made = [f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"]
    parameters = [a for f in made for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)]
    return len(attributes), max(0, len(parameters) - 1)


def test_classes_are_narrow() -> None:
    """A wide class has several jobs. The allowances were set when the rule was made, and only shrink."""
    found, met = [], set()
    for path in python_files("src"):
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.ClassDef):
                continue
            width = width_of(node)
            allowed = WIDE.get(node.name, (ATTRIBUTES_MAX, PARAMETERS_MAX))
            if any(has > may for has, may in zip(width, allowed, strict=True)):
                found.append(f"{where(path, node)} {node.name} has {width}, allowed are {allowed}")
            if node.name in WIDE:
                met.add(node.name)
                if width[0] < allowed[0] and width[0] >= ATTRIBUTES_MAX:
                    found.append(f"{where(path, node)} {node.name}: lower its allowance to {width}")
    found += [f"{name}: its allowance is not used" for name in WIDE.keys() - met]
    refuse(
        found, f"a class has at most {ATTRIBUTES_MAX} attributes and {PARAMETERS_MAX} constructor parameters"
    )


def test_parts_of_the_agent_know_one_function() -> None:
    """A part of the agent posts events (``docs/design/0043-agent-events.md``). A callback hides its target."""
    found = []
    for path in python_files("src/holdfast/runtime/agent"):
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.ClassDef):
                continue
            for method in node.body:
                if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                    continue
                if method.name[0] == "_" and method.name != "__init__":
                    continue
                arguments = method.args
                found += [
                    f"{where(path, a)} {node.name}.{method.name}({a.arg})"
                    for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
                    if a.arg != "post" and a.annotation and "Callable[" in ast.unparse(a.annotation)
                ]
    refuse(found, "a class in runtime/agent takes no function but `post`")


def test_a_class_name_is_defined_once() -> None:
    """Two classes with one name are two ideas with one word, and one import away from a mistake."""
    places: dict[str, list[str]] = {}
    for path in python_files("src"):
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(where(path, node))
    found = [f"{name}: {', '.join(at)}" for name, at in places.items() if len(at) > 1]
    refuse(found, "a class name is defined once in src/")


def test_functions_are_short() -> None:
    found = []
    for path in python_files("src", "tests", "bench", "scripts"):
        for node in functions(tree_of(path)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                found.append(f"{where(path, node)} {node.name} has {lines} lines")
    refuse(found, f"a function has at most {FUNCTION_LINES_MAX} lines")


def test_core_is_pure() -> None:
    found = []
    for path in python_files("src/holdfast/core"):
        for node in ast.walk(tree_of(path)):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{where(path, node)}: relative import"
                names = [node.module or ""]
            found += [
                f"{where(path, node)} imports {name}"
                for name in names
                if name.split(".")[0] not in CORE_MAY_IMPORT
            ]
    refuse(found, "core/ has no I/O, clock, thread, randomness, logging or framework")


def test_public_names_of_the_inner_rings_are_documented() -> None:
    found = []
    for folder in PUBLIC_DOCS:
        for path in python_files(f"src/holdfast/{folder}"):
            tree = tree_of(path)
            if tree.body and not ast.get_docstring(tree):
                found.append(f"{where(path)} module")
            found += [
                f"{where(path, node)} {node.name}"
                for node in public_definitions(tree)
                if not ast.get_docstring(node)
            ]
    refuse(found, "public modules, classes and functions of core, store and session have a docstring")


def public_definitions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Yield module-level functions, classes and their methods whose names do not start with an underscore."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name[0] != "_":
            yield node
            if isinstance(node, ast.ClassDef):
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and inner.name[0] != "_":
                        yield inner


def carries_unit(annotation: ast.expr | None) -> bool:
    """Return whether a type holds its unit (``timedelta``), or is a word or a record and not a number ("tiny")."""
    if annotation is None:
        return False
    kind = ast.unparse(annotation)
    return "timedelta" in kind or kind in {"str", "Size"}


def test_quantities_name_their_unit() -> None:
    found = []
    for path in python_files("src"):
        for node in ast.walk(tree_of(path)):
            names: list[str] = []
            if isinstance(node, ast.arguments):
                given = (*node.posonlyargs, *node.args, *node.kwonlyargs)
                names = [a.arg for a in given if not carries_unit(a.annotation)]
                line = next((a.lineno for a in given), 1)
            elif (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and not carries_unit(node.annotation)
            ):
                names, line = [node.target.id], node.lineno
            else:
                continue
            found += [
                f"{where(path, line)} {name}"
                for name in names
                if UNITLESS.search(name.lower()) and not name.endswith("world_size")
            ]
    refuse(found, "a quantity carries its unit in its name (timeout_s, size_bytes)")


def test_nothing_is_left_for_later() -> None:
    marks = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
    found = []
    for path in (*python_files("src", "tests", "bench", "scripts"), *markdown_files()):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if marks.search(line):
                found.append(f"{where(path, number)} {line.strip()[:80]}")
    refuse(found, "unfinished work belongs into an issue, not into a comment")


def test_nothing_is_loaded_by_executing_it() -> None:
    found = []
    for path in python_files("src"):
        for node in ast.walk(tree_of(path)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [
                f"{where(path, node)} imports {name}"
                for name in names
                if name.split(".")[0] in {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
            ]
    refuse(found, "no pickle: neither on a wire nor in a file that we read")


def test_connections_are_made_in_one_module() -> None:
    """Else some process of a run on one host listens on TCP."""
    makes = {"create_server", "create_connection", "create_unix_server", "create_unix_connection"}
    given = {"sock"}  # of asyncio, for a socket that was made there
    found = [
        f"{where(path, node)}: {node.func.attr}"
        for path in python_files("src/holdfast")
        if path.name != "stream_sockets.py"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in makes
        if not given & {keyword.arg for keyword in node.keywords}
    ]
    refuse(found, "listen() and dial() of runtime/net/stream_sockets.py")


def test_exceptions_are_not_swallowed() -> None:
    found = []
    for path in python_files("src"):
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            broad = node.type is None or (
                isinstance(node.type, ast.Name) and node.type.id in {"Exception", "BaseException"}
            )
            silent = all(
                isinstance(s, ast.Pass)
                or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
                or isinstance(s, ast.Continue)
                for s in node.body
            )
            if broad and silent:
                found.append(f"{where(path, node)} except without a type and without an effect")
    refuse(found, "an exception is handled, raised or reported")


# StateError is not here: most of its messages are about the state that a rank holds, not about input.
FIXED_BY_THE_USER = {
    "UserError", "UsageError", "ScriptError", "StepError", "DataError", "EmptyLoaderError", "UnsupportedError",
}  # fmt: skip


def test_what_the_user_can_mend_comes_with_a_hint() -> None:
    found = []
    for path in python_files("src"):
        for node in ast.walk(tree_of(path)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            hints = [k.value for k in node.keywords if k.arg == "hint"]
            empty = not hints or (isinstance(hints[0], ast.Constant) and not hints[0].value)
            if node.func.id in FIXED_BY_THE_USER and empty:
                found.append(f"{where(path, node)} {node.func.id}")
    refuse(found, "an error that the user can mend says what to do next (hint=...)")


@cache
def markdown_files() -> tuple[Path, ...]:
    """Return every tracked or new Markdown file of the repository."""
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listing.returncode:  # a source archive has no git
        return tuple(sorted(p for p in ROOT.rglob("*.md") if ".venv" not in p.parts))
    return tuple(ROOT / line for line in sorted(listing.stdout.splitlines()) if (ROOT / line).exists())


def test_links_between_documents_exist() -> None:
    link = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
    found = []
    for path in markdown_files():
        in_code = False
        for number, line in enumerate(path.read_text().splitlines(), 1):
            in_code ^= line.lstrip().startswith("```")
            for target in [] if in_code else link.findall(line):
                if re.match(r"[a-z]+:", target) or target.startswith("#"):
                    continue
                if not (path.parent / target.split("#")[0]).exists():
                    found.append(f"{where(path, number)} -> {target}")
    refuse(found, "a relative link in a document leads to a file")


def test_documents_name_files_that_exist() -> None:
    named = re.compile(r"`((?:src|tests|docs|bench|scripts|examples)/[\w./-]+\.\w+)`")
    source = ROOT / "src" / "holdfast"
    packages = [p.name for p in source.iterdir() if (p / "__init__.py").exists()]
    module = re.compile(rf"(?<![\w/.])((?:{'|'.join(packages)})/[\w/]+\.py)\b")
    found = []
    for path in markdown_files():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found += [f"{where(path, number)} {n}" for n in named.findall(line) if not (ROOT / n).exists()]
            found += [f"{where(path, number)} {n}" for n in module.findall(line) if not (source / n).exists()]
    refuse(found, "a file that a document names exists")


def test_the_map_of_the_code_names_directories_that_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = set(re.findall(r"`((?:\w+/)+)`", text))
    bases = (ROOT, ROOT / "src/holdfast")
    found = [name for name in sorted(named) if not any((base / name).is_dir() for base in bases)]
    refuse(found, "a directory that ARCHITECTURE.md names exists")
    inits = bases[1].glob("*/*/__init__.py")
    rooms = (f"{init.parent.relative_to(bases[1])}/" for init in inits)
    described = ("cli/", "integrations/")  # described by their rows in the table of rings
    found = sorted(room for room in rooms if room not in text and not room.startswith(described))
    refuse(found, "each room is on the map")


def test_no_module_is_unused() -> None:
    """Each module is imported by another one, or named by a dotted string, an entry point or a documented tool."""
    project = (ROOT / "pyproject.toml").read_text()
    tools = (ROOT / "Makefile").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    users: dict[str, set[Path]] = {}
    for path in python_files("src"):
        for dotted in _modules_named(path):
            users.setdefault(dotted, set()).add(path)
    found = []
    for path in python_files("src"):
        dotted = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
        if path.name in {"__init__.py", "__main__.py"} or f'"{dotted}:' in project or dotted in tools:
            continue
        if not users.get(dotted, set()) - {path}:
            found.append(f"{where(path)} {dotted}")
    refuse(found, "a module of src/ that nothing uses is dead")


def _modules_named(path: Path) -> set[str]:
    """Return the imports of a file, and each dotted name in its text."""
    found = set(re.findall(r"\bholdfast(?:\.\w+)+", path.read_text()))
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
    return found


def test_rings_are_checked_for_every_package() -> None:
    """The layers contract covers every package. This test shows that the contract really runs."""
    result = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-logo", "--no-cache"],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"\b1\d kept, 0 broken", result.stdout), (
        "the rings, the rooms of seven packages, two lists of what is forbidden"
    )


def test_no_sentence_uses_a_banned_word() -> None:
    """The rules are in ``docs/writing.md``."""
    found = [f"{where(path, line)} {rule}" for path in files() for line, rule in breaches(path)]
    refuse(found, "docs/writing.md bans these words")


def test_changes_are_one_line_each() -> None:
    changelog = ROOT / "CHANGELOG.md"
    entries = [
        (changelog, number, line.removeprefix("- "))
        for number, line in enumerate(changelog.read_text().splitlines(), 1)
        if line.startswith(("- ", "  "))
    ]
    assert entries
    found = []
    for path in (ROOT / "changelog.d").glob("*.*.md"):
        entries += [(path, number, line) for number, line in enumerate(path.read_text().splitlines(), 1)]
        if path.name.split(".")[1] not in KINDS_OF_CHANGE:
            found.append(f"{where(path)} is not NAME.added.md, NAME.changed.md or NAME.fixed.md")
    for path, number, line in entries:
        if len(line) > CHANGE_LENGTH_MAX:
            found.append(f"{where(path, number)} has {len(line)} characters")
    refuse(
        found, f"a change is one line of at most {CHANGE_LENGTH_MAX} characters; its story is in the commit"
    )


def test_each_decision_has_a_line_in_the_index() -> None:
    folder = ROOT / "docs" / "design"
    notes = sorted(path.name for path in folder.glob("[0-9]*.md"))
    rows = re.findall(r"^\| \[(\d{4})\]\(([\w-]+\.md)\) \|", (folder / "README.md").read_text(), re.MULTILINE)
    assert [name for _, name in rows] == notes
    assert all(name.startswith(number) for number, name in rows)
