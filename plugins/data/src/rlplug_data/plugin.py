"""The entry point: what this distribution registers. The classes are imported when a run names them."""

from rlplug.plugin_manager import hookimpl
from rlplug.registry import Registry

RLPLUG_API_VERSION = ">=3.1,<4"


@hookimpl
def rlplug_register_classes(registry: Registry) -> None:
    for place in (
        "rlplug_data.hf_datasets:HFDatasetSource",
        "rlplug_data.mixture:MixtureSource",
        "rlplug_data.curriculum:PassRateCurriculum",
    ):
        registry.add("classes", place)
