"""OpenTelemetry spans: one of each step, with a child for each phase."""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
from typing import Any, Final

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from rlplug.errors import ConfigError
from rlplug_watch.loggers.prometheus import run_label

NANOSECONDS: Final = 1e9
MODULES: Final = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")


class PhaseSpans(Callback):
    """Callback that exports a span of each step over OTLP/HTTP, with a child span for each of its phases.

    The first rank's timer gives the times. A thread exports them every five seconds; when the collector does not
    answer, spans are dropped with one warning, and the run goes on. Needs the extra ``rlplug-watch[opentelemetry]``.

    Args:
        endpoint: URL of the collector, such as ``http://127.0.0.1:4318/v1/traces``. By default OpenTelemetry's own
            variables say it, ``OTEL_EXPORTER_OTLP_ENDPOINT`` and ``OTEL_EXPORTER_OTLP_HEADERS`` for a key.
        service_name: ``service.name`` of the spans.
        timeout_s: Longest time of one export, and of what is left at the end of the run.
    """

    def __init__(self, endpoint: str | None = None, service_name: str = "rlplug", timeout_s: float = 3.0) -> None:
        if not _is_installed():
            raise ConfigError("PhaseSpans needs OpenTelemetry: pip install 'rlplug-watch[opentelemetry]'.")
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"PhaseSpans' endpoint is {endpoint!r}: give a URL such as http://127.0.0.1:4318/v1/traces."
            )
        if timeout_s <= 0:
            raise ConfigError(f"PhaseSpans' timeout_s is {timeout_s:g}: give a number of seconds above 0.")
        self.endpoint = endpoint
        self.service_name = service_name
        self.timeout_s = timeout_s
        self._provider: Any = None
        self._tracer: Any = None
        self._step: Any = None
        self._ended = 0
        """When the newest phase ended, in nanoseconds since 1970."""

    def make_exporter(self) -> Any:
        """Return OpenTelemetry's exporter of spans; a subclass may send them elsewhere."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        for name in ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal"):
            # they log each try that fails and each queue that is full; the warning here says it once
            logging.getLogger(name).setLevel(logging.CRITICAL)
        return OTLPSpanExporter(endpoint=self.endpoint, timeout=self.timeout_s)

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if not trainer.is_global_zero:
            return
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        run = {"service.name": self.service_name, "rlplug.run": run_label(pl_module.run_dir)}
        self._provider = TracerProvider(resource=Resource.create(run), shutdown_on_exit=False)
        exporter: Any = _OneWarning(self.make_exporter())
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("rlplug")
        pl_module.timer.on_exit = self._add_phase

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._end_step()  # only now, since the phase of a checkpoint follows the end of the batch
        if self._tracer is not None:
            step = pl_module.rollout_step + 1
            self._step = self._tracer.start_span("step", attributes={"rlplug.step": step})

    def _add_phase(self, name: str, seconds: float) -> None:
        from opentelemetry.trace import set_span_in_context

        self._ended = time.time_ns()
        context = None if self._step is None else set_span_in_context(self._step)
        span = self._tracer.start_span(name, context, start_time=self._ended - round(seconds * NANOSECONDS))
        span.end(self._ended)

    def _end_step(self) -> None:
        if self._step is not None:
            self._step.end(self._ended or None)
            self._step = None

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Export what is left; after ``timeout_s`` the rest is dropped."""
        provider, self._provider = self._provider, None
        if provider is None:
            return
        pl_module.timer.on_exit = lambda name, seconds: None
        self._end_step()
        self._tracer = None
        # the provider's own shutdown may wait for 30 s
        last = threading.Thread(target=provider.shutdown, name="rlplug-last-spans", daemon=True)
        last.start()
        last.join(self.timeout_s)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        if self._step is not None:
            from opentelemetry.trace import StatusCode

            self._step.set_status(StatusCode.ERROR, type(exception).__name__)
        self.teardown(trainer, pl_module, "fit")


def _is_installed() -> bool:
    try:
        return all(importlib.util.find_spec(name) is not None for name in MODULES)
    except ModuleNotFoundError:  # a parent package is missing
        return False


class _OneWarning:
    """Exporter of spans that says once when another one fails.

    Args:
        exporter: The other.
    """

    def __init__(self, exporter: Any) -> None:
        self._exporter = exporter
        self._has_failed = False

    def export(self, spans: Any) -> Any:
        result = self._exporter.export(spans)
        if result.name != "SUCCESS" and not self._has_failed:
            self._has_failed = True
            rank_zero_warn(
                "Spans cannot be exported, and those that the collector does not take are lost: is there an OTLP/HTTP "
                "collector at PhaseSpans' endpoint? The run goes on."
            )
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
