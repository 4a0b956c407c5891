"""megatron-core, which takes seconds to import. Only tensor parallelism imports this module.

Its layers allocate a rank's share of the weights and set Megatron's marks, which DeepSpeed reads for gradient norms.
Our forward functions compute the products, so they run on any device and with the chosen kernels.
"""

from __future__ import annotations

import logging
import warnings

import torch
from torch import Tensor, nn

from ctxlm_ds.kernels.linear import LinearKernel
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.mappings import reduce_from_ranks, reduce_scatter_tokens, share_parameters
from ctxlm_ds.process.patches import compile_at_first_call, replaced

with warnings.catch_warnings(), replaced(torch, "compile", compile_at_first_call):
    # It warns that Transformer Engine and apex are missing, which are optional and not used here.
    warnings.simplefilter("ignore")
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    from megatron.core import ModelParallelConfig, parallel_state, tensor_parallel
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "VocabParallelTable", "mark_split",
           "parallel_state", "vocab_parallel_cross_entropy"]  # fmt: skip


def _config() -> ModelParallelConfig:
    """Return a configuration that leaves values unset (parallel/parameters.py sets them by name)."""
    return ModelParallelConfig(
        use_cpu_initialization=True, perform_initialization=False, params_dtype=torch.get_default_dtype()
    )


class _PlainState(nn.Module):
    """A module without the `_extra_state` that megatron-core's layers add to every state dict."""

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    def _drop_hooks(self) -> None:
        self._load_state_dict_pre_hooks.clear()


class ColumnParallelLinear(_PlainState, tensor_parallel.ColumnParallelLinear):
    """A rank's rows of a matrix [o, i], computed by a kernel that contains ColumnParallelProduct."""

    def __init__(
        self, in_features: int, out_features: int, kernel: LinearKernel, parallel: ParallelContext, bias: bool
    ) -> None:
        tensor_parallel.ColumnParallelLinear.__init__(
            self, in_features, out_features, bias=bias, config=_config(), init_method=_leave_unset,
            tp_group=parallel.group,
        )  # fmt: skip
        self._drop_hooks()
        mark_split(self.weight, dim=0)
        self.kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        """Map x [b, s, i] (or this rank's tokens [t / n, i]) to [b, s, o / n] (or [t, o / n])."""
        return self.kernel(x, self.weight, self.bias)


class RowParallelLinear(_PlainState, tensor_parallel.RowParallelLinear):
    """A rank's columns of a matrix [o, i]; the bias is added once, to the sum of the ranks' products."""

    def __init__(
        self, in_features: int, out_features: int, kernel: LinearKernel, parallel: ParallelContext, bias: bool
    ) -> None:
        tensor_parallel.RowParallelLinear.__init__(
            self, in_features, out_features, bias=bias, input_is_parallel=True, skip_bias_add=False, config=_config(),
            init_method=_leave_unset, tp_group=parallel.group,
        )  # fmt: skip
        self._drop_hooks()
        mark_split(self.weight, dim=1)
        self.kernel = kernel
        self.parallel = parallel

    def forward(self, x: Tensor) -> Tensor:
        """Map x [b, s, i / n] to [b, s, o], or to this rank's tokens [t / n, o] under sequence parallelism."""
        product = self.kernel(x, self.weight, None)
        if not self.parallel.splits_tokens:
            total = reduce_from_ranks(product, self.parallel)
            return total if self.bias is None else total + self.bias
        own = reduce_scatter_tokens(product.flatten(0, -2), self.parallel)
        if self.bias is None:
            return own
        (bias,) = share_parameters(self.parallel, self.bias)
        return own + bias


class VocabParallelTable(_PlainState, tensor_parallel.VocabParallelEmbedding):
    """A rank's rows of the padded word embedding; padding rows stay 0."""

    def __init__(self, vocab_size: int, hidden_size: int, parallel: ParallelContext) -> None:
        tensor_parallel.VocabParallelEmbedding.__init__(
            self, parallel.size * parallel.vocabulary_rows(vocab_size), hidden_size, config=_config(),
            init_method=_leave_unset, tp_group=parallel.group,
        )  # fmt: skip
        mark_split(self.weight, dim=0)
        with torch.no_grad():
            self.weight.zero_()


def _leave_unset(tensor: Tensor) -> None:
    """Do nothing; perform_initialization is off, so this is never called."""


def mark_split(parameter: nn.Parameter, dim: int) -> None:
    """Mark a parameter as split along `dim`, with another part on each rank."""
    tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, dim, 1)
