"""One step under control: its divergence predicted on some responses, the step scaled to the budget, made, measured.

Predicting and measuring cost about three forward passes of the probe's responses. So they are done at every
`control.probe_every`-th update; in between the divergence is taken to grow with the square of the proposal's norm,
which it does along one direction.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from src import config as cfg
from src import methods
from src.control import decayed_budget, step_scale
from src.divergence import kl, predict
from src.models import Policy
from src.rollout import Rollout


class Scored(Protocol):
    """What is read of a batch."""

    @property
    def rollout(self) -> Rollout: ...


class ControlledStep:
    """Makes a method's steps.

    A method whose step cannot be split into proposal and application makes it in full, and its divergence is measured.

    Args:
        policy: as it is to be probed: whole where its head is trained, see `trainer`.
        phase: makes the context of a timed phase, by name and component.
    """

    def __init__(self, config: cfg.Config, policy: Policy, method: methods.Method, phase: Callable[..., Any]):
        self._config = config
        self._policy = policy
        self._method = method
        self._phase = phase
        self._splits: bool = getattr(method, "splits", True)
        self._old: list[Tensor] = []
        # Of the last probe: divergence (nats per token) over the proposal's squared norm.
        self._curvature: float | None = None

    def state(self) -> dict[str, float | None]:
        """Return what the next steps go by, for a checkpoint."""
        return {"curvature": self._curvature}

    def load_state(self, state: dict[str, float | None]) -> None:
        self._curvature = state["curvature"]

    def look(self, batch: Scored, update: int) -> None:
        """Before the gradients: keep the old policy's states where the method may step as soon as it has a gradient."""
        if not self._splits and self._due(update):
            with self._phase("probe", "probe"), torch.no_grad():
                self._old = [self._states(part) for part in self._parts(batch)]

    def make(self, batch: Scored, update: int) -> dict[str, float]:
        """Apply the method's proposal at the scale that keeps the budget of an update (from 1); return metrics.

        Divergences are means over the response tokens of the probe, nats per token. proposed_kl is predicted for the
        whole proposal, predicted_kl = scale^2 proposed_kl for the step that is made; realised_kl is that step's exact
        divergence. Updates without a probe have no realised_kl, and predictions only where a budget needs them.
        """
        probed = self._due(update)
        row = {"control/probed": float(probed)}
        limit = budget(self._config.control, update)
        scale = 1.0
        proposed = self._proposed(batch, probed, limit) if self._splits else None
        if proposed is not None:
            scale = step_scale(proposed, limit, getattr(self._config.control, "step_scale_max", 1.0))
            row |= {"control/proposed_kl": proposed, "control/predicted_kl": scale**2 * proposed}
        row |= {"control/step_scale": scale, "control/binds": float(limit is not None and (proposed or 0.0) > limit)}
        if limit is not None:
            row["control/budget"] = limit
        with self._phase("step"):
            applied = self._method.apply(scale) or {}
        if probed:
            row["control/realised_kl"] = self._realised(batch)
        return row | {f"method/{key}": value for key, value in applied.items()}

    def _due(self, update: int) -> bool:
        control = self._config.control
        if (update - 1) % control.probe_every == 0:
            return True
        # Without a norm, or a probe to start from, nothing can be said in between.
        bound = control.name != "none" and self._splits
        return bound and (self._curvature is None or not hasattr(self._method, "displacement_norm"))

    def _proposed(self, batch: Scored, probed: bool, limit: float | None) -> float | None:
        """Return the divergence of the whole proposal: predicted, or by the last prediction; None if nobody asks."""
        if probed:
            proposed = self._predicted(batch)
            if limit is not None and hasattr(self._method, "displacement_norm"):
                norm = self._method.displacement_norm()
                self._curvature = proposed / norm**2 if norm > 0 else None
            return proposed
        if limit is None or self._curvature is None:
            return None
        return self._curvature * self._method.displacement_norm() ** 2  # type: ignore[attr-defined]

    def _predicted(self, batch: Scored) -> float:
        predictions = []
        with self._phase("probe", "probe"):
            self._old = []
            for part in self._parts(batch):
                states_TD, predicted = predict(
                    partial(self._states, part),
                    self._policy.logits_by_chunks,
                    self._method.tangents(),
                    self._config.temperature,
                )
                self._old.append(states_TD)
                predictions.append(predicted)
            return float(torch.cat(predictions).mean())

    def _realised(self, batch: Scored) -> float:
        old, self._old = self._old, []
        chunks = self._policy.logits_by_chunks
        with self._phase("probe", "probe"), torch.no_grad():
            found = [
                kl(old_TV, new_TV, self._config.temperature)
                for old_TD, part in zip(old, self._parts(batch), strict=True)
                for old_TV, new_TV in zip(chunks(old_TD), chunks(self._states(part)), strict=True)
            ]
            return float(torch.cat(found).mean())

    def _states(self, part: Rollout) -> Tensor:
        return self._policy.states(part)[part.response_BL]

    def _parts(self, batch: Scored) -> Iterator[Rollout]:
        """Yield the probe's responses, spread evenly over the batch, in halves of microbatches.

        A response takes more here than in backward where that keeps little: twice what a layer makes, and the attention
        matrices that its composite kernel writes out.
        """
        probe = batch.rollout.rows(_spread(len(batch.rollout.finished_B), self._config.control.probe_responses))
        size = max(1, self._config.microbatch_responses // 2)
        for start in range(0, len(probe.finished_B), size):
            yield probe.rows(slice(start, start + size))


def budget(control: cfg.Control, update: int) -> float | None:
    """Return the budget of an update (from 1), nats per token, or None without control."""
    match control:
        case cfg.FixedControl():
            return control.budget
        case cfg.DecayControl():
            return decayed_budget(control.budget, control.budget_end, control.horizon, control.schedule, update - 1)
    return None


def _spread(total: int, count: int) -> Tensor:
    """Return `count` row indices spread evenly over `total` rows (all of them if there are fewer)."""
    count = min(count, total)
    return torch.arange(count) * total // count
