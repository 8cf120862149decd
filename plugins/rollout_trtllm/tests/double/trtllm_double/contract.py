"""The contract, as ``trtllm_contract.json`` has it. A change of that file changes the double."""

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
RPC: Final[tuple[str, ...]] = (*CONTRACT["rpc"]["required"], *CONTRACT["rpc"]["optional"])
FINISH_REASONS: Final[tuple[str, ...]] = tuple(CONTRACT["output"]["finish_reason"])
RESTORE_MODES: Final[tuple[str, ...]] = tuple(re.findall(r"'([A-Z]+)'", CONTRACT["SleepConfig"]["restore_modes"]))
