"""The entry point: what this distribution registers. The classes are imported when a run names them."""

from rlplug.interfaces import RunObserver
from rlplug.plugin_manager import hookimpl
from rlplug.registry import Registry
from rlplug_watch.report_writer import ReportWriter

RLPLUG_API_VERSION = ">=3,<4"


@hookimpl
def rlplug_register_classes(registry: Registry) -> None:
    for place in (
        "rlplug_watch.loggers.phase_spans:PhaseSpans",
        "rlplug_watch.loggers.prometheus:PrometheusLogger",
    ):
        registry.add("classes", place)


@hookimpl
def rlplug_make_observer() -> RunObserver:
    return ReportWriter()
