"""Blocks of verl's configuration whose names are long."""

from __future__ import annotations

from typing import Final

ACTOR: Final = "actor_rollout_ref.actor"
MODEL: Final = "actor_rollout_ref.model"
REF: Final = "actor_rollout_ref.ref"
ROLLOUT: Final = "actor_rollout_ref.rollout"
OPTIM: Final = f"{ACTOR}.optim"
FSDP: Final = f"{ACTOR}.fsdp_config"
