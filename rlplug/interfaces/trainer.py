"""Trainer interface: whose model code a run trains, and how its networks are built, sharded, loaded and named."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rlplug.interfaces.optimization import Effect
from rlplug.interfaces.weight_sync import WeightsOfParameters
from rlplug.types import MeshSizes
from rlplug.types.ranges import Seed, check_ranges

MYPY = False  # in place of TYPE_CHECKING, whose imports jsonargparse carries out
if MYPY:
    from rlplug.interfaces.memory import ActivationTraits
    from rlplug.interfaces.router_replay import RouterReplay


@dataclass
class ModelConfig:
    """Configuration of a Hugging Face model: the policy, the reference, or a critic's trunk.

    Args:
        path: Folder or Hugging Face Hub name, with configuration, tokenizer and (for ``pretrained``) safetensors.
        init: ``pretrained`` loads the weights; ``random`` draws new ones from the configuration, seeded by ``seed``.
        dtype: Dtype of the weights in forward and backward passes and in the engine. The optimizer always works on
            float32 weights, and gradients are reduced in float32.
        attn_implementation: Attention to use: ``packed``, rlplug's own, or ``flash_attention_2`` or ``_3`` of
            transformers.
        seed: Seed of the weights with ``init: random``; 0 follows ``seed_everything``.
        chat_template_kwargs: Variables of the policy's chat template, such as ``{enable_thinking: false}``, wherever it
            is rendered: for prompts, environments, evaluation and chat.
    """

    path: str
    init: Literal["pretrained", "random"] = "pretrained"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    attn_implementation: str = "packed"
    seed: Seed = 0
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_ranges(self)
        self.path = os.path.expanduser(self.path)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class TrainerClaims:
    """What a trainer can do; a run that needs more is refused before anything is loaded.

    Attributes:
        axes: Axes of the mesh that may have more than one rank, besides ``shard``: ``replicate``, ``sequence``,
            ``tensor``.
        critic: Whether a critic can be trained beside its policy: whether the class has
            :meth:`ModelTrainer.empty_trunk`.
        attention: Values of ``attn_implementation`` that it supports; ``None`` for all.
        optimizations: Class names of the optimizations that work on its networks; ``None`` for all.
        conflicts: Class names of optimizations that options of this trainer exclude, or a model in :meth:`check`, each
            with the reason.
        lora: Whether its networks take low-rank adapters: peft's layers in place of ``nn.Linear``, and frozen weights.
        router_replay: Whether its routers can take the experts that the engine chose: it has ``router_replay``.
        shared_prefixes: Whether its networks hand the argument ``shared`` of a packed row on to ``packed_attention``.
    """

    axes: frozenset[str] = frozenset()
    critic: bool = False
    attention: frozenset[str] | None = None
    optimizations: frozenset[str] | None = None
    conflicts: Mapping[str, str] = field(default_factory=dict)
    lora: bool = False
    router_replay: bool = False
    shared_prefixes: bool = False


class ModelTrainer(ABC):
    """Base class of trainers: one library's models, under rlplug's loop, FSDP2, optimizers and engines.

    A network is an ``nn.Module`` with transformers' ``config`` and ``generation_config`` as attributes, and the method
    ``get_output_embeddings``, which returns the output layer. Its forward method takes a packed row, the arguments of
    :meth:`PackedTokens.model_inputs <rlplug.models.packing.PackedTokens.model_inputs>` and ``logits_to_keep``, int64
    [K]. It calls the output layer once, with hidden states [1, K, D], and returns an object whose ``logits`` are what
    the output layer returned, [1, K, V]. What it learns is in its parameters: an engine and an export get no buffers.

    The core calls in this order: :meth:`check`, :meth:`empty_network`, :meth:`router_replay` where a run replays,
    optimizations, :meth:`split`, FSDP2 over :meth:`fsdp_units`, allocation of memory, optimizations,
    :meth:`load_weights`. For a critic with a trunk of its own, :meth:`empty_trunk` takes the place of
    :meth:`empty_network`.

    Attributes:
        claims: What the class can do; an instance may exclude more.
    """

    claims: TrainerClaims

    def check(self, config: ModelConfig, key: str, mesh: MeshSizes) -> None:  # noqa: B027 - overriding is optional
        """Refuse a model that this trainer cannot build, or cannot split over the mesh.

        Args:
            config: Configuration of the policy, the reference policy or a critic's trunk.
            key: Key of the model in the run's configuration, for messages.
            mesh: Sizes of the mesh.

        Raises:
            ConfigError: The message names the key and the fix.
        """

    def plan_memory(self, traits: ActivationTraits) -> ActivationTraits:
        """Return the properties of its training step, which optimizations then change; unchanged by default."""
        return traits

    @abstractmethod
    def empty_network(self, config: ModelConfig, key: str) -> nn.Module:
        """Return the network on the meta device, its parameters float32, in training mode, without dropout."""

    def router_replay(self, network: nn.Module) -> RouterReplay:
        """Hook the routers of a policy, as :meth:`empty_network` returns it, so that they can replay experts.

        Each router must choose by :func:`rlplug.interfaces.replayed`, and score its experts with its own logits, so
        that its gradient flows. A trainer that claims ``router_replay`` overrides it.

        Raises:
            ConfigError: The routers have a form that the trainer does not know.
        """
        raise NotImplementedError(f"{type(self).__name__} does not claim router_replay")

    def empty_trunk(self, config: ModelConfig, key: str) -> nn.Module:
        """Return what :meth:`empty_network` does without the output layer: a critic's trunk. For ``claims.critic``.

        Its forward method takes a packed row without ``logits_to_keep`` and returns an object whose
        ``last_hidden_state``, [1, n, D] or with a filling after the row, is what the output layer would read.
        :meth:`split`, :meth:`fsdp_units` and :meth:`load_weights` take it as they take a network.
        """
        raise NotImplementedError(f"{type(self).__name__} claims critics and has no empty_trunk")

    @abstractmethod
    def split(self, network: nn.Module, mesh: DeviceMesh) -> Mapping[nn.Module, DeviceMesh]:
        """Split the network in place over the tensor axis of ``mesh``, where it has several ranks.

        A trainer may also split modules over ranks of the shard axis, such as experts. Parameters that are split
        become DTensors on a mesh with the root of ``mesh``.

        Args:
            network: The network, on the meta device.
            mesh: Mesh of the axes replicate, shard, sequence and tensor.

        Returns:
            Modules that FSDP shards over fewer ranks than the rest of the network, because ranks of the shard axis
            hold different parts of them: each with the mesh of the ranks that hold the same part, as FSDP takes it.

        Raises:
            ConfigError: The network cannot be split over so many ranks.
        """

    @abstractmethod
    def fsdp_units(self, network: nn.Module) -> list[nn.Module]:
        """Return the modules that gather their parameters on their own, such as blocks; the network gathers the rest.

        FSDP needs each parameter in one unit: embeddings that are tied to the output layer belong to the rest.
        """

    @abstractmethod
    def load_weights(self, network: nn.Module, config: ModelConfig, key: str) -> Effect:
        """Load or draw every parameter and buffer of the sharded network; each rank keeps its own shards.

        ``init: random`` draws what transformers draws with that seed, so that trainers can be compared.

        Returns:
            An effect that says how the weights came.

        Raises:
            ConfigError: The weights cannot be read, have other shapes, or leave part of the network without a value.
        """

    @abstractmethod
    def hf_weights(self, network: nn.Module) -> WeightsOfParameters:
        """Return the weights that each parameter becomes in a Hugging Face checkpoint, by its name in the network.

        The weight sync and the export gather one parameter at a time, and then make these weights of it. Together they
        are the weights of the folder, each once; a tied parameter has the name that comes first. Conversions reorder
        entries and change no value, so they name gradients too.
        """

    @abstractmethod
    def architecture(self, network: nn.Module) -> str:
        """Return the name of transformers' class for the exported ``config.json``, such as ``LlamaForCausalLM``."""
