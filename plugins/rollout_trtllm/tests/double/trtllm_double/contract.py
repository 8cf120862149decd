"""The contract, as ``trtllm_contract.json`` has it, and a journal. A change of that file changes the double."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

CONTRACT: Final[dict[str, Any]] = json.loads((Path(__file__).parents[2] / "trtllm_contract.json").read_text())

LLM: Final[dict[str, Any]] = CONTRACT["AsyncLLM.__init__"]
WIRE: Final[dict[str, Any]] = CONTRACT["wire"]
FP8: Final[dict[str, Any]] = CONTRACT["fp8"]
SAMPLING: Final[dict[str, Any]] = CONTRACT["SamplingParams"]
RPC: Final[tuple[str, ...]] = tuple(CONTRACT["rpc"]["required"])
FINISH_REASONS: Final[tuple[str, ...]] = tuple(CONTRACT["output"]["finish_reason"])
RESTORE_MODES: Final[tuple[str, ...]] = tuple(re.findall(r"'([A-Z]+)'", CONTRACT["SleepConfig"]["restore_modes"]))

calls: list[tuple[str, Any]] = []
"""What engines of this process were asked, in order. Name and summary: tags for release and resume, the names of a
bucket or ``None`` for update_weights, the length of the prompt for generate_async, the method for collective_rpc,
sorted keywords for AsyncLLM."""


def record(name: str, summary: Any = None) -> None:
    """Note a call."""
    calls.append((name, summary))
