"""Keys of TRL: those of ``GRPOConfig``, ``ModelConfig`` and the arguments of ``trl grpo``."""

from __future__ import annotations

from typing import Final

from rlplug_migrate.keys import Framework
from rlplug_migrate.trl import algorithm, engine, run

TRL: Final = Framework(
    name="TRL",
    version="1.16.0",
    keys=(*algorithm.KEYS, *engine.KEYS, *run.KEYS),
    rules=(
        algorithm.write_algorithm,
        run.write_sizes,
        run.write_optimizer,
        run.write_trainer,
        run.write_source,
        run.write_rewards,
        engine.write_engine,
    ),
    program=r"\btrl\s+(?:grpo|rloo)\b|\S*(?:grpo|gspo|rloo)\w*\.py\b",
    takes_options=True,
    sections=frozenset(
        {
            *("model_name_or_path", "learning_rate", "num_generations", "max_completion_length"),
            *("per_device_train_batch_size", "dataset_name", "beta", "loss_type", "use_vllm"),
        }
    ),
)
