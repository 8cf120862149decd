"""Under FSDP2, on one process and on two, every optimisation gives the loss and gradients of plain torch."""

from __future__ import annotations

import pytest
from fsdp_worker import CASES, CASES_OF_TIED
from optims_models import Results, assert_same, plain_results, tiny_batch, tiny_model
from rlplug_optims import BackwardPrefetch, ForwardPrefetch

from rlplug.errors import ConfigError

PREFETCHING = [name for name in CASES if name.startswith(("forward", "backward", "together"))]


@pytest.fixture(scope="module")
def expected():
    return {family: plain_results(tiny_model(family, packed=False), tiny_batch()) for family in ("llama", "qwen3")}


ONE = pytest.param(1, marks=pytest.mark.nightly)


@pytest.mark.kit
@pytest.mark.parametrize(("family", "name"), [*(("llama", n) for n in CASES), *(("qwen3", n) for n in CASES_OF_TIED)])
@pytest.mark.parametrize("world_size", [ONE, 2])
def test_loss_and_gradients(family, name, world_size, sharded, expected):
    if world_size == 1 and name in PREFETCHING:
        pytest.skip("is refused: see below")
    result = sharded(world_size)[f"{family}/{name}"]
    assert_same(Results(result["loss"], result["gradients"]), expected[family])
    assert all(result["effects"])


@pytest.mark.kit
@pytest.mark.parametrize("world_size", [ONE, 2])
def test_offloaded_activations(world_size, sharded, expected):
    result = sharded(world_size)["llama/offload"]
    assert_same(Results(result["loss"], result["gradients"]), expected["llama"])


@pytest.mark.nightly
@pytest.mark.parametrize("name", PREFETCHING)
def test_one_process_has_nothing_to_prefetch(name, sharded):
    assert "nothing is gathered" in sharded(1)[f"llama/{name}"]["refused"]


def test_units_that_prefetch_are_counted(sharded):
    """Untied: root, embeddings, four blocks, output layer; tied: root and four blocks. The last has nothing ahead."""
    effects = {name: result.get("effects") for name, result in sharded(2).items() if isinstance(result, dict)}
    assert effects["llama/forward 1"] == [["forward prefetch set on 6 FSDP units, depth 1"]]
    assert effects["qwen3/forward 3"] == [["forward prefetch set on 4 FSDP units, depth 3"]]
    assert effects["llama/backward 2"] == [["backward prefetch set on 6 FSDP units, depth 2"]]
    assert effects["qwen3/together"][-1] == ["backward prefetch set on 4 FSDP units, depth 3"]


def test_units_prefetch_those_that_run_next(sharded):
    first, second, third, fourth = (f"model.layers.{number}" for number in range(4))
    forward = {
        "": ["model.embed_tokens", first, second],
        "model.embed_tokens": [first, second, third],
        first: [second, third, fourth],
        second: [third, fourth, "lm_head"],
        third: [fourth, "lm_head"],
        fourth: ["lm_head"],
        "lm_head": [],
    }
    backward = {
        "": ["lm_head", fourth],
        "lm_head": [fourth, third],
        fourth: [third, second],
        third: [second, first],
        second: [first, "model.embed_tokens"],
        first: ["model.embed_tokens"],
        "model.embed_tokens": [],
    }
    nothing = {name: [] for name in forward}
    results = sharded(2)
    assert results["llama/forward 3"]["prefetch"] == {"forward": forward, "backward": nothing}
    assert results["llama/backward 2"]["prefetch"] == {"forward": nothing, "backward": backward}


def test_backward_prefetch_needs_resharding(sharded):
    assert "reshard_after_forward" in sharded(2)["keeps gathered"]["refused"]


@pytest.mark.parametrize(
    ("make", "words"),
    [(lambda: ForwardPrefetch(depth=0), "depth is 0"), (lambda: BackwardPrefetch(depth=1), "one unit by itself")],
)
def test_a_depth_that_changes_nothing_is_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()
