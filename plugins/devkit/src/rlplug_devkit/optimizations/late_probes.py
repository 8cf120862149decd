"""Probes of what shows late: in long rows, in bfloat16, in what passes keep, and in a second model."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule

from rlplug.distributed.fsdp_units import transformer_blocks
from rlplug.distributed.mesh import local_part
from rlplug.interfaces.memory import ActivationTraits
from rlplug_devkit.optimizations.structure import attributes_read, is_plain, structure_of
from rlplug_devkit.process_state import new_objects_alone, num_alive
from rlplug_devkit.trainers.cases import VOCABULARY, rows
from rlplug_devkit.trainers.ranks import Measured

NUM_PASSES: Final = 6
NUM_NORMED: Final = 256
"""Rows that each norm gets."""
LONG: Final = [(3, 130), (2, 70), (1, 0), (4, 64), (1, 1), (2, 33), (1, 128), (5, 995)]
"""Tokens of prompt and completion of rows beyond usual sizes of chunks, in as many rows as the others."""


class LateProbes(Measured):
    """Probes that come after those of a first step; ``run`` returns values of all ranks."""

    optimizations: list[Any]

    def single(self) -> dict[str, Tensor]:
        """Return gradients of micro-batches of a row each."""
        return self.gradients_of(1)

    def long(self) -> Tensor:
        """Return values of rows of up to 1,000 tokens, in one packed row."""
        return self.run(rows(lengths=LONG), len(LONG))

    def bfloat16(self) -> dict[str, Any]:
        """Return values of a policy with the folder's weights, rounded to bfloat16, and how exact its norms are."""
        own, config = (self.policy, self.optimizer), self.config
        self.config = dataclasses.replace(config, dtype="bfloat16")
        self._build()
        values, norms = self.run(rows(), rows().num_sequences), error_of_norms(self.policy)
        self.policy, self.optimizer, self.config = *own, config
        self.strategy.model, self.strategy.optimizers = self.policy, [self.optimizer]
        return {"values": values.float(), "norms": norms}

    def kept(self) -> dict[str, int]:
        """Return how many tensors and hooks each of some passes left, and how many keep the last one's graph."""
        self._pass()
        with new_objects_alone():
            before = self._held()
            for _ in range(NUM_PASSES - 1):
                self._pass()
            former = graphs()
            self._pass()
            after = self._held()
            num_graphs = len(graphs() - former)
        return {name: (after[name] - before[name]) // NUM_PASSES for name in before} | {"graphs": num_graphs}

    def _pass(self) -> None:
        self.run(rows(), rows().num_sequences)
        self.gradients_of(rows().num_sequences)
        self.policy.zero_grad()

    def _held(self) -> dict[str, int]:
        return {
            "tensors": num_alive((Tensor,)),
            "hooks": sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in self.policy.modules()),
        }

    def saved(self) -> dict[str, Any]:
        """Return what a forward pass keeps for the backward one: bytes, and rows of logits; and what its plan says."""
        num_bytes = num_logits = 0
        is_backward = False
        blocks = transformer_blocks(self.policy)
        of_block: dict[nn.Module | None, int] = dict.fromkeys([*blocks, None], 0)
        block: nn.Module | None = None

        def enter(module: nn.Module, args: Any) -> None:
            nonlocal block
            block = module

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal block
            block = None

        def pack(tensor: Tensor) -> Tensor:
            nonlocal num_bytes, num_logits
            if not is_backward:
                num_bytes += local_part(tensor).nbytes
                of_block[block] += local_part(tensor).nbytes
                is_of_vocabulary = tensor.dim() > 0 and tensor.shape[-1] == VOCABULARY
                num_logits = max(num_logits, tensor.numel() // VOCABULARY if is_of_vocabulary else 0)
            return tensor

        def unpack(tensor: Tensor) -> Tensor:
            nonlocal is_backward
            is_backward = True  # what is computed again is not kept
            return tensor

        hooks = [each.register_forward_pre_hook(enter) for each in blocks]
        hooks += [each.register_forward_hook(leave) for each in blocks]
        with saved_tensors_hooks(pack, unpack):
            self.gradients_of(rows().num_sequences)
        for hook in hooks:
            hook.remove()
        self.policy.zero_grad()
        plan = traits = ActivationTraits()
        for each in self.optimizations:
            plan = each.plan_memory(plan)
        chunks = plan.logits_chunk is not None and not plan.keeps_logits
        is_less = plan.recompute != traits.recompute or plan.activations_on_host or chunks
        return {
            "bytes": num_bytes,
            "blocks": [of_block[each] for each in blocks],
            "recomputed": len(blocks) // plan.recompute_every if plan.recompute == "all" else 0,
            "planned less": is_less,
            "logits": num_logits,
            "chunk": None if plan.keeps_logits else plan.logits_chunk,
        }

    def second(self) -> dict[str, str]:
        """Return the structure of a second policy."""
        with self._another():
            self._build()
            return structure_of(self.policy)

    def unread(self) -> list[str]:
        """Return the attributes that the optimizations add, where they change nothing else and no pass reads one."""
        with self._another():
            structures, own = [], self.optimizations
            for self.optimizations in ([], [], own):
                self._build()
                structures.append(structure_of(self.policy))
            plain, again, edited = structures
            added = {name for name in edited if plain.get(name) == again.get(name) != edited[name]}
            if not added or any(name in plain or not is_plain(edited[name]) for name in added):
                return []
            with attributes_read(self.policy) as seen:
                self.gradients_of(rows().num_sequences)
            return [] if seen & added else sorted(added)

    @contextmanager
    def _another(self) -> Iterator[None]:
        """Let a probe build other policies, and go on with this one after it."""
        own = self.policy, self.optimizer
        yield
        self.policy, self.optimizer = own
        self.strategy.model, self.strategy.optimizers = self.policy, [self.optimizer]


@torch.no_grad()
def error_of_norms(policy: nn.Module) -> float:
    """Return by which share norms scale rows too much or too little: the root of the mean square over drawn rows.

    Roundings of single entries average out in a row, those of its mean square or its root do not. 0 without norms.
    """
    units = [module for module in policy.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.unshard()
    generator, errors = torch.Generator().manual_seed(0), [torch.zeros(1)]
    for norm in policy.modules():
        epsilon, weight = getattr(norm, "variance_epsilon", None), getattr(norm, "weight", None)
        if epsilon is None or weight is None:
            continue
        given = torch.randn(1, NUM_NORMED, len(weight), generator=generator).to(weight.dtype)
        whole = given.float()
        exact = whole * torch.rsqrt(whole.square().mean(-1, keepdim=True) + epsilon) * weight.float()
        scale = (norm(given).float() * exact).sum(-1) / exact.square().sum(-1)
        errors.append(scale.flatten() - 1)
    for unit in units:
        unit.reshard()
    return float(torch.cat(errors).square().mean().sqrt())


def graphs() -> set[int]:
    """Return the ids of all tensors that a graph has computed; torch's compiler keeps some of its own."""
    gc.collect()
    tensors = (each for each in gc.get_objects() if issubclass(type(each), Tensor))
    return {id(each) for each in tensors if each.grad_fn is not None}
