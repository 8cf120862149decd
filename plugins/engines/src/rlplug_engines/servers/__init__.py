"""Engines that run as servers: what their plugins import. A plugin writes one ``ServerBackend``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlplug_engines.servers.addresses import LOOPBACK
    from rlplug_engines.servers.backend import (
        BackendContext,
        EngineLabels,
        PendingRequest,
        SchedulerState,
        ServerBackend,
        ServerSettings,
    )
    from rlplug_engines.servers.http_client import Server, ServerError
    from rlplug_engines.servers.process_group import Group, Rendezvous, SendGroup
    from rlplug_engines.servers.processes import Launch, ServerSlot, to_flags
    from rlplug_engines.servers.server_checks import check_server_fp8
    from rlplug_engines.servers.server_engine import ServerEngine
    from rlplug_engines.servers.weight_sender import TensorList, WeightSender

__all__ = [
    "LOOPBACK",
    "BackendContext",
    "EngineLabels",
    "Group",
    "Launch",
    "PendingRequest",
    "Rendezvous",
    "SchedulerState",
    "SendGroup",
    "Server",
    "ServerBackend",
    "ServerEngine",
    "ServerError",
    "ServerSettings",
    "ServerSlot",
    "TensorList",
    "WeightSender",
    "check_server_fp8",
    "to_flags",
]

_MODULES = {
    "addresses": ("LOOPBACK",),
    "backend": (
        *("BackendContext", "EngineLabels", "PendingRequest"),
        *("SchedulerState", "ServerBackend", "ServerSettings"),
    ),
    "http_client": ("Server", "ServerError"),
    "process_group": ("Group", "Rendezvous", "SendGroup"),
    "processes": ("Launch", "ServerSlot", "to_flags"),
    "server_checks": ("check_server_fp8",),
    "server_engine": ("ServerEngine",),
    "weight_sender": ("TensorList", "WeightSender"),
}


def __getattr__(name: str) -> Any:
    # late, since servers import process_group of this package, and should not load the trainer for it
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
