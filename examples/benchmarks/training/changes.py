# SPDX-License-Identifier: Apache-2.0
"""What whole_model.py can change of its script: attention, loss, optimizer, compilation and DeepSpeed's timer.

guides/fast_training.md says which to choose. None is the script as it is: what transformers chooses for the model,
Liger's loss with Liger, torch's fused AdamW, nothing compiled, a timer that reads the host's clock.
"""

from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss
from torch import nn
from torch.utils.checkpoint import checkpoint

from lib.world import on_gpu

# What sdpa may call. Checkpoints that keep its results do not compute it again.
ATTENTION = [getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}").default for kernel in (
    "cudnn_attention", "flash_attention", "efficient_attention", "flash_attention_for_cpu")]
SDPA = {"sdpa, flash": "flash"}  # which of torch's backends; by itself it takes cuDNN's
OPTIMIZERS = {None: {"torch_adam": True, "fused": True}, "torch AdamW, not fused": {"torch_adam": True},
              "DeepSpeed's AdamW": {}}
# Adam's moments in 8 bits, and masters in float32, or in bf16 with 8 bits of correction. Our engines alone know it.
FLASH, FLASH_BF16 = "flashoptim.FlashAdamW", "flashoptim.FlashAdamW, masters in bf16"
ON_THE_HOST = "DeepSpeedCPUAdam, on the host"
OFFLOADED = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
FLASH_ON_CPU = {"quantize": False, "fused": False, "master_weight_bits": None}
BF16_MASTERS = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
OWN, LARGE_CHUNKS = "transformers' loss", "Liger's loss in large chunks"
IN_CHUNKS, TILED = "loss in chunks", "DeepSpeed's tiled loss"
BETWEEN = "between the MoE layers"  # what is compiled: DeepSpeed's compile.autoep_non_moe
WAITS = "waits for the device"  # twice in each micro-batch, as DeepSpeed's throughput timer does by default
CHUNK = 1024  # tokens of which the last two hold logits
CHUNK_MEM_CONST = 16  # Liger's loss holds the logits of about 16 times as many tokens as by default


def choose_attention(attention: str | None) -> dict[str, str]:
    """Lets torch choose the kernels that a case asks for. Returns what transformers needs to know."""
    for backend in ("flash", "cudnn", "mem_efficient"):
        getattr(torch.backends.cuda, f"enable_{backend}_sdp")(SDPA.get(attention, backend) == backend)
    return {"attn_implementation": "sdpa" if attention in SDPA else attention} if attention else {}


def optimizer_config(optimizer: str | None, params: dict) -> dict:
    """What the JSON says of the optimizer that a case asks for. `params`: AdamW's."""
    if optimizer in (FLASH, FLASH_BF16):
        masters = {"bf16": BF16_MASTERS} if optimizer == FLASH_BF16 else {}
        params = {key: value for key, value in params.items() if key not in OPTIMIZERS[None]}
        return {"optimizer": {"type": "FlashAdamW", "params": params | ({} if on_gpu() else FLASH_ON_CPU)}, **masters}
    if optimizer == ON_THE_HOST:
        return {"optimizer": {"type": "AdamW", "params": params}, "zero_optimization": OFFLOADED}
    return {"optimizer": {"type": "AdamW", "params": {**params, **OPTIMIZERS[optimizer]}}}


def change_loss(model: nn.Module, loss: str | None, micro_batches: int) -> None:
    """`micro_batches`: of a step."""
    if loss == LARGE_CHUNKS:
        _keep_ligers_loss_as_it_is()
        model.forward = partial(model.forward, chunk_mem_const=CHUNK_MEM_CONST)
    elif loss in (IN_CHUNKS, TILED):
        of = partial(tiled, micro_batches) if loss == TILED else in_chunks
        model.forward = partial(_forward, model, of)


@cache
def _keep_ligers_loss_as_it_is() -> None:
    """Where the rest is compiled, torch 2.11 cannot compile its kernels."""
    from liger_kernel.transformers.model import loss_utils
    loss_utils.fixed_fused_linear_cross_entropy = torch.compiler.disable(loss_utils.fixed_fused_linear_cross_entropy)


def _forward(model: nn.Module, loss_of: Any, input_ids: torch.Tensor, labels: torch.Tensor, **_of_peft) -> Any:
    """PEFT's arguments are those that its caller leaves out."""
    from transformers.modeling_outputs import CausalLMOutput
    hidden_BTH = model.model(input_ids=input_ids).last_hidden_state
    target_BT = F.pad(labels, (0, 1), value=-100)[:, 1:]
    return CausalLMOutput(loss=loss_of(model.lm_head, hidden_BTH, target_BT))


def _summed(head: nn.Module, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(head(hidden).float(), target, reduction="sum")


def in_chunks(head: nn.Module, hidden_BTH: torch.Tensor, target_BT: torch.Tensor) -> torch.Tensor:
    """As in guides/fast_training.md."""
    parts = zip(hidden_BTH.flatten(0, 1).split(CHUNK), target_BT.flatten().split(CHUNK), strict=True)
    losses = [checkpoint(_summed, head, *part, use_reentrant=False) for part in parts]
    return torch.stack(losses).sum() / (target_BT != -100).sum()


def tiled(micro_batches: int, head: nn.Module, hidden_BTH: torch.Tensor, target_BT: torch.Tensor) -> torch.Tensor:
    """DeepSpeed computes all gradients in forward. In backward, it scales that of the hidden states alone, so the
    factor 1 / micro_batches of the engine's backward has to be there in forward."""
    count = micro_batches * (target_BT != -100).sum()
    tiles = -(-target_BT.numel() // CHUNK)
    return micro_batches * TiledFusedLogitsLoss.apply(lambda *given: _summed(*given) / count, head, hidden_BTH,
                                                      target_BT, None, tiles, [head.weight], "sum")
