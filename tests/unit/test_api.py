# SPDX-License-Identifier: Apache-2.0
"""The API reference is made from docstrings: every public name has one, and the README's command builds it."""

import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parents[2] / "README.md"
MODULES = ["ds_mxfp8_moe", *(f"ds_mxfp8_moe.{name}" for name in ("all_to_all", "ep", "parallel_style",
                                                                 "scaled_grouped_mm"))]


def public() -> Iterator[tuple[str, Any]]:
    """Every public name, and the public methods and properties of this package's classes."""
    for module in map(importlib.import_module, MODULES):
        yield module.__name__, module
        for name in module.__all__:
            value = getattr(module, name)
            yield f"{module.__name__}.{name}", value
            for key in vars(value) if inspect.isclass(value) else ():
                if not key.startswith("_") and callable(getattr(value, key)):
                    yield f"{module.__name__}.{name}.{key}", getattr(value, key)


def parameters(value: Any) -> list[str]:
    return [name for name in inspect.signature(value).parameters if name not in ("self", "args", "kwargs")]


def test_every_public_name_has_a_docstring():
    assert not [name for name, value in public() if not inspect.getdoc(value)]


def test_docstrings_name_every_argument():
    """Of functions with more than two. Those of the package's base classes are described there."""
    functions = {name: value for name, value in public() if inspect.isfunction(value)}
    assert len(functions) >= 12
    for name, value in functions.items():
        text = inspect.getdoc(value)
        if len(parameters(value)) > 2 and "Args:" in text:
            assert not [one for one in parameters(value) if not re.search(rf"\b{one}\b", text)], name


def test_torchaos_name_has_a_public_alias():
    from ds_mxfp8_moe import scaled_grouped_mm
    assert scaled_grouped_mm.to_mxfp8_then_scaled_grouped_mm is scaled_grouped_mm._to_mxfp8_then_scaled_grouped_mm


@pytest.mark.slow
def test_the_reference_builds_without_warnings(tmp_path):
    pytest.importorskip("pdoc")
    command = re.search(r"`python (-m pdoc [^`]+)`", README.read_text().replace("\n", " "))[1]
    folder, names = re.search(r"(\S+)\.\{(.+)\}", command).groups()
    words = [word for word in shlex.split(command) if "{" not in word]
    words += [f"{folder}.{one}" for one in names.split(",")]
    assert sorted(words[4:]) == sorted(MODULES)
    done = subprocess.run([sys.executable, *words, "-o", str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "Warn" not in done.stderr, done.stderr
    page = (tmp_path / "ds_mxfp8_moe/scaled_grouped_mm.html").read_text()
    assert 'id="_to_mxfp8_then_scaled_grouped_mm"' in page and (tmp_path / "index.html").exists()


IMPORT = """
import sys
import deepspeed, peft, torch, transformers
from deepspeed.module_inject import auto_ep
from deepspeed.moe import layer
from deepspeed.runtime.zero import stage3

def held():
    modules = [(name, module) for name, module in sys.modules.items()
               if name.partition(".")[0] in ("deepspeed", "peft", "torch", "transformers")]
    found = {(name, key): value for name, module in modules for key, value in vars(module).items() if callable(value)}
    classes = {value for value in found.values() if isinstance(value, type)}
    return found | {(one, key): value for one in classes for key, value in vars(one).items() if callable(value)}

before = held()
import ds_mxfp8_moe
after = held()
assert len(before) > 10000 and (deepspeed.runtime.engine.DeepSpeedEngine, "__init__") in before
changed = [name for name, value in before.items() if after.get(name) is not value]
assert not changed, changed
"""


def test_importing_the_package_patches_nothing():
    run = subprocess.run([sys.executable, "-W", "error:::ds_mxfp8_moe", "-c", IMPORT], capture_output=True, text=True,
                         env=os.environ | {"DS_MXFP8_MOE_AUTO": "0"})
    assert run.returncode == 0, run.stderr
