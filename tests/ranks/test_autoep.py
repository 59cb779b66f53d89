# SPDX-License-Identifier: Apache-2.0
"""Converted AutoEP layers beside DeepSpeed's own: the same routing bits, the same training, MXFP8 within its bars."""

from datetime import timedelta

import autoep_models
import deepspeed.comm as dist
import peft
import pytest
import torch
from autoep_models import FAMILIES, autoep_layers, batch, engine, gathered, own_name, train_engine
from deepspeed.module_inject import auto_ep_layer
from deepspeed.utils import safe_get_full_grad
from rank_pool import set_timeout
from slow import slow_except
from torch.nn.utils import parametrize

from ds_mxfp8_moe import PeerFailure, convert
from ds_mxfp8_moe.compute.mx import sqnr_db

PLAIN = {"enabled": False}
BF16 = {"enabled": True, "recipe": "bf16"}
MXFP8 = {"enabled": True}


# ---------------------------------------------------------------- one layer, on the same input


def call(layer, x, grad) -> tuple:
    """Output, all gradients by name, and everything that routing decides."""
    routing = []
    hook = layer.router.register_forward_hook(lambda module, args, output: routing.extend(output))
    layer.tokens_per_expert.zero_()
    x = x.clone().requires_grad_()
    output = layer(x)
    hook.remove()
    y, logits = output if isinstance(output, tuple) else (output, None)
    parameters = dict(layer.named_parameters())
    loss = (y * grad.view(y.shape)).sum()
    if logits is not None:
        loss = loss + logits.float().square().sum()
    values = {"output": y, "input": torch.autograd.grad(loss, [x], retain_graph=True)[0]}
    values |= dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
    return ({name: value.detach() for name, value in values.items()},
            [part.detach() for part in routing] + [layer.tokens_per_expert.clone()]
            + ([] if logits is None else [logits.detach()]))


def layer_and_input(family: str, ep_size: int, dtype=torch.float32, tokens: int = 64):
    built = engine(None, 0, ep_size, family=family, model_changes={"dtype": dtype})
    generator = torch.Generator().manual_seed(built.global_rank)
    x, grad = (torch.randn(2, tokens, 64, generator=generator).to(dtype) for _ in range(2))
    return built, autoep_layers(built.module)[-1], x, grad


def decibels(expected: dict, got: dict) -> dict:
    return {name: float(sqnr_db(expected[name], got[name])) for name in expected}


def same_bits(first, second) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def bf16_recipe(family, shape, logits):
    built, layer, x, grad = layer_and_input(family, 2)
    layer.moe_output_shape = shape
    if logits is not None:
        layer.return_router_logits = logits
    plain, routing = call(layer, x, grad)
    keys = list(built.module.state_dict())
    report = convert(built, BF16)
    ours, our_routing = call(layer, x, grad)
    return report, decibels(plain, ours), same_bits(routing, our_routing), keys == list(built.module.state_dict())


@pytest.mark.parametrize("family, shape, logits", [*((family, "batched", None) for family in FAMILIES),
                                                   ("qwen2_moe", "flat", False), ("qwen2_moe", "flat", True)])
def test_the_bf16_recipe_equals_deepspeed(ranks2, family, shape, logits):
    for report, db, same_routing, same_keys in ranks2.run(bf16_recipe, family, shape, logits):
        assert report.converted == len(report.layers) > 0
        assert min(db.values()) >= 90, db
        assert same_routing and same_keys


def in_bfloat16():
    built, layer, x, grad = layer_and_input("qwen3_moe", 2, torch.bfloat16)
    plain, routing = call(layer, x, grad)
    convert(built, BF16)
    ours, our_routing = call(layer, x, grad)
    # The exact answer for the same routing: DeepSpeed's experts in float32 behind the router in bfloat16.
    convert(built, PLAIN)
    layer.experts.float()
    gate = layer.router.gate.forward
    layer.router.gate.forward = lambda x: gate(x.bfloat16())
    exact, _ = call(layer, x.float(), grad.float())
    return decibels(exact, plain), decibels(exact, ours), same_bits(routing, our_routing)


def test_in_bfloat16_it_is_no_farther_from_the_exact_answer_than_deepspeed(ranks2):
    for plain, ours, same_routing in ranks2.run(in_bfloat16):
        assert same_routing
        for name, db in ours.items():
            assert db >= 45 and db >= plain[name] - 0.5, (name, db, plain[name])


def dtypes_apart(tokens, experts):
    built, layer, x, grad = layer_and_input("qwen3_moe", 2, tokens=256)
    layer.to(tokens)
    layer.experts.to(experts)
    plain, routing = call(layer, x.to(tokens), grad.to(tokens))
    for section, bar in ((BF16, 40), (MXFP8, 20)):
        convert(built, section)
        ours, our_routing = call(layer, x.to(tokens), grad.to(tokens))
        db = decibels(plain, ours)
        assert min(db.values()) >= bar, (section, db)
        assert same_bits(routing, our_routing)
        assert [value.dtype for value in plain.values()] == [value.dtype for value in ours.values()]


@pytest.mark.parametrize("tokens, experts", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32),
                                             (torch.float16, torch.bfloat16)])
def test_experts_compute_in_the_dtype_of_the_tokens(ranks2, tokens, experts):
    ranks2.run(dtypes_apart, tokens, experts)


def mxfp8_recipes(ep_size, sections):
    built, layer, x, grad = layer_and_input("qwen3_moe", ep_size, tokens=256)
    plain, routing = call(layer, x, grad)
    results = []
    for section in sections:
        convert(built, section)
        ours, our_routing = call(layer, x, grad)
        again, _ = call(layer, x, grad)
        results.append((decibels(plain, ours), same_bits(routing, our_routing),
                        same_bits(ours.values(), again.values())))
    return results


SECTIONS = [{}, {"scale_block_size": 128}, {"recipe": "mxfp8"}, {"recipe": "mxfp8", "scale_block_size": 128},
            {"scaling_mode": "floor"}]


@pytest.mark.parametrize("ranks, ep_size", slow_except(
    [("ranks2", 2), ("ranks4", 2), ("ranks4", 4)], ("ranks2", 2), ("ranks4", 2)))
def test_mxfp8_stays_within_the_bars_of_swiglu(request, ranks, ep_size):
    sections = SECTIONS if ranks == "ranks2" else SECTIONS[:2]  # more ranks differ in the exchange alone
    for results in request.getfixturevalue(ranks).run(mxfp8_recipes, ep_size, sections):
        for section, (db, same_routing, repeatable) in zip(sections, results, strict=True):
            less = 1.5 if section.get("scaling_mode") == "floor" else 0
            # The routing weights' gradients are sums of products of two rounded factors each, whence the router's bar.
            bars = {"output": 23, "router.gate.weight": 21}
            for name, value in db.items():
                assert value >= bars.get(name, 22.5) - less, (section, name, value)
            assert same_routing and repeatable


# ---------------------------------------------------------------- whole models, trained


def train(section, *args, steps: int = 2, checkpointing: dict | None = None, one_batch: bool = False,
          lopsided: bool = False, **kwargs):
    """Losses, the first step's gradients as DeepSpeed reduced them, the weights after the last step, expert loads.

    `lopsided` sends every token to the experts of the first of two ranks.
    """
    built = engine(section, *args, **kwargs)
    if lopsided:
        for layer in autoep_layers(built.module):
            router = getattr(layer, "router", None) or layer.gate
            router.e_score_correction_bias = torch.tensor([9.0] * 4 + [0.0] * 4)
    if checkpointing is not None:
        built.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    losses, grads = [], {}
    for step in range(steps):
        for micro in range(built.gradient_accumulation_steps()):
            ids = batch(0 if one_batch else 10 * step + micro)
            loss = built(input_ids=ids, labels=ids).loss
            built.backward(loss)
            losses.append(loss.item())
            if step == 0 and built.is_gradient_accumulation_boundary():
                grads = {own_name(name): safe_get_full_grad(p).float().clone()
                         for name, p in built.module.named_parameters() if p.requires_grad}
            built.step()
    if built.zero_optimization_stage() == 3:  # nothing stays gathered: backward had to gather the experts again
        assert not any(p.numel() for layer in autoep_layers(built.module) for p in layer.experts.parameters())
    weights = {own_name(name): gathered(p).float() for name, p in built.module.named_parameters()}
    converted = autoep_models.converted(built)
    loads = [layer.tokens_per_expert.clone() for layer in autoep_layers(built.module)
             if hasattr(layer, "tokens_per_expert")]
    built.destroy()
    return losses, grads, weights, loads, converted


def trained_like_deepspeed(*args, **kwargs):
    plain, ours = (train(section, *args, **kwargs) for section in (PLAIN, BF16))
    moved = max([(abs(a - b).sum() / (2 * a.sum())).item() for a, b in zip(plain[3], ours[3], strict=False)] or [0])
    return plain[0], ours[0], decibels(plain[1], ours[1]), decibels(plain[2], ours[2]), moved, (plain[4], ours[4])


def check_training(results, tolerance=1e-5, db=90, most_moved=0):
    """`most_moved`: the share of tokens that may go to another expert."""
    for plain_losses, losses, grads, weights, moved, converted in results:
        assert converted[0] == 0 < converted[1]
        assert losses == pytest.approx(plain_losses, abs=tolerance)
        assert min(grads.values()) >= db, min(grads.items(), key=lambda item: item[1])
        assert min(weights.values()) >= db, min(weights.items(), key=lambda item: item[1])
        assert moved <= most_moved


@pytest.mark.parametrize("ranks, ep_size, stage", slow_except(
    [*(("ranks2", 2, stage) for stage in range(4)), ("ranks2", 1, 2), ("ranks2", 1, 3), ("ranks4", 2, 1),
     ("ranks4", 2, 2), ("ranks4", 2, 3)], ("ranks2", 2, 0), ("ranks2", 1, 2), ("ranks2", 2, 3), ("ranks4", 2, 2)))
def test_trains_like_deepspeed_in_every_zero_stage(request, ranks, ep_size, stage):
    pool = request.getfixturevalue(ranks)
    changes = {} if stage else {"gradient_clipping": 0.0}  # DeepSpeed's norm is another one there (test_clipping.py)
    check_training(pool.run(trained_like_deepspeed, stage, ep_size, **changes))


LAYOUTS = {
    "accumulation and clipping": (2, dict(gradient_accumulation_steps=2, gradient_clipping=0.1)),
    "accumulation and clipping, ZeRO-3": (3, dict(gradient_accumulation_steps=2, gradient_clipping=0.1)),
    "data before experts": (2, dict(use_data_before_expert_parallelism=True)),
    "optimizer on the CPU": (2, dict(zero_optimization={"offload_optimizer": {"device": "cpu"}},
                                     zero_force_ds_cpu_optimizer=False)),
    "everything on the CPU": (3, dict(zero_optimization={"offload_optimizer": {"device": "cpu"},
                                                         "offload_param": {"device": "cpu"}},
                                      zero_force_ds_cpu_optimizer=False)),
}


@pytest.mark.parametrize("layout", slow_except(
    LAYOUTS, "accumulation and clipping", "accumulation and clipping, ZeRO-3", "data before experts"))
def test_trains_like_deepspeed_in_other_layouts(ranks4, layout):
    stage, changes = LAYOUTS[layout]
    check_training(ranks4.run(trained_like_deepspeed, stage, 2, **changes))


# DeepSpeed's ZeRO-1 and 2 refuse MoE layers without a trained expert.
@pytest.mark.parametrize("stage, frozen", [(1, r".*layers\.0\.mlp\.experts.*"), (3, r".*layers\.0\.mlp\.gate.*"),
                                           (1, r".*embed_tokens.*|.*self_attn.*"), (0, r".*\.experts\..*"),
                                           (3, r".*\.experts\..*")])
def test_trains_like_deepspeed_with_parts_frozen(ranks2, stage, frozen):
    check_training(ranks2.run(trained_like_deepspeed, stage, 2, frozen=frozen))


def test_trains_like_deepspeed_under_autocast(ranks2):
    check_training(ranks2.run(trained_like_deepspeed, 1, 2, torch_autocast={"enabled": True, "dtype": "bfloat16"}),
                   tolerance=1e-3, db=30, most_moved=0.02)  # scores that tie but for a rounding, later on


@pytest.mark.parametrize("stage", [1, 3])
def test_mxfp8_learns_under_bf16_engines(ranks2, stage):
    def losses(section):
        return [result[0] for result in ranks2.run(train, section, stage, 2, steps=6, one_batch=True,
                                                   bf16={"enabled": True})]

    for plain, ours in zip(losses(PLAIN), losses(MXFP8), strict=True):
        assert ours != plain
        assert ours[-1] < ours[0] - 0.2
        assert ours == pytest.approx(plain, rel=0.02)


# ---------------------------------------------------------------- recomputation, empty ranks, odd calls


def recomputed(family, stage, use_reentrant, lopsided):
    changes = {"family": family, "gradient_clipping": 1.0, "lopsided": lopsided}
    plain = train(MXFP8, stage, 2, **changes)
    again = train(MXFP8, stage, 2, checkpointing={"use_reentrant": use_reentrant}, **changes)
    return plain[0] == again[0], [name for name in plain[1] if not torch.equal(plain[1][name], again[1][name])]


@pytest.mark.parametrize("family, stage, lopsided, use_reentrant", slow_except(
    [("deepseek_v3", 2, False, False), ("deepseek_v3", 2, False, True), ("deepseek_v3", 3, False, False),
     ("deepseek_v3", 3, True, True), ("gpt_oss", 3, False, False)],
    ("deepseek_v3", 2, False, False), ("deepseek_v3", 3, True, True), ("gpt_oss", 3, False, False)))
def test_activation_checkpointing_changes_no_bit(ranks2, family, stage, lopsided, use_reentrant):
    for same_losses, different in ranks2.run(recomputed, family, stage, use_reentrant, lopsided):
        assert same_losses and not different


def uneven():
    built, layer, all_x, _ = layer_and_input("qwen3_moe", 2)
    for section in (MXFP8, BF16, PLAIN):
        convert(built, section)
        for tokens_per_rank in ((5, 3), (7, 0)):
            x = all_x[:1, :tokens_per_rank[built.global_rank]].clone().requires_grad_()
            layer.zero_grad()
            y = layer.train()(x)
            y.square().sum().backward()
            assert y.shape == x.shape
            assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
            with torch.no_grad():
                assert torch.equal(y, layer.eval()(x))


def test_ranks_may_bring_different_numbers_of_tokens(ranks2):
    ranks2.run(uneven)


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
    except PeerFailure as failure:
        return str(failure)


@pytest.mark.slow
def test_generate_on_ranks_of_different_lengths_names_synced_gpus(ranks2):
    assert ranks2.run(generated_until, True) == [16 + 2, 16 + 5]
    _, failure = ranks2.run(generated_until, False)
    ranks2.close()  # their default group has a deadline of its own now
    assert "rank 1 waited for rank 0 in 'counts' of model.layers.0.mlp until the deadline" in failure
    assert "The layer is in evaluation mode. In generate(), " in failure and "pass synced_gpus=True" in failure


def converted_twice():
    built, layer, x, grad = layer_and_input("qwen3_moe", 2)
    plain, _ = call(layer, x, grad)
    ids = [id(p) for p in built.module.parameters()]
    first, second = convert(built, MXFP8), convert(built, BF16)
    ours, _ = call(layer, x, grad)
    back = convert(built, PLAIN)
    restored, _ = call(layer, x, grad)
    return (first.converted, second.converted, back.converted, min(decibels(plain, ours).values()),
            same_bits(plain.values(), restored.values()), ids == [id(p) for p in built.module.parameters()],
            type(layer) is auto_ep_layer.AutoEPMoELayer)


def test_converting_again_replaces_the_earlier_conversion_and_disabling_restores(ranks2):
    for first, second, back, db, restored, same_parameters, plain_class in ranks2.run(converted_twice):
        assert (first, second, back) == (2, 2, 0)
        assert db >= 90
        assert restored and same_parameters and plain_class


def balanced(family):
    built, layer, x, grad = layer_and_input(family, 2, torch.bfloat16)
    layer.router.gate.float()  # as transformers 5.24 has those of deepseek_v3
    convert(built, {**BF16, "force_load_balance": True})
    values, _ = call(layer, x, grad)
    return bool(values["router.gate.weight"].any()), layer.tokens_per_expert.unique().numel()


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_forced_balance_sends_as_many_tokens_to_every_expert_and_the_router_learns(ranks2, family):
    assert ranks2.run(balanced, family) == [(True, 1)] * 2


# ---------------------------------------------------------------- experts wrapped or replaced after conversion


class Doubled(torch.nn.Module):

    def forward(self, weight):
        return 2 * weight


def lora(layer):
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_parameters=["experts.w1", "experts.w2"]), layer)
    for name, p in layer.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(p, std=0.1)
    layer.requires_grad_(True)


WRAPPED = {"PEFT": lora,
           "parametrised": lambda layer: parametrize.register_parametrization(layer.experts, "w1", Doubled())}


def wrapped_experts(how):
    built, layer, x, grad = layer_and_input("qwen3_moe", 2)
    convert(built, BF16)
    WRAPPED[how](layer)
    ours, routing = call(layer, x, grad)
    report = convert(built, PLAIN)
    plain, plain_routing = call(layer, x, grad)
    return report.converted, decibels(plain, ours), same_bits(routing, plain_routing)


@pytest.mark.parametrize("how", WRAPPED)
def test_experts_wrapped_after_conversion_compute_what_deepspeed_does(ranks2, how):
    for converted, db, same_routing in ranks2.run(wrapped_experts, how):
        assert converted == 0
        assert min(db.values()) >= 90, db
        assert same_routing


def replaced_experts():
    built, layer, x, _ = layer_and_input("qwen3_moe", 2)
    convert(built, MXFP8)
    layer.experts = torch.nn.Identity()
    with pytest.raises(RuntimeError, match="mlp: its experts were replaced by a Identity after conversion"):
        layer(x)


def test_experts_replaced_after_conversion_raise(ranks2):
    ranks2.run(replaced_experts)
