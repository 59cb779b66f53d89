# SPDX-License-Identifier: Apache-2.0
"""Ways to train a model with attention in CUDA graphs, and without."""

import gc
import weakref
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ds_mxfp8_moe.engine import graphs
from tests.support.autoep_models import batch, engine
from tests.support.recorded_graphs import Recorded, emulated

BF16 = {"bf16": {"enabled": True}}
SLIDING = {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}


def loss_of(net, i: int, length: int = 16, **others) -> torch.Tensor:
    ids = batch(i, length=length).to(net.device)
    return net(input_ids=ids, labels=ids, **others).loss


def step(net, i: int, length: int = 16, **others) -> torch.Tensor:
    """`others`: arguments of the model."""
    loss = loss_of(net, i, length, **others)
    net.backward(loss)
    net.step()
    return loss.detach()


def plainly(net) -> list[torch.Tensor]:
    return [step(net, i) for i in range(8)]


def lengths(net) -> list[torch.Tensor]:
    """A micro-batch of another length now and then."""
    return [step(net, i, 12 if i in (7, 8, 11) else 16) for i in range(14)]


def changing(net) -> list[torch.Tensor]:
    """A length that comes in one step alone."""
    return [step(net, i, 8 + i) for i in range(12)]


def for_good(net) -> list[torch.Tensor]:
    """From some step on, another length. The graphs of the first one are freed."""
    losses = [step(net, i) for i in range(4)]
    made = net._mxfp8.after_step.get("graphs")
    first = weakref.WeakSet(made._graphed.values() if made else ())
    losses += [step(net, i, 12) for i in range(4, 7)]
    assert len(first) == (2 if made else 0)
    losses += [step(net, i, 12) for i in range(7, 14)]
    gc.collect()
    assert not first
    return losses


def evaluation(net, steps: int = 7) -> list[torch.Tensor]:
    losses = []
    for i in range(steps):
        losses.append(step(net, i))
        net.eval()
        with torch.no_grad():
            losses.append(loss_of(net, 90))
        net.train()
    return losses


def pairs(net, steps: int = 7) -> list[torch.Tensor]:
    """Two forwards, then the backward of both."""
    losses = []
    for i in range(steps):
        loss = sum(loss_of(net, j) for j in (2 * i, 2 * i + 1))
        net.backward(loss)
        net.step()
        losses.append(loss.detach())
    return losses


def thrown_away(net) -> list[torch.Tensor]:
    """Forwards whose loss nobody needs."""
    losses = []
    for i in range(7):
        loss_of(net, 80 + i)
        losses.append(step(net, i))
    return losses


def kept_losses(net) -> list[torch.Tensor]:
    """Losses that are kept with their graphs."""
    losses = []
    for i in range(7):
        losses.append(loss_of(net, i))
        net.backward(losses[-1])
        net.step()
    return [loss.detach() for loss in losses]


def uneven(net) -> list[torch.Tensor]:
    """Rank 1 goes on with micro-batches of another length, and so without graphs. ZeRO's gradients of both ranks still
    have to be of the same parameters."""
    return [step(net, i, 12 if i > 2 and dist.get_rank() == 1 else 16) for i in range(7)]


def padded(net) -> list[torch.Tensor]:
    """Two forwards of a step whose masks differ."""
    losses = []
    for i in range(6):
        loss = 0
        for j in (2 * i, 2 * i + 1):
            ids = batch(j).to(net.device)
            mask = torch.ones_like(ids)
            mask[j % 2, :5] = 0
            loss += net(input_ids=ids, attention_mask=mask, labels=ids).loss
        net.backward(loss)
        net.step()
        losses.append(loss.detach())
    return losses


def same_mask(net) -> list[torch.Tensor]:
    """A mask that changes without a new version, in one tensor."""
    mask = torch.ones(len(batch(0)), 1, 16, 16, dtype=torch.bool, device=net.device).tril()
    losses = []
    for i in range(8):
        mask.data[..., 1:, 0] = i % 2 == 0
        losses.append(step(net, 0, attention_mask=mask))
    return losses


def inference_tensors(net) -> list[torch.Tensor]:
    """Positions that have no version."""
    losses = []
    for i in range(6):
        with torch.inference_mode():
            positions = torch.arange(16, device=net.device).expand(len(batch(i)), -1).clone()
        losses.append(step(net, i, position_ids=positions))
    return losses


def kept_outputs(net) -> list[torch.Tensor]:
    """What a hook keeps of each micro-batch."""
    kept = []
    for layer in net.module.model.layers:
        layer.self_attn.register_forward_hook(lambda module, args, output: kept.append(output[0].detach()))
    return [*plainly(net), *kept]


def twice(net) -> list[torch.Tensor]:
    """Two backwards through each forward."""
    losses = []
    for i in range(6):
        ids = batch(i).to(net.device)
        output = net(input_ids=ids, labels=ids)
        net.backward(output.loss, retain_graph=True)
        net.backward(output.logits.float().square().mean())
        net.step()
        losses.append(output.loss.detach())
    return losses


def early(net) -> list[torch.Tensor]:
    """Backward begins at the first layer now and then, while the output of all is there."""
    losses = []
    for i in range(10):
        ids = batch(i).to(net.device)
        output = net(input_ids=ids, labels=ids, output_hidden_states=True)
        losses.append(output.hidden_states[1].float().square().mean() if i in (5, 8) else output.loss)
        net.backward(losses[-1])
        net.step()
    return [loss.detach() for loss in losses]


def reentrant(net) -> list[torch.Tensor]:
    net.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    net.module.enable_input_require_grads()
    return plainly(net)


def checkpointed(net) -> list[torch.Tensor]:
    """Micro-batches of another length, evaluation, and two forwards before the backward of both in between."""
    net.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return [*lengths(net), *evaluation(net, 2), *pairs(net, 2)]


def checkpointed_on_the_host(net) -> list[torch.Tensor]:
    net.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False}, offload=True)
    return plainly(net)


def attention_kept(net) -> list[torch.Tensor]:
    """Graphs would compute again what these checkpoints keep."""
    kept = [getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}").default
            for kernel in ("flash_attention_for_cpu", "flash_attention", "cudnn_attention")]
    chosen = {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, kept)}
    net.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=chosen)
    return plainly(net)


def half_checkpointed(net) -> list[torch.Tensor]:
    net.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    net.module.model.layers[0].gradient_checkpointing = False
    return [*plainly(net), *evaluation(net, 2)]


def no_longer_checkpointed(net) -> list[torch.Tensor]:
    losses = checkpointed(net)
    net.module.gradient_checkpointing_disable()
    return [*losses, *plainly(net)]


def segments(net) -> list[torch.Tensor]:
    """Two layers are recomputed at once, so their graphs would overwrite each other's activations."""
    layers = net.module.model.layers
    first, second = (layer.forward for layer in layers)
    # The second layer does what both do, under checkpointing. The first one hands its input on.
    def run(x, kwargs):
        return second(first(x, **kwargs), **kwargs)

    layers[0].forward = lambda x, **kwargs: x
    layers[1].forward = lambda x, **kwargs: checkpoint(run, x, kwargs, use_reentrant=False)
    return plainly(net)


def both(train, family: str, stage: int, steps_of: int, dtype: dict, contexts=emulated, frozen: str = "",
         **changes) -> tuple:
    """Losses, weights and printed lines without and with graphs; how many replays there were."""
    found = []
    for on in (False, True):
        with contexts(), mock.patch.object(graphs, "log_on_rank_0", found.append):
            net = engine({"enabled": True, "graph_attention": on}, stage, min(2, dist.get_world_size()), family=family,
                         frozen=frozen, gradient_accumulation_steps=steps_of,
                         model_changes={"use_cache": False, **changes}, **dtype)
            found.append((train(net), [p.detach().clone() for p in net.module.parameters()], Recorded.replays))
            net.destroy()
    (losses, weights, none), *lines, (others, other_weights, replays) = found
    assert none == 0
    return all(map(torch.equal, losses, others)), all(map(torch.equal, weights, other_weights)), lines, replays


def impatient(train, contexts=emulated, **changes) -> tuple:
    """As `both`, if graphs are freed, or given up, after 4 steps."""
    with mock.patch.object(graphs, "PATIENCE", 4):
        return both(train, "qwen3_moe", 1, 1, BF16, contexts, **changes)
