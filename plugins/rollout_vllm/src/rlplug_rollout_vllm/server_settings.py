"""What a server says of itself, and whether it is one that training can use."""

from __future__ import annotations

import json
from typing import Any, Final

from packaging.version import Version

from rlplug.errors import ConfigError
from rlplug.interfaces import FP8Weights
from rlplug.rollout.servers.http_client import HTTPClient
from rlplug.rollout.servers.settings import ServerSettings
from rlplug_rollout_vllm.versions import NEWEST, OLDEST

ROUTES: Final = {
    "start_weight_update": "with VLLM_SERVER_DEV_MODE=1 in its environment",
    "inference/v1/generate": "with --enable-scale-out",
}
"""What a server must have beside vLLM's defaults, and how it gets it."""

LOGPROBS_MODE: Final = "processed_logprobs"
WRONG_METHOD: Final = 405
"""Answer to a GET of a route that takes POST alone."""


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
    version = Version(client.get(f"{url}/version")["version"])
    if not OLDEST <= Version(version.base_version) < NEWEST:
        raise ConfigError(
            f"vLLM {version} runs at {url}, and rlplug-rollout-vllm knows {OLDEST} up to, not including, {NEWEST}."
        )
    client.get(f"{url}/v1/models")  # asks for the key
    for route, remedy in ROUTES.items():
        if client.status(f"{url}/{route}") != WRONG_METHOD:
            raise ConfigError(f"vLLM {version} at {url} has no /{route}: start it {remedy}.")
    config: dict[str, Any] = client.get(f"{url}/server_info?config_format=json")["vllm_config"]
    if (mode := config["model_config"]["logprobs_mode"]) != LOGPROBS_MODE:
        raise ConfigError(
            f"vLLM at {url} has the logprobs mode {mode!r}, with which ratios of probabilities are wrong: start it "
            f"with --logprobs-mode {LOGPROBS_MODE}."
        )
    needed = None if fp8 is None else fp8.quantization_config()
    if (config["model_config"].get("hf_overrides") or {}).get("quantization_config") != needed:
        remedy = "without a quantization_config in its --hf-overrides"
        if needed is not None:
            remedy = f"with --hf-overrides '{json.dumps({'quantization_config': needed})}'"
        raise ConfigError(f"vLLM at {url} has other layers in FP8 than model.weight_sync sends: start it {remedy}.")
    cache, copies = config["cache_config"], config["parallel_config"]["data_parallel_size"]
    return ServerSettings(
        max_model_len=config["model_config"]["max_model_len"],
        max_num_seqs=config["scheduler_config"]["max_num_seqs"] * copies,
        kv_cache_tokens=(cache["num_gpu_blocks"] or 0) * (cache["block_size"] or 0) * copies,
    )
