# SPDX-License-Identifier: Apache-2.0
"""LoRA by PEFT on spread experts of every layout: trained like plain transformers with PEFT, under its names."""

import deepspeed.comm as dist
import peft
import pytest
import torch
import transformers

import ds_mxfp8_moe
from ds_mxfp8_moe.config import ConfigError
from ds_mxfp8_moe.layers.adapters import whole_low_rank
from ds_mxfp8_moe.layers.experts import expert_blocks
from tests.support.autoep_models import VOCABULARY, batch, ds_config, train_engine
from tests.support.missing_names import without
from tests.support.slow import slow_except

BF16 = {"enabled": True, "recipe": "bf16"}  # which is fp32 where the model is
SIZES = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=4, head_dim=16, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
             pad_token_id=0)
TEXT = dict(**SIZES, moe_intermediate_size=64, num_experts_per_tok=2)


def nemotron_h():
    """Without a gate, in a latent space."""
    names = {name: value for name, value in TEXT.items() if name != "num_hidden_layers"}
    return transformers.NemotronHForCausalLM(transformers.NemotronHConfig(
        **names, layers_block_type=["full_attention", "moe"] * 2, n_routed_experts=8, moe_latent_size=32,
        moe_shared_expert_intermediate_size=32, num_nextn_predict_layers=0))


def qwen3_vl_moe():
    """Below a language model."""
    vision = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64)
    return transformers.Qwen3VLMoeForConditionalGeneration(transformers.Qwen3VLMoeConfig(
        text_config=dict(**TEXT, num_local_experts=8, rope_parameters={"rope_theta": 1e4, "rope_type": "default"}),
        vision_config=vision))


def aria():
    """Transposed."""
    return transformers.AriaTextForCausalLM(transformers.AriaTextConfig(
        **SIZES, moe_num_experts=8, moe_topk=2, moe_num_shared_experts=1))


# A model, the name of its experts' first weight, and of its router's weight.
FAMILIES = {"nemotron_h": (nemotron_h, "up_proj", "gate.weight"),
            "qwen3_vl_moe": (qwen3_vl_moe, "gate_up_proj", "gate.weight"),
            "aria": (aria, "gate_up_proj", "router.weight")}


def adapted(family: str, seed: int = 1, two: bool = False, router: bool = False):
    """A model with one adapter, or two, that are not zero at the start."""
    make, up, gate = FAMILIES[family]
    torch.manual_seed(0)
    net = make().train()
    torch.manual_seed(seed)
    targets = [f"experts.{up}", "experts.down_proj", *([gate] if router else [])]
    of_rank = {rank: peft.LoraConfig(r=rank, lora_alpha=8, init_lora_weights=False, target_modules=["q_proj"],
                                     target_parameters=targets) for rank in (4, 3)}
    net = peft.get_peft_model(net, of_rank[4])
    if two:
        net.add_adapter("other", of_rank[3])
        net.base_model.set_adapter(["default", "other"])
    return net


def build(net, stage: int = 0, section: dict = BF16, **changes):
    optimizer = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
    return ds_mxfp8_moe.initialize(model=net, config=ds_config(section, stage, 2, optimizer=optimizer, **changes))[0]


def plain_losses(net, steps: int) -> list[float]:
    """This rank's of plain transformers and PEFT, on the batches of both ranks."""
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        of_ranks = [net(input_ids=ids, labels=ids).loss for ids in (batch(step, rank) for rank in range(2))]
        (sum(of_ranks) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(of_ranks[dist.get_rank()].item())
    return losses


def factors(named) -> list[str]:
    return [name for name, _ in named if ".lora_" in name]


def beside_peft(family: str, stage: int, **changes):
    """Losses of plain PEFT and of an engine. All names are the same."""
    plain, net = (adapted(family, **changes) for _ in range(2))
    engine = build(net, stage)
    assert len(list(expert_blocks(net))) == 2
    assert factors(net.state_dict().items()) == factors(plain.state_dict().items())
    assert set(factors(net.named_parameters())) == set(factors(plain.named_parameters()))
    assert set(factors((name, None) for name in engine.param_names.values())) == set(factors(plain.named_parameters()))
    for adapter in plain.peft_config:
        assert list(peft.get_peft_model_state_dict(net, adapter_name=adapter)) == list(
            peft.get_peft_model_state_dict(plain, adapter_name=adapter))
    return plain_losses(plain, 3), train_engine(engine, range(3))


@pytest.mark.parametrize("family, stage, more", slow_except(
    [(family, stage, "") for family in FAMILIES for stage in (1, 3)]
    + [("nemotron_h", 3, "router"), ("qwen3_vl_moe", 1, "router"), ("aria", 3, "two"), ("aria", 1, "two router")],
    ("nemotron_h", 3, "router"), ("qwen3_vl_moe", 1, ""), ("aria", 3, "two")))
def test_trains_like_plain_peft_under_its_names(ranks2, family, stage, more):
    for plain, ours in ranks2.run(beside_peft, family, stage, **dict.fromkeys(more.split(), True)):
        assert ours == pytest.approx(plain, rel=1e-6)


def gathered_in_backward():
    """How many parameters of the last block's experts and router ZeRO-3 has gathered when the first one's backward
    ends."""
    net = adapted("aria", router=True)
    engine = build(net, 3, zero_optimization={"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0,
                                              "stage3_prefetch_bucket_size": 0})
    blocks, found = [block for _, block in expert_blocks(net)], []

    def count(grad):
        found.append(sum(p.shape == p.ds_shape for p in blocks[-1].parameters()))

    blocks[0].register_forward_pre_hook(lambda module, args: args[0].register_hook(count) and None)
    train_engine(engine, [0])
    return found


def test_zero3_gathers_adapters_for_their_own_blocks_backward_alone(ranks2):
    assert ranks2.run(gathered_in_backward) == [[0]] * 2


def loss_on(net) -> float:
    with torch.no_grad():
        return net(input_ids=(ids := batch(9, 0)), labels=ids).loss.item()


def loaded_by_peft(directory, family: str):
    """Losses with an adapter that PEFT's own functions load into an engine: in plain PEFT, and in the engine."""
    wanted = adapted(family, seed=2)
    if dist.get_rank() == 0:
        wanted.save_pretrained(directory)
    dist.barrier()
    found = []
    for load in (lambda net: net.load_adapter(directory, "default"),
                 lambda net: peft.set_peft_model_state_dict(net, peft.get_peft_model_state_dict(wanted))):
        net = adapted(family)
        engine = build(net, 1)
        assert not load(net).unexpected_keys
        for name, value in peft.get_peft_model_state_dict(net).items():
            assert torch.equal(value, peft.get_peft_model_state_dict(wanted)[name])
        found.append(loss_on(engine))
    return loss_on(wanted), found


@pytest.mark.parametrize("family", slow_except(list(FAMILIES), "aria"))
def test_pefts_own_functions_load_adapters_into_an_engine(ranks2, tmp_path, family):
    for wanted, found in ranks2.run(loaded_by_peft, tmp_path, family):
        assert found == pytest.approx([wanted] * 2, rel=1e-6)


def resumed(directory, family: str, stage: int):
    """Losses of an engine that goes on, and of one that loads its checkpoint."""
    first = build(adapted(family), stage)
    train_engine(first, range(2))
    first.save_checkpoint(directory, exclude_frozen_parameters=True)
    second = build(adapted(family, seed=2), stage)
    second.load_checkpoint(directory, load_module_strict=False)
    return train_engine(first, [2, 3]), train_engine(second, [2, 3])


@pytest.mark.parametrize("family, stage", slow_except([("nemotron_h", 1), ("aria", 0), ("aria", 3)], ("aria", 3)))
def test_training_goes_on_from_a_checkpoint(ranks2, tmp_path, family, stage):
    for went_on, loaded in ranks2.run(resumed, tmp_path, family, stage):
        assert loaded == pytest.approx(went_on, rel=1e-6)


def updates(family: str, stage: int) -> float:
    """The largest difference between PEFT's update of this rank's experts and the product of the factors."""
    plain, net = (adapted(family, two=True) for _ in range(2))
    build(net, stage)
    worst = 0.0
    for (name, block), (_, experts) in zip(expert_blocks(net), ((n, m) for n, m in plain.named_modules() if n.endswith(
            ".experts") and isinstance(m, peft.tuners.lora.layer.ParamWrapper)), strict=True):
        layout, found = block.experts.layout, whole_low_rank(block.experts)
        deltas = {}
        for wrapper in (experts, experts.base_layer):
            deltas[wrapper.parameter_name] = sum(map(wrapper.get_delta_weight, wrapper.active_adapters))
        w1, w2, w3 = layout.split(*(deltas[name] for name in layout.names))
        mine = slice(block.experts.first_expert, block.experts.first_expert + block.experts.num_local_experts)
        for gemm, wanted in (("up", torch.cat([w1, w3], 1)), ("down", w2)):
            product = found[gemm].b_ENR @ found[gemm].a_ERK
            worst = max(worst, float((product - wanted[mine]).abs().max()))
    return worst


@pytest.mark.parametrize("family, stage", slow_except(
    [("nemotron_h", 1), ("qwen3_vl_moe", 3), ("aria", 3)], ("aria", 3)))
def test_whole_factors_give_pefts_update(ranks2, family, stage):
    assert max(ranks2.run(updates, family, stage)) < 1e-5


def refused():
    net = adapted("aria")
    build(net)
    assert net.get_model_status().trainable_params > 0
    for call in (net.merge_and_unload, net.unload, net.merge_adapter):
        with pytest.raises(RuntimeError, match="PEFT cannot merge adapters into their weights.*save_pretrained"):
            call()
    unknown = "cannot take adapters of experts: deepspeed .*gone"
    with without("LoRA on experts"), pytest.raises(ConfigError, match=unknown):
        build(adapted("aria"))
    for modules, of in ((["experts"], "experts"), (["mlp"], "mlp")):
        with pytest.raises(ConfigError, match=f"{of} holds experts, and is in modules_to_save"):
            build(peft.get_peft_model(aria(), peft.LoraConfig(target_modules=["q_proj"], modules_to_save=modules)))


def test_what_is_refused(ranks2):
    ranks2.run(refused)


def in_mxfp8(family: str):
    net = adapted(family).bfloat16()
    losses = plain_losses(adapted(family).bfloat16(), 4)
    engine = build(net, 2, {"enabled": True}, bf16={"enabled": True})
    assert all("frozen" in block.experts._modules for _, block in expert_blocks(net))
    return losses, train_engine(engine, range(4))


@pytest.mark.parametrize("family", slow_except(list(FAMILIES), "nemotron_h"))
def test_beside_frozen_mxfp8_experts_losses_stay_close(ranks2, family):
    for plain, ours in ranks2.run(in_mxfp8, family):
        assert ours == pytest.approx(plain, rel=0.01)
