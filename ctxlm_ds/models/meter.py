"""Count the work of a call, operation by operation, on the `meta` device, where tensors have shapes and no data.

Fused attention and dropout take another path on `meta` than on the target device, so its operations replace them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ctxlm_ds.parallel.context import CONTEXT, TrafficCounter

aten = torch.ops.aten
MATRIX_PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm}
LOOK_UPS = {aten.embedding, aten.index_select, aten.gather, aten.index}
"""They read as much as they write, not the complete table."""
UNMOVED = {
    aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided, aten._unsafe_view,
    aten.detach,
}  # fmt: skip
ALIGNMENT_BYTES = 16
"""Tensor cores reach full speed if rows of a matrix begin at multiples of this (NVIDIA's guide of matrix products)."""
NAMESPACES = ("aten", "ctxlm_ds")
"""torch's operations, and those of kernels/."""
SCALINGS = {aten.mul, aten.div}
"""With a number they are part of the kernel before or after."""


@dataclass(frozen=True, slots=True)
class Platform:
    """The device whose operations are counted."""

    device: Literal["cuda", "cpu"] = "cuda"
    keeps_scores: bool = False
    """True if attention writes its s x s matrices and keeps them (before FlashAttention)."""
    reads_masks: bool = True
    """True if attention takes masks of what a position sees; False for kernels with bounds of sequences (`varlen`)."""


CUDA = Platform()
CPU = Platform("cpu")


class Product(NamedTuple):
    """One matrix product of a forward pass."""

    flops: int
    tokens: int
    """Rows of the result."""
    width: int
    """The smaller side of the weight."""
    computed: int
    """Of the `flops`, those that the device computes: fused causal attention leaves out later positions."""
    aligned: bool = True
    """False if rows of the weight or its transpose do not begin at multiples of ALIGNMENT_BYTES."""


class Work(NamedTuple):
    """Work of a forward and a backward pass on one rank, in bytes unless stated."""

    flops: int
    """Operations of the forward pass's products; a multiplication and an addition count as two."""
    forward_bytes: int
    """Read and written by all operations except products."""
    backward_bytes: int
    kept: int
    """Kept from the forward to the backward pass, without parameters and fields of the batch."""
    workspace: int
    """Largest temporary memory of a backward operation, plus the gradients of a layer's inputs and outputs."""
    scores: int
    """Elements of the attention matrices."""
    all_reduce: int
    all_gather: int
    reduce_scatter: int
    context_all_to_all: int
    context_all_gather: int
    context_reduce_scatter: int
    collectives: int
    """Number of tensor-parallel collectives."""
    context_collectives: int
    constant_flops: int
    """Of the `flops`, those of products with inputs that have no gradient: backward they are one product."""


class Trace(NamedTuple):
    """One call, counted."""

    work: Work
    products: tuple[Product, ...]
    fields: frozenset[str]
    """Fields of the batch that it keeps."""
    outputs: tuple[Tensor, ...]
    together: Callable[[int], float] = float
    """Of a number of rows, those whose temporary memory is held together."""


class Meter:
    """Counts consecutive calls; a storage that two of them keep counts for the first."""

    def __init__(self, platform: Platform, traffic: TrafficCounter, fields: dict[str, Tensor]) -> None:
        """`traffic` is the layers' counter of collectives, `fields` are those of the batch by name."""
        self.device = DeviceFunctions(platform)
        self._keeps_scores = platform.keeps_scores
        self._traffic = traffic
        self._fields = {_storage(tensor): name for name, tensor in fields.items()}
        self._kept: dict[int, Tensor] = {}

    def count(
        self,
        call: Callable[..., Sequence[Tensor]],
        inputs: Sequence[Tensor],
        parameters: Sequence[Tensor] = (),
        remember: bool = True,
        constants: Sequence[int] = (),
        in_one_pass: bool = False,
    ) -> Trace:
        """Run a call, which takes the inputs and returns tensors, forward and backward; detach the inputs, on `meta`.

        `parameters` are those of the call's module, `constants` the places of inputs that have no gradient in the
        model. Storages that are kept count in later calls only without `remember`. `in_one_pass`: the forward pass
        also computes the gradients, so that its first product counts, and its workspace does.
        """
        given = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
        counter = _Operations(parameters, self._keeps_scores, {_storage(given[place]) for place in constants})
        counter.in_one_pass = in_one_pass
        self.device.scores = self.device.score_bytes = 0
        held = dict(self._kept) if not remember else self._kept
        kept = _Kept({_storage(parameter) for parameter in parameters}, self._fields, held)
        self._traffic.reset()
        with counter:
            with saved_tensors_hooks(kept.pack, lambda tensor: tensor):
                outputs = tuple(call(*given))
            flowing = [output for output in outputs if output.requires_grad]
            arriving = [torch.empty_like(output) for output in flowing]
            counter.present = kept.storages | {_storage(gradient) for gradient in arriving}
            if flowing:
                torch.autograd.backward(flowing, arriving)
        ends = {_storage(x): _size(x) for x in (*arriving, *(x.grad for x in given)) if x is not None}
        sent = self._traffic.num_bytes
        exchanges = sum(calls for name, calls in self._traffic.calls.items() if name.startswith(CONTEXT))
        work = Work(
            flops=sum(product.flops for product in counter.products),
            forward_bytes=counter.forward_bytes,
            backward_bytes=counter.backward_bytes,
            kept=kept.num_bytes + self.device.score_bytes,
            workspace=counter.workspace + (sum(ends.values()) if parameters else 0),
            scores=self.device.scores,
            all_reduce=sent["all_reduce"],
            all_gather=sent["all_gather"],
            reduce_scatter=sent["reduce_scatter"],
            context_all_to_all=sent[CONTEXT + "all_to_all"],
            context_all_gather=sent[CONTEXT + "all_gather"],
            context_reduce_scatter=sent[CONTEXT + "reduce_scatter"],
            collectives=self._traffic.calls.total() - exchanges,
            context_collectives=exchanges,
            constant_flops=counter.constant_flops,
        )
        return Trace(work, tuple(counter.products), frozenset(kept.fields), outputs)


class OnDevice(nn.Module):
    """A module whose functions choose operations of the target device, also in recomputation."""

    def __init__(self, module: nn.Module, device: DeviceFunctions) -> None:
        super().__init__()
        self.module = module
        self._device = device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._device:
            return self.module(*args, **kwargs)


class _Kept:
    """The distinct storages that autograd saves."""

    def __init__(self, parameters: set[int], fields: dict[int, str], held: dict[int, Tensor]) -> None:
        self._parameters, self._all_fields, self._held = parameters, fields, held
        self.fields: set[str] = set()
        self.storages = set(parameters)
        self.num_bytes = 0

    def pack(self, tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        if storage in self._all_fields:
            self.fields.add(self._all_fields[storage])
        elif storage not in self._parameters:
            self.storages.add(storage)
            if storage not in self._held:
                # A reference keeps the storage alive, because a new one could reuse its address.
                self._held[storage] = tensor.detach()
                self.num_bytes += tensor.untyped_storage().nbytes()
        return tensor


class _Operations(TorchDispatchMode):
    """Counts operations as they reach the device."""

    def __init__(
        self, parameters: Sequence[Tensor], keeps_scores: bool = False, constants: AbstractSet[int] = frozenset()
    ) -> None:
        super().__init__()
        self._constants = constants
        self._keeps_scores = keeps_scores
        shapes = {tuple(parameter.shape) for parameter in parameters}
        self._gradients = shapes | {shape[::-1] for shape in shapes}
        self.present: set[int] | None = None
        """In the backward pass: storages that are not temporary."""
        self.in_one_pass = False
        self.products: list[Product] = []
        self.forward_bytes = self.backward_bytes = self.workspace = self.constant_flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        operation = func.overloadpacket
        if func.namespace not in NAMESPACES or func.is_view or operation in UNMOVED:
            return out
        sources = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if self.present is None and operation in flop_registry and not (self.in_one_pass and self.products):
            flops = flop_registry[operation](*args, **kwargs, out_val=out)
            named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
            skips = bool(named.get("is_causal")) and not self._keeps_scores
            self.products.append(_product(operation, sources, flops, skips))
            if operation in MATRIX_PRODUCTS and _storage(sources[-2]) in self._constants:
                self.constant_flops += flops
        if any(x.is_floating_point() for x in results):
            self._add(operation, sources, results)
        return out

    def _add(self, operation: Any, sources: list[Tensor], results: list[Tensor]) -> None:
        written = sum(_size(x) for x in results)
        read = sum(_size(x) for x in sources)
        if operation in LOOK_UPS:
            read = written
        moved = 0 if operation in MATRIX_PRODUCTS or (operation in SCALINGS and len(sources) == 1) else read + written
        if self.present is None:
            self.forward_bytes += moved
            if not self.in_one_pass:
                return
        else:
            self.backward_bytes += moved
        passing = {_storage(x): x for x in (*sources, *results) if tuple(x.shape) not in self._gradients}
        present = self.present or ()
        self.workspace = max(self.workspace, sum(_size(x) for storage, x in passing.items() if storage not in present))


class DeviceFunctions(TorchFunctionMode):
    """Replaces functions whose operation on `meta` differs from that of the target device."""

    def __init__(self, platform: Platform) -> None:
        super().__init__()
        self._platform = platform
        self.scores = self.score_bytes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is F.dropout and self._platform.device == "cuda":
            return torch.native_dropout(args[0], kwargs.get("p", 0.5), True)[0]
        return func(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        shape = (*query.shape[:-1], key.shape[-2])
        self.scores += prod(shape)
        # torch's fused attention on CPUs has neither dropout nor the gradient of a bias (T5).
        is_plain = dropout_p > 0.0 or (attn_mask is not None and attn_mask.requires_grad)
        if self._platform.device == "cpu" and is_plain:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if self._platform.keeps_scores:
            masks = (1 + query.element_size()) if dropout_p > 0.0 else 0
            self.score_bytes += prod(shape) * (query.element_size() + masks)
        if enable_gqa:
            group = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        is_mask = attn_mask is not None and attn_mask.dtype == torch.bool
        bias = None if is_mask and not self._platform.reads_masks and query.shape[-1] % 8 == 0 else attn_mask
        if bias is not None and bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill(~bias, float("-inf"))
        if self._platform.device == "cpu":
            return aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, dropout_p, is_causal, attn_mask=bias, scale=scale
            )[0]
        if bias is None:
            return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, bias.expand(shape), True, dropout_p, is_causal, scale=scale
        )[0]


def _product(operation: Any, sources: Sequence[Tensor], flops: int, skips: bool) -> Product:
    """Describe a product of tokens with a weight; attention counts as one with the columns of all heads.

    With `skips`, attention computes the pairs of a position and itself or an earlier one.
    """
    if operation in (aten.mm, aten.addmm):
        tokens, weight = sources[-2], sources[-1]
        aligned = all(size * weight.element_size() % ALIGNMENT_BYTES == 0 for size in weight.shape)
        return Product(flops, tokens.shape[0], min(weight.shape), flops, aligned)
    query = sources[-2] if operation in MATRIX_PRODUCTS else sources[0]
    batch, *heads, length, size = query.shape
    computed = flops * (length + 1) // (2 * length) if skips else flops
    return Product(flops, batch * length, prod(heads) * size, computed)


def _storage(tensor: Tensor) -> int:
    """Identify a storage; `data_ptr` is 0 on `meta`."""
    return tensor.untyped_storage()._cdata


def _size(tensor: Tensor) -> int:
    """Return the bytes of a tensor; those of an expanded one (a mask) count once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
