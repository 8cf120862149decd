"""Files of tokenizers, read in a process with limits first: they come with a model, and may compute without end.

The Rust library that reads and runs them has no limits, and a thread that waits for it cannot end it.
"""

from __future__ import annotations

import functools
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from rlplug_sandbox.chat_templates import program_command

READER: Final = Path(__file__).with_name("tokenizer_reader.py")

FILES: Final = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json")
CPU_S: Final = 60
MEMORY_BYTES: Final = 4 << 30
"""Address space of the process; Gemma's tokenizer, of 262,144 tokens, takes a quarter."""
DEADLINE_S: Final = 1800
"""Of a file that does not answer; a busy machine may take long for 60 s of a processor."""


@functools.cache
def require_bounded(path: str) -> None:
    """Read the tokenizer of a folder or Hugging Face Hub name within limits, once; others than ``tokenizer.json`` not.

    Raises:
        ValueError: It takes more time or memory than any needs, or may make texts that much longer.
    """
    files = [_found(path, name) for name in FILES]
    if files[0] is None:
        return
    command, environment = program_command(READER)
    environment |= {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command += [str(CPU_S), str(MEMORY_BYTES), *filter(None, files)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"reading it takes longer than {DEADLINE_S} s") from error
    reason = done.stdout.decode(errors="replace").strip()
    if done.returncode == -signal.SIGXCPU:
        reason = f"reading it takes longer than {CPU_S} s"
    elif done.returncode == -signal.SIGABRT:
        reason = f"reading it takes more than {MEMORY_BYTES >> 30} GiB of memory"
    elif done.returncode:
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        reason = f"the process that reads it ended with status {done.returncode}: {said[:500]}"
    if reason:
        raise ValueError(reason)


def _found(path: str, name: str) -> str | None:
    from transformers.utils.hub import cached_file

    with suppress(OSError):  # there is none, or none can be reached: transformers says so
        found: Any = cached_file(path, name)
        return None if found is None else str(found)
    return None
