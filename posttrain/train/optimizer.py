"""AdamW on float32 masters of the model's parameters, which are updated in place.

Not a schedule (`settings.learning_rate_at`). Masters, gradients and moments are one flat tensor
each. A parameter's gradient goes into the float32 sum in the very moment that a backward pass has
it, and is freed: so it is read from the cache, and memory for all of them is never needed. The one
thing that must stay true: an update whose gradient is not finite changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from posttrain.core.errors import NonFiniteError
from posttrain.train.settings import OptimizerSettings, learning_rate_at

_PIECE = 1 << 18
"""Elements added at a time: torch first makes a float32 copy of what it adds, and the copy of a
whole embedding would be new memory at every step.
"""


class MasterAdamW:
    """Masters and moments (AdamW without weight decay, arXiv 1711.05101, algorithm 2) of named
    parameters that want gradients, float64 where the parameters are. Backward passes add up to the
    next `update` or `zero`.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        named = list(named_parameters)
        self._parameters = [parameter for _, parameter in named]
        self.layout = {name: tuple(parameter.shape) for name, parameter in named}
        """Names and shapes in the order of the flat tensors."""
        kind = torch.promote_types(self._parameters[0].dtype, torch.float32)
        flat = torch.cat([p.detach().flatten().to(kind) for p in self._parameters])
        self._masters = torch.nn.Parameter(flat)
        self._masters.grad = torch.zeros_like(flat)
        self._adam = torch.optim.AdamW([self._masters], weight_decay=0.0, fused=True)
        self._totals = self._views(self._grad)
        self._untouched = set(range(len(named)))
        """Parameters whose total is not valid: no gradient came yet."""
        for index, parameter in enumerate(self._parameters):
            assert not hasattr(parameter, "gradient_sink"), "a parameter has one optimizer"
            parameter.register_post_accumulate_grad_hook(partial(self._take, index))
            parameter.gradient_sink = partial(self._add, index)  # type: ignore[attr-defined]

    def _take(self, index: int, parameter: torch.Tensor) -> None:
        """A parameter's whole gradient has come, unless it came by rows."""
        if parameter.grad is not None:
            self._add(index, slice(None), parameter.grad)
            parameter.grad = None

    @torch.no_grad()
    def _add(self, index: int, rows: slice | torch.Tensor, gradient: torch.Tensor) -> None:
        """Add the gradient of some rows; of a row that is named twice, twice."""
        total = self._totals[index]
        fresh, whole = index in self._untouched, rows == slice(None)
        self._untouched.discard(index)
        if fresh and whole:
            total.copy_(gradient)
            return
        if fresh:
            total.zero_()
        if isinstance(rows, torch.Tensor):
            total.index_add_(0, rows, gradient.to(total.dtype))
            return
        flats = (x.reshape(-1).split(_PIECE) for x in (total[rows], gradient))
        for sum_piece, piece in zip(*flats, strict=True):
            sum_piece.add_(piece)

    def zero(self) -> None:
        """Forget gradients."""
        self._untouched = set(range(len(self._parameters)))

    @torch.no_grad()
    def update(self, settings: OptimizerSettings, *, step: int) -> float:
        """One step at the learning rate of `step`; returns the gradient's norm before clipping.

        Raises:
            NonFiniteError: the gradient was not finite; nothing changed.
        """
        for index in self._untouched:
            self._totals[index].zero_()
        norm = float(torch.linalg.vector_norm(self._grad))
        if not math.isfinite(norm):
            self.zero()
            raise NonFiniteError(
                f"the gradient of step {step} is not finite (norm {norm}); no weight was changed.",
                "lower the learning rate in the run's config.toml",
            )
        if norm > settings.clip_norm:
            self._grad.mul_(settings.clip_norm / norm)
        (options,) = self._adam.param_groups
        options["lr"] = learning_rate_at(step, settings)
        options["betas"] = (settings.beta1, settings.beta2)
        self._adam.step()
        self._publish()
        self.zero()
        return norm

    def restart(self) -> None:
        """Forget the moments: a new phase, whose gradients are of another scale, begins."""
        self._adam.state.clear()

    def state(self) -> dict[str, torch.Tensor]:
        """Masters and moments, not copied. Moments are absent before the first update."""
        moments = self._adam.state.get(self._masters, {})
        return {"masters": self._masters.detach(), **moments}

    @torch.no_grad()
    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what `state` gave; the parameters follow."""
        self._masters.copy_(state["masters"])
        moments = {key: value.clone() for key, value in state.items() if key != "masters"}
        self._adam.state.clear()
        if moments:
            self._adam.state[self._masters] = moments
        self._publish()
        self.zero()

    @property
    def _grad(self) -> torch.Tensor:
        assert self._masters.grad is not None, "the masters always have a gradient"
        return self._masters.grad

    def _publish(self) -> None:
        """Copy the masters into the parameters, in place."""
        for parameter, master in zip(
            self._parameters, self._views(self._masters.detach()), strict=True
        ):
            parameter.data.copy_(master)

    def _views(self, flat: torch.Tensor) -> list[Any]:
        shapes = self.layout.values()
        pieces = flat.split([math.prod(shape) for shape in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
