"""Faults of an engine that runs in a child process, the one of docs/writing-an-engine.md."""

from __future__ import annotations

import subprocess

import torch
from docs_worker import import_worker_engine
from rlplug_engines.workers import WorkerEngine

from engine_faults.faults import fault
from rlplug.errors import RunError
from rlplug.interfaces import EngineFault
from rlplug.types import Completion

worker_engine = import_worker_engine()
CHILD, DEATH = "child processes", "test_death_of_its_processes_is_a_fault"


class InAChild(WorkerEngine):
    """The page's engine."""

    worker_class = worker_engine.MyWorker

    def __init__(self) -> None:
        super().__init__(num_threads=1)


@fault(CHILD, DEATH, "must raise EngineFault")
class ReportsDeathAsAnError(InAChild):
    """Raises ``RunError`` when its process has died."""

    def generate(self, requests, sampling):
        try:
            return super().generate(requests, sampling)
        except EngineFault as problem:
            raise RunError(str(problem)) from problem


@fault(CHILD, DEATH, "processes were killed")
class AnswersWhenDead(InAChild):
    """Returns a token for each request when its process has died."""

    def generate(self, requests, sampling):
        try:
            return super().generate(requests, sampling)
        except EngineFault:
            return [Completion(r.request_id, [3], [-1.0], "length", self._requests.version) for r in requests]


@fault(CHILD, DEATH, "close after a fault must succeed")
class CannotCloseWhenDead(InAChild):
    """Asks its process to close, which fails when that has died."""

    def close(self) -> None:
        if self._process is not None and not self._process._connection.closed:
            self._process.call("finish_sync", deadline_s=5.0)
        super().close()


@fault(CHILD, "test_close_leaves_nothing_behind", "after close")
class LeavesAnOrphan(InAChild):
    """Leaves a process behind that its worker started in a session of its own."""

    def start(self, policy, placement):
        super().start(policy, placement)
        self._orphan = subprocess.Popen(["sleep", "60"], start_new_session=True)

    def close(self) -> None:
        super().close()
        if "_orphan" in self.__dict__ and self._orphan.poll() is not None:
            self._orphan = subprocess.Popen(["sleep", "60"], start_new_session=True)


@fault(CHILD, DEATH, "after a fault and close")
class LeavesItsProcess(InAChild):
    """Leaves its process running when it is closed without a fault."""

    def close(self) -> None:
        if self._process is not None and self._process._process.poll() is None:
            LEFT.append(self._process)  # ends with this process
            self._process = None
        super().close()


LEFT: list[object] = []


@fault(CHILD, DEATH, "like")
class StartsAgainWithoutItsOptions(InAChild):
    """Starts again with the weights of a file, and takes no other."""

    def start(self, policy, placement):
        self._starts = self.__dict__.get("_starts", 0) + 1
        super().start(policy, placement)

    def update_weights(self, buckets, version):
        report = super().update_weights(buckets, version)
        if self._starts > 1:
            zeros = [(name, torch.zeros(info.shape, dtype=info.dtype)) for name, info in self._weights.items()]
            super().update_weights([zeros], version)
        return report


class Hoarder(worker_engine.MyWorker):
    """Keeps a copy of each bucket."""

    def load(self, bucket):
        self.__dict__.setdefault("kept", []).append([tensor.clone() for _, tensor in bucket])
        super().load(bucket)


@fault(CHILD, "test_rounds_of_a_run_do_not_grow")
class GrowsInItsProcess(InAChild):
    """Keeps a copy of each bucket in the child process."""

    worker_class = Hoarder


class KeepsBuckets(worker_engine.MyWorker):
    """Points its weights at the bucket."""

    def load(self, bucket):
        own = dict(self.model.named_parameters())
        for name, tensor in bucket:
            own[name].data = tensor


@fault("weight sync", "test_buckets_smaller_than_the_largest_tensor")
class PointsAtBuckets(InAChild):
    """Lets its weights be the tensors of a bucket, whose memory is used again."""

    worker_class = KeepsBuckets


class RaisesNow(worker_engine.MyWorker):
    """Raises for batches that are larger than four."""

    def generate(self, requests, sampling):
        if len(requests) > 4:
            raise ValueError("too many")
        return super().generate(requests, sampling)


@fault("order and number", "test_completions_are_well_formed")
class RefusesLargeBatches(InAChild):
    """Fails when there are more than four requests."""

    worker_class = RaisesNow
