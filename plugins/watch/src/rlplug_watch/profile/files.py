"""Files of a profile's summary: ``summary.json`` for programs, and ``summary.txt`` for people."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Final

import torch

from rlplug.distributed.durable_files import write_file
from rlplug.interfaces import ProfiledSteps
from rlplug_watch.profile.summary import read_trace, summarize
from rlplug_watch.profile.text import SLOWER, headlines, summary_text

SUMMARY: Final = "summary.txt"


def write_summary(profile: ProfiledSteps) -> list[str]:
    """Write the summary of the steps beside their trace, and return its headlines, for the terminal."""
    has_device = profile.device.type == "cuda"
    name = torch.cuda.get_device_name(profile.device) if has_device else None
    summary = summarize(read_trace(profile.trace, has_device), has_device)
    header = {"steps": profile.steps, "rank": 0, "device": name, "note": SLOWER}
    folder = profile.trace.parent
    write_file(folder / "summary.json", json.dumps(header | asdict(summary), indent=2))
    title = f"Profile of steps {profile.steps}, rank 0, {name or 'CPU'}."
    write_file(folder / SUMMARY, summary_text(summary, title))
    return [f"profile of steps {profile.steps}: {folder / SUMMARY}", *(f"  {line}" for line in headlines(summary))]
