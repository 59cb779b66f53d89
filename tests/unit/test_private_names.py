# SPDX-License-Identifier: Apache-2.0
"""The table of other libraries' private names, walked in the installed releases; and what the next ones may change."""

import ast
import importlib
import importlib.metadata
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine
from packaging.version import Version

from ds_mxfp8_moe.compat import private_names
from ds_mxfp8_moe.compat.patches import PATCHES
from ds_mxfp8_moe.compat.private_names import FEATURES, NAMES, SINCE, Row, absent
from ds_mxfp8_moe.engine.moe_engine import MoEEngine


@pytest.mark.parametrize("row", NAMES, ids=lambda row: f"{row.feature}: {row.place}")
def test_the_installed_releases_have_every_name(row):
    assert row.each() and row.feature in FEATURES
    importlib.import_module(row.place.partition(":")[0])
    assert absent(row) is None


def test_every_feature_has_names_of_libraries_that_are_installed():
    assert {row.feature for row in NAMES} == set(FEATURES)
    libraries = {re.match(r"\w+", row.place)[0] for row in NAMES}
    assert libraries == set(SINCE)
    for library, since in SINCE.items():
        assert Version(importlib.metadata.version(library)) >= Version(since)


# ---- how many there are ---------------------------------------------------------------------------------------------

PACKAGE = Path(__file__).parents[2] / "ds_mxfp8_moe"
MAKER = "compat/patches.py"  # whose own calls are no patches
REPLACED = {"__class__", "__init__", "forward"}
MOST_NAMES = 141  # a number to lower


def patches(source: str) -> list[str]:
    """What a source replaces: the names in calls of wrap, patched and lent, and assignments to attributes of
    REPLACED."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("wrap", "patched", "lent"):
            names.append(node.args[1].value)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in REPLACED:
            names.append(node.attr)
    return names


def test_the_count_of_private_names_does_not_grow():
    names = {(row.place, re.match(r"\.?\w+", name)[0]) for row in NAMES for name in row.each()}
    assert len(names) <= MOST_NAMES


def test_every_patch_is_in_the_table_with_its_end():
    files = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    made = {(by, name) for by, text in files.items() if by != MAKER for name in patches(text)}
    assert made == {(patch.by, patch.name) for patch in PATCHES}
    assert all(patch.of and patch.until for patch in PATCHES)


def test_patches_are_found():
    source = "wrap(a, 'f', g)\nwith lent(a, 'b', 1), patched(a, 'f', g):\n    a.__class__, A.__init__ = C, f"
    assert sorted(patches(source)) == ["__class__", "__init__", "b", "f", "f"]
    assert not patches("a.__class__.__name__\nfunctools.wraps(f)\na.b = c")


def test_each_method_of_the_engine_is_deepspeeds_and_the_private_ones_are_listed():
    own = {name for name, value in vars(MoEEngine).items() if inspect.isfunction(value)} - {"without_moe_layers"}
    assert not [name for name in own if not hasattr(DeepSpeedEngine, name)]
    rows = [row for row in NAMES if row.place == private_names._ENGINE]
    listed = {re.match(r"\.?\w+", name)[0] for row in rows for name in row.each()}
    private = {name for name in own if name.startswith("_")}
    assert private and private <= listed


# ---- what is missing ------------------------------------------------------------------------------------------------


class Engine:
    def __init__(self):
        self.steps = 0

    def step(self, loss, scale=1):
        return loss


DIGEST = private_names._source_digest(Engine.step)[:8]
KNOWN = f"step(self, loss, scale) step(self, loss, ...) step#{DIGEST} .steps"


@pytest.fixture
def library(monkeypatch):
    """A library of one class, whose next release a test makes."""
    module = SimpleNamespace(Engine=Engine)
    monkeypatch.setitem(sys.modules, "some_library", module)
    return module


def test_names_that_are_there(library):
    assert absent(Row("steps", "some_library:Engine", KNOWN)) is None
    assert absent(Row("steps", "no_such_library:Engine", KNOWN)) is None  # not installed: nobody uses it
    library.Engine = OtherSignature
    assert absent(Row("steps", "some_library:Engine", "step(self, loss, scale, ...)")) is None  # where the row says so


class OtherSignature(Engine):
    def step(self, loss, weight, scale=1):
        return loss


class OtherSource(Engine):
    def step(self, loss, scale=1):
        return loss * scale


class OtherAttribute:
    step = Engine.step

    def __init__(self):
        self.step_count = 0


@pytest.mark.parametrize("kind, names, said", [
    (OtherSignature, "step(self, loss, scale)", r"another signature of Engine.step: \(self, loss, weight, scale=1\)"),
    (OtherSignature, "step(self, weight, loss, ...)", "another signature of Engine.step"),
    (OtherSource, f"step#{DIGEST}", "another Engine.step"),
    (OtherAttribute, ".steps", "gives instances of Engine no steps"),
    (Engine, "backward", "has no Engine.backward"),
    (None, "step", "has no Engine in some_library"),
])
def test_what_a_next_release_changes_is_found(library, kind, names, said):
    library.Engine = kind
    assert re.search(said, absent(Row("steps", "some_library:Engine", names)))


def test_other_libraries_are_not_imported_to_look_at_them(monkeypatch):
    """One that the program does not use may be broken."""
    module = "transformers.models.gpt_oss.modeling_gpt_oss"
    monkeypatch.delitem(sys.modules, module, raising=False)
    importlib.import_module("transformers.models.gpt_oss")
    row = Row("steps", f"{module}:GptOssExperts", "no_such_name")
    assert absent(row) is None and module not in sys.modules
    importlib.import_module(module)
    assert absent(row) == "has no GptOssExperts.no_such_name"
    gone = "transformers.models.gpt_oss.no_such_module"  # of a library that is installed
    assert absent(Row("steps", gone, "no_such_name")) == f"has no {gone}"


# ---- the import of the package --------------------------------------------------------------------------------------


def test_a_library_without_a_name_that_is_imported():
    version = importlib.metadata.version("deepspeed")
    with pytest.raises(ImportError) as caught, private_names.importing():
        from deepspeed.moe.mappings import renamed_tokens  # noqa: F401
    said = str(caught.value)
    assert said.startswith(f"ds_mxfp8_moe cannot be imported: deepspeed {version} does not fit: cannot import name "
                           "'renamed_tokens' from 'deepspeed.moe.mappings'")
    assert said.endswith(f"(the package was made for deepspeed {SINCE['deepspeed']})") and "\n" not in said


@pytest.mark.parametrize("name", ["deepspeed_of_somebody", "ds_mxfp8_moe.no_such_module"])
def test_other_errors_of_the_import_stay_as_they_are(name):
    with pytest.raises(ModuleNotFoundError, match=f"^No module named '{name}'$"), private_names.importing():
        importlib.import_module(name)


def test_a_missing_private_name_costs_its_feature_or_the_import(monkeypatch):
    monkeypatch.setattr(private_names, "NAMES", tuple(Row(feature, "deepspeed.runtime.engine", "_gone")
                                                      for feature in ("metrics", "import")))
    private_names._absent.cache_clear()
    try:
        line = private_names.line_about("metrics")
        with pytest.raises(ImportError) as caught, private_names.importing():
            pass
    finally:
        private_names._absent.cache_clear()
    lacks = (f"deepspeed {importlib.metadata.version('deepspeed')} has no deepspeed.runtime.engine._gone (the package "
             f"was made for deepspeed {SINCE['deepspeed']})")
    assert line == f'mxfp8_moe: WARNING: "metrics" has no effect: {lacks}'
    assert str(caught.value) == f"ds_mxfp8_moe cannot be imported: {lacks}"


@pytest.mark.slow
def test_the_package_says_why_it_cannot_be_imported():
    program = "from deepspeed.moe import mappings; del mappings.drop_tokens; import ds_mxfp8_moe"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 1
    assert re.search("^ImportError: ds_mxfp8_moe cannot be imported: deepspeed .*drop_tokens", run.stderr, re.M)
