"""Keys of verl: those of ``ppo_trainer.yaml``, and older names that its scripts still use."""

from __future__ import annotations

from typing import Final

from rlplug_migrate.keys import Framework
from rlplug_migrate.verl import algorithm, batch, data, engine, optimizer, run, tuning

VERL: Final = Framework(
    name="verl",
    version="0.9.1",
    keys=tuple(key for module in (algorithm, batch, optimizer, tuning, engine, data, run) for key in module.KEYS),
    rules=(
        algorithm.write_algorithm,
        algorithm.write_kl,
        algorithm.write_correction,
        algorithm.write_critic,
        batch.write_batch,
        optimizer.write_optimizers,
        tuning.write_optimizations,
        tuning.write_memory,
        tuning.write_mesh,
        engine.write_engine,
        engine.write_validation_sampling,
        data.write_sources,
        data.write_rewards,
        run.write_trainer,
        run.write_loggers,
        run.write_checkpoints,
        run.write_profile,
    ),
    program=r"\bverl\.trainer\.main_ppo\b|\bmain_ppo\.py\b|\brecipe\.\w+\.main_\w+",
    takes_options=False,
    sections=frozenset({"actor_rollout_ref", "algorithm", "critic", "data", "trainer"}),
)
