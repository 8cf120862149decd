"""Loggers of a run besides ``metrics.csv``: Prometheus, OpenTelemetry, and what W&B, MLflow and TensorBoard get."""

__all__ = []
