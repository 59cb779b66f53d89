# SPDX-License-Identifier: Apache-2.0
"""The table of other libraries' private names is complete: every name with an underscore in the sources is in it."""

import ast
import re
from pathlib import Path

import torch

from ds_mxfp8_moe.compat.private_names import NAMES

ROOT = Path(__file__).parents[2]
FILES = [path for folder in ("ds_mxfp8_moe", "ops") for path in sorted((ROOT / folder).rglob("*.py"))
         if (ROOT / "ds_mxfp8_moe" / "ops") not in path.parents]
BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "lent", "patched", "wrap"}  # take an attribute's name
KNOWN = {"_asdict", "_make", "_replace",  # of named tuples
         "_reinterpret"}  # of Triton until 3.8 (gluon_names.py)


def is_private(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"_[A-Za-z0-9]\w*", name) is not None


def names_in(tree: ast.AST) -> tuple[set[str], dict[str, int]]:
    """The names that a source defines, and those that it uses, with a line."""
    own, used = set(), {}
    for node in ast.walk(tree):
        found = []
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.arg):
            own.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute):
            found = [node.attr]
            if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id in (
                    "self", "twin"):
                own.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found = [alias.name for alias in node.names] + (node.module or "").split(".")
        elif isinstance(node, ast.Import):
            found = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME:
            found = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            found = [node.slice.value]
        used |= {name: node.lineno for name in found if is_private(name)}
    return own, used


def test_every_private_name_in_the_sources_is_in_the_table():
    listed = {name for row in NAMES for names in (row.place, row.names) for name in re.findall(r"\w+", names)}
    own, used = set(), {}
    for path in FILES:
        defined, found = names_in(ast.parse(path.read_text()))
        own |= defined
        used |= {name: f"{path.relative_to(ROOT)}:{line}" for name, line in found.items()}
    own -= set(dir(torch.nn.Module()))  # _modules, for example, is ours as well
    absent = {name: place for name, place in used.items() if not name.startswith("_mxfp8")
              and name not in listed | own | KNOWN}
    assert not absent, f"in the sources, and not in compat/private_names.py: {absent}"
