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

from rlplug_sandbox import tokenizer_reader
from rlplug_sandbox.chat_templates import program_command

FILES: Final = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json")
CPU_S: Final = 60


@functools.cache
def require_bounded(path: str) -> None:
    """Read the tokenizer of a folder or Hugging Face Hub name within limits, once; others than ``tokenizer.json`` not.

    Raises:
        ValueError: It takes more time or memory than any needs, or may make texts that much longer.
    """
    files = [_found(path, name) for name in FILES]
    if files[0] is None:
        return
    from rlplug.distributed.child_process import ChildProcess, ending

    command, environment = program_command(Path(tokenizer_reader.__file__))
    environment |= {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command += [str(CPU_S), *filter(None, files)]
    process = ChildProcess(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    reason = process.communicate()[0].decode(errors="replace").strip()
    if process.returncode == -signal.SIGXCPU:
        reason = f"reading it takes longer than {CPU_S} s"
    elif process.returncode == -signal.SIGABRT:
        reason = f"reading it takes more than {tokenizer_reader.MEMORY_BYTES >> 30} GiB of memory"
    elif process.returncode:
        reason = f"the process that reads it {ending(process.returncode)}"
    if reason:
        raise ValueError(reason)


def _found(path: str, name: str) -> str | None:
    from transformers.utils.hub import cached_file

    with suppress(OSError):  # there is none, or none can be reached: transformers says so
        found: Any = cached_file(path, name)
        return None if found is None else str(found)
    return None
