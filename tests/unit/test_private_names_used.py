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


def names_in(tree: ast.AST) -> tuple[set[str], dict[str, int]]:
    """The names that a source defines, and those with an underscore that it uses, with a line."""
    own, used = set(), {}
    for node in ast.walk(tree):
        found = []
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                own.add(name)
            case (ast.Name(id=name, ctx=ast.Store())
                  | ast.Attribute(attr=name, value=ast.Name(id="self" | "twin"), ctx=ast.Store())):
                own.add(name)
            case ast.Call(func=ast.Name(id=function), args=args) if function in BY_NAME:
                found = [one.value for one in args if isinstance(one, ast.Constant)]
            case (ast.Attribute(attr=name) | ast.Subscript(slice=ast.Constant(value=str(name)))
                  | ast.alias(name=name) | ast.ImportFrom(module=str(name))):
                found = name.split(".")
        used |= {name: node.lineno for name in map(str, found) if re.fullmatch(r"_[A-Za-z0-9]\w*", name)}
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
