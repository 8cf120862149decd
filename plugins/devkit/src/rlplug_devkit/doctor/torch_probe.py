"""What torch sees, as JSON on stdout; ``rlplug doctor`` runs this file in a process of its own, which may crash."""

import json
from typing import Any


def probe() -> dict[str, Any]:
    """Return versions, and name, memory in bytes, capability and peers of each GPU."""
    import torch

    found: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": []}
    found["available"] = torch.cuda.is_available()
    if not found["available"]:
        return found
    nccl: Any = torch.cuda.nccl
    found |= {"nccl": ".".join(map(str, nccl.version())), "architectures": torch.cuda.get_arch_list()}
    indices = range(torch.cuda.device_count())
    for index in indices:
        free, total = torch.cuda.mem_get_info(index)
        peers = [other for other in indices if other != index and torch.cuda.can_device_access_peer(index, other)]
        gpu = {"name": torch.cuda.get_device_name(index), "free": free, "total": total, "peers": peers}
        found["gpus"].append(gpu | {"capability": list(torch.cuda.get_device_capability(index))})
    return found


if __name__ == "__main__":
    print(json.dumps(probe()))
