# SPDX-License-Identifier: Apache-2.0
"""How tokens travel between the ranks of an expert-parallel group: `Transport`, and the types that it uses.

Every flat transport gives the same bits. A token travels once to each rank that holds one of its experts. On the way
back, the experts' rank adds up a token's rows in float32, in ascending choice, and rounds the sum once to the type in
which it travels. The token's own rank adds up what arrives in float32, in ascending rank. The transport in two hops
has an order of its own (hierarchical.py).

Letters in tensor names: T tokens of this rank, K choices of a token, H hidden size, W ranks, E local experts,
S rows that this rank sends, R rows that it receives, P expert-sorted rows with their padding.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

ROW_ALIGNMENT = 128


@dataclass(frozen=True)
class RowFormat:
    """The format of rows while they travel: their own dtype, or MXFP8."""

    mxfp8: bool
    block_size: int = 32
    scaling_mode: str = "rceil"


class Plan(NamedTuple):
    """What one forward's routing means for this rank. Autograd keeps it for the backward of this forward.

    Attributes:
        num_tokens, top_k: T and K.
        tokens_per_expert: mean number of choices per expert over the whole group, dropped ones included. Equal on all
            ranks.
        send_splits, recv_splits: number of rows sent to and received from each rank of the group, in rank order.
        send_token_S: int64 [S], the token in each row sent, ascending by (rank, token).
        sent_slot_WT: int64 [W, T], the row of `send_token_S` in which token t goes to rank w. S where it does not.
        group_ends_E: int32, the end of each local expert's rows among the P. Multiples of ROW_ALIGNMENT.
        slot_RK: int64 [R, K], the expert-sorted row of choice k of received row r. P where another rank serves it.
        source_P: int64 [P], r * K + k of the choice in each expert-sorted row. R * K in padding rows.
    """

    num_tokens: int
    top_k: int
    tokens_per_expert: float
    send_splits: tuple
    recv_splits: tuple
    send_token_S: torch.Tensor
    sent_slot_WT: torch.Tensor
    group_ends_E: torch.Tensor
    slot_RK: torch.Tensor
    source_P: torch.Tensor

    @property
    def num_rows(self) -> int:
        """P: expert-sorted rows on this rank, padding included."""
        return self.source_P.shape[0]


def padded(rows: Any) -> Any:
    """The rows of a group, an int, or of each group, a tensor, rounded up to a multiple of ROW_ALIGNMENT."""
    return (rows + ROW_ALIGNMENT - 1) // ROW_ALIGNMENT * ROW_ALIGNMENT


def room_for(rows: int) -> int:
    """P for groups that end at this row: a multiple of ROW_ALIGNMENT.

    Beyond that, at most 1/16 of the rows is added. There are few different sizes, so that most calls can replay what
    an earlier one recorded.
    """
    step = max(ROW_ALIGNMENT, 1 << max(rows.bit_length() - 5, 0))
    return -(-rows // step) * step


def with_zero_row(x: torch.Tensor) -> torch.Tensor:
    """A copy of x [N, M] with one more row, of zeros. An index equal to N reads it."""
    return torch.cat([x, x.new_zeros(1, x.shape[1])])


class Transport(ABC):
    """Moves the tokens of one layer to the ranks of their experts and back.

    Dispatch and combine over the same plan are each other's gradient. `phase` names an exchange in errors.
    """

    name: str  # of the layer, for errors
    # Whether all that it does can be recorded and replayed (compute/recorded.py). Its plans are then named tuples of
    # tensors, its `plan` never calls `meanwhile`, and equal transports do the same.
    replayable = False

    def _where(self, phase: str) -> str:
        return f"'{phase}' of {self.name}"

    @staticmethod
    def usable_here() -> tuple[bool, str]:
        """Whether this machine can use it, and why, without asking other ranks."""
        return True, "on every machine"

    @abstractmethod
    def plan(self, expert_TK: torch.Tensor, num_local_experts: int, meanwhile: Callable[[], None] | None = None,
             rows: str = "") -> Any:
        """Plans the exchange of one forward. Every rank of the group calls it.

        Args:
            expert_TK: int64 [T, K], the global experts of each token. -1: the choice is dropped.
            num_local_experts: E.
            meanwhile: called before the host waits for other ranks' counts, to launch work that needs none of them.
                Not called where the host does not wait.
            rows: a text, not data. It describes the tokens: everything about them that must be equal on all ranks.

        Returns:
            An immutable plan: a `Plan`, or an object with its num_tokens, top_k, tokens_per_expert, group_ends_E and
            num_rows.

        Raises:
            PeerError: a rank did not come in time, or is in the plan of another layer or of other `rows`.
        """

    @abstractmethod
    def dispatch(self, plan: Any, x_TH: torch.Tensor, row_format: RowFormat, weight_TK: torch.Tensor | None = None,
                 phase: str = "dispatch") -> tuple:
        """Brings every token to the ranks of its experts, into expert-sorted, padded rows.

        Args:
            weight_TK: a number for each choice, which travels with the token.

        Returns:
            (x_PH, weight_P). x_PH: rows of x_TH's dtype, or an MXTensor where `row_format` is MXFP8. Padding of a
            group is zeros, and rows behind the last group may hold anything. weight_P: float32, 0 in both; None
            without weight_TK.
        """

    @abstractmethod
    def combine(self, plan: Any, y_PH: torch.Tensor, row_format: RowFormat, dtype: torch.dtype,
                weight_P: torch.Tensor | None = None, phase: str = "combine") -> tuple:
        """Brings expert-sorted rows back to their tokens and adds them up.

        Args:
            dtype: of the result, and of rows that travel where `row_format` is not MXFP8.
            weight_P: a float32 number for each row, which goes back to its choice.

        Returns:
            (y_TH, weight_TK). weight_TK: float32, 0 for dropped choices; None without weight_P.
        """
