# SPDX-License-Identifier: Apache-2.0
"""Each kind of Hugging Face MoE model trains once, with the losses and weights of transformers' own experts in plain
data parallelism. The same engine then replays routes, saves the model for transformers, and exports it."""

from dataclasses import dataclass, field

import pytest
import torch
from safetensors.torch import load_file

import ds_mxfp8_moe
from small_models import small_config
from tests.support.autoep_models import FAMILIES, batch, engine, weights
from tests.support.autoep_trainings import BF16, PLAIN, assert_trains_like_transformers, near, trained
from tests.support.invented_moe import InventedModel
from tests.support.pretrained_models import held_out_loss, loaded
from tests.support.slow import WIDE


@dataclass(frozen=True)
class Case:
    """`changes`: of the engine's config, with `model_changes` and `frozen` for the model's."""

    ranks: int
    family: str
    ep_size: int
    stage: int
    changes: dict = field(default_factory=dict)
    near: tuple = ()  # the largest difference of losses and the least SQNR of weights, if not those of float32


TIED = {"model_changes": {"tie_word_embeddings": True}}
CLIPPED = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.1}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
# Routers, biases, shared experts: FAMILIES says which has what. The experts of nemotron_h have no gate, those of aria
# are transposed, those of qwen3_vl_moe lie below a language model, muse_spark has a norm behind each expert,
# deepseek_v4 a clamped gate. Nothing knows invented_moe. On four ranks, two share the experts, and two such pairs
# share the batches.
QUICK = {
    "shared experts on every rank": Case(2, "qwen2_moe", 1, 2, TIED),
    "groups and a dense layer, zero3": Case(2, "deepseek_v3", 2, 3),
    "biases, zero0": Case(4, "gpt_oss", 2, 0),
    "no gate, zero3": Case(2, "nemotron_h", 2, 3),
    "transposed": Case(2, "aria", 2, 1),
    "below a language model": Case(2, "qwen3_vl_moe", 2, 1),
    "of no release": Case(2, "invented_moe", 2, 1),
    "accumulated and clipped, zero3": Case(4, "qwen3_moe", 2, 3, CLIPPED),
    "data before experts": Case(4, "mixtral", 2, 2, {"use_data_before_expert_parallelism": True}),
    # DeepSpeed's ZeRO-1 and 2 refuse MoE layers without a trained expert.
    "frozen experts of one layer": Case(2, "qwen3_moe", 2, 1, {"frozen": r".*layers\.0\.mlp\.experts.*"}),
    "experts alone are trained": Case(2, "qwen3_moe", 2, 2, {"frozen": r"(?!.*\.experts\.).*"}),
    "frozen experts, zero3": Case(2, "qwen3_moe", 2, 3, {"frozen": r".*\.experts\..*"} | TIED),
    "autocast": Case(2, "qwen3_moe", 2, 1, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, (1e-3, 25)),
}
SLOW = {
    **{f"{family}, zero2": Case(2, family, 2, 2) for family in FAMILIES},
    "zero3, experts on every rank": Case(2, "qwen3_moe", 1, 3),
    "biases, zero3": Case(2, "gpt_oss", 2, 3),
    "four ranks, deepseek_v2": Case(4, "deepseek_v2", 2, 1),
    "four ranks, minimax_m3, zero3": Case(4, "minimax_m3", 2, 3),
    "four ranks share the experts": Case(4, "qwen3_moe", 4, 3),
    "norms behind experts, zero3": Case(2, "muse_spark", 2, 3),
    "clamped gate": Case(2, "deepseek_v4", 2, 1),
    "accumulated and clipped": Case(4, "qwen3_moe", 2, 2, CLIPPED),
    "optimizer on the CPU": Case(4, "qwen3_moe", 2, 2, {"zero_optimization": OFFLOAD,
                                                        "zero_force_ds_cpu_optimizer": False}),
    "everything on the CPU": Case(4, "qwen3_moe", 2, 3, {
        "zero_optimization": OFFLOAD | {"offload_param": {"device": "cpu"}}, "zero_force_ds_cpu_optimizer": False}),
    "frozen router, zero3": Case(2, "qwen3_moe", 2, 3, {"frozen": r".*layers\.0\.mlp\.gate.*"}),
    "frozen attention": Case(2, "qwen3_moe", 2, 1, {"frozen": r".*embed_tokens.*|.*self_attn.*"}),
    "frozen experts, zero0": Case(2, "qwen3_moe", 2, 0, {"frozen": r".*\.experts\..*"}),
}


def assert_a_replay_has_the_bits_of_its_recording(built) -> None:
    with torch.no_grad():
        with ds_mxfp8_moe.record_routes(built) as routes:
            recorded = built(input_ids=batch(5)).logits
        with ds_mxfp8_moe.replay_routes(built, routes):
            replayed = built(input_ids=batch(5)).logits
    assert torch.equal(recorded, replayed)


def beside_transformers(directory, case: Case) -> tuple:
    """Losses and weights of both; the held-out loss and the exported weights of our engine, which is saved."""
    after = []

    def use(built) -> None:
        assert_a_replay_has_the_bits_of_its_recording(built)
        ds_mxfp8_moe.save_pretrained(built, directory)
        assert built.save_16bit_model(directory)
        exported = weights(built)
        ds_mxfp8_moe.convert(built, {"enabled": False})
        after.extend((held_out_loss(built), exported))

    arguments = dict(stage=case.stage, ep_size=case.ep_size, family=case.family, **case.changes)
    own, ours = trained(engine(PLAIN, **arguments)), trained(engine(BF16, **arguments), use=use)
    return near(own, ours), *after


@pytest.mark.parametrize("case", [*(pytest.param(case, id=name) for name, case in QUICK.items()),
                                  *(pytest.param(case, id=name, marks=WIDE) for name, case in SLOW.items())])
def test_trains_replays_saves_and_exports_like_transformers(request, tmp_path, case):
    found = request.getfixturevalue(f"ranks{case.ranks}").run(beside_transformers, tmp_path, case)
    assert_trains_like_transformers([result for result, *_ in found], *case.near)
    assert_transformers_loads(tmp_path, case, [loss for _, loss, _ in found])
    files = {name: tensor for path in tmp_path.glob("*.safetensors") for name, tensor in load_file(path).items()}
    for _, _, exported in found:
        assert files.keys() == exported.keys()
        assert not [name for name, x in files.items() if not torch.equal(x.float(), exported[name])]
    assert "model_changes" not in case.changes or "lm_head.weight" not in files  # tied embeddings are written once


def assert_transformers_loads(directory, case: Case, losses: list[float]) -> None:
    model_class = InventedModel if case.family == "invented_moe" else (
        None if case.family in FAMILIES else small_config(case.family)[0])
    net = loaded(directory, model_class=model_class)
    tolerance = case.near[0] if case.near else 1e-5
    assert losses == pytest.approx([held_out_loss(net)] * len(losses), abs=tolerance)
    state, of_16_bits = net.state_dict(), torch.load(directory / "pytorch_model.bin")  # which has the modules' names
    assert state.keys() - of_16_bits.keys() <= {"lm_head.weight"} and of_16_bits.keys() <= state.keys()
    assert not [name for name, x in of_16_bits.items() if not torch.equal(x, state[name])]
