"""Who may import whom, read from the source: promises do not rest on runs, and trust is decided in one folder."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import silodp
from silodp import registry
from silodp.errors import ConfigError

ROOT = Path(silodp.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
MODULES = {
    ".".join(("silodp", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in FILES
}


class Imports(ast.NodeVisitor):
    """Every module of silodp that a file names in an import, also inside functions; not those for types alone."""

    def __init__(self, module: str):
        self.module, self.found = module, set[str]()

    def visit_If(self, node: ast.If) -> None:
        typing_only = ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.orelse if typing_only else [*node.body, *node.orelse]:
            self.visit(statement)

    def visit_Import(self, node: ast.Import) -> None:
        self.found |= {resolved(alias.name) for alias in node.names if alias.name.split(".")[0] == "silodp"}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert node.level == 0, f"{self.module} line {node.lineno}: imports are absolute here"
        if node.module is not None and node.module.split(".")[0] == "silodp":
            self.found |= {resolved(f"{node.module}.{alias.name}") for alias in node.names}


def resolved(name: str) -> str:
    """The module that holds a name."""
    while name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def imports_of(module: str) -> set[str]:
    visitor = Imports(module)
    visitor.visit(ast.parse(MODULES[module].read_text(encoding="utf-8")))
    return visitor.found - {module}


def folder(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def graph() -> dict[str, set[str]]:
    """Which folders and top-level modules each of them imports."""
    edges: dict[str, set[str]] = {}
    for module in MODULES:
        edges.setdefault(folder(module), set()).update(map(folder, imports_of(module)))
    return {node: found - {node} for node, found in edges.items()}


def cycle(edges: dict[str, set[str]]) -> list[str]:
    """What is left after everything that imports nothing of the rest is taken away: cycles, and who needs them."""
    left = dict(edges)
    while free := [node for node, found in left.items() if not found & left.keys()]:
        left = {node: found for node, found in left.items() if node not in free}
    return sorted(left)


def test_a_cycle_is_found():
    assert cycle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]


def test_no_folder_imports_one_that_imports_it():
    edges = graph()
    assert {"channels", "data", "deploy", "plan", "privacy", "run", "errors"} <= edges.keys()
    left = set(cycle(edges))
    within = {node: sorted(edges[node] & left) for node in left}
    assert not left, f"imports in a circle, or needing one: {within}"


# Who must not know whom: numbers rest on no run, and a trust model on no algorithm.
FORBIDDEN = {
    "privacy": {"channels", "algorithms", "plan", "run", "deploy", "config", "core"},
    "channels": {"plan", "run", "deploy", "algorithms"},
    "data": {"run"},
    "deploy": {"run"},
}


def test_layers_keep_to_their_own():
    edges = graph()
    wrong = {node: edges[node] & forbidden for node, forbidden in FORBIDDEN.items() if edges[node] & forbidden}
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("silodp.algorithms.gradient:GradientDescent", "algorithm"),
        ("silodp.channels.compressed:Compressed", "channel"),
        ("silodp.compressors:RandK", "compressor"),
        ("silodp.channels.randomizers:Duchi", "randomizer"),
        ("silodp.models:build_model", "model"),
    ],
)
def test_a_part_is_known_by_its_base_class(path, kind):
    """The registry names base classes without importing them: a renamed one would be noticed here."""
    module, _, name = path.partition(":")
    assert registry.kind_of(getattr(importlib.import_module(module), name)) == kind


def test_a_part_of_no_kind_is_refused():
    with pytest.raises(ConfigError, match="give kind = one of algorithm"):
        registry.kind_of(dict)


# --- trust is decided in silodp/channels ---------------------------------------------------------------------

TRUSTS = {"trusted", "untrusted", "aggregated", "shuffled"}
CHANNELS = {"Channel", "Trusted", "Untrusted", "Aggregated", "Compressed", "Shuffled", "Summed"}
MOST_TRUST_TESTS = 5


def trust_tests(tree: ast.AST) -> Iterator[int]:
    """Lines that ask which trust model there is: by its name, or by a channel's class."""
    for node in ast.walk(tree):
        inside = list(ast.walk(node))
        if isinstance(node, ast.Compare | ast.MatchValue):
            by_name = any(isinstance(each, ast.Constant) and each.value in TRUSTS for each in inside)
            if by_name or any(isinstance(each, ast.Attribute) and each.attr == "trust" for each in inside):
                yield node.lineno
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            named = {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)}
            named |= {each.attr for each in ast.walk(node.args[1]) if isinstance(each, ast.Attribute)}
            if named & CHANNELS:
                yield node.lineno


def test_tests_on_trust_are_found():
    source = """
if config.privacy.trust == other: pass
if kind in ("trusted", "shuffled"): pass
if isinstance(channel, Trusted | Other): pass
if isinstance(channel, (channels.Summed,)): pass
match kind:
    case "untrusted": pass
proved = {"trusted": "Thm 1"}
if isinstance(channel, Other) or kind == "full": pass
"""
    assert sorted(trust_tests(ast.parse(source))) == [2, 3, 4, 5, 7]


def test_hardly_anybody_asks_which_trust_model_there_is():
    """Whatever differs by trust model is an answer of its channel; what is left are an audit's choices and checks."""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in FILES
        if path.parent != ROOT / "channels"
        for line in trust_tests(ast.parse(path.read_text(encoding="utf-8")))
    ]
    print(f"{len(found)} tests on trust outside silodp/channels: {', '.join(found)}")
    assert len(found) <= MOST_TRUST_TESTS, found
