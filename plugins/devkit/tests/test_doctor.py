"""``rlplug doctor``: what it finds on machines that are broken in many ways, each made of files that programs print."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from rlplug_devkit.doctor import doctor_command, gpus, host, packages
from rlplug_devkit.doctor.findings import Finding, Probe, checked, lines_of
from rlplug_devkit.doctor.gpus import GPU, Driver
from rlplug_devkit.doctor.known_problems import Machine, problems_of

H200 = "NVIDIA H200"
TORCH = {
    "version": "2.13.0",
    "cuda": "13.0",
    "available": True,
    "nccl": "2.28.3",
    "architectures": ["sm_80", "sm_90", "compute_120"],
    "gpus": [
        {"name": H200, "free": 1, "total": 2, "peers": [1], "capability": [9, 0]},
        {"name": H200, "free": 1, "total": 2, "peers": [0], "capability": [9, 0]},
    ],
}


def smi_xml(used: int = 4, mode: str = "Default", mig: str = "Disabled", cuda: str = "13.0") -> str:
    """Return what ``nvidia-smi -q -x`` prints of two GPUs, shortened; ``used`` is in MiB."""
    memory = f"<fb_memory_usage><total>143771 MiB</total><used>{used} MiB</used></fb_memory_usage>"
    modes = f"<compute_mode>{mode}</compute_mode><mig_mode><current_mig>{mig}</current_mig></mig_mode>"
    gpu = f"<gpu><product_name>{H200}</product_name>{memory}{modes}<processes><process_info/></processes></gpu>"
    return (
        '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n<nvidia_smi_log>'
        f"<driver_version>580.65</driver_version><cuda_version>{cuda}</cuda_version>{gpu}{gpu}</nvidia_smi_log>"
    )


@pytest.fixture
def printing(tmp_path: Path) -> Callable[[Any], Probe]:
    """Return a probe of a program that prints a text, or a value as JSON."""

    def make(printed: Any) -> Probe:
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.txt"
        file.write_text(printed if isinstance(printed, str) else json.dumps(printed))
        return Probe(["cat", str(file)], 10)

    return make


def bad(findings: list[Finding]) -> list[tuple[str, str]]:
    """Return state and first words of what is not as it should be."""
    return [(found.state, f"{found.what}: {found.found}") for found in findings if found.state in ("warns", "fails")]


@pytest.mark.parametrize(
    ("changes", "state", "words"),
    [
        ({"used": 20_000}, "warns", "120.9 GiB of 140.4 GiB free, 1 processes"),
        ({"mode": "Exclusive_Process"}, "warns", "compute mode Exclusive_Process"),
    ],
)
def test_a_gpu_that_is_not_free_for_all_is_said(
    printing: Callable[[Any], Probe], changes: Mapping[str, Any], state: str, words: str
) -> None:
    assert bad(list(gpus.driver(printing(smi_xml())))) == []

    assert bad(list(gpus.driver(printing(smi_xml(**changes))))) == [
        (state, f"GPU {index}: {words if 'mode' in words else f'{H200}, {words}'}") for index in range(2)
    ]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["false"], "ended with status 1"),
        (["echo", "Failed to initialize NVML"], "wrote no XML"),
        (["sleep", "60"], "took longer than 0.1 s"),
        ([sys.executable, "-c", "import os; os.abort()"], "ended with signal 6"),
        (["/"], "did not start"),
    ],
)
def test_a_driver_that_does_not_answer_fails(command: list[str], words: str) -> None:
    ((state, found),) = bad(list(gpus.driver(Probe(command, 0.1 if command[0] == "sleep" else 20))))

    assert state == "fails"
    assert words in found


def test_a_machine_without_a_driver_trains_on_the_cpu() -> None:
    (found,) = gpus.driver(Probe(["no-such-program"], 1))

    assert (found.state, "trainer.accelerator: cpu" in found.found) == ("note", True)


NO_PEERS = [{**gpu, "peers": []} for gpu in TORCH["gpus"]]
NEWER = [{**gpu, "capability": [10, 0]} for gpu in TORCH["gpus"]]
BLIND = {"available": False, "gpus": []}


@pytest.mark.parametrize(
    ("changes", "cuda", "state", "words"),
    [
        ({"gpus": NO_PEERS}, "13.0", "warns", "peer access: lacks 0 to 1, 1 to 0"),
        ({"gpus": NEWER}, "13.0", "fails", "GPU 0: NVIDIA H200, sm_100, and torch has kernels for"),
        ({**BLIND, "cuda": None}, "13.0", "fails", "Install a torch that is built for CUDA 13.0 or older"),
        (BLIND, "12.4", "fails", "The driver has CUDA 12.4: update it"),
        (BLIND, "13.1", "fails", "Look at CUDA_VISIBLE_DEVICES"),
    ],
)
def test_what_torch_cannot_use_is_said(
    printing: Callable[[Any], Probe], changes: Mapping[str, Any], cuda: str, state: str, words: str
) -> None:
    assert bad(list(gpus.torch(printing(TORCH), printing(smi_xml())))) == []

    found = list(gpus.torch(printing(TORCH | changes), printing(smi_xml(cuda=cuda))))
    assert bad(found)[0][0] == state
    assert any(words in f"{each.what}: {each.found} {each.advice}" for each in found)


def test_a_gpu_that_runs_the_kernels_of_older_ones_is_fine(printing: Callable[[Any], Probe]) -> None:
    """PTX of an older generation is compiled for it, and kernels of its own generation run."""
    for own in ([12, 1], [9, 0], [8, 9]):
        seen = TORCH | {"gpus": [{**TORCH["gpus"][0], "capability": own}]}
        assert bad(list(gpus.torch(printing(seen), printing(smi_xml())))) == []


def record(state: str, reason: str = "") -> dict[str, str]:
    return {"name": "x", "distribution": "d", "version": "1", "api_range": ">=1", "state": state, "reason": reason}


def test_plugins_that_fail_are_said_with_the_reason(printing: Callable[[Any], Probe]) -> None:
    records = [record("loaded"), record("blocked", "by name"), record("failed", "importing raised ImportError: y.")]
    found = list(packages.plugins(printing(records), ()))

    assert [each.state for each in found] == ["ok", "note", "fails"]
    assert "importing raised ImportError: y." in found[2].found
    assert "--block x" in found[2].advice


def test_a_plugin_whose_import_kills_the_process_is_a_finding() -> None:
    script = "import os, sys; sys.stderr.write('Fatal Python error'); sys.stderr.flush(); os.abort()"
    ((state, found),) = bad(list(packages.plugins(Probe([sys.executable, "-c", script], 20), ())))

    assert (state, "signal 6: Fatal Python error" in found) == ("fails", True)


@pytest.fixture
def fake_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "rlplug_fake-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: rlplug-fake\nVersion: 1.0\nProvides-Extra: engine\nProvides-Extra: test\n"
        "Requires-Dist: numpy<1\nRequires-Dist: no-such-package>=2\nRequires-Dist: pytest>=99; extra == 'test'\n"
        "Requires-Dist: pluggy<1; extra == 'engine'\nRequires-Dist: no-such-engine; extra == 'engine'\n"
        "Requires-Dist: also-missing; python_version < '3'\n"
    )
    (folder / "entry_points.txt").write_text("[rlplug.plugins]\nfake = rlplug_fake\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("fake_distribution")
def test_requirements_that_are_not_met_name_the_command() -> None:
    found = [each for each in packages.requirements() if each.state != "ok"]

    assert [(each.what, each.state, each.advice) for each in found] == [
        ("numpy", "fails", "pip install 'numpy<1'"),
        ("no-such-package", "fails", "pip install 'no-such-package>=2'"),
    ]


@pytest.mark.usefixtures("fake_distribution")
def test_libraries_of_extras_are_compared_with_the_tested_versions() -> None:
    found = {each.what: each for each in packages.libraries() if "rlplug-fake" in each.found}

    assert {name: each.state for name, each in found.items()} == {"pluggy": "warns", "no-such-engine": "ok"}
    assert "pip install 'rlplug-fake[engine]'" in found["pluggy"].advice


GPUS = tuple(GPU(H200, 140 << 30, used << 30, "Default", "Disabled", 0) for used in (0, 0))
UNEVEN = tuple(GPU(H200, 140 << 30, used << 30, "Default", "Disabled", 0) for used in (0, 30))
A100S = tuple(GPU("NVIDIA A100", 80 << 30, 0, "Default", "Disabled", 0) for _ in range(2))
FUSED = {"vllm": "0.26", "flashinfer-python": "0.5"}
TRT = {"VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm"}


@pytest.mark.parametrize(
    ("versions", "there", "environ", "expected"),
    [
        (FUSED, GPUS, {}, "vLLM and FlashInfer"),
        (FUSED, GPUS, TRT, None),
        (FUSED, GPUS[:1], {}, None),
        (FUSED, A100S, {}, None),
        ({"vllm": "0.26"}, GPUS, {}, None),
        ({"vllm": "0.26", "sglang": "0.5.16"}, GPUS, {}, "vLLM and SGLang"),
        ({"sglang": "0.5.16"}, GPUS, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments: True"}, "expandable segments"),
        ({"vllm": "0.26"}, GPUS, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, None),
        ({"sglang": "0.5.16"}, UNEVEN, {}, "memory of GPUs"),
        ({"sglang": "0.5.16"}, GPUS, {"NCCL_CUMEM_ENABLE": "0"}, "NCCL_CUMEM_ENABLE"),
        ({"sglang": "0.5.16"}, GPUS, {"NCCL_CUMEM_ENABLE": "-2"}, None),
        ({}, None, {}, None),
    ],
)
def test_known_problems_are_found_where_they_are(
    versions: Mapping[str, str], there: tuple[GPU, ...] | None, environ: Mapping[str, str], expected: str | None
) -> None:
    driver = None if there is None else Driver("580", "13.0", there)
    found = [each.what for each in problems_of(Machine(versions, driver, environ)) if each.state != "ok"]

    assert found == ([] if expected is None else [expected])


def test_values_of_secrets_are_not_shown() -> None:
    found = list(host.variables({"HF_TOKEN": "hf_abc", "VLLM_API_KEY": "k", "NCCL_DEBUG": "INFO", "HOME": "/root"}))

    assert [(each.what, each.found) for each in found] == [
        ("HF_TOKEN", "set"),
        ("NCCL_DEBUG", "INFO"),
        ("VLLM_API_KEY", "set"),
    ]


@pytest.mark.parametrize(
    ("name", "value", "state"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", "warns"),
        ("CUDA_LAUNCH_BLOCKING", "0", "ok"),
        ("PYTHONDONTWRITEBYTECODE", "0", "note"),  # Python asks whether it is empty
        ("PYTHONDONTWRITEBYTECODE", "", "ok"),
    ],
)
def test_variables_that_make_runs_slow_are_said(name: str, value: str, state: str) -> None:
    assert [found.state for found in host.variables({name: value})] == [state]


def test_a_check_that_raises_is_a_finding_and_cannot_move_the_cursor() -> None:
    def check() -> list[Finding]:
        raise OSError("no \x1b[2J file\nat all")

    found = checked("host", check)
    assert [each.state for each in found] == ["warns"]
    (line,) = [line for line in lines_of(found, is_quick=False) if "broke off" in line]
    assert line.endswith("broke off: OSError: no \\x1b[2J file at all")


def test_a_host_that_is_too_small_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = "rlplug_devkit.doctor.host"
    monkeypatch.setattr(f"{gone}.LEAST_SHARED_MEMORY", 1 << 60)
    monkeypatch.setattr(f"{gone}.LEAST_FREE_DISK", 1 << 60)
    monkeypatch.setattr(f"{gone}.LEAST_OPEN_FILES", 1 << 60)
    found = bad([*host.memory(), *host.disks(), *host.limits()])

    assert [what.partition(":")[0] for _, what in found] == [
        *("shared memory", "this folder", "models (HF_HOME)", "open files"),
    ]


def test_the_quick_command_imports_neither_torch_nor_what_may_be_broken(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['rich'] = sys.modules['packaging'] = None\n"
        "from rlplug.cli.main import main; code = main(['--block', 'algos', 'doctor', '--quick'])\n"
        "assert not {'torch', 'lightning', 'transformers', 'numpy'} & sys.modules.keys()\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.count("broke off: ModuleNotFoundError: ") == 3  # requirements, libraries of extras, records
    assert "algos                  blocked" in done.stdout


@pytest.mark.nightly
def test_the_whole_command_finds_nothing_wrong_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLPLUG_BLOCK", "algos")
    assert doctor_command(["--json"]) == 0

    found = {(each["area"], each["what"]): each for each in json.loads(capsys.readouterr().out)}
    assert found["plugins", "algos"]["state"] == "note"
    assert found["plugins", "optims"]["found"].startswith("loaded; rlplug-optims")
    assert found["GPUs", "torch"]["found"].split(",")[0] == __import__("torch").__version__
