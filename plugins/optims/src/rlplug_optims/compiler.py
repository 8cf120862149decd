"""What all that is compiled here asks of torch.compile."""

from __future__ import annotations

import torch


def stop_when_not_compiled() -> None:
    """Let code that is compiled again too often raise: by default torch would run it uncompiled from then on."""
    torch._dynamo.config.recompile_limit = 32  # policy, reference and critic, with and without gradients
    torch._dynamo.config.fail_on_recompile_limit_hit = True
