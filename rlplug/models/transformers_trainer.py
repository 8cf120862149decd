"""``TransformersTrainer``: trains the models of transformers, on every axis of the mesh; the default trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rlplug.distributed.fsdp_units import transformer_units
from rlplug.interfaces.optimization import Effect
from rlplug.interfaces.trainer import ModelConfig, ModelTrainer, TrainerClaims
from rlplug.interfaces.weight_sync import WeightsOfParameters
from rlplug.models.loading import empty_model, load_weights
from rlplug.models.packing_checks import check_passes
from rlplug.types import MeshSizes
from rlplug.weight_sync.hf_names import hf_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rlplug.interfaces.router_replay import RouterReplay


class TransformersTrainer(ModelTrainer):
    """Trains the models of Hugging Face's transformers, sharded by FSDP2. The default."""

    claims = TrainerClaims(
        axes=frozenset({"replicate", "sequence", "tensor"}),
        critic=True,
        lora=True,
        router_replay=True,
        shared_prefixes=True,
    )

    def check(self, config: ModelConfig, key: str, mesh: MeshSizes) -> None:
        check_passes(config, key, self.edit)

    def edit(self, network: PreTrainedModel) -> None:
        """Change layers of a whole network on the meta device: for subclasses."""

    def empty_network(self, config: ModelConfig, key: str) -> PreTrainedModel:
        self.edit(network := empty_model(config, key))
        return network

    def empty_trunk(self, config: ModelConfig, key: str) -> nn.Module:
        trunk: nn.Module = self.empty_network(config, key).base_model
        return trunk

    def router_replay(self, network: nn.Module) -> RouterReplay:
        from rlplug.models.routers import replay_routers

        return replay_routers(network, "model.router_replay")

    def split(self, network: nn.Module, mesh: DeviceMesh) -> Mapping[nn.Module, DeviceMesh]:
        if mesh["tensor"].size() > 1:
            from rlplug.distributed.tensor_parallel import parallelize

            parallelize(network, mesh["tensor"])
        return {}

    def fsdp_units(self, network: nn.Module) -> list[nn.Module]:
        return transformer_units(network)

    def load_weights(self, network: nn.Module, config: ModelConfig, key: str) -> Effect:
        own: Any = network
        prefix = f"{own.base_model_prefix}." if own.get_output_embeddings() is None else ""  # before a trunk's names
        return load_weights(network, config, key, prefix)

    def hf_weights(self, network: nn.Module) -> WeightsOfParameters:
        return hf_weights(network)

    def architecture(self, network: nn.Module) -> str:
        return type(network).__name__.removeprefix("FSDP")


TRANSFORMERS: Final = TransformersTrainer()
