# SPDX-License-Identifier: Apache-2.0
"""When the builder of the CUDA extension builds, from which sources, and what it reports. The extension built here is
tiny."""

import builtins
import importlib
import multiprocessing
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch

from ds_mxfp8_moe.ops.op_builder import builder as building_with_nvcc
from ds_mxfp8_moe.ops.op_builder import nvlink
from ds_mxfp8_moe.ops.op_builder.builder import BOTH, CSRC
from ds_mxfp8_moe.ops.op_builder.nvlink import NVLinkBuilder

KERNEL = """\
__global__ void nothing() {}
int launch() { nothing<<<1, 1>>>(); return 0; }
"""
BINDINGS = """\
#include <Python.h>
#include "answer.h"
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "tiny", nullptr, -1, nullptr};
PyMODINIT_FUNC JOIN(PyInit_, TORCH_EXTENSION_NAME)() {
  PyObject *m = PyModule_Create(&module);
  PyModule_AddIntConstant(m, "answer", ANSWER);
  return m;
}
"""


def needs_nvcc(test):
    can_build = pytest.mark.skipif(not NVLinkBuilder(capabilities=BOTH).is_compatible(),
                                   reason=str(NVLinkBuilder(capabilities=BOTH)._obstacle()))
    return pytest.mark.slow(can_build(test))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The sources of a tiny extension. Each test builds in a folder of its own."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "kernel.cu").write_text(KERNEL)
    (sources / "bindings.cpp").write_text(BINDINGS)
    (sources / "answer.h").write_text("#define ANSWER 42\n")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    nvlink.try_load.cache_clear()
    yield sources
    nvlink.try_load.cache_clear()


@pytest.fixture
def commands(monkeypatch):
    """The arguments of every call of nvcc so far."""
    run, calls = building_with_nvcc._run, []

    def record(*args):
        calls.append(args)
        return run(*args)

    monkeypatch.setattr(building_with_nvcc, "_run", record)
    return calls


def test_flags_are_our_own(monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a")  # which DeepSpeed's own parser stumbles over
    args = NVLinkBuilder(capabilities=((9, 0), (10, 0), (10, 3))).nvcc_args()
    assert [arg for arg in args if "arch" in arg] == [
        f"-gencode=arch=compute_{name},code=sm_{name}" for name in ("90a", "100a", "103a")]
    assert "-std=c++20" in args and not any("fast" in arg for arg in args)
    assert NVLinkBuilder().sources() and all(path.startswith(str(CSRC)) for path in NVLinkBuilder().sources())


def test_compiles_for_the_gpu_that_is_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert NVLinkBuilder().capabilities() == BOTH
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert NVLinkBuilder().capabilities() == ((9, 0), )


def test_says_why_it_cannot_build(monkeypatch, capsys):
    for capability in ((8, 0), (12, 0)):
        builder = NVLinkBuilder(capabilities=(capability, ))
        assert not builder.is_compatible() and "compute capability 9 and 10" in builder.error_log
    monkeypatch.setattr(building_with_nvcc, "_nvcc_says", lambda: "Cuda compilation tools, release 12.4, V12.4.131")
    monkeypatch.setattr(building_with_nvcc, "_nvcc", lambda: "/opt/nvcc")
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    assert NVLinkBuilder(capabilities=((9, 0), )).is_compatible()
    builder = NVLinkBuilder(capabilities=BOTH)
    assert not builder.is_compatible()
    assert builder.error_log == "/opt/nvcc belongs to CUDA 12.4, but CUDA 12.8 or newer is needed"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    builder = NVLinkBuilder(capabilities=((9, 0), ))
    assert not builder.is_compatible() and "but torch is built for CUDA 13.0" in builder.error_log
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(building_with_nvcc, "_nvcc", lambda: None)
    assert not builder.is_compatible(verbose=True) and "install the CUDA toolkit" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="nvcc was not found"):
        builder.jit_load()


@pytest.mark.parametrize("script, reason", [("#!/bin/sh\nexit 3\n", "status 3"), ("no program", "Exec format error")])
def test_an_nvcc_that_does_not_run_is_an_obstacle(tmp_path, monkeypatch, script, reason):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(script)
    nvcc.chmod(0o755)
    monkeypatch.setattr(building_with_nvcc, "_nvcc", lambda: str(nvcc))
    monkeypatch.setattr(building_with_nvcc, "_nvcc_says", building_with_nvcc._nvcc_says.__wrapped__)
    builder = NVLinkBuilder(capabilities=BOTH)
    assert not builder.is_compatible()
    assert builder.error_log.startswith(f"the version of {nvcc} is unknown:") and reason in builder.error_log


@pytest.fixture
def cached(folder, monkeypatch):
    """A builder whose library is text, which nvcc would have made."""
    monkeypatch.setattr(building_with_nvcc, "_nvcc_says", lambda: "release 13.0")
    monkeypatch.setattr(NVLinkBuilder, "_obstacle", lambda self: None)
    monkeypatch.setattr(building_with_nvcc, "_run",
                        lambda *args: "-shared" in args and Path(args[-1]).write_text("ELF"))
    monkeypatch.setattr(importlib.util, "module_from_spec", lambda spec: spec)
    monkeypatch.setattr(importlib.machinery.ExtensionFileLoader, "exec_module", lambda self, spec: None)
    return NVLinkBuilder(folder)


def test_a_damaged_library_is_built_again(cached, capsys):
    library = Path(cached.jit_load().origin)
    checksum = library.with_name("checksum")
    for damage in (lambda: library.write_text("E"), lambda: library.write_text("EL\0"), checksum.unlink,
                   lambda: checksum.write_text("")):
        assert cached.is_built() and library.read_text() == "ELF"
        damage()
        assert not cached.is_built() and Path(cached.jit_load().origin) == library
        assert capsys.readouterr().out.count(f"{library} is damaged, probably cut short: building it again") == 1
    library.unlink()
    assert cached.jit_load() and capsys.readouterr().out == ""


def test_a_library_that_others_can_write_is_not_loaded(cached, monkeypatch):
    """What is built is its user's alone, whatever the umask."""
    before = os.umask(0)
    try:
        library = Path(cached.jit_load().origin)
    finally:
        os.umask(before)
    for path in (library.parent, library, library.with_name("checksum"), library.with_name("lock")):
        assert path.stat().st_mode & 0o022 == 0
    assert cached.is_compatible()
    for path, mode in ((library, 0o664), (library.parent, 0o757)):
        before = path.stat().st_mode
        path.chmod(mode)
        with pytest.raises(RuntimeError, match=f"others can write {path} .mode {mode:o}.*delete it, or"):
            cached.jit_load()
        assert not cached.is_compatible()  # the report says why
        path.chmod(before)
    stranger = os.geteuid() + 4321
    if os.geteuid() == 0:
        os.chown(library, stranger, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: stranger)
    with pytest.raises(RuntimeError, match=r"is user \d+'s.*set TORCH_EXTENSIONS_DIR"):
        cached.jit_load()


def test_the_lock_follows_no_link_and_empties_no_file(cached, tmp_path):
    lock, victim = cached._library().with_name("lock"), tmp_path / "victim"
    lock.parent.mkdir(parents=True)
    victim.write_text("precious")
    lock.symlink_to(victim)
    with pytest.raises(OSError, match="lock"):
        cached.jit_load()
    lock.unlink()
    lock.hardlink_to(victim)
    assert cached.jit_load() and victim.read_text() == "precious"


def refuse(*args):
    raise PermissionError("read-only")


@needs_nvcc
def test_builds_once_and_anew_after_an_edit(folder, commands):
    """One of several ranks builds. Threads stand for ranks, since the lock belongs to an open file, not to a process.
    The build is loaded where nothing can be written, too."""
    builder = NVLinkBuilder(folder)
    assert not builder.is_built()
    with ThreadPoolExecutor(3) as ranks:
        modules = [rank.result() for rank in [ranks.submit(NVLinkBuilder(folder).jit_load) for _ in range(3)]]
    assert [module.answer for module in modules] == [42] * 3 and builder.is_built()
    assert len(commands) == 3  # two files and the linker
    with mock.patch.object(builtins, "open", refuse):
        assert NVLinkBuilder(folder).jit_load().answer == 42 and len(commands) == 3
    (folder / "answer.h").write_text("#define ANSWER 43\n")
    assert not builder.is_built() and builder.jit_load().answer == 43
    assert len(commands) == 6
    assert not NVLinkBuilder(folder, capabilities=((9, 0), )).is_built()


@needs_nvcc
def test_a_failed_build_is_a_reason(folder, monkeypatch):
    (folder / "kernel.cu").write_text("int launch() { return not_declared; }\n")
    monkeypatch.setattr(nvlink, "NVLinkBuilder", lambda: NVLinkBuilder(folder))
    module, reason = nvlink.try_load()
    assert module is None
    assert reason.startswith("the extension cannot be built:")
    assert "kernel.cu" in reason and "not_declared" in reason and len(reason.splitlines()) < 25
    assert nvlink.try_load() == (None, reason)
    # Corrected sources are built, although an earlier attempt failed.
    (folder / "kernel.cu").write_text(KERNEL)
    assert NVLinkBuilder(folder).jit_load().answer == 42


def test_no_error_leaves_try_load(folder, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/dev/null/nowhere")
    monkeypatch.setattr(nvlink, "NVLinkBuilder", lambda: NVLinkBuilder(folder))
    module, reason = nvlink.try_load()
    assert module is None and reason.startswith("the extension cannot be built:")


@needs_nvcc
def test_ranks_share_a_failure(folder, commands, monkeypatch):
    builder = NVLinkBuilder(folder)
    failed = builder._library().with_name("failed")
    failed.parent.mkdir(parents=True)
    failed.write_text("what nvcc said")
    assert builder.last_failure() == "what nvcc said"
    stamps = iter([1, 2])  # before and after waiting for the rank that built
    monkeypatch.setattr(building_with_nvcc, "_stamp", lambda path: next(stamps))
    with pytest.raises(RuntimeError, match="what nvcc said"):
        builder.jit_load()
    assert not commands
    monkeypatch.setattr(building_with_nvcc, "_stamp", lambda path: 2)  # a failure of an earlier run
    assert builder.jit_load().answer == 42 and builder.last_failure() is None


def _build_forever(folder, building) -> None:
    building_with_nvcc._run = lambda *args: (building.set(), time.sleep(600))
    NVLinkBuilder(folder).jit_load()


@needs_nvcc
def test_a_killed_build_leaves_no_lock(folder):
    library, context = NVLinkBuilder(folder)._library(), multiprocessing.get_context("fork")
    building = context.Event()
    killed = context.Process(target=_build_forever, args=(folder, building))
    killed.start()
    assert building.wait(100)
    killed.kill()
    killed.join()
    library.with_name("linked").write_text("half of a library")
    assert NVLinkBuilder(folder).jit_load().answer == 42
