# SPDX-License-Identifier: Apache-2.0
"""What the MoE layers of a model choose, forward by forward, while their routes are recorded or replayed.

engine/replay.py starts and ends this. A layer asks for its turn in each call (`ModelRoutes.turn`): what to choose, and
where to note what it has chosen. Without a turn it routes as always.

Activation checkpointing calls layers again, in backward. They then choose what they chose in forward, and note
nothing. This also holds if backward runs after the `with` block. Which forward a recomputation repeats follows from
the autograd node that asks for it: torch numbers nodes in the order in which they are made.

Letters: T tokens, L MoE layers, K choices of a token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ..transport.deadline import tell_peers, tell_peers_on_error


@dataclass
class Turn:
    """One call of a layer whose routes are recorded or replayed.

    Attributes:
        chosen_TK: int16, the experts to choose. A token whose row is -1 chooses by itself. None: all tokens do.
        complete: whether there are chosen_TK, and none of its rows is -1.
        made_TK: int16, what the layer chose. `note` sets it.
    """

    chosen_TK: torch.Tensor | None = None
    complete: bool = False
    made_TK: torch.Tensor | None = None

    def note(self, expert_TK: torch.Tensor) -> None:
        """Takes the experts that the layer chose."""
        self.made_TK = self.chosen_TK if self.complete else expert_TK.to(torch.int16)


@dataclass(frozen=True)
class Given:
    """Routes to replay in one forward.

    Attributes:
        chosen_LTK: int16. K is the largest of all layers. A layer with fewer choices has -1 in the rest.
        complete: whether no token chooses by itself in any layer.
    """

    chosen_LTK: torch.Tensor
    complete: bool


@dataclass
class Forward:
    """One forward of the model.

    Attributes:
        start: the number of the autograd node that was made before it.
        given: what it replays. None: the layers choose by themselves.
        turns: of the layers that were called, by their indices.
        token_shape: of the hidden states, without the last axis.
        forgotten: whether this stands for all forwards that `ModelRoutes.forget` forgot.
    """

    start: int
    given: Given | None = None
    turns: dict[int, Turn] = field(default_factory=dict)
    token_shape: torch.Size | None = None
    forgotten: bool = False


class RecordedRoutes(Sequence):
    """The experts that a model's MoE layers chose, forward by forward.

    `routes[n]` is an int16 tensor [*tokens, L, K] on the layers' device. `tokens` is the shape of the hidden states
    without their last axis: [B, S] for Hugging Face models, and [B, 1] where they generate token by token. L counts
    the MoE layers in the order of the model's modules, without dense layers. K is the number of choices. A layer with
    fewer choices than another one has -1 in the rest. Padding tokens have routes like all others.
    """

    def __init__(self, layers: "Sequence[LayerRoutes]"):
        self._layers = layers
        self._forwards: list[Forward] = []

    def __len__(self) -> int:
        return len(self._forwards)

    def __getitem__(self, n):
        if isinstance(n, slice):
            return [self[i] for i in range(*n.indices(len(self)))]
        forward = self._forwards[n]
        if absent := [layer.name for layer in self._layers if forward.turns.get(layer.index, Turn()).made_TK is None]:
            raise RuntimeError(f"the routes of forward {n} are incomplete: it did not reach {', '.join(absent)}")
        made = [forward.turns[layer.index].made_TK for layer in self._layers]
        other = next((i for i, made_TK in enumerate(made) if len(made_TK) != len(made[0])), None)
        if other is not None:
            names = self._layers[0].name, self._layers[other].name
            raise RuntimeError(f"the routes of forward {n} are no tensor [*tokens, L, K], since blocks got different "
                               f"tokens: {names[0]} got {len(made[0])}, and {names[1]} got {len(made[other])}. Record "
                               "a block, or a part of the model, in which all get the same")
        most = max(made_TK.shape[1] for made_TK in made)
        made = [torch.nn.functional.pad(made_TK, (0, most - made_TK.shape[1]), value=-1) for made_TK in made]
        return torch.stack(made, dim=1).reshape(*forward.token_shape, len(made), most)


class ModelRoutes:
    """What the layers of a model share.

    Attributes:
        recorded: where to record. None: nothing is recorded.
        replayed: what the next forwards replay. None: nothing is replayed.
        ignored: a layer and what its router does -> a bool on the device, whether the experts got another choice than
            the one to replay.
    """

    def __init__(self) -> None:
        self.recorded: RecordedRoutes | None = None
        self.replayed: Iterator[Given] | None = None
        self.ignored: dict[tuple[str, str], torch.Tensor] = {}
        self._current: Forward | None = None
        self._remembered: list[Forward] = []  # that may be recomputed, in ascending order of `start`

    @torch.compiler.disable
    @tell_peers_on_error
    def begin(self, *_) -> None:
        """A forward pre-hook of the modules that contain all layers. The outermost that is called begins a forward.

        Raises:
            RuntimeError: there are no more routes to replay.
        """
        if is_recomputed():
            return
        if self._current is not None and not self._current.turns:  # a module around this one began it
            return
        given = None
        if self.replayed is not None:
            given = next(self.replayed, None)
            if given is None:
                raise RuntimeError("replay_routes: there are more forwards than routes: give the routes of each "
                                   "forward inside the `with`, in their order")
        self._current = Forward(_node_number(), given)
        if torch.is_grad_enabled():
            self._remembered.append(self._current)

    def cut(self) -> None:
        """Where a `with` block begins or ends: the next forward is another one. Backward of earlier ones may come."""
        self._current = None
        if self.recorded is None and self.replayed is None:
            self._remembered.append(Forward(_node_number()))  # later forwards have no turns

    def forget(self) -> None:
        """Forgets what recomputations of all forwards until now would need. They raise an error."""
        gone = [one for one in self._remembered if one.turns or one.forgotten][:1]
        last = [one for one in self._remembered[-1:] if not one.turns and not one.forgotten]
        self._remembered = [*(Forward(one.start, forgotten=True) for one in gone), *last]

    def end_replay(self) -> None:
        """The host waits for the device. Raises RuntimeError if a layer chose other experts than it replayed."""
        flags = torch.stack([*self.ignored.values()]).tolist() if self.ignored else []
        if found := next((one for one, flag in zip(self.ignored, flags, strict=True) if flag), None):
            error = RuntimeError(f"replay_routes: not supported for {found[0]}: its router {found[1]}")
            tell_peers(error)
            raise error

    @tell_peers_on_error
    def turn(self, layer: "LayerRoutes", token_shape: torch.Size) -> Turn | None:
        """The turn of one call of a layer. None: it routes as always.

        `token_shape`: of the hidden states, without the last axis.

        Raises:
            ValueError: the routes to replay are for another number of tokens.
            RuntimeError: the layer was called without its model, or twice in one forward, or is recomputed too late.
        """
        node = torch._C._current_autograd_node()
        if node is not None:
            number = node._sequence_nr()
            repeated = next((one for one in reversed(self._remembered) if one.start <= number), None)
            if repeated is not None and repeated.forgotten:
                raise RuntimeError(f"{layer.name} is recomputed after the routes of its forward were forgotten: run "
                                   "backward before the engine's step; if routes of a part of the model are replayed, "
                                   "before the next `with`")
            known = repeated is not None and layer.index in repeated.turns
            return Turn(repeated.turns[layer.index].made_TK, complete=True) if known else None
        if self.recorded is None and self.replayed is None:
            return None
        forward, turn = self._current, Turn()
        if forward is None or layer.index in forward.turns:
            how = "outside its model's forward" if forward is None else "twice in one forward of its model"
            raise RuntimeError(f"{layer.name} was called {how}, while routes are recorded or replayed: call the model")
        if forward.given is not None:
            turn = Turn(forward.given.chosen_LTK[layer.index, :, :layer.top_k], forward.given.complete)
            if len(turn.chosen_TK) != token_shape.numel():
                raise ValueError(f"{layer.name}: the routes to replay are for {len(turn.chosen_TK)} tokens; expected "
                                 f"{token_shape.numel()}, of hidden states [{', '.join(map(str, token_shape))}, H]. "
                                 "Padding tokens count, too: give them -1 where they have no routes")
        if self.recorded is not None and not forward.turns:
            self.recorded._forwards.append(forward)
        forward.token_shape = token_shape
        forward.turns[layer.index] = turn
        return turn


@dataclass(frozen=True)
class LayerRoutes:
    """What a layer knows of its model's routes.

    Attributes:
        name: the layer's.
        index: among the model's MoE layers.
        top_k: choices of a token. None: the router does not tell. All layers have as many then.
    """

    name: str
    index: int
    top_k: int | None
    model: ModelRoutes

    def check(self, arrived_TK: torch.Tensor, given_TK: torch.Tensor, router: str) -> None:
        """Compares the experts that the router chose, in any order, with those to replay. The host waits for nothing.

        Args:
            given_TK: a token whose row is -1 chooses by itself.
            router: what the router does, for the error if they differ.
        """
        given_TK = torch.where(given_TK < 0, arrived_TK, given_TK)
        ignored = (arrived_TK.sort()[0] != given_TK.sort()[0]).any()
        earlier = self.model.ignored.get((self.name, router))
        self.model.ignored[self.name, router] = ignored if earlier is None else ignored | earlier


def routes_of(model: torch.nn.Module, make: bool = False) -> ModelRoutes | None:
    """The state of a model. None: its routes were never recorded or replayed, and `make` is False."""
    if make:
        vars(model).setdefault("_mxfp8_routes", ModelRoutes())
    return vars(model).get("_mxfp8_routes")


def is_recomputed() -> bool:
    """Whether activation checkpointing repeats a forward, in backward."""
    return torch._C._current_autograd_node() is not None


def _node_number() -> int:
    """The number of an autograd node that this thread makes now."""
    with torch.inference_mode(False), torch.enable_grad():
        return torch.zeros((), requires_grad=True).clone().grad_fn._sequence_nr()
