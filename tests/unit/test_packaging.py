# SPDX-License-Identifier: Apache-2.0
"""The package as it is installed: the wheel of an sdist imports completely from anywhere. The Makefile, which installs
it for editing, sets up an environment around the torch of a GPU machine."""

import ast
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IMPORT_ALL = """
import importlib, pkgutil, sys
import ds_mxfp8_moe, ds_mxfp8_moe.ops
names = [m.name for m in pkgutil.walk_packages(ds_mxfp8_moe.__path__, "ds_mxfp8_moe.") if not m.name.endswith(".hook")]
for name in names:
    importlib.import_module(name)
print(ds_mxfp8_moe.__file__)
print(*sorted(names))
"""


def run(*command, cwd, path=None) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "DS_MXFP8_MOE_AUTO")}
    environment["DS_ACCELERATOR"] = "cpu"
    if path:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run([sys.executable, *map(str, command)], cwd=cwd, env=environment, capture_output=True,
                          text=True, stdin=subprocess.DEVNULL, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def modules() -> list[str]:
    """The modules that the checkout's files say there are."""
    sources = [p.relative_to(ROOT) for p in (ROOT / "ds_mxfp8_moe").rglob("*.py") if "ops" not in p.parts]
    sources += ["ds_mxfp8_moe" / p.relative_to(ROOT) for p in (ROOT / "ops").rglob("*.py")]
    names = {".".join(p.with_suffix("").parts).removesuffix(".__init__") for p in sources}
    return sorted(names - {"ds_mxfp8_moe", "ds_mxfp8_moe.hook"})  # the hook is a package of its own


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The checkout's files as a fresh clone has them, and a CUDA source: builds leave their traces in this copy."""
    target = tmp_path_factory.mktemp("clone")
    files = "git ls-files --cached --others --exclude-standard -z | tar --null --files-from - --ignore-failed-read -c"
    subprocess.run(f"{files} | tar -x -C {shlex.quote(str(target))}", shell=True, cwd=ROOT, check=True)
    probe = target / "ops/csrc/probe/kernel.cuh"
    probe.parent.mkdir(parents=True)
    probe.write_text("// a CUDA source in a folder of its own\n")
    return target


@pytest.fixture(scope="module")
def dist(copy, tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    run("-m", "build", "--no-isolation", "--sdist", "--outdir", out, ".", cwd=copy)
    sdist, = out.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert not [name for name in archive.getnames() if name.split("/")[1:2] == ["tests"]]
        archive.extractall(out, filter="data")
    # The wheel comes from the sdist, so it proves that the sdist is complete.
    run("-m", "build", "--no-isolation", "--wheel", "--outdir", out, ".", cwd=out / sdist.name.removesuffix(".tar.gz"))
    return out


@pytest.fixture(scope="module")
def site(dist, tmp_path_factory):
    """The folder of an installed wheel."""
    site = tmp_path_factory.mktemp("site")
    run("-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", site, *dist.glob("*.whl"), cwd=site)
    return site


@pytest.mark.slow
def test_wheel_imports_completely_from_anywhere(dist, site, tmp_path):
    wheel, = dist.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    sources = [path for path in (ROOT / "ops/csrc").rglob("*") if path.suffix in (".cu", ".cuh", ".cpp", ".h")]
    assert {f"ds_mxfp8_moe/{path.relative_to(ROOT)}" for path in sources} <= set(names)
    assert {"ds_mxfp8_moe/ops/csrc/probe/kernel.cuh", "ds_mxfp8_moe/py.typed"} <= set(names)
    assert not [n for n in names if n.startswith(("ops/", "tests/", "examples/"))]
    file, found = run("-c", IMPORT_ALL, cwd=tmp_path, path=site).splitlines()
    assert file == str(site / "ds_mxfp8_moe/__init__.py")
    assert found.split() == modules()


# What each line of a program has imported: Python's start, torch, and DeepSpeed. Then the report.
HOOKED = """
import sys

def ours():
    return sorted(name for name in sys.modules if name.startswith("ds_mxfp8_moe"))

assert not ours(), ours()
import torch
assert ours() == ["ds_mxfp8_moe_hook"], ours()
import deepspeed
assert ours() == ["ds_mxfp8_moe_hook"] and hasattr(deepspeed.DeepSpeedEngine.__init__, "__wrapped__"), ours()
print("armed")
import runpy
runpy.run_module("ds_mxfp8_moe.report", run_name="__main__")
"""


@pytest.mark.slow
def test_installing_it_arms_the_hook_and_imports_nothing(site, tmp_path):
    said = run("-c", HOOKED, cwd=tmp_path, path=site)
    assert said.startswith("armed\n") and "[OKAY] armed" in said
    assert not list(site.rglob("*.pth"))  # every Python of the environment would run it at its start


@pytest.mark.slow
def test_metadata(dist):
    wheel, = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        metadata, = [archive.read(n).decode() for n in archive.namelist() if n.endswith("/METADATA")]
        scripts, = [archive.read(n).decode() for n in archive.namelist() if n.endswith("entry_points.txt")]
        assert any(n.endswith("licenses/LICENSE") for n in archive.namelist())
    description = metadata.split("\n\n", 1)[1]
    assert "## Install" in description and "](examples" not in description and "](.github" not in description
    for module, function in re.findall(r"= (ds_mxfp8_moe\.\w+):(\w+)", scripts):
        assert callable(getattr(importlib.import_module(module), function))
    core, extra = [{re.match(r"\w+", line)[0].lower() for line in re.findall(r"^Requires-Dist: (.*)$", metadata, re.M)
                    if ("extra ==" in line) == optional} for optional in (False, True)]
    # transformers and peft are imported where there is one of their models, matplotlib by ds_mxfp8_report --plot.
    # Advice on speed looks into Liger, and benchmarks use SonicMoE and flashoptim, where a user has installed them.
    others = {"sonicmoe", "liger_kernel", "flashoptim", "safetensors"}
    optional = {"transformers", "peft", "matplotlib", "liger_kernel", "flashoptim", "safetensors"}
    assert imports("ds_mxfp8_moe", "ops") - {"yaml"} - optional <= core and "matplotlib" in extra
    assert imports("ds_mxfp8_moe", "ops", "examples") - {"yaml"} - others <= core | extra and "pyyaml" in core


def imports(*folders: str) -> set[str]:
    """Packages that the sources import, other than Python's and their own."""
    found, own = set(), {"ds_mxfp8_moe"}
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        own |= {path.stem, path.parent.name}
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            found |= {name.split(".")[0] for name in names}
    return found - own - set(sys.stdlib_module_names)


@pytest.mark.parametrize("folder", ["ds_mxfp8_moe", "ops", "examples", "tests"])
def test_sources_are_python_3_11_and_carry_the_licence(folder):
    for path in (ROOT / folder).rglob("*.py"):
        text = path.read_text()
        ast.parse(text, str(path), feature_version=(3, 11))
        assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n"), path


def test_no_path_of_one_machine():
    found = subprocess.run(["git", "grep", "-nE", r"(^|[^A-Za-z0-9_.])/(work|root|home)/[A-Za-z]", "--", ".",
                            ":!tests/unit/test_packaging.py"], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout == ""


TORCH = """
__version__ = "2.13.0+cu130"
class cuda:
    is_available = staticmethod(lambda: True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
def test_setup_keeps_the_torch_of_a_virtual_environment_that_sees_a_gpu(tmp_path):
    """Where PYTHON is found on PATH, and an environment without that torch was made before."""
    for name in ("Makefile", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("given", ".venv"):
        run("-m", "venv", "--without-pip", tmp_path / name, cwd=tmp_path)
    packages, = (tmp_path / "given/lib").glob("python3*/site-packages")
    for name in ("torch", "deepspeed/comm"):
        (packages / name).mkdir(parents=True)
    (packages / "torch/__init__.py").write_text(TORCH)
    (packages / "deepspeed/comm/torch.py").write_text("build_shm_op = print")
    (tmp_path / ".whl").mkdir()
    (tmp_path / ".whl/some.whl").touch()  # a machine without a package index
    environment = os.environ | {"PATH": f"{tmp_path / 'given/bin'}{os.pathsep}{os.environ['PATH']}", "MAKEFLAGS": ""}
    done = subprocess.run(["make", "INSTALL=true", "PYTHON=python3", "VENV=.venv"], cwd=tmp_path, env=environment,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"keeping the torch of {tmp_path / 'given/bin/python3'}, which sees a GPU" in done.stdout
    assert (tmp_path / ".venv/constraints.txt").read_text().startswith("torch==2.13.0+cu130\n")
    kept, = (tmp_path / ".venv/lib").glob("python3*/site-packages/kept.pth")
    assert kept.read_text() == f"{packages}\n"
