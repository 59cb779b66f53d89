# SPDX-License-Identifier: Apache-2.0
"""A router behind its linear layer: scores, top-k, routing weights and counts in one kernel, and one for the gradient.

Letters: T tokens, E experts, K choices of a token.

    score_TE    softmax or sigmoid of the logits, in float32
    expert_TK   the K experts with the largest score + biases, in descending order. Of equal ones, the first.
                Or those of chosen_TK, for tokens whose row there is not -1
    weight_TK   the scores of these experts, divided by their sum (`normalize`), times `scale`
    count_E     how many choices each expert got

NaN counts as the largest score, as in torch.topk. The oracle is DeepSpeed's TokenChoiceTopKRouter. exp differs from
torch's in its last bits, and so do sums of scores. Both kernels are bound by the host: their data is small.
"""

import torch
import triton
import triton.language as tl

from .launch import Launched
from .library import cdiv
from .message import lanes_for

MOST_EXPERTS = 1024
TILE = 4096  # scores that one program computes
MOST_TOKENS = 64  # of a program


@triton.jit
def _scores(logit_ptr, t, T, E: tl.constexpr, LANES: tl.constexpr, SIGMOID: tl.constexpr):
    """float32 [BLOCK, LANES], 0 beyond the last expert."""
    lane = tl.arange(0, LANES)[None, :]
    inside = (t < T)[:, None] & (lane < E)
    logit = tl.load(logit_ptr + t[:, None] * E + lane, mask=inside, other=0.0).to(tl.float32)
    if SIGMOID:
        score = tl.div_rn(1.0, 1.0 + tl.exp(-logit))
    else:
        logit = tl.where(lane < E, logit, float("-inf"))
        exp = tl.exp(logit - tl.max(logit, 1)[:, None])
        score = tl.div_rn(exp, tl.broadcast_to(tl.sum(exp, 1)[:, None], exp.shape))
    return tl.where(lane < E, score, 0.0)


@Launched
@triton.jit(do_not_specialize=["T"])
def _route_kernel(
        logit_ptr,  # [T, E]
        bias_ptr,  # [E], or None
        correction_ptr,  # [E], or None
        chosen_ptr,  # [T, K] int16, or None
        weight_ptr,  # [T, K] float32
        expert_ptr,  # [T, K] int64
        count_ptr,  # [E] int32, zeros
        T, E: tl.constexpr, LANES: tl.constexpr, K: tl.constexpr, CHOICES: tl.constexpr, SIGMOID: tl.constexpr,
        NORMALIZE: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """Routes BLOCK tokens. Grid (T / BLOCK, )."""
    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    lane, choice = tl.arange(0, LANES), tl.arange(0, CHOICES)
    score = _scores(logit_ptr, t, T, E, LANES, SIGMOID)
    biased = score
    if bias_ptr is not None:
        biased += tl.load(bias_ptr + lane, mask=lane < E, other=0.0).to(tl.float32)[None, :]
    if correction_ptr is not None:
        biased += tl.load(correction_ptr + lane, mask=lane < E, other=0.0).to(tl.float32)[None, :]
    # An integer whose order is that of the floats. An expert that is taken, or none, comes after all others.
    LAST: tl.constexpr = -0x80000000
    rank = biased.to(tl.int32, bitcast=True)
    rank = tl.where(rank < 0, rank ^ 0x7FFFFFFF, rank)
    rank = tl.where(biased != biased, 0x7FFFFFFF, rank)
    rank = tl.where(lane[None, :] < E, rank, LAST)
    expert = tl.zeros([BLOCK, CHOICES], tl.int32)
    top = tl.zeros([BLOCK, CHOICES], tl.float32)
    at = t[:, None] * K + choice[None, :]
    kept = (t < T)[:, None] & (choice < K)[None, :]
    for k in tl.static_range(K):
        here = choice[None, :] == k
        best = tl.argmax(rank, 1)
        if chosen_ptr is not None:
            # One by one: a tile of them would lay out the sums in another way, with other bits than without them.
            given = tl.load(chosen_ptr + t * K + k, mask=t < T, other=0).to(tl.int32)
            best = tl.where(given < 0, best, given)
        taken = lane[None, :] == best[:, None]
        expert = tl.where(here, best[:, None], expert)
        top = tl.where(here, tl.sum(tl.where(taken, score, 0.0), 1)[:, None], top)
        rank = tl.where(taken, LAST, rank)
    if NORMALIZE:
        top = tl.div_rn(top, tl.broadcast_to(tl.sum(top, 1)[:, None] + 1e-20, top.shape))
    tl.store(weight_ptr + at, top * SCALE, mask=kept)
    tl.store(expert_ptr + at, expert.to(tl.int64), mask=kept)
    count = tl.sum(((rank == LAST) & (t < T)[:, None]).to(tl.int32), 0)
    tl.atomic_add(count_ptr + lane, count, mask=(lane < E) & (count > 0), sem="relaxed")  # integers: any order


@Launched
@triton.jit(do_not_specialize=["T"])
def _route_backward_kernel(
        logit_ptr,  # [T, E]
        expert_ptr,  # [T, K] int64
        dweight_ptr,  # [T, K] float32
        dlogit_ptr,  # [T, E]
        T, E: tl.constexpr, LANES: tl.constexpr, K: tl.constexpr, CHOICES: tl.constexpr, SIGMOID: tl.constexpr,
        NORMALIZE: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """The gradient of BLOCK tokens' logits. Grid (T / BLOCK, )."""
    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    lane, choice = tl.arange(0, LANES), tl.arange(0, CHOICES)
    score = _scores(logit_ptr, t, T, E, LANES, SIGMOID)
    at = t[:, None] * K + choice[None, :]
    kept = (t < T)[:, None] & (choice < K)[None, :]
    expert = tl.load(expert_ptr + at, mask=kept, other=0).to(tl.int32)
    dtop = tl.load(dweight_ptr + at, mask=kept, other=0.0) * SCALE
    if NORMALIZE:
        top = tl.zeros([BLOCK, CHOICES], tl.float32)
        for k in tl.static_range(K):
            here = choice[None, :] == k
            taken = lane[None, :] == tl.sum(tl.where(here, expert, 0), 1)[:, None]
            top = tl.where(here, tl.sum(tl.where(taken, score, 0.0), 1)[:, None], top)
        total = tl.sum(top, 1)[:, None] + 1e-20
        share = top / total
        dtop = (dtop - tl.sum(dtop * share, 1)[:, None]) / total
    dscore = tl.zeros([BLOCK, LANES], tl.float32)
    for k in tl.static_range(K):
        here = choice[None, :] == k
        taken = lane[None, :] == tl.sum(tl.where(here, expert, 0), 1)[:, None]
        dscore = tl.where(taken, tl.sum(tl.where(here, dtop, 0.0), 1)[:, None], dscore)
    if SIGMOID:
        dlogit = dscore * (1.0 - score) * score
    else:
        dlogit = (dscore - tl.sum(dscore * score, 1)[:, None]) * score
    tl.store(dlogit_ptr + t[:, None] * E + lane[None, :], dlogit.to(dlogit_ptr.dtype.element_ty),
             mask=(t < T)[:, None] & (lane < E)[None, :])


def _constants(E: int, K: int, sigmoid: bool, normalize: bool, scale: float) -> tuple:
    lanes = lanes_for(E)
    return E, lanes, K, lanes_for(K), sigmoid, normalize, float(scale), max(1, min(MOST_TOKENS, TILE // lanes))


def route(logits_TE: torch.Tensor, top_k: int, sigmoid: bool, normalize: bool, scale: float,
          bias_E: torch.Tensor | None = None, correction_E: torch.Tensor | None = None,
          chosen_TK: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Chooses experts.

    Args:
        logits_TE: bf16, fp16 or fp32, contiguous. At least one token, and at most MOST_EXPERTS experts.
        sigmoid: scores are the logits' sigmoid. Otherwise their softmax.
        bias_E, correction_E: added to the scores that experts are chosen by, one after the other. None adds nothing.
        chosen_TK: int16, the experts to take. A token whose row is -1 chooses by its scores. None: all tokens do.

    Returns:
        weight_TK, float32; expert_TK, int64; count_E, int32.
    """
    (T, E), K, device = logits_TE.shape, top_k, logits_TE.device
    weight_TK = torch.empty((T, K), dtype=torch.float32, device=device)
    expert_TK = torch.empty((T, K), dtype=torch.int64, device=device)
    count_E = torch.zeros(E, dtype=torch.int32, device=device)
    constants = _constants(E, K, sigmoid, normalize, scale)
    _route_kernel[(cdiv(T, constants[-1]), )](
        logits_TE, bias_E, correction_E, None if chosen_TK is None else chosen_TK.contiguous(), weight_TK, expert_TK,
        count_E, T, *constants, num_warps=4)
    return weight_TK, expert_TK, count_E


def route_backward(logits_TE: torch.Tensor, expert_TK: torch.Tensor, dweight_TK: torch.Tensor, sigmoid: bool,
                   normalize: bool, scale: float) -> torch.Tensor:
    """The gradient of the logits of `route`, in their dtype. All tensors are contiguous."""
    (T, E), K = logits_TE.shape, expert_TK.shape[1]
    dlogits_TE = torch.empty_like(logits_TE)
    constants = _constants(E, K, sigmoid, normalize, scale)
    _route_backward_kernel[(cdiv(T, constants[-1]), )](logits_TE, expert_TK, dweight_TK, dlogits_TE, T, *constants,
                                                       num_warps=4)
    return dlogits_TE
