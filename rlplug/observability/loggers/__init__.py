"""Loggers of a run besides ``metrics.csv``: Prometheus, OpenTelemetry, and what W&B, MLflow and TensorBoard get."""

from rlplug.observability.loggers.phase_spans import PhaseSpans
from rlplug.observability.loggers.prometheus import PrometheusLogger

__all__ = ["PhaseSpans", "PrometheusLogger"]
