"""``rlplug doctor``: what this machine has for a run, what is wrong with it, and what to do.

Only the standard library is imported at the top of these modules: the command must also work where a package that
rlplug needs is missing or broken, and it must be quick.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from rlplug.plugin_names import blocked_names
from rlplug_devkit.doctor.findings import Finding, Probe, checked, lines_of

DESCRIPTION = """what this machine has for a run, what is wrong with it, and what to do

It looks at Python and packages, plugins and engines, GPUs, memory, disks, limits, ports, and pairs of these that are
known not to go together. Paste its output into an issue: it has no values of secrets. With --model, it loads that
model as a run would, and tries whether packed rows stay apart, passes repeat, weights have the names that engines load,
an export opens again, and the chat template stops.

Exit status 1: something will not work.
"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "rlplug doctor",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON, for machines")
    parser.add_argument("--quick", action="store_true", help="import neither torch nor plugins: done in half a second")
    model = parser.add_argument_group("a model")
    model.add_argument(
        "--model", metavar="PATH", help="folder or Hugging Face Hub name of the model to look at instead"
    )
    model.add_argument("--device", help="where to run it: cpu, cuda or cuda:1 (default: the first GPU, or the CPU)")
    model.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype of passes; bfloat16 takes half the memory, and its round-off hides small errors (default: float32)",
    )
    model.add_argument(
        "--layers", type=_at_least_one, metavar="N", help="try the first N layers alone, of a deep model"
    )
    model.add_argument("--attn-implementation", default="packed", metavar="NAME", help="as in a run (default: packed)")
    return parser


def _at_least_one(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give at least 1")
    return number


def doctor_command(arguments: list[str]) -> int:
    """Look at this machine, packages and plugins, or at a model: what is wrong, and what to do."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.model is not None:
        from rlplug_devkit.doctor.model.command import model_command

        return model_command(options)
    if given := [name for name in ("device", "layers") if getattr(options, name) is not None]:
        parser.error(f"--{given[0]} is of --model PATH")
    findings = diagnose(blocked_names(), is_quick=options.quick)
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print("\n".join(lines_of(findings, is_quick=options.quick)))
    return 1 if any(finding.state == "fails" for finding in findings) else 0


def diagnose(blocked: Sequence[str] = (), is_quick: bool = False) -> list[Finding]:
    """Return all findings; a check that raises becomes one of them.

    Args:
        blocked: Names of plugins to leave out.
        is_quick: Import neither torch nor plugins.
    """
    from rlplug_devkit.doctor import gpus, host, known_problems, packages

    smi = Probe(gpus.SMI_COMMAND, timeout_s=30)
    torch = None if is_quick else Probe(gpus.TORCH_COMMAND, timeout_s=180)  # these run while the others are looked at
    plugins = None if is_quick else Probe(packages.plugins_command(blocked), timeout_s=180)
    found = [
        *checked("environment", packages.environment),
        *checked("packages", packages.requirements),
        *checked("host", host.memory),
        *checked("host", host.disks),
        *checked("host", host.limits),
        *checked("host", host.ports),
        *checked("variables", host.variables),
        *checked("libraries of plugins", packages.libraries),
        *checked("certified sets", packages.certified),
        *checked("plugins", lambda: packages.plugins(plugins, blocked)),
    ]
    driver = checked("GPUs", lambda: gpus.driver(smi))
    found += [*driver, *checked("GPUs", lambda: gpus.torch(torch, smi))]
    return [*found, *checked("known problems", lambda: known_problems.known_problems(smi))]
