"""Base of engines that run in one child process. Authors of engine plugins import it from here."""

from rlplug_engines.workers.engine import WorkerEngine
from rlplug_engines.workers.worker import Answer, Worker

__all__ = ["Answer", "Worker", "WorkerEngine"]
