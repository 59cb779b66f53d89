# SPDX-License-Identifier: Apache-2.0
"""The four expert-parallel functions on gloo ranks, against what one process computes from every rank's rows."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ds_mxfp8_moe.compute.mx import MXTensor, quantize, quantize_tiles, sqnr_db
from ds_mxfp8_moe.ep import (
    a2a_combine_hp_fwd_mxfp8_bwd,
    a2a_dispatch_mxfp8_fwd_hp_bwd,
    generate_permute_indices,
    permute_mxfp8_fwd_hp_bwd,
    unpermute_hp_fwd_mxfp8_bwd,
)
from ds_mxfp8_moe.transport.deadline import PeerError, absence
from tests.support.ep_cases import KINDS, LOCAL_EXPERTS, D, chain, check_chain, counts_table, reference, weights
from tests.support.rank_pool import set_timeout

# One cast each of x and w (31.4 dB apiece) gives 28.4; backward's gradient and w the same; dW two casts or more.
EXPECTED_DB = {"y": 28, "dx": 26, "dw": 25}


@pytest.mark.parametrize("block_size", (32, 128))
@pytest.mark.parametrize("kind", KINDS)
def test_chain_on_two_ranks(ranks2, kind, block_size):
    results = ranks2.run(chain, kind, torch.bfloat16, block_size, "rceil", wgrad_with_hp=block_size == 32)
    check_chain(2, results, kind, EXPECTED_DB)
    for r in results:
        assert r["grad_type"] == ["MXTensor"]


@pytest.mark.parametrize("dtype, mode, less", ((torch.float32, "rceil", 0), (torch.float16, "rceil", 0),
                                               (torch.bfloat16, "floor", 1.5)), ids=str)
def test_chain_in_other_dtypes_and_with_floor_rounding(ranks2, dtype, mode, less):
    results = ranks2.run(chain, "uneven", dtype, 32, mode)
    check_chain(2, results, "uneven", {name: db - less for name, db in EXPECTED_DB.items()})
    for r in results:
        assert r["x"].dtype == r["dx"].dtype == r["dispatched"].dtype == dtype


def test_dispatch_and_permute_move_exact_bytes(ranks2):
    """What arrives is what one process quantizes, row for row; padding is zero data with scale byte 0."""
    results = ranks2.run(chain, "uneven", torch.bfloat16, 32, "rceil")
    table = counts_table(2, "uneven")
    sent = [quantize(r["x"]) for r in results]
    for rank, r in enumerate(results):
        order, arrived = [], []  # expert-sorted and as it arrived
        for source in range(2):
            starts = table[source].cumsum(0) - table[source]
            for e in range(LOCAL_EXPERTS):
                g = rank * LOCAL_EXPERTS + e
                arrived += [(source, int(starts[g]) + i) for i in range(table[source, g])]
        for e in range(LOCAL_EXPERTS):
            g, n = rank * LOCAL_EXPERTS + e, 0
            for source in range(2):
                start = int(table[source, :g].sum())
                order += [(source, start + i) for i in range(table[source, g])]
                n += int(table[source, g])
            size = max(-(-n // 32) * 32, 32)
            order += [None] * (size - n)
            assert r["sizes"][e] == size and r["ends"][e] == len(order)
        assert r["shape"] == (len(arrived) + 1, D)
        assert r["rows"].shape[0] == -(-(len(arrived) + 32 * LOCAL_EXPERTS) // 32) * 32
        order += [None] * (r["rows"].shape[0] - len(order))
        assert r["indices"].tolist() == [-1 if place is None else arrived.index(place) for place in order]
        for half in ("qdata", "scale"):
            stored = [getattr(mx, half).view(torch.uint8) for mx in sent]
            zero = torch.zeros_like(stored[0][0])
            assert torch.equal(getattr(r["dispatched"], half).view(torch.uint8),
                               torch.stack([stored[s][i] for s, i in arrived]))
            assert torch.equal(getattr(r["rows"], half).view(torch.uint8),
                               torch.stack([zero if place is None else stored[place[0]][place[1]] for place in order]))


def test_expanded_gradient(ranks2):
    """`out.sum().backward()` hands combine a gradient whose rows all share one value in memory."""
    results = ranks2.run(chain, "uneven", torch.bfloat16, 32, "rceil", backward="sum")
    w = weights(2).float()
    table = counts_table(2, "uneven")
    for rank, r in enumerate(results):
        expected = torch.cat([w[e].sum(0).expand(int(n), D) for e, n in enumerate(table[rank])])
        assert sqnr_db(expected, r["dx"]) >= 26


def test_high_precision_backward(ranks2):
    """With mxfp8_bwd=False the gradient that reaches the GEMM is plain, and weights see it unrounded."""
    hp = ranks2.run(chain, "uneven", torch.float32, 32, "rceil", mxfp8_bwd=False)
    mx = ranks2.run(chain, "uneven", torch.float32, 32, "rceil")
    _, _, dw = reference("uneven", 2, hp)
    for rank, (a, b) in enumerate(zip(hp, mx, strict=True)):
        assert a["grad_type"] == ["Tensor"]
        assert torch.equal(a["y"], b["y"])
        assert sqnr_db(dw[rank], a["dw"]) > sqnr_db(dw[rank], b["dw"]) + 2  # one cast (x) instead of two (x and g)


def test_four_ranks(ranks4):
    results = ranks4.run(chain, "uneven", torch.bfloat16, 32, "rceil", alignment=128)
    check_chain(4, results, "uneven", EXPECTED_DB)
    for r in results:
        assert all(r["sizes"] % 128 == 0)


def subgroups():
    """Two groups of two: each pair exchanges its own rows, by the group's name and by the group itself."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[rank % 2]
    x = torch.full((3, 32), float(rank + 1))
    by_name, by_group = (a2a_dispatch_mxfp8_fwd_hp_bwd(x, [1, 1] if rank < 2 else [2, 2], [1, 2], group_name=g)
                         for g in (mine.group_name, mine))
    for group in groups:
        if dist.get_rank(group) >= 0:
            dist.destroy_process_group(group)
    assert torch.equal(by_name.qdata.view(torch.uint8), by_group.qdata.view(torch.uint8))
    return by_name.dequantize()[:, 0].tolist()


def test_process_groups(ranks4):
    assert ranks4.run(subgroups) == [[1, 3], [2, 4], [1, 1, 3, 3], [2, 2, 4, 4]]


def bad_calls():
    """Every mistake raises on this rank alone, before a collective could hang."""
    x = torch.zeros(4, 64)
    good = dict(output_splits=[2, 2], input_splits=[2, 2])
    cases = {
        "sum to 5, but the input has 4 rows": (x, good | {"input_splits": [2, 3]}),
        "output_splits is [4]": (x, good | {"output_splits": [4]}),
        "output_splits is [2.0, 2.0], of type list": (x, good | {"output_splits": [2.0, 2.0]}),
        "input_splits is None": (x, good | {"input_splits": None}),
        "input is a MXTensor": (quantize(x), good),
        "input is [4], of type list": ([4], good),
        "multiple of 32": (torch.zeros(4, 48), good),
        "block_size is 64": (x, good | {"block_size": 64}),
        "group_name is 'no such group'": (x, good | {"group_name": "no such group"}),
        "group_name is -100": (x, good | {"group_name": dist.GroupMember.NON_GROUP_MEMBER}),
    }
    missed = {}
    if dist.get_rank() == 0:
        for function in (a2a_dispatch_mxfp8_fwd_hp_bwd, a2a_combine_hp_fwd_mxfp8_bwd):
            for text, (tensor, arguments) in cases.items():
                try:
                    function(tensor, **arguments)
                    missed[function.__name__, text] = "nothing raised"
                except (TypeError, ValueError) as error:
                    told_peers = str(error) in absence(0)
                    if not told_peers or text not in str(error):
                        missed[function.__name__, text] = f"{type(error).__name__}: {error}"
    dist.barrier()
    combined = a2a_combine_hp_fwd_mxfp8_bwd(torch.zeros(4, 48), [2, 2], [2, 2], mxfp8_bwd=False)
    return missed, combined.shape


def test_bad_input_raises_before_the_collective(ranks2):
    assert ranks2.run(bad_calls) == [({}, (4, 48))] * 2


def disagreements() -> dict:
    """Exchanges of the ranks that do not fit together, and then one that does. What each of them raised here."""
    rank, x = dist.get_rank(), torch.ones(4, 64, dtype=torch.bfloat16)
    dispatch, combine = a2a_dispatch_mxfp8_fwd_hp_bwd, a2a_combine_hp_fwd_mxfp8_bwd
    calls = {
        "expected": (dispatch, x, [2, 3] if rank == 0 else [2, 2], [2, 2], {}),
        "sent": (combine, x, [2, 2], [1, 3] if rank == 0 else [2, 2], {}),
        "dtypes": (combine, x if rank == 0 else x.half(), [2, 2], [2, 2], {}),
        "widths": (combine, x if rank == 0 else x[:, :32], [2, 2], [2, 2], {}),
        "functions": (dispatch if rank == 0 else combine, x, [2, 2], [2, 2], {}),
        "blocks": (dispatch, x, [2, 2], [2, 2], {"block_size": 128 if rank == 0 else 32}),
        "gradients": (combine, x, [2, 2], [2, 2], {"mxfp8_bwd": rank == 0}),
    }
    texts = {}
    for name, (function, rows, output_splits, input_splits, keys) in calls.items():
        with pytest.raises(PeerError) as caught:
            function(rows, output_splits, input_splits, **keys)
        texts[name] = str(caught.value)
    assert torch.equal(combine(x, [2, 2], [2, 2]), x)
    return texts


def test_ranks_that_disagree_raise_on_every_rank_and_may_go_on(ranks2):
    """gloo and NCCL check nothing: they fill rows that nobody sent with what lay in memory."""
    zero, one = ranks2.run(disagreements)
    assert zero["expected"] == one["expected"] == (
        "rank 1 sends 2 rows to rank 0 in a2a_dispatch, and rank 0 expects 3: the input_splits of rank 1 are [2, 2], "
        "the output_splits of rank 0 are [2, 3]")
    assert zero["sent"] == one["sent"] and "rank 0 sends 1 rows to rank 0 in a2a_combine" in zero["sent"]
    for name, texts in {"dtypes": ("bfloat16", "float16"), "widths": ("[., 64]", "[., 32]"),
                        "functions": ("a2a_dispatch", "a2a_combine"), "blocks": ("of 128", "of 32"),
                        "gradients": ("MXFP8 in blocks of 32 (rceil) on", "unquantized on")}.items():
        for rank, text in enumerate((zero[name], one[name])):
            assert f"rank {rank} is in a2a" in text and f"ranks [{1 - rank}] are in another" in text
            assert texts[rank] in text


def backward_of_rank_0_alone() -> str | None:
    rank, group = dist.get_rank(), dist.new_group()
    set_timeout(timedelta(seconds=2), group)
    y = a2a_combine_hp_fwd_mxfp8_bwd(torch.ones(4, 32, requires_grad=True), [2, 2], [2, 2], group)
    text = None
    if rank == 0:
        with pytest.raises(PeerError) as caught:
            y.sum().backward()
        text = str(caught.value)
    return text


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(ranks2):
    text, _ = ranks2.run(backward_of_rank_0_alone)
    assert "in backward of a2a_combine" in text and "rank 1 did not come" in text


def test_chain_without_process_groups_says_so():
    with pytest.raises(RuntimeError, match="init_process_group"):
        a2a_dispatch_mxfp8_fwd_hp_bwd(torch.zeros(4, 64), [4], [4])


def test_generate_permute_indices_by_hand():
    """2 ranks, 3 experts, alignment 4. Rank 0 sent 3, 0, 1 rows; rank 1 sent 2, 0, 4: rows 0-3 and 4-9."""
    indices, sizes, ends = generate_permute_indices(torch.tensor([3, 0, 1, 2, 0, 4]), 3, 2, 24, 4)
    assert indices.tolist() == [0, 1, 2, 4, 5, -1, -1, -1,  # expert 0: 3 + 2 rows
                                -1, -1, -1, -1,  # expert 1: none, still one multiple
                                3, 6, 7, 8, 9, -1, -1, -1,  # expert 2: 1 + 4
                                -1, -1, -1, -1]
    assert sizes.tolist() == [8, 4, 8] and ends.tolist() == [8, 12, 20]
    assert indices.dtype == sizes.dtype == ends.dtype == torch.int32


def test_permute_of_plain_rows_is_its_own_inverse():
    x = torch.randn(10, 48, requires_grad=True)
    shape, rows, indices, _, _ = permute_mxfp8_fwd_hp_bwd(x, torch.tensor([3, 0, 1, 2, 0, 4]), 2, 3, 4,
                                                          use_mxfp8=False, use_triton_for_bwd=False)
    back = unpermute_hp_fwd_mxfp8_bwd(rows, indices, shape)
    assert not isinstance(rows, MXTensor) and torch.equal(back, x)
    g = torch.randn_like(back)
    back.backward(g)
    assert torch.equal(x.grad, g)


def test_permute_rejects_what_does_not_fit():
    mx, counts = quantize(torch.zeros(10, 64)), torch.tensor([3, 0, 1, 2, 0, 4])
    with pytest.raises(TypeError, match="use_mxfp8=False"):
        permute_mxfp8_fwd_hp_bwd(torch.zeros(10, 64), counts, 2, 3)
    with pytest.raises(TypeError, match="share scales"):
        permute_mxfp8_fwd_hp_bwd(quantize_tiles(torch.zeros(10, 64)), counts, 2, 3)
    for given, experts, text in (
            (counts, 4, "integers \\[8\\]"), (counts.float(), 3, "num_tokens_per_expert is a Tensor of torch.float32"),
            (counts - 1, 3, "-1, 3\\]; expected 0 or more"), (counts + 1, 3, "sum to 16, but there are 10 rows"),
            (counts.tolist(), 3, "num_tokens_per_expert is \\[3, 0, 1, 2, 0, 4\\], of type list"),
            (counts, 3.0, "num_local_experts is 3.0"), (counts, 0, "num_local_experts is 0; expected 1 or more")):
        with pytest.raises((TypeError, ValueError), match=text):
            permute_mxfp8_fwd_hp_bwd(mx, given, 2, experts)
    with pytest.raises(ValueError, match="max_len is 8; the padded groups have 96 rows"):
        generate_permute_indices(counts, 3, 2, 8, 32)
    with pytest.raises(ValueError, match="go up to 9, .* there are 4 rows"):
        unpermute_hp_fwd_mxfp8_bwd(torch.zeros(10, 64), torch.arange(10), torch.Size((5, 64)))


def test_rows_behind_the_counted_ones_are_in_no_group():
    x, counts = torch.randn(12, 32, requires_grad=True), torch.tensor([3, 0, 1, 2, 0, 4])
    shape, rows, indices, _, _ = permute_mxfp8_fwd_hp_bwd(x, counts, 2, 3, 4, use_mxfp8=False)
    back = unpermute_hp_fwd_mxfp8_bwd(rows, indices, shape)
    back.sum().backward()
    assert torch.equal(back[:10], x[:10]) and not back[10:].any()
    assert bool((x.grad[:10] == 1).all()) and not x.grad[10:].any()


def test_permute_of_dequantized_rows_passes_the_gradient_on():
    x = quantize(torch.randn(10, 64)).requires_grad_()
    _, rows, _, _, _ = permute_mxfp8_fwd_hp_bwd(x, torch.tensor([3, 0, 1, 2, 0, 4]), 2, 3, use_mxfp8=False)
    rows.sum().backward()
    assert torch.equal(x.grad, torch.ones(10, 64))
