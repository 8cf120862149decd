"""``RLFSDP2Strategy``: Lightning's model-parallel strategy, with sharding and collectives for RL.

One process or many, CPU (gloo) or GPU (NCCL) run the same code: parameters are FSDP2 shards. Upstream's strategy leaves
sharding, gradient synchronisation and clipping over several meshes to the module; they are here, beside the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from numpy.typing import NDArray
from torch import nn
from torch._C._distributed_c10d import Store
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer

from rlplug.distributed.checkpoints.files import TRAINED
from rlplug.distributed.mesh import build_mesh, data_mesh, scale_to_norm, total_norm, weights_mesh
from rlplug.distributed.ranks import RankLauncher, join_ranks, waiting_time, watch_launcher
from rlplug.distributed.stop_signal import StopSignal
from rlplug.errors import ConfigError, shorten
from rlplug.types import MeshSizes, StepStatistics
from rlplug.types.ranges import Count, Seconds

Item = TypeVar("Item")


class RLFSDP2Strategy(ModelParallelStrategy):
    """FSDP2 over a mesh of four axes: replicate, shard, sequence and tensor.

    Every rank of the shard axis keeps a part of every weight. Its size is the factor of all ranks that the other axes
    leave.

    Args:
        replicate: Groups of ranks that each hold a whole copy of the weights (HSDP). All-gathers stay inside a group,
            such as a host, and only gradients are reduced across groups; 1 shards over all ranks.
        sequence: Ranks that share the tokens of a micro-batch (Ulysses), for long sequences.
        tensor: Ranks that share each matrix of a block (tensor parallelism), for blocks too large for one device.
        reshard_after_forward: Free a block's gathered parameters after its forward pass and gather them again for
            the backward pass: less memory, more communication.
        reshard_after_backward: Free gathered parameters after every backward pass. ``false`` keeps them for a
            mini-batch's other micro-batches, which then gather nothing: together with
            ``reshard_after_forward: false`` a mini-batch gathers once.
        sync_every_micro_batch: Reduce gradients in each micro-batch rather than only in a mini-batch's last: more
            communication, and no gradients of whole parameters are kept in between.
        timeout_s: Timeout of collectives of tensors, in seconds; other ranks' phases are waited for longer.
        process_group_backend: ``nccl`` or ``gloo``; by default the one for the accelerator.
    """

    def __init__(
        self,
        replicate: Count = 1,
        sequence: Count = 1,
        tensor: Count = 1,
        reshard_after_forward: bool = True,
        reshard_after_backward: bool = True,
        sync_every_micro_batch: bool = False,
        timeout_s: Seconds = 1800.0,
        process_group_backend: str | None = None,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timedelta(seconds=timeout_s))
        self._axes = {"replicate": replicate, "sequence": sequence, "tensor": tensor}
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = reshard_after_backward
        self.sync_every_micro_batch = sync_every_micro_batch
        self._cpu_group: dist.ProcessGroup | None = None  # of gloo, in which ranks wait for one another's phases
        self.store: Store | None = None
        """Store of all ranks; ``None`` for a single one."""
        self.accept_checkpoint: Callable[[Path, Mapping[str, Any]], None] | None = None
        """Refuses a checkpoint, by what it holds besides tensors, before one is loaded; the run sets it."""

    def setup_environment(self) -> None:
        """Join the processes and build the mesh of four axes; upstream's has two.

        Raises:
            ConfigError: The sizes of the axes do not divide the processes, or torch lacks the backend.
        """
        backends = [part.rpartition(":")[2] for part in (self._process_group_backend or "gloo").split(",")]
        if unknown := set(backends) - {*dist.Backend.backend_list}:
            raise ConfigError(
                f"trainer.strategy.init_args.process_group_backend names {shorten(min(unknown))}, which torch does not "
                "have: give nccl or gloo, or null for that of the accelerator."
            )
        sizes = self.mesh_sizes(self.num_nodes * self.num_processes)
        self._join_ranks()
        timeout: Any = self._timeout
        self.waiting_time = waiting_time(getattr(self.lightning_module, "phase_deadline_s", timeout.total_seconds()))
        if self.world_size > 1:
            self._cpu_group = dist.new_group(backend="gloo", timeout=self.waiting_time)
        self._setup_distributed()
        self._device_mesh = build_mesh(self.root_device.type, sizes)
        self._weights_mesh = weights_mesh(self._device_mesh)
        self._data_mesh = data_mesh(self._device_mesh)
        self._ranks = {  # kept, because asking a mesh is slow and each micro-batch does
            "data": self._data_mesh.get_local_rank(),
            "sequence": self._device_mesh["sequence"].get_local_rank(),
        }
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = RankLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def _join_ranks(self) -> None:
        """Make the process group, before upstream makes one that listens on all interfaces."""
        environment = self.cluster_environment
        assert environment is not None
        assert self.accelerator is not None
        watch_launcher()
        try:
            device, port = self.root_device, environment.main_port
        except (IndexError, ValueError) as error:
            names = f"LOCAL_RANK is not below trainer.devices {self.num_processes}, or MASTER_PORT is no number"
            raise ConfigError(f"{names}: start the run with rlplug launch or torchrun, or unset them.") from error
        self.accelerator.setup_device(device)
        self.set_world_ranks()
        self.store = join_ranks(
            self._get_process_group_backend(),
            environment.main_address,
            port,
            self.global_rank,
            self.world_size,
            is_one_host=self.num_nodes == 1,
            timeout=self._timeout,
            device_id=None if self.root_device.type == "cpu" else self.root_device,
        )

    def mesh_sizes(self, world_size: int) -> MeshSizes:
        """Return the sizes of the mesh over ``world_size`` ranks, which need not have started.

        Raises:
            ConfigError: The sizes of the axes do not divide them.
        """
        return MeshSizes.from_world(world_size, **self._axes)

    # ---- the mesh -------------------------------------------------------------------------------------------------

    @property
    def mesh(self) -> DeviceMesh:
        """Device mesh over all ranks, with the axes replicate, shard, sequence and tensor."""
        return self.device_mesh

    @property
    def data_size(self) -> int:
        """Number of parts into which the rows of a batch are divided: ranks of the replicate and shard axes."""
        return self._data_mesh.size()

    @property
    def data_rank(self) -> int:
        """Index of the part, of ``data_size``, that this rank and those of its sequence and tensor groups compute."""
        return self._ranks["data"]

    @property
    def data_ranks(self) -> list[int]:
        """The ``data_rank`` of each rank: ranks that share rows are neighbours."""
        return [rank // (self.sequence_size * self.tensor_size) for rank in range(self.world_size)]

    @property
    def statistics(self) -> StepStatistics:
        """Sums over all ranks."""
        return StepStatistics(self.world_size, self._exchange_device)

    @property
    def _exchange_device(self) -> torch.device:
        """Device of the arrays that ranks exchange: gloo takes them from the host."""
        return torch.device("cpu") if self._get_process_group_backend() == "gloo" else self.root_device

    @property
    def data_group(self) -> dist.ProcessGroup:
        """Process group over which rows are divided, at this rank's index on the sequence and tensor axes."""
        return self._data_mesh.get_group()

    @property
    def sequence_size(self) -> int:
        """Number of ranks that share the tokens of a row."""
        return self.mesh["sequence"].size()

    @property
    def sequence_rank(self) -> int:
        """Index of this rank's part of each row."""
        return self._ranks["sequence"]

    @property
    def sequence_group(self) -> dist.ProcessGroup | None:
        """Process group of the ranks that share the tokens of this rank's rows; ``None`` without sharing."""
        return self.mesh["sequence"].get_group() if self.sequence_size > 1 else None

    @property
    def tensor_size(self) -> int:
        """Number of ranks that share each matrix of a block."""
        return self.mesh["tensor"].size()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_size, "rank": self.data_rank}

    # ---- sharding -------------------------------------------------------------------------------------------------

    def shard(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        units: Sequence[nn.Module] = (),
        meshes: Mapping[nn.Module, DeviceMesh] = MappingProxyType({}),
    ) -> None:
        """Shard ``model`` in place by FSDP; it may lie on the meta device, and be split over the tensor axis.

        Forward and backward passes run in ``dtype``; shards, optimizer and gradient reduction stay float32. Gradients
        are *summed* over ranks, because losses are divided by global denominators.

        Args:
            model: The model.
            dtype: Dtype of its passes.
            units: Modules in it that gather their parameters on their own; the model gathers the rest.
            meshes: More such modules, inside ``units`` or not, each with the mesh over which it is sharded.
        """
        options: dict[str, Any] = {
            "reshard_after_forward": self.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        }
        for module in [*meshes, *units, model]:  # inner modules first
            fully_shard(module, mesh=meshes.get(module, self._weights_mesh), **options)
        for unit in fsdp_units(model) if self.world_size > 1 else []:  # a rank alone would copy what it divides by 1
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # or a factor becomes PREMUL_SUM, which gloo lacks
        model.register_forward_hook(_reshard_without_gradients)

    def set_last_micro_batch(self, model: nn.Module, is_last: bool) -> None:
        """Set whether the next backward pass is a mini-batch's last, in which gradients are reduced over ranks."""
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(is_last or self.sync_every_micro_batch)
        model.set_requires_all_reduce(is_last)  # between replicas, which can wait for the last one
        model.set_reshard_after_backward(is_last or self.reshard_after_backward)

    def clip_grad_norm(self, model: nn.Module, max_norm: float | None) -> float:
        """Scale gradients to a global norm of at most ``max_norm`` and return the norm before scaling."""
        gradients: list[Any] = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norm = total_norm(gradients)
        if max_norm is not None and max_norm - 1e-6 < norm < torch.inf:
            scale_to_norm(gradients, norm, max_norm)
        return float(norm)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the shards of what trains, without upstream's copy on the host, which the writer makes again."""
        assert self.model is not None
        return get_model_state_dict(self.model, options=TRAINED)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint, or begin to with the ``BackgroundWriter`` that ``storage_options`` may be."""
        if storage_options is not None:
            storage_options.begin(checkpoint, Path(filepath))
            return
        from rlplug.distributed.checkpoints.writer import ChecksumWriter, take_tensors, write_others

        tensors = take_tensors(checkpoint)
        write_others(checkpoint, Path(filepath))
        save(tensors, storage_writer=ChecksumWriter(filepath), process_group=self._cpu_group)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Verify a checkpoint, load its tensors and return all else. Collective; no pickled code runs.

        Raises:
            RunError: A file is damaged, or the checkpoint does not fit this run.
            ConfigError: ``accept_checkpoint`` refuses it.
        """
        from rlplug.distributed.checkpoints.reader import find_damage, read_checkpoint, require_whole

        folder = Path(self.broadcast(checkpoint_path))
        require_whole(folder, self.gather([find_damage(folder, self.global_rank, self.world_size)]))
        assert self.model is not None
        return read_checkpoint(folder, self.model, self.optimizers, self.accept_checkpoint)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state for a checkpoint, without changing an optimizer that has not stepped.

        Torch's ``get_optimizer_state_dict`` steps a fresh optimizer with zero gradients to learn the layout of its
        state, and Adam would count that step.
        """
        is_fresh = not optimizer.state
        assert self.model is not None
        state = get_optimizer_state_dict(self.model, optimizer)
        if is_fresh:
            optimizer.state.clear()
        return state

    # ---- between ranks --------------------------------------------------------------------------------------------

    def gather(self, items: list[Item]) -> list[Item]:
        """Return the concatenation of every rank's ``items``, in rank order, on every rank."""
        if self._cpu_group is None:
            return items
        gathered: list[list[Item]] = [[] for _ in range(self.world_size)]
        dist.all_gather_object(gathered, items, group=self._cpu_group)
        return [item for part in gathered for item in part]

    def gather_arrays(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return the concatenation of every rank's array; see :func:`rlplug.distributed.exchange.gather_arrays`."""
        if self._cpu_group is None:
            return array
        from rlplug.distributed.exchange import gather_arrays

        return gather_arrays(array, self.world_size, self._exchange_device, self._cpu_group)

    def exchange_arrays(self, parts: Sequence[NDArray[Any]], lengths: Sequence[int]) -> NDArray[Any]:
        """Send each rank its part; see :func:`rlplug.distributed.exchange.exchange_arrays`."""
        from rlplug.distributed.exchange import exchange_arrays

        return exchange_arrays(parts, lengths, self._exchange_device)

    def barrier(self, name: str | None = None) -> None:
        self.gather([name])

    def broadcast(self, obj: Item, src: int = 0) -> Item:
        return self.gather([obj])[src if self._cpu_group else 0]

    def any_rank(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on some rank."""
        return any(self.gather([flag]))

    def agree_to_stop(self, stop: StopSignal) -> bool:
        """Return whether some rank was told to stop, the same on all ranks. Collective."""
        is_told = stop.agree(self.gather)
        if is_told and isinstance(self.launcher, RankLauncher):
            self.launcher.is_ending = True  # with a status that is no failure
        return is_told


def fsdp_units(model: nn.Module) -> list[FSDPModule]:
    """Return the FSDP units of a sharded model: modules that gather their own parameters."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _reshard_without_gradients(model: nn.Module, inputs: Any, output: Any) -> None:
    """Free the parameters that a forward-only pass gathered; otherwise no backward pass would reshard them."""
    if not torch.is_grad_enabled():
        for unit in fsdp_units(model):
            unit.reshard()


def require_strategy(strategy: Any) -> RLFSDP2Strategy:
    """Return ``strategy``, the trainer's.

    Raises:
        ConfigError: It is another class.
    """
    if not isinstance(strategy, RLFSDP2Strategy):
        raise ConfigError(
            f"trainer.strategy is {type(strategy).__name__}: rlplug shards and synchronises the policy itself. Set "
            "trainer.strategy to rlplug.distributed.strategy.RLFSDP2Strategy, on one device too."
        )
    return strategy
