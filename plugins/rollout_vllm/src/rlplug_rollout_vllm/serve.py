"""``python -m rlplug_rollout_vllm.serve MODEL ...`` is ``vllm serve``, which can have several API processes.

The command itself does not start where vLLM was built for CPUs: it asks for a distribution named ``vllm``.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as the command does
    command, parser = ServeSubcommand(), FlexibleArgumentParser()
    command.subparser_init(parser.add_subparsers(required=True))
    arguments = parser.parse_args(["serve", *sys.argv[1:]])
    command.validate(arguments)
    command.cmd(arguments)


if __name__ == "__main__":
    main()
