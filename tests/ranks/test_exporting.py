# SPDX-License-Identifier: Apache-2.0
"""Weights in FP8 and in bf16 under published names: other people's readers find what training multiplied with."""

import io
import itertools
import json
import os
import re
import signal
import time
from contextlib import ExitStack, contextmanager, redirect_stdout
from unittest import mock

import deepspeed
import deepspeed.comm as dist
import peft
import pytest
import torch
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.layer import MoE
from torch.multiprocessing.reductions import StorageWeakRef

import ds_mxfp8_moe
from ds_mxfp8_moe import export_weights, save_pretrained
from ds_mxfp8_moe.checkpoint import gathering
from ds_mxfp8_moe.checkpoint.gathering import Gather
from ds_mxfp8_moe.checkpoint.staging import staged
from ds_mxfp8_moe.checkpoint.writing import ShardWriter
from ds_mxfp8_moe.compute import casts
from ds_mxfp8_moe.compute.mx import dequantize, quantize_tiles
from ds_mxfp8_moe.transport import deadline
from small_models import small_model
from tests.support.adapted_models import with_adapters
from tests.support.autoep_models import batch, model, train_engine
from tests.support.exporting_cases import (
    MULTIPLIED,
    SIZES,
    check_files,
    config_of,
    engine_of,
    same,
    saved,
    saved_with_its_loss,
)
from tests.support.models import Layout, SwiGLU, make_engine
from tests.support.pretrained_models import held_out_loss, loaded
from tests.support.rank_pool import RankFailure
from tests.support.slow import WIDE, slow_except
from tests.support.vllm_reader import EXPERT, files_of, read

EVERY_WAY = tuple(itertools.product((1, 2, 3), (1, 2)))


FOUR_RANKS = (1, 2), (3, 2), (2, 4), (0, 1)


@pytest.mark.parametrize("ranks, model_type, ways", [
    ("ranks2", "mixtral", EVERY_WAY), pytest.param("ranks4", "qwen3_moe", FOUR_RANKS, marks=WIDE),
    *(pytest.param("ranks2", model_type, EVERY_WAY, marks=WIDE) for model_type in ("deepseek_v3", "lfm2_moe"))])
def test_transformers_and_vllm_read_the_same_weights(request, tmp_path, ranks, model_type, ways):
    assert set(request.getfixturevalue(ranks).run(saved, tmp_path, model_type, ways)) == {True}
    check_files(tmp_path)
    theirs, before = (loaded(tmp_path / weights, torch.bfloat16).state_dict() for weights in ("fp8", "model"))
    experts = {name: dequantize(quantize_tiles(tensor)) for name, tensor in before.items()
               if name.endswith(("experts.gate_up_proj", "experts.down_proj"))}
    assert len(experts) >= 2 and not all(torch.equal(before[name], tensor) for name, tensor in experts.items())
    assert same(theirs, before | experts)


# ---- which bytes


def multiplied_and_exported(section):
    """Whether the FP8 weights are what a forward after a step multiplied with; what was printed."""
    engine, made = engine_of(small_model("qwen3_moe", **SIZES), section), []
    train_engine(engine, range(1))
    quantize = casts.quantize_weights

    def spy(*args, **kwargs):
        made.append(quantize(*args, **kwargs))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(casts, "quantize_weights", spy)
        engine(input_ids=batch(1))
    with redirect_stdout(io.StringIO()) as printed:
        found = dict(export_weights(engine, "fp8"))
    first = 4 * dist.get_rank()
    for layer, (up, down) in enumerate(zip(made[0::2], made[1::2], strict=True)):
        for i in range(4):
            for name, mx in (("gate_proj", (up, slice(0, 128))), ("up_proj", (up, slice(128, 256))),
                             ("down_proj", (down, slice(0, 128)))):
                mx, rows = mx
                name = f"model.layers.{layer}.mlp.experts.{first + i}.{name}.weight"
                tiles = slice(rows.start // 128, rows.stop // 128)
                assert torch.equal(found[name].view(torch.uint8), mx.qdata.view(torch.uint8)[i, rows]), name
                assert torch.equal(found[f"{name}_scale_inv"], mx.scale[i, tiles].float()), name
    return len(made), printed.getvalue()


@pytest.mark.parametrize("mode", ["rceil", "floor"])
def test_the_bytes_are_those_that_training_multiplies_with(ranks2, mode):
    assert ranks2.run(multiplied_and_exported, {**MULTIPLIED, "scaling_mode": mode}) == [(4, ""), (4, "")]


def difference_told(section) -> str:
    engine = engine_of(small_model("qwen3_moe", **SIZES), section, ep_size=1)
    with redirect_stdout(io.StringIO()) as printed:
        found = dict(export_weights(engine, "fp8", rank_0_only=True))
    return printed.getvalue(), len(found)


@pytest.mark.parametrize("section, trained, low, high", [
    ({"scale_block_size": 32}, "blocks of 32", 100, 200), ({"recipe": "bf16"}, "unquantized weights", 31, 32)])
def test_one_line_says_how_far_other_trainings_are_from_these_bytes(ranks2, section, trained, low, high):
    (told, count), other = ranks2.run(difference_told, section)
    assert other == ("", 0) and count > 2 * 2 * 8 * 3
    line, = told.splitlines()
    found = re.fullmatch(rf"mxfp8_moe: .* tiles of 128x128, .* with {trained}: SQNR ([\d.]+) dB between .*", line)
    assert low < float(found[1]) < high


def test_the_files_have_the_loss_of_training(ranks2, tmp_path):
    (before, after), _ = ranks2.run(saved_with_its_loss, tmp_path, MULTIPLIED)
    assert before - after > 0.1
    assert held_out_loss(loaded(tmp_path, torch.bfloat16)) == pytest.approx(after, rel=1e-3)


# ---- the iterator


def stopped_early(where, rank_0_only):
    """Whether the ranks can still talk after rank `where` has stopped; how many tensors this rank got."""
    engine = engine_of(small_model("qwen3_moe", **SIZES), stage=3)
    count = 0
    for _ in export_weights(engine, "fp8", bucket_bytes=1, rank_0_only=rank_0_only):
        count += 1
        if dist.get_rank() == where and count == 3:
            break
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item(), count, len(dict(export_weights(engine, "fp8")))


@pytest.mark.parametrize("where, rank_0_only", [(0, False), (1, False), (0, True)])
def test_a_rank_that_stops_early_leaves_nobody_waiting(ranks2, where, rank_0_only):
    results = ranks2.run(stopped_early, where, rank_0_only)
    for rank, (total, count, of_all) in enumerate(results):
        assert total == 2
        assert count == (3 if rank == where else 0 if rank_0_only else of_all)


def most_held(stage, weights, bucket_bytes):
    """The most bytes of exported tensors, beside the model's own, that exist at one time; and of all of them."""
    engine = engine_of(small_model("qwen3_moe", **SIZES), stage=stage)
    own = {p.untyped_storage().data_ptr() for p in engine.module.parameters()}
    held, most, total = {}, 0, 0
    for name, tensor in export_weights(engine, weights, bucket_bytes):
        total += tensor.nbytes
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and ".experts." in name:
            held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        held = {key: value for key, value in held.items() if not value[0].expired()}
        most = max(most, sum(size for _, size in held.values()))
    return most, total


@pytest.mark.parametrize("stage, weights, of_expert", [(1, "fp8", 3 * 128 * 128), (3, "model", 2 * 3 * 128 * 128)])
def test_what_is_gathered_fits_into_the_bucket(ranks2, stage, weights, of_expert):
    bucket_bytes = 2 * of_expert  # one expert of each of the two ranks
    for most, total in ranks2.run(most_held, stage, weights, bucket_bytes):
        assert bucket_bytes <= most < 2.01 * bucket_bytes < total / 3  # gloo's threads may hold the one before, too


# ---- adapters


def merged_and_exported(directory, stage, ep_size):
    net = with_adapters(model("qwen3_moe", torch.bfloat16, **SIZES))
    engine = engine_of(net, {"frozen_experts": "keep"}, stage, ep_size)
    train_engine(engine, range(1))
    save_pretrained(engine, directory / "adapters")
    save_pretrained(engine, directory / "fp8", weights="fp8")
    found = {name: tensor.clone() for name, tensor in export_weights(engine, "model")}
    train_engine(engine, range(1))  # the adapters are where they were
    return found


@pytest.mark.parametrize("stage, ep_size", slow_except([(0, 2), (2, 1), (3, 2)], (3, 2)))
def test_adapters_are_merged(ranks2, tmp_path, stage, ep_size):
    found, others = ranks2.run(merged_and_exported, tmp_path, stage, ep_size)
    assert same(found, others)
    base = model("qwen3_moe", torch.bfloat16, **SIZES)
    net = peft.PeftModel.from_pretrained(base, tmp_path / "adapters", autocast_adapter_dtype=False)
    net.merge_and_unload().save_pretrained(tmp_path / "bf16")
    merged = files_of(tmp_path / "bf16")
    assert found.keys() == merged.keys()
    for name, tensor in merged.items():
        if EXPERT.fullmatch(name) or "q_proj" in name:  # PEFT rounds to nearest: the next number may be another
            assert torch.allclose(found[name], tensor, rtol=2**-6, atol=2**-12), name
        else:
            assert torch.equal(found[name], tensor), name
    for name, tensor in read(tmp_path / "fp8", merged).items():
        expected = dequantize(quantize_tiles(found[name])) if EXPERT.fullmatch(name) else found[name]
        assert torch.equal(tensor.bfloat16(), expected), name


def held_and_exported(adapters):
    """Whether frozen experts in MXFP8 are exported as they are; what was printed."""
    net = model("qwen3_moe", torch.bfloat16, **SIZES)
    if adapters:
        net = with_adapters(net)
    else:
        for p in net.model.layers.parameters():
            p.requires_grad = False
    engine = engine_of(net, {"frozen_experts": "mxfp8"}, stage=3)
    with redirect_stdout(io.StringIO()) as printed:
        found, plain = dict(export_weights(engine, "fp8")), dict(export_weights(engine, "model"))
    layers, right = [layer for layer in engine.module.modules() if isinstance(layer, AutoEPMoELayer)], True
    for i, layer in enumerate(layers):
        held = layer.experts.frozen.operands()
        for j in range(4):
            name = f"model.layers.{i}.mlp.experts.{4 * dist.get_rank() + j}."
            right &= torch.equal(plain[f"{name}down_proj.weight"], dequantize(held["down"], torch.bfloat16)[j])
            right &= all(torch.equal(found[f"{name}{part}_proj.weight"].view(torch.uint8),
                                     tiles.view(torch.uint8)[j, rows])
                         for part, tiles, rows in (("gate", held["up"].qdata, slice(0, 128)),
                                                   ("up", held["up"].qdata, slice(128, 256)),
                                                   ("down", held["down"].qdata, slice(0, 128))))
    return right, len(layers), printed.getvalue()


@pytest.mark.parametrize("adapters", [False, True])
def test_frozen_experts_in_mxfp8_are_exported_as_they_are(ranks2, adapters):
    (right, count, told), (others_right, _, others_told) = ranks2.run(held_and_exported, adapters)
    assert right == others_right == (not adapters) and count == 2 and "SQNR" not in told and others_told == ""
    shares = re.findall(r"adapters were merged into experts( in FP8|), which keep (\d+\.\d) % of the update", told)
    assert [place for place, _ in shares] == ([" in FP8", ""] if adapters else [])
    assert all(float(share) == pytest.approx(100, abs=3) for _, share in shares)


def merged_alike():
    """Whether engines with one and with two ranks, in ZeRO-1 and 3, and two calls, merge adapters alike."""
    first: dict[str, dict] = {}
    for stage, ep_size in ((1, 2), (3, 1)):
        engine = engine_of(with_adapters(model("qwen3_moe", torch.bfloat16, **SIZES)), stage=stage, ep_size=ep_size)
        for weights, bucket_bytes in (("fp8", 2**30), ("fp8", 1), ("model", 2**30)):
            found = {name: tensor.clone() for name, tensor in export_weights(engine, weights, bucket_bytes)}
            if not same(found, first.setdefault(weights, found)):
                return stage, ep_size, weights, bucket_bytes
    return True


def test_merged_weights_do_not_depend_on_ranks_or_calls(ranks2):
    assert ranks2.run(merged_alike) == [True, True]


def tied_and_exported(directory, target, stage):
    """The engine's loss of a text, with an adapter on one of two tied weights."""
    net = model("qwen3_moe", **SIZES, tie_word_embeddings=True)
    lora = peft.LoraConfig(r=4, lora_alpha=16, target_modules=[target], init_lora_weights=False)
    engine = engine_of(peft.get_peft_model(net, lora), stage=stage)
    with engine.module.disable_adapter():
        export_weights(engine).close()  # names are found without the adapter, too
    save_pretrained(engine, directory, "fp8")
    return held_out_loss(engine)


@pytest.mark.parametrize("target, stage", [("embed_tokens", 1), ("lm_head", 3)])
def test_an_adapter_on_one_of_two_tied_weights(ranks2, tmp_path, target, stage):
    loss, _ = ranks2.run(tied_and_exported, tmp_path, target, stage)
    assert held_out_loss(loaded(tmp_path)) == pytest.approx(loss, rel=0.01)
    base = model("qwen3_moe", torch.bfloat16, **SIZES).model.embed_tokens.weight
    files = files_of(tmp_path)
    assert [name for name in ("model.embed_tokens.weight", "lm_head.weight")
            if not torch.equal(files[name], base)] == [name for name in files if target in name]
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False


def there_and_back(directory):
    """Whether files in FP8 that were loaded for LoRA of attention, and are saved before a step, are the same."""
    save_pretrained(engine_of(small_model("qwen3_moe", **SIZES)), directory / "first", "fp8")
    net = ds_mxfp8_moe.from_pretrained(directory / "first", config_of(stage=2), dtype=torch.bfloat16)
    net = peft.get_peft_model(net, peft.LoraConfig(target_modules=["q_proj"]))
    save_pretrained(engine_of(net, stage=2), directory / "second", "fp8")
    net = ds_mxfp8_moe.from_pretrained(directory / "first", config_of(stage=2), dtype=torch.bfloat16)
    save_pretrained(engine_of(net, stage=2), directory / "unquantized")
    dist.barrier()
    return same(files_of(directory / "second"), files_of(directory / "first"))


def test_files_in_fp8_come_back_as_they_were(ranks2, tmp_path):
    assert ranks2.run(there_and_back, tmp_path) == [True, True]
    first, second, unquantized = (json.loads((tmp_path / name / "config.json").read_text())
                                  for name in ("first", "second", "unquantized"))
    # transformers 5.17 adds plans of parallelism when it loads FP8.
    assert first == {key: value for key, value in second.items() if not key.endswith("_plan")}
    assert "quantization_config" in first and "quantization_config" not in unquantized


def with_dora():
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True)
    engine = engine_of(peft.get_peft_model(model("qwen3_moe", **SIZES), config))
    with pytest.raises(RuntimeError, match=r"q_proj: the adapters \['default'\] cannot be merged here"):
        export_weights(engine, "fp8")


def test_adapters_that_are_no_product_of_two_factors_are_refused(ranks2):
    ranks2.run(with_dora)


# ---- classic layers


class Classic(torch.nn.Module):

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(128, 128)
        self.moe = MoE(128, SwiGLU(128, 256), 4, 2)

    def forward(self, x):
        return self.moe(self.first(x))[0].float().mean()


def classic(directory):
    engine = make_engine(Layout(zero=2, dtype="bf16"), {"enabled": True}, Classic())
    for p in engine.module.moe.deepspeed_moe.experts.parameters():  # experts of ranks that differ
        p.data.add_(dist.get_rank() / 100)
    engine.save_16bit_model(directory)
    save_pretrained(engine, directory / "fp8", weights="fp8")
    found = dict(export_weights(engine, "fp8"))
    dist.barrier()
    return same(found, files_of(directory / "fp8"))


def test_classic_layers_become_a_state_dict_in_fp8(ranks2, tmp_path):
    assert ranks2.run(classic, tmp_path) == [True, True]
    found, plain = files_of(tmp_path / "fp8"), torch.load(tmp_path / "pytorch_model.bin")
    assert [path.name for path in (tmp_path / "fp8").iterdir()] == ["model.safetensors"]
    for name, tensor in plain.items():
        if "deepspeed_experts" not in name:
            assert torch.equal(found.pop(name), tensor)
            continue
        scale = found.pop(f"{name}_scale_inv").repeat_interleave(128, 0).repeat_interleave(128, 1)
        assert torch.equal((found.pop(name).float() * scale).bfloat16(), dequantize(quantize_tiles(tensor)))
    assert not found


# ---- errors


def refused(model_type, error, text, weights="fp8", **changes):
    engine = engine_of(small_model(model_type, **changes))
    for call in (export_weights, lambda engine, weights: save_pretrained(engine, "nowhere", weights)):
        with pytest.raises(error, match=text):
            call(engine, weights)
    return len(dict(export_weights(engine, "model"))) > 10


@pytest.mark.parametrize("model_type, biases", [("gpt_oss", ", with biases"), ("granitemoe", "")])
def test_models_whose_experts_are_stacked_are_refused(ranks2, model_type, biases):
    text = (rf'of {model_type} hold the experts of a layer in one tensor{biases} \(model.layers.*\), and engines read '
            'no block FP8 in this form: take weights="model"')
    assert ranks2.run(refused, model_type, ValueError, text) == [True, True]


def test_other_sizes_and_formats_are_refused(ranks2):
    shape = r"experts\.0\.gate_proj\.weight has shape \(64, 64\); in block FP8, both must be multiples of 128"
    ranks2.run(refused, "qwen3_moe", ValueError, shape)
    ranks2.run(refused, "qwen3_moe", ValueError, "weights='int4' was given; supported are 'model' and 'fp8'", "int4")


ARGUMENTS = {"weights": ("fp8", "model"), "bucket_bytes": (2**30, 1), "rank_0_only": (False, True)}


def given_other_arguments(directory):
    """The errors of this rank, which gives other arguments than the other one; nobody waits."""
    engine, rank, told = engine_of(small_model("qwen3_moe", **SIZES)), dist.get_rank(), []
    calls = [lambda name=name, values=values: export_weights(engine, **{name: values[rank]})
             for name, values in ARGUMENTS.items()]
    calls += [lambda: save_pretrained(engine, directory, ("model", "fp8")[rank]),
              lambda: ds_mxfp8_moe.from_pretrained(directory, config_of(ep_size=1 + rank)),
              lambda: export_weights(engine) if rank else save_pretrained(engine, directory)]
    for call in calls:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            call()
        told.append(str(caught.value))
    return told


def test_arguments_that_differ_between_ranks_are_an_error_on_every_rank(ranks2, tmp_path):
    told, others = ranks2.run(given_other_arguments, tmp_path)
    cure = "pass the same value on every rank"
    assert told == others == [
        *(f"export_weights got {name}={first!r} on rank 0 and {name}={second!r} on rank 1: {cure}"
          for name, (first, second) in ARGUMENTS.items()),
        f"save_pretrained got weights='model' on rank 0 and weights='fp8' on rank 1: {cure}",
        f"from_pretrained got autoep_size=1 on rank 0 and autoep_size=2 on rank 1: {cure}",
        "rank 0 calls save_pretrained, and rank 1 calls export_weights: all ranks must make the same calls in the "
        "same order"]


def seconds_in_exchanges(directory, stage):
    """The longest exchange of a rank, while rank 0 writes a tensor for two seconds."""
    engine = engine_of(model("qwen3_moe", **SIZES), stage=stage)
    longest, write, slow = [0.0], ShardWriter.add, [2]

    def add(*args):
        time.sleep(slow.pop() if slow else 0)
        write(*args)

    def timed(plain):
        @contextmanager
        def context(*args):
            start = time.monotonic()
            with plain(*args):
                yield
            longest.append(time.monotonic() - start)

        return context

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(ShardWriter, "add", add))
        for module, name in (gathering, "deadline_for"), (deepspeed.zero, "GatheredParameters"):
            stack.enter_context(mock.patch.object(module, name, timed(getattr(module, name))))
        save_pretrained(engine, directory, "fp8")
    return max(longest)


@pytest.mark.parametrize("stage", [1, 3])
def test_no_rank_waits_in_an_exchange_while_rank_0_writes(ranks2, tmp_path, stage):
    assert 0 < ranks2.run(seconds_in_exchanges, tmp_path, stage)[1] < 1


def exports(directory):
    """Rank 1 dies while rank 0 writes what all ranks export."""
    engine = engine_of(model("qwen3_moe", **SIZES, num_hidden_layers=1))
    save_pretrained(engine, directory, "fp8")
    dist.barrier()
    pairs = export_weights(engine, "fp8", bucket_bytes=1, rank_0_only=True)
    if dist.get_rank() == 1:
        plain, calls = Gather.parts, iter(range(100))
        with mock.patch.object(Gather, "parts", lambda *args: plain(*args) if next(calls) < 3 else
                               os.kill(os.getpid(), signal.SIGKILL)):
            list(pairs)
    with mock.patch.object(deadline, "GRACE_SECONDS", 0.3), staged(directory) as folder:
        files = ShardWriter(folder, 10_000)
        for name, tensor in pairs:
            files.add(name, tensor)
        files.finish()


@pytest.mark.slow
def test_a_rank_that_dies_during_an_export(ranks2, tmp_path):
    with pytest.raises(RankFailure) as caught:
        ranks2.run(exports, tmp_path)
    assert "ended" in caught.value.errors[1] and "PeerError" in caught.value.errors[0]
    assert loaded(tmp_path, torch.bfloat16) and not list(tmp_path.glob(".*"))
