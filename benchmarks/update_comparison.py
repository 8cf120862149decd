"""Compares logprobs, loss and gradients of one variant of the update benchmark with those of another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Comparison:
    """Holds logprobs, loss and gradients with which others are compared: of ``file`` if it exists, else the first.

    Args:
        file: Where the first ones are kept for other processes, or were kept by one; ``None`` keeps them in this
            process alone.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._first: dict[str, Any] = {}
        if file is not None and file.exists():
            self._first = torch.load(file, map_location="cpu")

    def differences(self, logprobs: Tensor, loss: float, gradients: dict[str, Tensor]) -> dict[str, Any]:
        """Return how far these are from the first ones.

        Args:
            logprobs: Those of the tokens that train, which differ by nats.
            loss: Of the whole step; its difference is relative.
            gradients: By name, whole, on any device; without any, the loss is left out too.

        Returns:
            ``gradients differ by`` is relative, in the 2-norm, of the parameter where that is largest, and ``in`` its
            name; ``all gradients differ by`` is that of all parameters together.
        """
        if not self._first:
            on_host = {name: gradient.float().cpu() for name, gradient in gradients.items()}
            self._first = {"logprobs": logprobs, "loss": loss, "gradients": on_host}
            if self._file is not None:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                torch.save(self._first, self._file)
        first: dict[str, Any] = self._first
        apart = (logprobs - first["logprobs"]).abs()
        row = {"logprobs differ by, mean": float(apart.mean()), "logprobs differ by, max": float(apart.max())}
        if not gradients:
            return row
        if gradients.keys() != first["gradients"].keys():
            raise SystemExit(
                f"gradients of other parameters: {sorted(gradients.keys() ^ first['gradients'].keys())[:4]}"
            )
        squares = {name: _squares(gradient, first["gradients"][name]) for name, gradient in gradients.items()}
        relative = {name: (difference / size) ** 0.5 for name, (difference, size) in squares.items()}
        worst = max(relative, key=relative.__getitem__)
        total, size = (sum(pair[index] for pair in squares.values()) for index in (0, 1))
        return row | {
            "loss differs by": abs(loss - first["loss"]) / abs(first["loss"]),
            "gradients differ by": relative[worst],
            "in": worst,
            "all gradients differ by": (total / size) ** 0.5,
        }


def _squares(gradient: Tensor, first: Tensor) -> tuple[float, float]:
    """Return the squared 2-norms of the difference and of ``first``, computed where ``gradient`` is."""
    reference = first.to(gradient.device)
    difference = gradient.float() - reference
    return float(difference.double().square().sum()), float(reference.double().square().sum())
