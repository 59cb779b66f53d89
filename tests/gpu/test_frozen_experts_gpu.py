# SPDX-License-Identifier: Apache-2.0
"""Frozen weights in MXFP8 with the kernels, their recordings, and their memory."""

import pytest
import torch

from ds_mxfp8_moe.compute import recorded
from ds_mxfp8_moe.compute.block_fp8 import Rounding, from_mxfp4
from ds_mxfp8_moe.compute.formula import ExpertFormula
from ds_mxfp8_moe.compute.mx import sqnr_db
from ds_mxfp8_moe.compute.mxfp4 import quantize, unpack_tiles
from ds_mxfp8_moe.compute.routing import Routes
from ds_mxfp8_moe.ffn.expert_ffn import ExpertFFN
from ds_mxfp8_moe.ffn.frozen_weights import FrozenMXFP4Weights, FrozenWeights
from ds_mxfp8_moe.transport.local import Local
from tests.support.expert_ffn_cases import RECIPES
from tests.support.frozen_experts_cases import as_it_is, calls, far_apart, merge_aware_call
from tests.support.mxfp4_cases import run_pack
from tests.support.slow import slow_unless


@pytest.mark.parametrize("recipe, routing, tokens", slow_unless(
    lambda recipe, routing, tokens: recipe == "hp-128" or (routing, tokens) == ("random", 50),
    ((recipe, *calls) for recipe in ("hp-128", "mxfp8-128")
     for calls in (("random", 50), ("one-expert", 50), ("nowhere", 50), ("random", 0)))))
def test_the_bits_of_kept_weights(one_rank, recipe, routing, tokens):
    kept = calls(None, recipe, routing, tokens, device="cuda")
    assert all(map(torch.equal, calls(FrozenWeights, recipe, routing, tokens, device="cuda"), kept))


@pytest.mark.parametrize("recipe, files", [("hp-128", as_it_is), ("hp-128", far_apart), ("hp-32", as_it_is)])
def test_files_in_mxfp4_give_the_bits_of_mxfp8(one_rank, recipe, files):
    wanted = calls(FrozenWeights, recipe, "random", device="cuda", files=files)
    assert all(map(torch.equal, calls(FrozenMXFP4Weights, recipe, "random", device="cuda", files=files), wanted))


@pytest.mark.parametrize("changed", [as_it_is, far_apart])
def test_weights_are_read_and_rounded_as_on_the_cpu(changed):
    w = torch.randn(256, 384, generator=torch.Generator().manual_seed(0)) * 0.02
    found = quantize(w.cuda())
    assert sqnr_db(w, found.values().cpu()) == pytest.approx(sqnr_db(w, quantize(w).values()), abs=1e-3)
    weight = changed({"down": quantize(w)})["down"]
    read, roundings = [], []
    for device in ("cpu", "cuda"):
        roundings.append(Rounding())
        blocks, scales = weight.codes[None].unflatten(-1, (-1, 16)).to(device), weight.scale_bytes[None].to(device)
        read.append(from_mxfp4("w", blocks, scales, roundings[-1]))
        frozen = FrozenWeights(1, 256, 384, torch.bfloat16, device)
        frozen.write("down", slice(0, 1), read[-1])
        assert torch.equal(frozen.tiles("down").qdata[0].view(torch.uint8).cpu(),
                           unpack_tiles(weight).qdata.view(torch.uint8))
    assert all(torch.equal(one, other.cpu()) for one, other in zip(read[0].buffers, read[1].buffers, strict=True))
    assert roundings[0].changed == roundings[1].changed and (roundings[0].changed > 0) == (changed is far_apart)


@pytest.mark.parametrize("shape, dtype", [((768, 2048), torch.bfloat16), ((3, 160, 416), torch.float32)])
def test_the_kernel_rounds_to_mxfp4_as_plain_torch(shape, dtype):
    run_pack("cuda", shape, dtype)


@pytest.mark.parametrize("recipe, frozen", [("hp-128", FrozenWeights), ("hp-128", FrozenMXFP4Weights),
                                            ("hp-32", FrozenMXFP4Weights)])
def test_merged_adapters_give_the_bits_of_merged_weights(one_rank, recipe, frozen):
    ours, merged, found, wanted = merge_aware_call(frozen, recipe, device="cuda")
    assert all(map(torch.equal, ours, merged))
    assert min(sqnr_db(expected, one.float().cpu()) for expected, one in zip(wanted, found, strict=True)) > 20


@pytest.mark.parametrize("recipe, frozen, merge_aware", [
    ("hp-128", FrozenWeights, False), ("mxfp8-128", FrozenWeights, False), ("hp-32", FrozenWeights, False),
    ("hp-128", FrozenMXFP4Weights, False), ("hp-32", FrozenMXFP4Weights, False), ("hp-128", FrozenWeights, True),
    ("hp-128", FrozenMXFP4Weights, True)])
def test_replayed_calls_give_the_same_bits(one_rank, recipe, frozen, merge_aware):
    recorded._PROGRAMS.clear()
    with recorded.from_python():
        direct = calls(frozen, recipe, "random", device="cuda", merge_aware=merge_aware)
    assert not recorded._PROGRAMS
    for _ in range(2):  # the second time, with other memory
        again = calls(frozen, recipe, "random", device="cuda", merge_aware=merge_aware)
        assert all(map(torch.equal, again, direct))
    programs = [program for found in recorded._PROGRAMS.values() for program, _ in found.values()]
    assert len(programs) == 2 and all(programs)


@pytest.mark.parametrize("frozen, share", [(FrozenWeights, 1), (FrozenMXFP4Weights, 17 / 32)])
def test_layers_share_the_memory_of_one_operand(one_rank, frozen, share):
    """Peak memory of forward and backward of 4 layers, of which one is 192 MiB in MXFP8: 128 in "up", 64 in "down".

    It is transposed for one GEMM at a time. MXFP4 is also unpacked. `share`: how much of 192 MiB a layer holds.
    """
    E, H, F, mib = 32, 2048, 1024, 2**20
    layers, of_others = [], torch.cuda.memory_allocated()
    for _ in range(4):
        layers.append(frozen(E, H, F, torch.bfloat16, "cuda"))
        for i in range(E):
            gate, up = (torch.randn(F, H, dtype=torch.bfloat16, device="cuda") for _ in range(2))
            layers[-1].put(i, gate, torch.randn(H, F, dtype=torch.bfloat16, device="cuda"), up, "rceil")
    formula = ExpertFormula("gated", "silu", H, F, gate="gate", up="up", down="down")
    ffn = ExpertFFN(formula, RECIPES["hp-128"], Local(), E)
    x = torch.randn(256, H, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    routes = Routes(expert_TK=torch.randint(0, E, (256, 1), device="cuda"),
                    weight_TK=torch.ones(256, 1, device="cuda"), num_experts=E)

    def step():
        y = x
        for held in layers:
            y = ffn(y, routes, {}, frozen=held)
        y.sum().backward()

    for _ in range(2):  # the first one is recorded
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        extra = torch.cuda.max_memory_allocated() - before
    assert 4 * 192 * mib * share <= before - of_others <= 4 * 193 * mib * share + 64 * mib
    assert 128 * mib <= extra < (128 + 250) * mib  # rows are padded to 128 for each expert: 4096 of them
