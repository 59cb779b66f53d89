# SPDX-License-Identifier: Apache-2.0
"""Models whose experts are spread over ranks train as transformers' own do in plain data parallelism."""

import contextlib
import io
from datetime import timedelta

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.module_inject import auto_ep

from ds_mxfp8_moe import PeerError, convert
from tests.support.autoep_models import autoep_layers, batch, engine, train_engine
from tests.support.autoep_trainings import BF16, PLAIN, trained
from tests.support.rank_pool import set_timeout
from tests.support.slow import slow_except

MXFP8 = {"enabled": True}


# ---------------------------------------------------------------- trained, beside test_model_types.py


def learned(section, family, stage, rate) -> list[float]:
    optimizer = {"type": "SGD", "params": {"lr": rate, "momentum": 0.9}}
    built = engine(section, stage, family=family, bf16={"enabled": True}, optimizer=optimizer)
    return trained(built, steps=6, one_batch=True)[0]


@pytest.mark.parametrize("family, stage, rate", slow_except(
    [("qwen3_moe", 1, 0.2), ("qwen3_moe", 3, 0.2), ("invented_moe", 3, 0.02)],
    ("invented_moe", 3, 0.02)))
def test_mxfp8_learns_under_bf16_engines(ranks2, family, stage, rate):
    both = (ranks2.run(learned, section, family, stage, rate) for section in (PLAIN, MXFP8))
    for plain, ours in zip(*both, strict=True):
        assert ours != plain and ours[-1] < ours[0] - 0.2
        assert ours == pytest.approx(plain, rel=0.02)


def recomputed(family, stage, use_reentrant, lopsided) -> tuple:
    """Whether losses are the same, and the weights that have moved otherwise.

    `lopsided` sends every token to the experts of the first of two ranks.
    """
    results = []
    for again in (False, True):
        built = engine(MXFP8, stage, 2, family=family, gradient_clipping=1.0)
        for layer in autoep_layers(built.module) if lopsided else ():
            layer.gate.e_score_correction_bias = torch.tensor([9.0] * 4 + [0.0] * 4)
        if again:
            built.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        results.append(trained(built))
    plain, again = results
    return plain[0] == again[0], [name for name in plain[1] if not torch.equal(plain[1][name], again[1][name])]


@pytest.mark.parametrize("family, stage, lopsided, use_reentrant", slow_except(
    [("deepseek_v3", 2, False, False), ("deepseek_v3", 2, False, True), ("deepseek_v3", 3, False, False),
     ("deepseek_v3", 3, True, True), ("gpt_oss", 3, False, False)],
    ("deepseek_v3", 3, True, True)))
def test_activation_checkpointing_changes_no_bit(ranks2, family, stage, lopsided, use_reentrant):
    for same_losses, different in ranks2.run(recomputed, family, stage, use_reentrant, lopsided):
        assert same_losses and not different


# ---------------------------------------------------------------- other calls


def compiled(around_the_layers: bool):
    """Losses of an engine and of a compiled one, and how many graphs were compiled.

    around_the_layers: DeepSpeed compiles what lies between the MoE layers.
    """
    changes = {"compile": {"autoep_non_moe": True}} if around_the_layers else {}
    shape = {"num_hidden_layers": 3, "use_cache": False}
    engines = [engine(MXFP8, 1, 2, model_changes=shape, **changes) for _ in range(2)]
    engines[1].compile(backend="eager")
    torch._dynamo.utils.counters.clear()
    losses = [train_engine(built, range(3)) for built in engines]
    return losses, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("around_the_layers", slow_except([False, True], True))
def test_compiled_engines_train_alike(ranks2, around_the_layers):
    for (plain, traced), graphs in ranks2.run(compiled, around_the_layers):
        assert traced == plain
        # Before and after an MoE layer, for all three. transformers 5.17 breaks them once more.
        assert graphs <= 4 or not around_the_layers


def generated(section):
    built = engine(section, 0, 2)
    built.eval()
    ids = batch(0, size=1, length=5 + 4 * built.global_rank)
    with torch.no_grad():
        return built.module.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)[0].tolist()


def test_generates_from_prompts_of_different_lengths(ranks2):
    plain, ours = ranks2.run(generated, PLAIN), ranks2.run(generated, BF16)
    assert plain == ours and [len(ids) for ids in ours] == [10, 14]
    assert [len(ids) for ids in ranks2.run(generated, MXFP8)] == [10, 14]


def generated_until(synced: bool) -> str | int:
    """Rank 1 wants more tokens than rank 0. How many it gets, or the error."""
    built = engine(MXFP8, 0)
    built.eval()
    built.module(input_ids=batch(0))  # the ranks choose a transport
    set_timeout(timedelta(seconds=3))
    more = 2 + 3 * dist.get_rank()
    try:
        return built.module.generate(batch(0), max_new_tokens=more, min_new_tokens=more, synced_gpus=synced).shape[1]
    except PeerError as failure:
        return str(failure)


@pytest.mark.slow
def test_generate_on_ranks_of_different_lengths_names_synced_gpus(ranks2):
    assert ranks2.run(generated_until, True) == [16 + 2, 16 + 5]
    _, failure = ranks2.run(generated_until, False)
    ranks2.close()  # their default group has a deadline of its own now
    assert "rank 1 waited for rank 0 in 'counts' of model.layers.0.mlp until the deadline" in failure
    assert "The layer is in evaluation mode. In generate(), " in failure and "pass synced_gpus=True" in failure


def recorded(section, family) -> list[torch.Tensor]:
    net = engine(section, 0, family=family).module.eval()
    with torch.no_grad():
        out = net(input_ids=batch(0), output_router_logits=True, output_hidden_states=True)
    assert len(out.router_logits) == 2 and len(out.hidden_states) == 3
    return [tensor.flatten(0, -2) for tensor in (*out.router_logits, *out.hidden_states)]


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_transformers_records_router_logits_and_hidden_states(ranks2, family):
    for own, ours in zip(ranks2.run(recorded, PLAIN, family), ranks2.run(recorded, BF16, family), strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-5)


def converted_again() -> tuple:
    """Losses after each of four conversions, whether parameters stay the same objects, and how many are converted."""
    built = engine(MXFP8, 0)
    ids, losses, counts = [id(p) for p in built.module.parameters()], [], []
    for section in (MXFP8, BF16, {"enabled": False}, MXFP8):
        counts.append(convert(built, section).converted)
        losses.append(built(input_ids=batch(0), labels=batch(0)).loss.item())
    return losses, ids == [id(p) for p in built.module.parameters()], counts


def test_converting_again_replaces_the_earlier_conversion(ranks2):
    for (mxfp8, bf16, off, again), same, counts in ranks2.run(converted_again):
        assert mxfp8 == again != bf16 == off and same and counts == [2, 2, 0, 2]


# ---------------------------------------------------------------- keys of "expert_parallel", and other paths


def with_keys(keys: dict) -> tuple[list[float], str]:
    """Losses and what was said, with more keys in DeepSpeed's section."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        built = engine(BF16, 1, expert_parallel=keys)
    return train_engine(built, range(2)), said.getvalue()


@pytest.mark.parametrize("keys, line", [
    ({"comm_backend": "deepep", "comm_max_tokens_per_rank": 64}, "converted: 8 experts, 4 on each of 2 ranks"),
    ({"preset_model": "mixtral", "route_norm": False}, '"route_norm" in "expert_parallel" has no effect: the router')])
def test_the_exchange_is_ours_and_the_router_the_models_own(ranks2, keys, line):
    results, plain = ranks2.run(with_keys, keys), ranks2.run(with_keys, {})
    assert [losses for losses, _ in results] == [losses for losses, _ in plain] and line in results[0][1]


def of_narrow_experts(size: int) -> tuple:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        changes = {"model_changes": {"moe_intermediate_size": size}}
        plain, ours = (train_engine(engine(section, 1, **changes), range(2)) for section in (PLAIN, MXFP8))
    return plain, ours, said.getvalue()


@pytest.mark.parametrize("size, reason", [
    (48, "hidden size 64 and FFN size 48 are not both multiples of 32; its experts run in the model's dtype"),
    (40, "experts of model.layers.0-1.mlp stay whole on every rank, as transformers computes them: the size 40")])
def test_sizes_that_are_not_exchanged_in_mxfp8_train_like_transformers(ranks2, size, reason):
    results = ranks2.run(of_narrow_experts, size)
    assert reason in results[0][2]
    for plain, ours, _ in results:
        assert ours == pytest.approx(plain, abs=1e-5)


def folded() -> tuple[list[str], list[float]]:
    keys = {"tensor_parallel": {"autotp_size": 2, "preset_model": "mixtral"},
            "expert_parallel": {"preset_model": "mixtral"}}
    built = engine(MXFP8, 1, 2, family="mixtral", **keys)
    return [layer.detail for layer in convert(built, MXFP8).layers], train_engine(built, [0, 0, 0], rank=0)


def test_layers_that_are_folded_with_autotp_stay_deepspeeds(ranks4):
    for details, losses in ranks4.run(folded):
        assert details and all("AutoTP" in detail for detail in details)
        assert losses[-1] < losses[0]


def after_an_error() -> bool:
    plain = auto_ep.AutoEP
    with pytest.raises(ValueError, match="autoep_size"):
        engine(MXFP8, 0, 3)
    return auto_ep.AutoEP is plain


def test_deepspeed_is_as_before_after_an_error(ranks2):
    assert ranks2.run(after_an_error) == [True, True]
