# SPDX-License-Identifier: Apache-2.0
"""What nvcc makes of the CUDA sources, compiled for Hopper and Blackwell as users' machines compile them."""

import re

import pytest

from ds_mxfp8_moe.ops.op_builder import builder
from ds_mxfp8_moe.ops.op_builder.builder import BOTH, CSRC
from ds_mxfp8_moe.ops.op_builder.nvlink import NVLinkBuilder
from ds_mxfp8_moe.ops.op_builder.nvshmem import NVSHMEMBuilder

KERNEL_FILES = sorted(path.name for path in (CSRC / "nvlink").glob("*.cu"))
# Most bytes that a kernel may spill to or load from memory. Saving some registers around a wait costs nothing, but a
# loop that spills does.
SPILL_BYTES = 128

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not NVLinkBuilder(capabilities=BOTH).is_compatible(),
                                                   reason=str(NVLinkBuilder(capabilities=BOTH)._obstacle()))]


# pybind11's templates, with which no kernel has to do, compile much longer with optimizations.
BINDINGS_ARGS = ["-O0", "-std=c++20"]


class TalkativeBuilder(NVLinkBuilder):
    """Also makes ptxas say what every kernel uses, and keeps the PTX in `folder`."""

    def __init__(self, folder):
        super().__init__(capabilities=BOTH)
        self.folder = folder

    def cxx_args(self):
        return BINDINGS_ARGS

    def nvcc_args(self):
        return [*super().nvcc_args(), "-Xptxas=-v", "--keep", f"--keep-dir={self.folder}"]


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """(the module, what nvcc said of each source by file name, the folder with the PTX)."""
    run, said, folder = builder._run, {}, tmp_path_factory.mktemp("ptx")

    def record(*args):
        output = run(*args)
        if args[0] == "-c":
            said[args[1].rpartition("/")[2]] = output
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("extensions")))
        patch.setattr(builder, "_run", record)
        yield TalkativeBuilder(folder).jit_load(), said, folder


def test_the_bindings_import_without_a_gpu(build):
    module, said, _ = build
    assert set(KERNEL_FILES) < set(said)
    for name in ("Totals", "Dispatch", "Combine"):  # structs: every field has a default
        assert getattr(module, name)()
    rows = module.Rows(module.Rows(T=3, slot_WT=1 << 63), group=module.Group(peer=[0] * module.MAX_RANKS))
    assert module.Dispatch(rows=rows)
    with pytest.raises(TypeError, match="Rows has no field 'rows'"):
        module.Rows(rows=rows)


@pytest.mark.parametrize("name", KERNEL_FILES)
def test_kernels_keep_to_their_registers(build, name):
    said = build[1][name]
    assert "warning" not in said, said
    kernels = re.findall(r"Compiling entry function '(\w+)' for '(sm_\w+)'", said)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert {architecture for _, architecture in kernels} == {"sm_90a", "sm_100a"}
    assert len(spills) == len(kernels)
    too_much = [(*kernel, *spill) for kernel, spill in zip(kernels, spills, strict=True)
                if max(map(int, spill)) > SPILL_BYTES]
    assert not too_much


@pytest.mark.parametrize("name", KERNEL_FILES)
def test_no_read_through_the_read_only_cache(build, name):
    """Peers write to staging while kernels run, so no kernel may read through ld.global.nc."""
    files = [path for path in build[2].glob("*.ptx") if path.name.startswith(name.removesuffix(".cu"))]
    assert len(files) == len(BOTH), sorted(path.name for path in build[2].iterdir())
    for path in files:
        text = path.read_text()
        assert ".entry" in text
        assert not re.findall(r"ld\.global[.\w]*\.nc\b|ldu\.", text), path.name


HOPPER = BOTH[0]
NO_NVSHMEM = NVSHMEMBuilder(capabilities=(HOPPER, ))._obstacle()


@pytest.mark.skipif(NO_NVSHMEM is not None, reason=str(NO_NVSHMEM))
def test_the_kernels_over_nvshmem_compile_link_and_import_without_a_gpu(tmp_path, monkeypatch):
    said, run = {}, builder._run

    def record(*args):
        said[args[1].rpartition("/")[2]] = output = run(*args)
        return output

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(builder, "_run", record)
    monkeypatch.setattr(NVSHMEMBuilder, "compute_capability_args",
                        lambda self: [*NVLinkBuilder.compute_capability_args(self), "-Xptxas=-v"])
    monkeypatch.setattr(NVSHMEMBuilder, "cxx_args", lambda self: BINDINGS_ARGS)
    module = NVSHMEMBuilder(capabilities=(HOPPER, )).jit_load()  # the same kernels as above, over other puts
    assert not module.started() and module.ShmemExchange(rows=module.RowExchange(chunks=3), pe=[0] * module.MAX_RANKS)
    assert module.LowLatencyDispatch(common=module.LowLatency(outbox_at=1 << 40))
    # 5 kinds of rows in a dispatch. 3 dtypes of rows and 2 of outputs in a combine.
    for source, kernels in (("row_exchange.cu", {"row_exchange": 1}),
                            ("low_latency.cu", {"low_latency_dispatch": 5, "low_latency_combine": 6})):
        text = said[source]
        for name, number in kernels.items():
            assert len(re.findall(rf"Compiling entry function '\w*\d{name}\w*' for 'sm_90a'", text)) == number, text
        spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
        assert spills and max(int(number) for pair in spills for number in pair) <= SPILL_BYTES, text
