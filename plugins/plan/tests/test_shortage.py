"""What is said of a memory that ran out: the numbers, the cause that they name, and the change that fits them."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from memory_cases import QWEN, make_engine, make_facts
from rlplug_plan.decisions import decide
from rlplug_plan.inputs import Possible
from rlplug_plan.measurements import numbers_of, resident_items, shortage_of
from rlplug_plan.plan import STATE, WEIGHTS, MemoryPlan
from rlplug_plan.resize import with_budget
from rlplug_plan.shortage import EXPANDABLE, Shortage, message
from rlplug_plan.table import told

from rlplug.interfaces import EngineCapabilities
from rlplug.interfaces.memory_plan import CUDA_BYTES, GPU, RESERVE_SHARE
from rlplug.observability.phase_timer import PhaseTimer
from rlplug.types import GIB

TEXT = (
    "CUDA out of memory. Tried to allocate {}. GPU 1 has a total capacity of 79.11 GiB of which 41.56 MiB is free. "
    "{}Of the allocated memory 70.25 GiB is allocated by PyTorch, {}and 194.00 MiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=... 512 bytes is free"
)


def gib(*sizes: float) -> list[int]:
    return [int(size * GIB) for size in sizes]


@pytest.mark.parametrize("others", ["", "Process 7 has 2.00 GiB memory in use. Including non-PyTorch memory, "])
@pytest.mark.parametrize("pools", ["", "with 1.00 GiB allocated in private pools (e.g., CUDA Graphs), "])
def test_numbers_are_read_from_torch_s_message(others: str, pools: str) -> None:
    """The wordings of torch 2.1 to 2.13; catches a number of another process or pool in place of torch's."""
    found = numbers_of(TEXT.format("2.00 GiB", others, pools))
    names = ("requested", "total", "free", "allocated", "unallocated")
    assert [found[name] for name in names] == gib(2, 79.11, 41.56 / 1024, 70.25, 194 / 1024)
    assert numbers_of("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`") == {}


def make_shortage(total: float = 80, **others: Any) -> Shortage:
    """Return a lack of 3 GiB on a GPU where torch has all but 5 GiB; the run was planned to need 57.9 in its update."""
    free_before = total * GIB - CUDA_BYTES
    shortage = Shortage(
        step=7,
        rank=1,
        num_ranks=4,
        during="phase update",
        phase="update",
        device="cuda:1 (H100)",
        requested=3 * GIB,
        total=int(total * GIB),
        free=GIB,
        allocated=int((total - 5) * GIB),
        unallocated=GIB,
        peak=int((total - 4.5) * GIB),
        items={WEIGHTS: 8 * GIB, STATE: 12 * GIB},
        can_expand=True,
        plan=MemoryPlan(replace(make_facts(), gpu=GPU(int(total * GIB), int(free_before)))),
    )
    return replace(shortage, **others)


def test_the_phase_needs_what_it_had_and_what_it_asked_for() -> None:
    shortage = make_shortage()
    planned = MemoryPlan(make_facts()).need("update")
    assert shortage.outside == 3 * GIB
    # 75 + 3 of torch, more than its peak of 75.5, and 3 of CUDA and others; 0.6 of CUDA are no other process's
    assert shortage.needed == 81 * GIB
    assert shortage.factor == pytest.approx(81 * GIB / planned)
    assert replace(shortage, peak=79 * GIB).needed == 82 * GIB  # freed again before the failure


def test_what_others_held_at_the_start_is_no_need_of_the_run() -> None:
    """The plan's capacity has been reduced by it already."""
    shortage = make_shortage()
    assert shortage.plan is not None
    facts = replace(shortage.plan.facts, gpu=GPU(80 * GIB, 78 * GIB - CUDA_BYTES))
    assert replace(shortage, plan=MemoryPlan(facts)).needed == 79 * GIB


def test_a_phase_needs_no_less_than_was_planned() -> None:
    """It failed before it had all: a plan that is scaled down would propose too little."""
    assert make_shortage(50).needed is not None
    assert make_shortage(50).factor == 1


def test_the_change_fits_what_was_measured() -> None:
    """Catches a change that fits the plan alone: 16,384 tokens were planned to fit, and half of them still do not."""
    shortage = make_shortage()
    text = message(shortage)
    found = re.search(
        r"Smallest change that fits, .* times 1\.40, as measured: model\.batch\.max_tokens_per_gpu: (\d+)\.", text
    )
    assert found is not None, text
    facts, budget = shortage.measured_facts, int(found[1])
    assert facts is not None
    capacity = 80 * GIB * (1 - RESERVE_SHARE)
    assert [MemoryPlan(with_budget(facts, tokens)).need("update") <= capacity for tokens in (budget, 2 * budget)] == [
        *(True, False),
    ]


def test_other_training_and_more_gpus_are_alternatives_with_their_costs() -> None:
    """Catches the first alternative printed as if nothing else fitted: a person may rather take GPUs than LoRA."""
    possible = Possible(heads=32, kv_heads=8, lora=True, adamw_8bit=True, optimizations=frozenset())
    facts = make_facts(QWEN, possible=possible)
    plan = MemoryPlan(replace(facts, gpu=GPU(80 * GIB, 80 * GIB - CUDA_BYTES)))
    text = message(make_shortage(plan=plan))
    assert "Nothing fits that trains the same on as many GPUs, with the plan of this phase times" in text
    assert "(1) model.lora.rank: 16 (other training: adapters learn" in text
    assert re.search(r"\(2\) \d+ GPUs .*more hardware", text)
    assert "Smallest change" not in text


def test_a_run_that_was_tried_is_not_to_be_tried_as_it_is() -> None:
    """A plan may say so of a run that lacks little of the reserve; here it has failed."""
    for missing in (0.05, 0.5):
        facts = make_facts(completion=16128, rows=1)
        need = MemoryPlan(facts).need("update") / GIB - missing
        total = int(need / 0.9 * GIB)
        plan = MemoryPlan(replace(facts, gpu=GPU(total, total - CUDA_BYTES)))
        assert "on_shortfall" not in message(make_shortage(need / 0.9, plan=plan))


def test_planned_and_measured_stand_side_by_side() -> None:
    lines = [" ".join(line.split()) for line in message(make_shortage()).splitlines()]
    assert lines[0] == "phase update of step 7, rank 1 of 4, cuda:1 (H100); in GiB:"
    for line in (
        *("total 80.00", "allocated by torch 75.00", "at its peak in this phase 75.50", "asked for 3.00", "free 1.00"),
        *("reserved by torch, not allocated 1.00", "CUDA, libraries and other processes 3.00"),
        *("update, by item planned measured", f"{WEIGHTS} 6.38 8.00", f"{STATE} 12.75 12.00"),
        "needed 57.85 81.00",
    ):
        assert line in lines, lines
    rest = next(line for line in lines if line.startswith("all else"))
    assert rest == "all else, measured together 38.73 61.00"
    assert len(lines) <= 24


@pytest.mark.parametrize(("unallocated", "is_first"), [(5.0, True), (3.0, False)])
def test_fragmentation_comes_first_where_it_is_large(unallocated: float, is_first: bool) -> None:
    shortage = make_shortage(unallocated=int(unallocated * GIB), allocated=int((76 - unallocated) * GIB))
    text = message(shortage)
    assert (EXPANDABLE in text) == is_first
    assert not is_first or text.index(EXPANDABLE) < text.index("Smallest change")
    barred = message(replace(shortage, can_expand=False))
    assert EXPANDABLE not in barred
    assert ("Fragmentation: 5.0 GiB" in barred) == is_first


def test_memory_of_other_processes_is_named() -> None:
    shortage = make_shortage(allocated=60 * GIB)
    assert "nvidia-smi names who holds the 18.0 GiB that torch does not." in message(shortage)
    assert shortage.plan is not None
    engine = MemoryPlan(replace(shortage.plan.facts, engine=make_engine(0.2)))
    assert "nvidia-smi" not in message(replace(shortage, plan=engine))  # it is the engine's


@pytest.mark.parametrize(
    ("missing", "why"), [("plan", "nothing was planned"), ("phase", "no such phase"), ("free", "no")]
)
def test_without_a_plan_to_compare_no_change_is_invented(missing: str, why: str) -> None:
    text = message(make_shortage(**{missing: None}))
    assert why in text
    assert "Smallest change" not in text
    assert "planned " not in text


# ---- what is measured -----------------------------------------------------------------------------------------------


class Policy(torch.nn.Module):
    """A model of 1 MiB of weights, of which a half is seen twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Parameter(torch.zeros(1 << 17))
        self.two = torch.nn.Parameter(torch.zeros(1 << 17))
        self.alias = torch.nn.Parameter(self.two.data)


def make_run(phase: str, device: str, memory: Any = None) -> Any:
    timer = PhaseTimer(stall_s=60, device=torch.device(device))
    timer.running = phase
    timer.asleep_bytes = 20 * GIB
    models = SimpleNamespace(policy=Policy(), critic=None, reference=None)
    engine = SimpleNamespace(capabilities=EngineCapabilities(sleep=True))
    return SimpleNamespace(
        timer=timer,
        step=7,
        start_timer=SimpleNamespace(is_running=True),
        parts=SimpleNamespace(plan=SimpleNamespace(memory=memory)),
        models=models,
        config=SimpleNamespace(engine=engine, lora=None, reference_is_policy=False),
    )


@pytest.fixture
def trainer() -> Any:
    state = {"step": torch.tensor(3.0), "exp_avg": torch.zeros(1 << 19)}
    return SimpleNamespace(global_rank=1, world_size=4, optimizers=[SimpleNamespace(state={"weight": state})])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 80 GiB, of which torch counts 70 as allocated, those of the sleeping engine too."""
    numbers = {"memory_allocated": 70, "memory_reserved": 74, "max_memory_allocated": 72}
    for name, size in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, size=size: size * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (24 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")


@pytest.mark.usefixtures("gpu")
def test_a_sleeping_engine_s_memory_is_not_allocated(trainer: Any) -> None:
    """torch counts what the engine has released: 20 GiB that the message has, and the GPU has free."""
    run = make_run("update", "cuda:1")
    run.timer._memory = {"update": 51.0, "rollout": 70.0}
    silent = shortage_of(run, trainer, RuntimeError("CUDA error: out of memory"))
    assert (silent.allocated, silent.unallocated, silent.outside) == (50 * GIB, 4 * GIB, 2 * GIB)
    assert (silent.peak, silent.requested, silent.can_expand) == (51 * GIB, None, False)
    assert silent.device == "cuda:1 (H100)"
    speaking = shortage_of(run, trainer, RuntimeError(TEXT.format("2.00 GiB", "", "")))
    assert [speaking.allocated, speaking.requested] == gib(50.25, 2)
    assert speaking.peak == 52 * GIB  # since the timer has given its own away


def test_tensors_are_counted_once_and_on_the_device_alone(trainer: Any) -> None:
    assert resident_items(make_run("update", "cpu"), trainer.optimizers, torch.device("cpu")) == {
        WEIGHTS: 1 << 20,
        STATE: (1 << 21) + 4,
    }
    elsewhere = resident_items(make_run("update", "cpu"), trainer.optimizers, torch.device("cuda"))
    assert elsewhere == {WEIGHTS: 0, STATE: 0}


@pytest.mark.parametrize(("phase", "column"), [("update", "update"), ("validate", "rollout"), ("rewards", None)])
def test_the_plan_is_found_by_the_phase(trainer: Any, phase: str, column: str | None) -> None:
    memory = told(decide([], "auto", lambda optimizations: make_facts()))
    shortage = shortage_of(make_run(phase, "cpu", memory), trainer, RuntimeError("CUDA error: out of memory"))
    assert (shortage.phase, shortage.plan, shortage.during) == (column, memory.plan, f"phase {phase}")


def test_an_error_before_the_run_is_whole_is_described_too(trainer: Any) -> None:
    run = make_run("", "cpu")
    del run.parts, run.models
    assert shortage_of(run, trainer, RuntimeError("CUDA error: out of memory")).during.startswith("start, ")
    assert resident_items(run, trainer.optimizers, torch.device("cpu")) == {}
