# SPDX-License-Identifier: Apache-2.0
"""The table of other libraries' private names, walked in the installed releases; and what the next ones may change."""

import importlib
import importlib.metadata
import inspect
import os
import re
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
from packaging.version import Version
from rank_pool import free_port

import ds_mxfp8_moe
from ds_mxfp8_moe.ops import private_names
from ds_mxfp8_moe.ops.private_names import FEATURES, NAMES, SINCE, Row, absent


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


def test_a_function_with_more_parameters_is_taken_where_the_row_says_so(library):
    library.Engine = OtherSignature
    assert absent(Row("steps", "some_library:Engine", "step(self, loss, scale, ...)")) is None


def test_a_missing_module_of_an_installed_library_is_found():
    assert absent(Row("steps", "deepspeed.no_such_module:Engine", "step")) == "has no deepspeed.no_such_module"


def test_other_libraries_are_not_imported_to_look_at_them(monkeypatch):
    """One that the program does not use may be broken."""
    module = "transformers.models.gpt_oss.modeling_gpt_oss"
    monkeypatch.delitem(sys.modules, module, raising=False)
    importlib.import_module("transformers.models.gpt_oss")
    row = Row("steps", f"{module}:GptOssExperts", "no_such_name")
    assert absent(row) is None and module not in sys.modules
    importlib.import_module(module)
    assert absent(row) == "has no GptOssExperts.no_such_name"
    gone = "transformers.models.gpt_oss.no_such_module"
    assert absent(Row("steps", gone, "no_such_name")) == f"has no {gone}"


def test_the_line_names_what_is_lost_and_the_release(monkeypatch):
    monkeypatch.setattr(private_names, "NAMES", (Row("metrics", "deepspeed.runtime.engine", "gone"), ))
    private_names._absent.cache_clear()
    try:
        line = private_names.line_about("metrics")
    finally:
        private_names._absent.cache_clear()
    version = importlib.metadata.version("deepspeed")
    assert line == (f'mxfp8_moe: WARNING: "metrics" has no effect: deepspeed {version} has '
                    "no deepspeed.runtime.engine.gone (the package was made for deepspeed "
                    f"{SINCE['deepspeed']})")


NOTING_IMPORTS = """
import builtins
seen, plain = set(), builtins.__import__
def noting(name, globals=None, locals=None, fromlist=(), level=0):
    if level == 0 and name.startswith("deepspeed.") and (globals or {}).get("__name__", "").startswith("ds_m"):
        seen.update((name, one) for one in fromlist or ())
    return plain(name, globals, locals, fromlist, level)
builtins.__import__ = noting
import ds_mxfp8_moe
print("imported", *sorted(f"{module}:{name}" for module, name in seen))
"""
WITHOUT_A_NAME = """
from deepspeed.moe import mappings
del mappings.drop_tokens  # as if renamed: DeepSpeed's own layers have theirs
import ds_mxfp8_moe
ds_mxfp8_moe.enable()
deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
model = torch.nn.Linear(4, 1)
config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
          "mxfp8_moe": {"enabled": True}}
engine, *_ = ds_mxfp8_moe.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(2):
    loss = engine(torch.ones(2, 4)).sum()
    engine.backward(loss)
    engine.step()
print("loss", loss.isfinite().item())
try:
    ds_mxfp8_moe.save_pretrained
except ImportError as error:
    print("told", "drop_tokens" in str(error))
"""


@pytest.fixture(scope="module")
def said() -> str:
    """What the two programs print, each in a process that is forked from one that has imported DeepSpeed."""
    program = f"""
        import os, sys, deepspeed, torch
        for program in {(NOTING_IMPORTS, WITHOUT_A_NAME)!r}:
            child = os.fork()
            if child == 0:
                exec(program)
                sys.stdout.flush()
                os._exit(0)
            os.waitpid(child, 0)
    """
    alone = dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True,
                         env={**os.environ, **alone})
    return run.stdout + run.stderr


@pytest.mark.slow
def test_rows_for_the_import_name_what_the_package_imports_at_its_start(said):
    """Else a release without a name ends the import in a traceback."""
    imported = set(re.search("^imported (.+)", said, re.MULTILINE)[1].split())
    promised = {"deepspeed.accelerator:get_accelerator", "deepspeed.moe:layer", "deepspeed.pipe:PipelineModule",
                "deepspeed.module_inject:auto_ep"}
    listed = {f"{row.place}:{name.partition('(')[0]}" for row in NAMES if row.feature == "import"
              for name in row.each()}
    assert imported - promised <= listed


@pytest.mark.slow
def test_without_the_names_of_the_import_the_package_is_plain_deepspeed(said):
    assert "loss True" in said and "told True" in said, said
    lines = set(re.findall("mxfp8_moe: WARNING: .*", said))
    assert len(lines) == 1 and "this is plain DeepSpeed: deepspeed" in lines.pop()


def test_plain_has_the_signatures_of_the_package(monkeypatch):
    monkeypatch.setattr(private_names, "missing", lambda feature: "")
    from ds_mxfp8_moe import plain
    ours, its = inspect.signature(ds_mxfp8_moe.convert), inspect.signature(plain.convert)
    assert list(ours.parameters) == list(its.parameters)
