"""Settings of torch.compile that every compiled part of this distribution needs."""

from __future__ import annotations

import torch


def stop_when_not_compiled() -> None:
    """Make code that is recompiled too often raise an error; by default torch would run it uncompiled from then on."""
    torch._dynamo.config.recompile_limit = 32  # enough for policy, reference and critic, with and without gradients
    torch._dynamo.config.fail_on_recompile_limit_hit = True
