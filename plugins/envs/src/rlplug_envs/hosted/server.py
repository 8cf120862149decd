"""Program of an environment's process: ``python -m rlplug_envs.hosted.server``.

Environments need the main thread (they set signal handlers) and one event loop, and run code that their authors or a
model wrote, so they run outside the trainer. The trajectories of this process share its loop. Requests and replies are
lines of JSON, on standard input and output.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import signal
import sys
from typing import Any, TextIO

from rlplug_envs.hosted.loading import Refusal, examples, load, tool_schemas
from rlplug_envs.hosted.trajectory import FailedRewards, Trajectory

STREAM_LIMIT_BYTES = 2**30
"""Longest request in bytes; examples may hold whole documents."""


class Server:
    """Server that answers the trainer's requests, many at a time."""

    def __init__(self, environment: Any, replies: TextIO, refuse_failed_rewards: bool) -> None:
        self.environment = environment
        self.replies = replies
        self.refuse_failed_rewards = refuse_failed_rewards
        self.trajectories: dict[int, Trajectory] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.ended = False

    async def serve(self, stall_timeout_s: float) -> None:
        """Answer requests until the trainer closes the pipe or dies."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=STREAM_LIMIT_BYTES)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        self._tick(stall_timeout_s)
        while line := await reader.readline():
            request = json.loads(line)
            if request["do"] == "close":
                if trajectory := self.trajectories.pop(request["trajectory"], None):
                    trajectory.close()
                continue
            task = asyncio.create_task(self._reply(request))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        self.ended = True

    def _tick(self, stall_timeout_s: float) -> None:
        """Postpone the alarm with which the kernel ends a process whose event loop is blocked."""
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, stall_timeout_s)
        asyncio.get_running_loop().call_later(min(1.0, stall_timeout_s / 4), self._tick, stall_timeout_s)

    async def _reply(self, request: dict[str, Any]) -> None:
        try:
            reply = {"id": request["id"], "result": await self._answer(request)}
        except asyncio.CancelledError:
            reply = {"id": request["id"], "error": "the trajectory was closed"}
        except Refusal as refusal:
            reply = {"id": request["id"], "error": str(refusal)}
        except Exception as error:  # noqa: BLE001 - the trainer gets the error, and the trajectory has no reward
            reply = {"id": request["id"], "error": f"{type(error).__name__}: {error}"[:2000]}
        if not self.ended:
            send(self.replies, reply)

    async def _answer(self, request: dict[str, Any]) -> Any:
        if request["do"] == "examples":
            # building a data set may take minutes, in which the event loop must postpone the alarm
            return await asyncio.to_thread(
                examples, self.environment, request["split"], request["start"], request["count"]
            )
        if request["do"] == "begin":
            trajectory = Trajectory(self.environment, request["example"], self.refuse_failed_rewards)
            self.trajectories[request["trajectory"]] = trajectory
            return await trajectory.begin()
        assert request["do"] == "step", request
        return await self.trajectories[request["trajectory"]].step(request["completion"])


def send(replies: TextIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def main() -> None:
    """Load the environment that the first line of input names, send its tools, and serve it."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # printed text of an environment must not mix with the replies
    os.register_at_fork(after_in_child=lambda: os.close(replies.fileno()))  # else the pipe would outlive this process
    # unbuffered, so that later requests are left for the event loop
    with open(0, "rb", buffering=0, closefd=False) as requests:
        settings = json.loads(requests.readline())
    try:
        environment = load(settings["environment"], settings["arguments"])
        tools = tool_schemas(environment)
    except Refusal as refusal:
        send(replies, {"error": str(refusal)})
        return
    logging.getLogger(importlib.import_module("verifiers.rubrics.rubric").__name__).addHandler(FailedRewards())
    send(replies, {"tools": tools})
    server = Server(environment, replies, settings["refuse_failed_rewards"])
    asyncio.run(server.serve(settings["stall_timeout_s"]))


if __name__ == "__main__":
    main()
