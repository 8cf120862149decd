"""What one of SGLang's servers says of itself, and whether it is one that training can use."""

from __future__ import annotations

import json
from typing import Any, Final

from packaging.version import Version

from rlplug.errors import ConfigError
from rlplug.interfaces import FP8Weights
from rlplug.rollout.servers.http_client import HTTPClient
from rlplug.rollout.servers.settings import ServerSettings
from rlplug_rollout_sglang.options import CONTEXT_MARGIN, SAMPLING_BACKEND
from rlplug_rollout_sglang.sampler import FLAG
from rlplug_rollout_sglang.versions import NEWEST, OLDEST

NEEDED: Final = {
    "skip_tokenizer_init": (True, "with --skip-tokenizer-init: token ids go in and out"),
    "incremental_streaming_output": (True, "with --incremental-streaming-output"),
    "sampling_backend": (
        SAMPLING_BACKEND,
        f"with --sampling-backend {SAMPLING_BACKEND} and {FLAG}=1 in its environment, where this plugin is installed: "
        "SGLang's own give other logprobs than those of what they draw from",
    ),
    "dp_size": (1, "without --dp-size, once for each copy of the model: SGLang takes weights for one"),
    "pp_size": (1, "without --pp-size"),
    "speculative_algorithm": (None, "without --speculative-algorithm"),
}
"""Arguments that a server must have been started with, and how that is done."""

KEPT_OF_PROMPT: Final = 6
"""By how much the longest prompt that SGLang takes is shorter than its context."""


def server_info(client: HTTPClient, url: str) -> dict[str, Any]:
    """Return a server's arguments, resolved, and what its scheduler found at start."""
    info: dict[str, Any] = client.get(f"{url}/server_info")
    return info


def read_settings(client: HTTPClient, url: str, fp8: FP8Weights | None) -> ServerSettings:
    """Ask a server.

    Args:
        client: Asks.
        url: The server's.
        fp8: Which weights it will get in FP8.

    Raises:
        ConfigError: It is of another version, or was not started as training needs it.
        RunError: It refuses the key.
    """
    info = server_info(client, url)
    version = Version(info["version"])
    if not OLDEST <= Version(version.base_version) < NEWEST:
        raise ConfigError(
            f"SGLang {version} runs at {url}, and rlplug-rollout-sglang knows {OLDEST} up to, not including, {NEWEST}."
        )
    for name, (needed, remedy) in NEEDED.items():
        if info[name] != needed:
            raise ConfigError(f"SGLang {version} at {url} has {name}={info[name]!r}: start it {remedy}.")
    needed = None if fp8 is None else fp8.quantization_config()
    if json.loads(info["json_model_override_args"]).get("quantization_config") != needed:
        remedy = "without a quantization_config in its --json-model-override-args"
        if needed is not None:
            remedy = f"with --json-model-override-args '{json.dumps({'quantization_config': needed})}'"
        raise ConfigError(f"SGLang at {url} has other layers in FP8 than model.weight_sync sends: start it {remedy}.")
    state: dict[str, Any] = info["internal_states"][0]
    return ServerSettings(
        max_model_len=info["max_req_input_len"] + KEPT_OF_PROMPT - CONTEXT_MARGIN,
        max_num_seqs=state["effective_max_running_requests_per_dp"],
        kv_cache_tokens=info["max_total_num_tokens"],
    )
