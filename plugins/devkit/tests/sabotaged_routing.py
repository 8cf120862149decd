"""Engines with a mistake each in the experts that they return. ``test_sabotage.py`` runs the checks on them."""

from __future__ import annotations

import dataclasses

import numpy as np
from rlplug_devkit.engines.routing import RoutingChecks
from sabotage import Sabotaged

from rlplug.rollout.hf_engine import HFRollout


class ChangesExperts(HFRollout):
    def generate(self, requests, sampling):
        completions = super().generate(requests, sampling)
        return [
            dataclasses.replace(c, routed_experts=self.changed(c.routed_experts.copy(), r.prompt_ids))
            for r, c in zip(requests, completions, strict=True)
        ]


class ShiftsByOneToken(ChangesExperts):
    def changed(self, experts, prompt_ids):
        experts[1:-1] = experts[:-2]
        return experts


class SwapsLayers(ChangesExperts):
    def changed(self, experts, prompt_ids):
        return experts[:, ::-1]


class NamesAnExpertTwice(ChangesExperts):
    def changed(self, experts, prompt_ids):
        experts[0, 0, 1] = experts[0, 0, 0]
        return experts


class KeepsExpertsOfItsPrompts(ChangesExperts):
    """Has a cache of experts beside that of keys and values, and forgets the one alone when weights come."""

    def changed(self, experts, prompt_ids):
        cache = self.__dict__.setdefault("_cache", [])
        for tokens, cached in cache:
            length = min(len(tokens), len(prompt_ids), len(cached) - 1)
            if tokens[:20] == prompt_ids[:20]:
                experts[:length] = cached[:length]
        cache.append((prompt_ids, np.array(experts)))
        return experts


class TestShifted(Sabotaged, RoutingChecks):
    engine = ShiftsByOneToken


class TestSwappedLayers(Sabotaged, RoutingChecks):
    engine = SwapsLayers


class TestTwice(Sabotaged, RoutingChecks):
    engine = NamesAnExpertTwice


class TestStaleExperts(Sabotaged, RoutingChecks):
    engine = KeepsExpertsOfItsPrompts
