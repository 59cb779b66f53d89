# SPDX-License-Identifier: Apache-2.0
"""Models trained through transformers' registries of experts, compared with eager ones."""

import copy
import functools
from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers
from deepspeed.accelerator import get_accelerator
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed import DistributedConfig

from ds_mxfp8_moe.compute.mx import sqnr_db
from ds_mxfp8_moe.layers.registries import register
from tests.support.autoep_models import VOCABULARY, batch, model
from tests.support.rank_pool import RankPool

STEPS = 5
NEMOTRON = transformers.NemotronHConfig(  # experts without a gate
    vocab_size=VOCABULARY, hidden_size=64, layers_block_type=["attention", "moe"], num_attention_heads=4, head_dim=16,
    num_key_value_heads=4, n_routed_experts=8, moe_intermediate_size=64, moe_shared_expert_intermediate_size=64,
    max_position_embeddings=64)


def tiny(family: str, experts: str, device: str = "cpu", **changes) -> torch.nn.Module:
    """A model of two layers with experts computed by that implementation."""
    if family == "nemotron_h":
        torch.manual_seed(0)
        net = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(NEMOTRON), dtype=torch.float32).train()
    else:
        net = model(family, **changes)
    net.set_experts_implementation(experts)
    return net.to(device)


def loss_of(net: torch.nn.Module, step: int = 0, rank: int | None = 0) -> torch.Tensor:
    ids = batch(step, rank).to(next(net.parameters()).device)
    return net(input_ids=ids, labels=ids).loss


def check_near_eager(family: str, bar: float, device: str = "cpu", **changes) -> None:
    register(min_tokens_per_expert=0)
    nets = [tiny(family, experts, device, num_hidden_layers=1, **changes) for experts in ("eager", "mxfp8")]
    eager, ours = (loss_of(net) for net in nets)
    (eager + ours).backward()
    assert ours.item() == pytest.approx(eager.item(), rel=2e-3)
    for (name, one), other in zip(nets[0].named_parameters(), nets[1].parameters(), strict=True):
        assert ".experts." not in name or bar < sqnr_db(one.grad, other.grad) < 50, name
    assert sqnr_db(*(torch.cat([p.grad.flatten() for p in net.parameters()]) for net in nets)) > bar


def detached(function):
    """Runs a case in a process whose torch.distributed DeepSpeed has not seen."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        known, deepspeed.comm.comm.cdb = deepspeed.comm.comm.cdb, None
        try:
            return function(*args, **kwargs)
        finally:
            deepspeed.comm.comm.cdb = known

    return run


def losses(net: torch.nn.Module, same_batches: bool = False) -> list[float]:
    """Of some steps: their mean over the ranks."""
    optimizer, found = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9), []
    for step in range(STEPS):
        loss = loss_of(net, step, 0 if same_batches else dist.get_rank())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach() / dist.get_world_size())
        found.append(loss.item())
    return found


@detached
def trained(how: str, experts: str, family: str) -> list[float]:
    register(min_tokens_per_expert=0)
    net = tiny(family, experts, get_accelerator().current_device_name())
    if how == "ddp":
        net = DistributedDataParallel(net)
    else:
        for layer in net.model.layers:
            fully_shard(layer)
        fully_shard(net)
    return losses(net)


DATA_PARALLEL = (("ddp", "qwen3_moe"), ("fsdp2", "qwen3_moe"), ("fsdp2", "gpt_oss"))


def check_data_parallelism(ranks: RankPool, how: str, family: str) -> None:
    expected, actual = (ranks.run(trained, how, experts, family)[0] for experts in ("eager", "mxfp8"))
    assert actual == pytest.approx(expected, rel=6e-3) and actual != expected


def apart(folder: Path, experts: str, family: str, **distributed) -> torch.nn.Module:
    """A model by transformers' own expert parallelism."""
    register(min_tokens_per_expert=0)
    if dist.get_rank() == 0:
        model(family).save_pretrained(folder)
    dist.barrier()
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation=experts,
        distributed_config=DistributedConfig(**distributed)).train()


@detached
def trained_apart(*args, **distributed) -> list[float]:
    return losses(apart(*args, **distributed), same_batches="tp_size" in distributed)


@detached
def called_apart(folder: Path, exchange: str) -> list[torch.Tensor]:
    """One call in which all tokens go to one expert, and rank 1 has none: output, gradients of tokens and weights."""
    experts = apart(folder, "eager", "qwen3_moe", fsdp_size=2, ep_size=2, ep_implementation=exchange).model.layers[
        0].mlp.experts
    index_TK = torch.full((0 if dist.get_rank() else 21, 2), 6)
    index_TK[:, 1] = 7
    g = torch.Generator().manual_seed(2)
    x, weights = (torch.randn(len(index_TK), n, generator=g) for n in (64, 2))
    given = [one.to(get_accelerator().current_device_name()) for one in (x, index_TK, weights)]
    leaves = [given[0].requires_grad_(), given[2].requires_grad_()]
    y = experts(*given)
    y.square().sum().backward()
    return [y, *(leaf.grad for leaf in leaves), *(p.grad.full_tensor() for p in experts.parameters())]


APART = (("qwen3_moe", dict(fsdp_size=2, ep_size=2)), ("gpt_oss", dict(fsdp_size=2, ep_size=2)),
         ("qwen3_moe", dict(tp_size=2, ep_size=2)))
needs_exchange = pytest.mark.skipif(not hasattr(DistributedConfig, "ep_implementation"),
                                    reason="transformers knows no exchanges of others before 5.23")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="transformers would put the model on the GPU")


def check_expert_parallelism(ranks: RankPool, folder: Path, family: str, sizes: dict) -> None:
    """Three ways: transformers alone; its exchange and our GEMMs; our exchange and GEMMs."""
    plain, kernels, both = (ranks.run(trained_apart, folder, experts, family, ep_implementation=exchange, **sizes)[0]
                            for experts, exchange in (("eager", "all_to_all"), ("mxfp8", "all_to_all"),
                                                      ("eager", "mxfp8")))
    assert kernels == pytest.approx(plain, rel=6e-3) and both == pytest.approx(plain, rel=6e-3)
    assert both not in (plain, kernels)


def check_a_rank_without_tokens(ranks: RankPool, folder: Path) -> None:
    for expected, actual in zip(*(ranks.run(called_apart, folder, exchange) for exchange in ("all_to_all", "mxfp8")),
                                strict=True):
        for one, other in zip(expected, actual, strict=True):
            assert one.shape == other.shape
            assert sqnr_db(one, other) > 18 if one.any() else not other.any()
