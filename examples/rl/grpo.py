# SPDX-License-Identifier: Apache-2.0
"""GRPO on one CPU: rollouts by transformers' generate, with and without replay of their routes in the trainer.

    python examples/rl/grpo.py --out runs/rl

A tiny Qwen3-MoE learns to write even numbers. The rollout model is a plain transformers model in bf16. It gets the
trainer's weights after each step, in bf16 or in block FP8. The trainer computes in MXFP8. So both round differently,
and choose different experts for some tokens. The script measures the KL divergence between the two models on each
rollout, before the trainer's step, prints a table and draws the curves. It trains each combination from three seeds.
"""

import argparse
import os
import socket
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed  # noqa: E402
import matplotlib  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from torch.nn import functional  # noqa: E402

import ds_mxfp8_moe  # noqa: E402

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

SEEDS = (1, 2, 3)
ARMS = [(weights, replay) for weights in ("fp8", "model") for replay in (False, True)]
VOCABULARY, PROMPT, NEW = 64, 4, 12
PROMPTS, GROUP = 4, 8  # of a step: different prompts, and rollouts of each
CLIP = 0.2
CONFIG = dict(vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=3, num_attention_heads=4,
              num_key_value_heads=4, head_dim=32, intermediate_size=128, moe_intermediate_size=128, num_experts=16,
              num_experts_per_tok=2, norm_topk_prob=True, max_position_embeddings=64, tie_word_embeddings=False,
              bos_token_id=None, eos_token_id=None, pad_token_id=0)


class Rollouts:
    """A copy of the model in plain transformers, which generates and notes its routes."""

    def __init__(self, config: transformers.PretrainedConfig):
        self._model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).eval()
        self._routes: list[list[torch.Tensor]] = []
        for layer in self._model.model.layers:
            found: list[torch.Tensor] = []
            self._routes.append(found)
            layer.mlp.gate.register_forward_hook(lambda module, inputs, out, found=found: found.append(out[2]))

    @torch.no_grad()
    def refit(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes (published name, tensor). A weight in FP8 is followed by its scales, one for 128x128 values."""
        for name, tensor in weights:
            if tensor.dtype == torch.float8_e4m3fn:
                values = tensor
                continue
            if name.endswith("_scale_inv"):
                scales = tensor.repeat_interleave(128, 0).repeat_interleave(128, 1)
                name, tensor = name.removesuffix("_scale_inv"), values.float() * scales
            self._place(name).copy_(tensor)

    def _place(self, name: str) -> torch.Tensor:
        """Where a weight is in transformers' model, which stacks experts, and joins gate and up."""
        block, _, rest = name.partition(".experts.")
        if not rest:
            return self._model.get_parameter(name)
        expert, projection, _ = rest.split(".")
        stacked = "down_proj" if projection == "down_proj" else "gate_up_proj"
        weight = self._model.get_parameter(f"{block}.experts.{stacked}")[int(expert)]
        return weight if stacked == projection else weight.chunk(2)[projection == "up_proj"]

    @torch.no_grad()
    def generate(self, prompts_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids [B, S], the logits of the new tokens [B, new, V] and the routes [B, S, L, K]."""
        for found in self._routes:
            found.clear()
        out = self._model.generate(prompts_BS, max_new_tokens=NEW, do_sample=True, top_k=0, output_logits=True,
                                   return_dict_in_generate=True)
        B = len(prompts_BS)
        by_layer = [torch.cat([step.view(B, -1, step.shape[-1]) for step in found], dim=1) for found in self._routes]
        ids_BS = out.sequences
        routes = ds_mxfp8_moe.pad_routes(torch.stack(by_layer, dim=2), torch.ones_like(ids_BS))
        return ids_BS, torch.stack(out.logits, dim=1).float(), routes


def train(seed: int, steps: int, weights: str, replay: bool) -> list[dict[str, float]]:
    """The KL divergence of the trainer from the rollouts, and their mean reward, at each step."""
    torch.manual_seed(seed)
    config = transformers.Qwen3MoeConfig(**CONFIG)
    model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, p in model.named_parameters():  # as large as trained ones, so that the MoE layers matter
            p.mul_(4 if "experts" in name or name.endswith("gate.weight") else 2 if "proj" in name else 1)
    engine = ds_mxfp8_moe.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": PROMPTS * GROUP, "bf16": {"enabled": True}, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1}, "expert_parallel": {"enabled": True, "autoep_size": 1},
        "mxfp8_moe": {"enabled": True, "scale_block_size": 128}})[0]
    rollouts, records = Rollouts(config), []
    for _ in range(steps):
        rollouts.refit(ds_mxfp8_moe.export_weights(engine, weights=weights))
        prompts_BS = torch.randint(1, VOCABULARY, (PROMPTS, PROMPT)).repeat_interleave(GROUP, dim=0)
        ids_BS, theirs_BNV, routes = rollouts.generate(prompts_BS)
        new_BN = ids_BS[:, PROMPT:]
        reward_B = (new_BN % 2 == 0).float().mean(dim=1)
        group = reward_B.view(PROMPTS, GROUP)
        advantage_B1 = ((group - group.mean(1, keepdim=True)) / (group.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        with ds_mxfp8_moe.replay_routes(engine, routes) if replay else nullcontext():
            logits_BSV = engine(input_ids=ids_BS).logits
        ours_BNV = logits_BSV[:, PROMPT - 1:-1].float().log_softmax(-1)
        theirs_BNV = theirs_BNV.log_softmax(-1)
        ratio_BN = (ours_BNV - theirs_BNV).gather(-1, new_BN[..., None])[..., 0].exp()
        clipped_BN = ratio_BN.clamp(1 - CLIP, 1 + CLIP)
        engine.backward(-torch.minimum(ratio_BN * advantage_B1, clipped_BN * advantage_B1).mean())
        engine.step()
        kl = functional.kl_div(ours_BNV.detach(), theirs_BNV, reduction="none", log_target=True).sum(-1).mean()
        records.append({"kl": kl.item(), "reward": reward_B.mean().item()})
    engine.destroy()
    return records


def name_of(weights: str, replay: bool) -> str:
    return f"{'FP8' if weights == 'fp8' else 'bf16'} weights, {'replay' if replay else 'no replay'}"


def draw(runs: dict[tuple, list[dict[str, float]]], path: Path) -> None:
    """For each combination, the mean of the seeds, and the range of all of them."""
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for weights, replay in dict.fromkeys(key[:2] for key in runs):
        style = {"color": "tab:blue" if replay else "tab:red", "linestyle": "-" if weights == "fp8" else ":"}
        for one, key in zip(axes, ("kl", "reward"), strict=True):
            steps = list(zip(*([record[key] for record in records] for arm, records in runs.items()
                               if arm[:2] == (weights, replay)), strict=True))
            one.plot([sum(values) / len(values) for values in steps], label=name_of(weights, replay), **style)
            one.fill_between(range(len(steps)), *zip(*((min(values), max(values)) for values in steps), strict=True),
                             color=style["color"], alpha=0.12, linewidth=0)
    axes[0].set(yscale="log", ylabel="KL(rollout || trainer), nats a token", xlabel="step")
    axes[1].set(ylabel="reward: share of even numbers", xlabel="step", ylim=(0, 1))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("runs/rl"), help="the folder of kl.png")
    arguments = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        alone = dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, MASTER_ADDR="127.0.0.1", MASTER_PORT=probe.getsockname()[1])
    os.environ |= {key: str(value) for key, value in alone.items()}
    torch.set_num_threads(1)  # the tensors are too small for more
    transformers.logging.set_verbosity_error()
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    runs = {(*arm, seed): train(seed, arguments.steps, *arm) for arm in ARMS for seed in SEEDS}
    print(f"\n{'mean KL over all steps':28}" + "".join(f"{f'seed {seed}':>11}" for seed in SEEDS)
          + "   reward, first to last step, mean of the seeds")
    for arm in ARMS:
        found = [runs[(*arm, seed)] for seed in SEEDS]
        kls = [sum(record["kl"] for record in records) / len(records) for records in found]
        first, last = (sum(records[at]["reward"] for records in found) / len(found) for at in (0, -1))
        print(f"{name_of(*arm):28}" + "".join(f"{kl:11.6f}" for kl in kls) + f"   {first:.2f} to {last:.2f}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    draw(runs, arguments.out / "kl.png")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
