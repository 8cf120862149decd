"""Program of the process that renders chat templates, within limits. It loads nothing of rlplug.

Requests come pickled from the trainer; answers are lines of JSON and are never unpickled.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import sys
from typing import Any, Final

from transformers.utils.chat_template_utils import render_jinja_template

MEMORY_BYTES: Final = 2 << 30
"""Address space of the process, of which Python and its modules take a tenth."""
LONGEST_TEXT: Final = 1 << 26


def answer(request: dict[str, Any]) -> dict[str, str]:
    """Return the text of one conversation, or the reason why there is none."""
    try:
        rendered: Any = render_jinja_template(**request)  # texts, and what of them the assistant wrote
        text = str(rendered[0][0])
    except MemoryError:
        return {"reason": f"it needs more than {MEMORY_BYTES >> 30} GiB of memory", "is_full": "may stay so"}
    except Exception as error:  # noqa: BLE001 - a template may raise anything
        is_own = type(error).__module__.startswith("jinja2.")
        return {"reason": ("" if is_own else f"{type(error).__name__}: ") + str(error)[:500]}
    if len(text) > LONGEST_TEXT:
        return {"reason": f"it writes {len(text):,} characters"}
    return {"text": text}


def main() -> None:
    """Answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    if sys.platform == "linux":  # macOS refuses it
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    requests: Any = sys.stdin.buffer
    while requests.peek(1):
        deadline_s, request = pickle.load(requests)
        signal.setitimer(signal.ITIMER_REAL, deadline_s)  # its signal ends the process, in the midst of C code too
        found = answer(request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            print(json.dumps(found), file=answers, flush=True)
        except BrokenPipeError:  # the trainer has gone
            os._exit(0)


if __name__ == "__main__":
    main()
