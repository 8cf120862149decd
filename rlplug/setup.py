"""How Lightning sets an RL run up, and what its checkpoints hold; ``module.py`` has the loop."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from rlplug.config import RLModuleOptions
from rlplug.config_checks import (
    UNCORRECTED,
    check_algorithm,
    check_engine,
    check_fp8,
    check_max_grad_norm,
    check_networks,
    check_optimizations,
    check_partial_rollout,
    check_sampling,
)
from rlplug.distributed.host_tuning import freeze_gc, limit_host_threads
from rlplug.distributed.mesh import MeshSizes
from rlplug.distributed.offload import Offload
from rlplug.distributed.rng import rng_state, set_rng_state
from rlplug.errors import ConfigError
from rlplug.interfaces.algorithm import RunInfo
from rlplug.interfaces.optimization import Effect
from rlplug.interfaces.rollout import Placement
from rlplug.memory_inputs import PlannedRun
from rlplug.models.build import build_critic, build_policy, build_reference
from rlplug.models.hf_files import read_config
from rlplug.models.shape import attention_cost
from rlplug.observability.phase_timer import PhaseTimer
from rlplug.plugin_manager import plugins
from rlplug.rollout.engine_driver import EngineDriver
from rlplug.rollout.generator import RolloutGenerator
from rlplug.rollout.observation_tokens import ObservationTokens
from rlplug.training.actor_critic import ActorCritic
from rlplug.training.batch_plan import BatchPlan
from rlplug.training.forward_backward import MicroBatchRunner
from rlplug.training.losses import TrainableModel
from rlplug.training.memory_plan.decisions import shortfall
from rlplug.training.memory_plan.inputs import GPU, total_and_free
from rlplug.training.update import Update
from rlplug.weight_sync.fp8_layers import describe


class RLModuleSetup(RLModuleOptions):
    """Checks, plans, builds and starts what the options name, in the order in which Lightning asks for it."""

    def setup(self, stage: str) -> None:
        """Check what can be checked before anything is loaded."""
        engines = plugins().registry.classes("rollouts").values()
        check_engine(self.engine, self.algorithm, engines, self.sleep_between_rollouts, self.mismatch_gate)
        if self.weight_sync.transform is not None:
            check_fp8(self.engine, engines)
        self.engine.check(self.spec)
        check_optimizations(self.optimizations)
        self.clock = PhaseTimer(self.strategy.root_device, self.stall_s)
        if stage == "fit":
            check_sampling(self.sampling, self.validation, bool(self.val_prompts))
            check_max_grad_norm(self.max_grad_norm, "model.max_grad_norm")
            if self.in_flight is not None:
                check_partial_rollout(self.in_flight.options, self.sampling, self.algorithm, self.engine, engines)
            mesh = self.strategy.mesh_sizes(self.trainer.world_size)
            self.plan = self.make_batch_plan(mesh, self._longest)
            check_algorithm(
                self.algorithm, self.plan, self.critic_config, self.reference_config, num_steps=self.total_steps
            )
            trunk = None if self.critic_config is None else self.critic_config.trunk
            networks = {"policy": self.policy_config, "reference": self.reference_config, "critic.trunk": trunk}
            check_networks(networks, self.tokenizer, self._longest, self.strategy.sequence_size)
            in_fp8 = self.weight_sync.transform is not None
            self.algorithm.setup(
                RunInfo(self.plan.num_completions, self.plan.group_size, self.sampling.max_new_tokens, in_fp8)
            )
            if in_fp8 and not self.algorithm.needs.rollout_logprobs:
                rank_zero_warn(UNCORRECTED.format(name=type(self.algorithm).__name__))
            if self.strategy.root_device.type == "cuda":
                self._settle_memory(mesh)

    @property
    def total_steps(self) -> int:
        return self.num_steps or max(1, len(self.stream) // self.plan.prompts_per_step)

    @property
    def _longest(self) -> int:
        """Tokens of the longest possible prompt and completion."""
        return self.stream.longest_prompt + self.sampling.max_new_tokens

    def make_batch_plan(self, mesh: MeshSizes, longest: int) -> BatchPlan:
        """Resolve the sizes for the ranks of ``mesh`` and sequences of up to ``longest`` tokens."""
        config = read_config(self.policy_config.path, "model.policy").get_text_config()
        return BatchPlan(
            self.batch_sizes,
            mesh.world_size,
            data_size=mesh.data_size,
            sequence_size=mesh.sequence,
            longest=longest,
            quadratic_cost=attention_cost(config),
        )

    def _settle_memory(self, mesh: MeshSizes) -> None:
        """Plan for the fullest GPU of all ranks, so that they decide alike.

        Raises:
            ConfigError: The plan does not fit.
        """
        gpus = [GPU(*numbers) for numbers in self.strategy.gather([total_and_free(self.strategy.root_device)])]
        run = PlannedRun(self, self.strategy, mesh, self._longest)
        self.memory = run.decide(min(gpus, key=lambda gpu: gpu.capacity))
        self.sleeps, self.optimizations = self.memory.plan.facts.sleeps, list(self.memory.kept)
        problem = shortfall(self.memory.plan)
        if problem is not None and self.on_memory_shortfall == "stop":
            raise problem
        if problem is not None:
            rank_zero_warn(str(problem))

    def configure_model(self) -> None:
        """Build what the stage needs and former stages, such as a validation, have not built."""
        if not hasattr(self, "policy"):
            self.policy, self.effects = build_policy(self.policy_config, self.optimizations, self.strategy)
            self.effects += self.memory.left_out if self.memory is not None else ()
            self.effects += [] if self.spec.fp8 is None else [Effect(describe(self.spec.fp8))]
        if self.trainer.state.fn != "fit":
            return
        if self.algorithm.needs.reference_policy and not self._reference:
            reference, effects = build_reference(
                self.reference_config, self.policy_config, self.optimizations, self.strategy
            )
            self._reference = [reference]
            self.effects += effects
        if self.critic_config is not None and not hasattr(self, "critic"):
            self.critic, effects = build_critic(
                self.critic_config, self.policy, self.policy_config, self.optimizations, self.strategy
            )
            self.effects += effects

    def configure_optimizers(self) -> Any:
        optimizers = [self.make_optimizer(self.policy.named_parameters())]
        make_schedulers = [self.make_lr_scheduler]
        if self.critic_config is not None:
            optimizers.append(self.critic_config.make_optimizer(self.critic.named_parameters()))
            make_schedulers.append(self.critic_config.lr_scheduler)
        pairs = zip(make_schedulers, optimizers, strict=True)
        self._schedulers = [None if make is None else make(optimizer) for make, optimizer in pairs]
        return optimizers, [scheduler for scheduler in self._schedulers if scheduler is not None]

    def on_train_start(self) -> None:
        self._start_engine()
        self.learners = self._make_learners()
        self.updater = Update(
            passes=MicroBatchRunner(self.plan, self.strategy),
            backward=self.manual_backward,
            skip_nonfinite=self.on_nonfinite == "skip",
            seed=self.seed,
        )
        self.stop_signal.install()
        limit_host_threads(self.strategy.root_device)
        freeze_gc()

    def _make_learners(self) -> ActorCritic:
        optimizers: Any = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        critic = None
        if self.critic_config is not None:
            critic = TrainableModel(
                "critic", self.critic, optimizers[1], self._schedulers[1], self.critic_config.max_grad_norm
            )
        return ActorCritic(
            policy=TrainableModel("policy", self.policy, optimizers[0], self._schedulers[0], self.max_grad_norm),
            critic=critic,
            critic_config=self.critic_config,
            reference=self._reference[0] if self._reference else None,
            algorithm=self.algorithm,
            sampling=self.sampling,
            hook=plugins().hook,
        )

    def on_train_end(self) -> None:
        self.stop_signal.uninstall()

    def on_validation_start(self) -> None:
        self._start_engine()

    def teardown(self, stage: str) -> None:
        self.stop_signal.uninstall()
        if hasattr(self, "player"):
            self.player.close()

    def _start_engine(self) -> None:
        self.offload = Offload(
            self.offload_mode,
            self.strategy.root_device,
            trained=[self.policy, self.critic] if hasattr(self, "critic") else [self.policy],
            reference=self._reference,
            optimizers=self.trainer.optimizers,
        )
        placement = Placement(self.strategy.root_device, self.global_rank, self.trainer.world_size)
        self.driver = EngineDriver(
            engine=self.engine,
            policy=self.policy,
            spec=self.spec,
            placement=placement,
            hook=plugins().hook,
            sleeps=self.sleeps,
            bucket_bytes=self.sync_bucket_bytes,
            offload=self.offload,
            any_rank=self.strategy.any_rank,
            max_restarts=self.max_engine_restarts,
        )
        self.clock.asleep_bytes = self.driver.asleep_bytes
        data = self._datamodule
        self.player = RolloutGenerator(
            driver=self.driver,
            spec=self.spec,
            placement=placement,
            tokenizer=self.tokenizer,
            make_environment=self.make_environment,
            options=self.turns,
            observations=ObservationTokens(
                self.tokenizer,
                chat=data.renders_chat and self.make_environment is not None,
                tools=data.template_tools,
                has_tools=bool(self.tools),
            ),
            gather=self.strategy.gather,
        )

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["rlplug"] = {
            "rollout_step": self.rollout_step,
            "policy_version": self.policy_version,
            "algorithm": self.algorithm.state_dict(),
            "in_flight": [] if self.in_flight is None else self.in_flight.state_dict(),
            "stepped": [bool(optimizer.state) for optimizer in self.trainer.optimizers],
            "rng": self.strategy.gather([rng_state()]),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["rlplug"]
        self.rollout_step = self.step = state["rollout_step"]
        self.policy_version = state["policy_version"]
        self.algorithm.load_state_dict(state["algorithm"])
        if self.trainer.state.fn == "fit":
            self._load_in_flight(state["in_flight"])
        for optimizer, stepped in zip(self.trainer.optimizers, state["stepped"], strict=False):  # none to validate
            if not stepped:
                optimizer.state.clear()  # see RLFSDP2Strategy.optimizer_state
        set_rng_state(state["rng"][self.global_rank % len(state["rng"])])

    def _load_in_flight(self, groups: list[dict[str, Any]]) -> None:
        if self.in_flight is not None:
            self.in_flight.load_state_dict(groups, self.stream.by_uid)
        elif groups:
            raise ConfigError(
                f"The checkpoint has {len(groups)} groups in flight, and model.partial_rollout is not set: set it as "
                "in the run that wrote the checkpoint."
            )
