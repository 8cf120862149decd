"""All that the plugin names of SGLang is there, in the oldest and in the newest version that it supports."""

from __future__ import annotations

import ast
import io
import pickle
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import rlplug_rollout_sglang
import torch
from packaging.version import Version
from published import Published, calls, parameters, strings
from rlplug_engines.flat_buckets import flatten_bucket
from rlplug_rollout_sglang import options as options_module
from rlplug_rollout_sglang.fp8 import LOSE_SCALES
from rlplug_rollout_sglang.host import ALL_MEMORY, KEPT
from rlplug_rollout_sglang.options import (
    BESIDE_TRAINERS,
    FORMER_NAMES,
    OWN_NAMES,
    RESERVED,
    SGLangOptions,
)
from rlplug_rollout_sglang.sampler import BATCHES, FLAG
from rlplug_rollout_sglang.sampling import sampling_arguments
from rlplug_rollout_sglang.versions import NEWEST, OLDEST, argument_names
from rlplug_rollout_sglang.weights import serialised

from rlplug.interfaces import PolicySpec
from rlplug.types import Request, SamplingParams

VERSIONS = ("0.5.13", "0.5.23")
FOLDER = Path(next(iter(rlplug_rollout_sglang.__path__)))
SPEC = PolicySpec("folder", torch.bfloat16, eos_token_ids=(1, 7), pad_token_id=0, max_context=4096)

ENGINE = "sglang.srt.entrypoints.engine"
TOKENIZER = "sglang.srt.managers.tokenizer_manager"
CONTROL = "sglang.srt.managers.tokenizer_control_mixin"
REQUESTS = "sglang.srt.managers.io_struct"
SAMPLER = "sglang.srt.layers.sampler"
BATCH_INFO = "sglang.srt.sampling.sampling_batch_info"

REDUCTIONS = "torch.multiprocessing.reductions"
OF_A_CPU_TENSOR = {
    *((REDUCTIONS, "rebuild_storage_fd"), (REDUCTIONS, "rebuild_storage_filename"), (REDUCTIONS, "rebuild_tensor")),
    *(("multiprocessing.resource_sharer", "DupFd"), ("multiprocessing.reduction", "_rebuild_partial")),
}
OF_A_CUDA_TENSOR = {
    (REDUCTIONS, "rebuild_cuda_tensor"),
    *(("torch", "Tensor"), ("torch", "Size"), ("torch", "uint8"), ("torch.storage", "TypedStorage")),
}
"""How torch hands a tensor on: with ``reduce_tensor`` of ``torch.multiprocessing.reductions``."""

SINCE_LATER = {"begin_weight_update", "end_weight_update", "BeginWeightUpdateReqInput", "EndWeightUpdateReqInput"}
"""What the plugin asks for with ``hasattr``: SGLang has all of it, or none."""


@pytest.fixture(scope="module", params=[pytest.param(version, marks=pytest.mark.nightly) for version in VERSIONS])
def sglang(request: pytest.FixtureRequest) -> Published:
    return Published(request.param)


def own(name: str) -> ast.Module:
    """Return a module of the plugin."""
    return ast.parse((FOLDER / f"{name}.py").read_text())


def attributes(tree: ast.AST, *owners: str) -> set[str]:
    """Return the attributes that code reads of what it calls ``owners``, such as ``self._engine``."""
    return {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) in owners
    }


def keywords(tree: ast.AST, function: str) -> Iterator[tuple[str, set[str]]]:
    """Yield the keywords of each call of a function, whatever it is an attribute of."""
    for call in calls(tree):
        if ast.unparse(call.func).rpartition(".")[2] == function:
            yield ast.unparse(call), {keyword.arg for keyword in call.keywords if keyword.arg is not None}


def has_sessions(sglang: Published) -> bool:
    return "begin_weight_update" in sglang.methods(CONTROL, "TokenizerControlMixin")


def test_versions_are_the_oldest_and_the_newest() -> None:
    assert Version(VERSIONS[0]) == OLDEST
    oldest_unknown = Version(VERSIONS[1]).release
    assert NEWEST.release == (*oldest_unknown[:2], oldest_unknown[2] + 1)


def test_imports(sglang: Published) -> None:
    """Every import of SGLang, in the whole package."""
    found = 0
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "sglang":
                wanted = {alias.name for alias in node.names}
                if wanted <= SINCE_LATER and not has_sessions(sglang):
                    continue
                missing = wanted - sglang.names(str(node.module))
                assert not missing, f"{path.name} imports {missing} of {node.module}"
                found += 1
    assert found > 4


def test_sessions_of_weight_updates_are_whole_or_missing(sglang: Published) -> None:
    methods, requests = sglang.methods(CONTROL, "TokenizerControlMixin"), sglang.names(REQUESTS)
    assert len(SINCE_LATER & (methods.keys() | requests)) in (0, len(SINCE_LATER))
    if has_sessions(sglang):
        for name in ("begin_weight_update", "end_weight_update"):
            assert "-> Tuple[bool, str]" in ast.unparse(methods[name]).partition("\n")[0]


def test_arguments_of_the_server(sglang: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that options become, those that are refused, and those that the colocated engine adds."""
    known = argument_names(sglang.package)
    assert len(known) > 300
    monkeypatch.setattr(options_module, "sglang_argument_names", lambda: known)
    every = SGLangOptions(
        gpu_memory_utilization=0.5,
        max_model_len=1,
        max_num_seqs=1,
        max_num_batched_tokens=1,
        max_total_tokens=1,
        context_length=1,
        max_running_requests=1,
        chunked_prefill_size=1,
        attention_backend="triton",
        cuda_graph_batch_sizes=[1],
        cuda_graph_max_batch_size=1,
        server_args={"page_size": 1},
    )
    assert all(getattr(every, field.name) is not None for field in fields(every)), "the test must set each option"
    added = {key for call in calls(own("colocated")) for key in strings(call) if key in RESERVED}
    for node in ast.walk(own("colocated")):
        if isinstance(node, ast.Dict):
            added |= strings(node) & (known | RESERVED.keys())
    assert {"enable_memory_saver", "base_gpu_id"} <= added
    assert not ({*every.arguments(SPEC)} | added | {*RESERVED, *SGLangOptions.pass_through.weight_formats}) - known
    for name in {*OWN_NAMES, *FORMER_NAMES, *FORMER_NAMES.values()}:
        assert name in known or name in FORMER_NAMES or name in FORMER_NAMES.values()
    assert all(new in known or former in known for new, former in FORMER_NAMES.items())


def test_every_option_is_explained() -> None:
    assert SGLangOptions.__doc__ is not None
    for field in fields(SGLangOptions):
        assert f"        {field.name}: " in SGLangOptions.__doc__


def test_variables_of_the_environment(sglang: Published) -> None:
    """Those that the plugin sets, and those that its documentation names."""
    text = sglang.text("sglang.srt.environ")
    readme = (FOLDER.parents[1] / "README.md").read_text()
    named = {word.strip("`*.,:;=()10") for word in readme.split() if "SGLANG_" in word}
    named |= BESIDE_TRAINERS.keys() | {"SGLANG_MEMORY_SAVER_CUDA_GRAPH"}
    named = {name.partition("=")[0] for name in named} - {FLAG}
    assert "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN" in named
    assert not [name for name in named if f"    {name} = Env" not in text]


def test_engine(sglang: Published) -> None:
    methods = sglang.methods(ENGINE, "Engine")
    used = attributes(own("host"), "engine", "self._engine")
    assert {"get_server_info", "async_generate", "shutdown", "loop", "tokenizer_manager"} == used
    for name in used - {"loop", "tokenizer_manager"}:
        assert name in methods
    for name in ("loop", "tokenizer_manager"):
        assert f"self.{name} = " in ast.unparse(methods["__init__"])
    for call, named in keywords(own("host"), "async_generate"):
        assert named <= parameters(methods["async_generate"]), call
        assert isinstance(methods["async_generate"], ast.AsyncFunctionDef)
    assert methods["__init__"].args.kwarg is not None, "it takes the arguments of ServerArgs"


def test_what_the_engine_says_of_itself(sglang: Published) -> None:
    assert "internal_states" in strings(sglang.methods(ENGINE, "Engine")["get_server_info"])
    assert "server_args" in ast.unparse(sglang.methods(ENGINE, "Engine")["get_server_info"])  # as one dictionary
    assert {"chunked_prefill_size", "disable_cuda_graph"} <= argument_names(sglang.package)
    assert "scheduler_infos[0]" in ast.unparse(sglang.methods(ENGINE, "Engine")["get_server_info"])
    scheduler = "sglang.srt.managers.scheduler"
    assert "max_total_num_tokens" in strings(sglang.methods(scheduler, "Scheduler")["get_init_info"])
    about = strings(sglang.methods(scheduler, "Scheduler")["get_internal_state"])
    if "effective_max_running_requests_per_dp" not in about:
        about = strings(sglang.module("sglang.srt.managers.scheduler_components.internal_state"))
    assert "effective_max_running_requests_per_dp" in about


def test_tokenizer_manager(sglang: Published) -> None:
    """Methods, that those which are awaited can be, and the keywords of calls."""
    methods = {
        **sglang.methods(TOKENIZER, "TokenizerManager"),
        **sglang.methods(CONTROL, "TokenizerControlMixin"),
    }
    tree = own("host")
    awaited = {ast.unparse(node.value) for node in ast.walk(tree) if isinstance(node, ast.Await)}
    used = attributes(tree, "self._tokenizer")
    assert len(used) == 8
    for name in used:
        if name in SINCE_LATER and not has_sessions(sglang):
            continue
        assert name in methods
        is_awaited = any(call.startswith(f"self._tokenizer.{name}(") for call in awaited)
        assert isinstance(methods[name], ast.AsyncFunctionDef) == is_awaited, name
        for call, named in keywords(tree, name):
            assert named <= parameters(methods[name]), call


def test_requests(sglang: Published) -> None:
    """The fields of what is sent to SGLang, and of its answers."""
    tree, found = own("host"), 0
    for name in sglang.names(REQUESTS):
        for call, named in keywords(tree, name):
            assert named <= sglang.fields(REQUESTS, name), call
            found += 1
    assert found >= 3
    assert {"success", "message"} <= sglang.fields(REQUESTS, "FlushCacheReqOutput")
    load = attributes(tree, "load")
    assert len(load) == 3
    assert load <= sglang.fields("sglang.srt.managers.load_snapshot", "LoadSnapshot")


def test_memory_has_its_names(sglang: Published) -> None:
    assert set(ALL_MEMORY) <= strings(sglang.module("sglang.srt.constants"))
    from rlplug_rollout_sglang.colocated import WAKING

    assert sorted(name for names in WAKING.values() for name in names) == sorted(ALL_MEMORY)


def test_answers_have_what_is_read(sglang: Published) -> None:
    assert strings(sglang.module(TOKENIZER)) >= KEPT | {"output_ids", "meta_info"}
    read = strings(own("sampling")) & strings(sglang.module(TOKENIZER))
    assert read >= KEPT
    assert {"stop", "length", "abort"} <= strings(sglang.module("sglang.srt.managers.schedule_batch"))


def test_sampling_parameters(sglang: Published) -> None:
    module = "sglang.srt.sampling.sampling_params"
    arguments = sampling_arguments(Request("a", (1,), seed=1), SamplingParams(), SPEC, room=5)
    assert {*arguments} <= sglang.fields(module, "SamplingParams")
    text = sglang.text(module)
    assert "self.top_k = 1" in text, "temperature 0 is greedy"
    assert "TOP_K_ALL" in text, "-1 keeps all tokens"


def test_sampler(sglang: Published) -> None:
    """What the backend inherits, is given, reads and writes."""
    tree, methods = own("sampler"), sglang.methods(SAMPLER, "Sampler")
    (ours,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "forward")
    for name in attributes(tree, "self"):
        assert name in methods
    theirs = methods["forward"].args
    assert [a.arg for a in ours.args.args] == [a.arg for a in theirs.args], "SGLang passes them by position"
    assert attributes(tree, "sampling_info") <= sglang.fields(BATCH_INFO, "SamplingBatchInfo")
    written = attributes(tree, "logits_output")
    assert written == {"next_token_logits", "next_token_logprobs"}
    assert written <= sglang.fields("sglang.srt.layers.logits_processor", "LogitsProcessorOutput")
    register = next(
        node
        for node in sglang.module(SAMPLER).body
        if isinstance(node, ast.FunctionDef) and node.name == "register_sampler_backend"
    )
    assert [argument.arg for argument in register.args.args] == ["backend", "factory"]


def test_sampling_backend_of_a_plugin_is_not_refused(sglang: Published) -> None:
    """Only SGLang's command line knows choices, and its watermarks want another backend."""
    for path in ("srt/server_args.py", "srt/arg_groups/fields/exec_.py"):
        file = sglang.package / path
        if file.is_file() and "sampling_backend: " in file.read_text():
            declared = file.read_text().partition("sampling_backend: ")[2].partition(" = None")[0]
            assert "choices" not in declared or "SAMPLING_BACKEND_CHOICES" in declared


def test_seeds_are_hooked_in(sglang: Published) -> None:
    module, cls, name = BATCHES.rsplit(".", 2)
    assert module == BATCH_INFO
    hooked = sglang.methods(module, cls)[name]
    assert [ast.unparse(decorator) for decorator in hooked.decorator_list] == ["classmethod"]
    assert [argument.arg for argument in hooked.args.args] == ["cls", "batch", "vocab_size"]
    read = ast.unparse(hooked)
    assert "r.sampling_params.sampling_seed" in read
    assert "for r in reqs" in read
    assert {"batch.reqs", "batch.device"} <= {ast.unparse(n) for n in ast.walk(hooked) if isinstance(n, ast.Attribute)}
    for name in ("filter_batch", "merge_batch"):
        assert "sampling_seed" in strings(sglang.methods(module, cls)[name]), "seeds stay with their requests"
    hooks = "sglang.srt.plugins.hook_registry"
    assert {"target", "hook", "hook_type"} <= parameters(sglang.methods(hooks, "HookRegistry")["register"])
    assert "AFTER" in ast.unparse(sglang.cls(hooks, "HookType"))


def test_scales_of_fp8_blocks_are_still_dropped(sglang: Published) -> None:
    """Of the models that are refused for it. When this fails, SGLang has been mended, and they need not be."""
    text = sglang.text("sglang.srt.models.llama")
    assert 'name = name.replace(".weight_scale_inv", ".weight_scale")' in text
    assert '"weight_scale_inv"' in sglang.text("sglang.srt.layers.quantization.fp8")
    for name in LOSE_SCALES:
        module = {
            "MistralForCausalLM": "mistral",
            "Ministral3ForCausalLM": "ministral3",
            "TeleFLMForCausalLM": "teleflm",
        }
        source = sglang.text(f"sglang.srt.models.{module.get(name, 'llama')}")
        assert f"class {name}(" in source
        assert "LlamaForCausalLM" in source


def test_plugins_are_loaded_in_every_process(sglang: Published) -> None:
    project = (FOLDER.parents[1] / "pyproject.toml").read_text()
    assert '"sglang.srt.plugins"' in project
    assert "sglang.srt.plugins" in strings(sglang.module("sglang.srt.plugins"))
    assert "load_plugins()" in ast.unparse(sglang.methods(ENGINE, "Engine")["__init__"])
    scheduler = sglang.module("sglang.srt.managers.scheduler")
    start = next(n for n in scheduler.body if isinstance(n, ast.FunctionDef) and n.name == "run_scheduler_process")
    assert "load_plugins()" in ast.unparse(start)


def test_weights_are_read_as_they_are_sent(sglang: Published) -> None:
    """The format, what SGLang reads of an entry, and that it un-pickles all that is in one."""
    flat, places = flatten_bucket([("a", torch.ones(3, dtype=torch.bfloat16)), ("b", torch.ones(2, 2))])
    recorder = Recorder(serialised(flat, places))
    (entry, _) = recorder.load()["metadata"]
    metadata = sglang.fields("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata")
    assert metadata == {*vars(entry)}
    module = "sglang.srt.model_executor.model_runner"
    if (sglang.package / "srt/model_executor/model_runner_components/weight_updater.py").is_file():
        module = "sglang.srt.model_executor.model_runner_components.weight_updater"
    assert {"flattened_bucket", "flattened_tensor", "metadata"} <= strings(sglang.module(module))
    assert ("types", "SimpleNamespace") in recorder.found
    for name in (recorder.found - OF_A_CPU_TENSOR) | OF_A_CUDA_TENSOR:
        assert is_allowed(sglang, *name), f"SGLang un-pickles no {name}"


class Recorder(pickle.Unpickler):
    """Un-pickles, and notes which classes and functions that takes."""

    def __init__(self, payload: bytes) -> None:
        super().__init__(io.BytesIO(payload))
        self.found: set[tuple[str, str]] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.found.add((module, name))
        return super().find_class(module, name)


def is_allowed(sglang: Published, module: str, name: str) -> bool:
    """Whether ``SafeUnpickler`` finds a class or function, as its ``find_class`` decides."""
    rules: dict[str, Any] = {}
    for node in sglang.cls("sglang.srt.utils.common", "SafeUnpickler").body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Set):
            rules[ast.unparse(node.targets[0])] = ast.literal_eval(node.value)
    if "ALLOWED_GLOBALS" in rules:
        return (module, name) in rules["ALLOWED_GLOBALS"]
    prefixes, denied = rules["ALLOWED_MODULE_PREFIXES"], rules["DENY_CLASSES"]
    return (module, name) not in denied and any(f"{module}.".startswith(prefix) for prefix in prefixes)
