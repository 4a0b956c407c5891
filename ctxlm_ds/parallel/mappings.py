"""Collectives on activations between ranks that share a layer or a row, as autograd functions.

Those of tensor parallelism replace megatron-core's mappings, whose sequence-parallel ones allocate on the current CUDA
device. Tokens are split in their flattened order [b·s, h], so no transposition and no divisible sequence length is
needed. Context parallelism shares the positions of each row; inside attention, ranks exchange them for heads and back
(DeepSpeed-Ulysses, Jacobs 2023, arXiv:2309.14509), and predictions are shared by slots. torch.compile cuts its graphs
here; otherwise it would specialise each of them on the state around it.

Shape letters: t tokens (b·s), n ranks of tensor parallelism, h width, i inputs, o outputs of a rank's share of a layer;
b rows, s positions of a row, c ranks of context parallelism, a heads, d size of a head, p slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.parallel.context import CONTEXT, ParallelContext

Send = Callable[[Tensor, ParallelContext], Tensor]


@torch._disable_dynamo
def reduce_from_ranks(x: Tensor, parallel: ParallelContext) -> Tensor:
    """Sum x over the ranks in place, after a layer with split inputs; backward passes the gradient on."""
    return _ReduceFromRanks.apply(x.contiguous(), parallel) if parallel.size > 1 else x


@torch._disable_dynamo
def reduce_scatter_tokens(x: Tensor, parallel: ParallelContext) -> Tensor:
    """Sum x [t, h] over the ranks and return this rank's tokens [t / n, h]; backward gathers."""
    return _Collective.apply(x, parallel, _scatter_tokens, _gather_tokens)


@torch._disable_dynamo
def gather_tokens(x: Tensor, parallel: ParallelContext) -> Tensor:
    """Gather x [t / n, h] to [t, h], before a part that every rank computes; backward takes this rank's tokens."""
    return _Collective.apply(x, parallel, _gather_tokens, _own_tokens)


def own_tokens(x: Tensor, parallel: ParallelContext) -> Tensor:
    """Return this rank's tokens [t / n, ...] of values [t, ...] that every rank holds, without a gradient."""
    return x.unflatten(0, (parallel.size, -1)).select(0, parallel.rank)


def share_parameters(parallel: ParallelContext, *parameters: Tensor) -> tuple[Tensor, ...]:
    """Return parameters that every rank holds and uses for its tokens only; backward sums their gradients.

    One collective inside autograd sums all of them, so every ZeRO stage receives complete gradients.
    """
    return _share(parallel, *parameters) if parallel.splits_tokens else parameters


@torch._disable_dynamo
def _share(parallel: ParallelContext, *parameters: Tensor) -> tuple[Tensor, ...]:
    return _ShareParameters.apply(parallel, *parameters)


@dataclass(frozen=True)
class ColumnParallelProduct:
    """The product of a layer split by its outputs (a linear kernel), with communication during computation.

    As in megatron-core, the all-reduce (or reduce-scatter) of the input's gradient runs while the weight's gradient is
    computed. Under sequence parallelism the gathered input is not kept but gathered again.
    """

    parallel: ParallelContext
    in_float32: bool
    """Compute as kernels/linear.py's float32."""
    split_tokens: bool
    """x holds this rank's tokens only."""

    @torch._disable_dynamo
    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map x [..., i] ([t / n, i] with split tokens), weight [o, i], bias [o] to [..., o] ([t, o])."""
        return _ColumnProduct.apply(x, weight, bias, self)


class _ReduceFromRanks(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, parallel: ParallelContext) -> Tensor:
        ctx.mark_dirty(x)
        all_reduce(x, parallel)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _Collective(Function):
    """Sends x, and its gradient by another collective."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parallel: ParallelContext, there: Send, back: Send) -> Tensor:
        ctx.parallel, ctx.back = parallel, back
        return there(x, parallel)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.back(gradient, ctx.parallel), None, None, None


def _scatter_tokens(x: Tensor, parallel: ParallelContext) -> Tensor:
    return reduce_scatter(x.contiguous(), parallel)[0]


def _gather_tokens(x: Tensor, parallel: ParallelContext) -> Tensor:
    return all_gather(x.contiguous(), parallel)[0]


def _own_tokens(x: Tensor, parallel: ParallelContext) -> Tensor:
    return own_tokens(x, parallel).contiguous()


class _ShareParameters(Function):
    @staticmethod
    def forward(ctx: Any, parallel: ParallelContext, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.parallel = parallel
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        flat = all_reduce(torch.cat([gradient.reshape(-1) for gradient in gradients]), ctx.parallel)
        pieces = flat.split([gradient.numel() for gradient in gradients])
        return None, *(piece.view_as(gradient) for piece, gradient in zip(pieces, gradients, strict=True))


class _ColumnProduct(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: ColumnParallelProduct) -> Tensor:
        ctx.product = product
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, weight)
        total = all_gather(x.contiguous(), product.parallel)[0] if product.split_tokens else x
        if product.in_float32:
            return F.linear(total.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
        return F.linear(total, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        product: ColumnParallelProduct = ctx.product
        parallel, dtype = product.parallel, x.dtype
        total, gathering = x, None
        if product.split_tokens:
            total, gathering = all_gather(x.contiguous(), parallel, wait=False)
        if product.in_float32:
            gradient, weight = gradient.float(), weight.float()
        of_input = gradient.matmul(weight).to(dtype)
        if gathering is not None:
            gathering.wait()
            of_input, reducing = reduce_scatter(of_input, parallel, wait=False)
        else:
            reducing = dist.all_reduce(_counted("all_reduce", of_input, parallel), group=parallel.group, async_op=True)
        flat_gradient, flat_input = gradient.flatten(0, -2), total.flatten(0, -2).to(gradient.dtype)
        of_weight = flat_gradient.t().matmul(flat_input).to(dtype)
        of_bias = flat_gradient.sum(dim=0).to(dtype) if ctx.has_bias else None
        reducing.wait()
        return of_input, of_weight, of_bias, None


def all_reduce(x: Tensor, parallel: ParallelContext, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Reduce x over the ranks in place, and count the traffic; one rank has the result."""
    if parallel.size == 1:
        return x
    x = x.contiguous()
    dist.all_reduce(_counted("all_reduce", x, parallel), op=op, group=parallel.group)
    return x


def all_gather(x: Tensor, parallel: ParallelContext, wait: bool = True) -> tuple[Tensor, Any]:
    """Gather x [t / n, ...] to [t, ...] without autograd; return it and, without `wait`, what to wait for."""
    total = x.new_empty(parallel.size * x.shape[0], *x.shape[1:])
    work = dist.all_gather_into_tensor(
        _counted("all_gather", total, parallel), x, group=parallel.group, async_op=not wait
    )
    return total, work


def reduce_scatter(x: Tensor, parallel: ParallelContext, wait: bool = True) -> tuple[Tensor, Any]:
    """Sum x [t, ...] to this rank's share [t / n, ...] without autograd; return as all_gather."""
    share = x.new_empty(x.shape[0] // parallel.size, *x.shape[1:])
    work = dist.reduce_scatter_tensor(
        share, _counted("reduce_scatter", x, parallel), group=parallel.group, async_op=not wait
    )
    return share, work


def _counted(operation: str, x: Tensor, parallel: ParallelContext) -> Tensor:
    parallel.traffic.add(operation, x.numel() * x.element_size())
    return x


def own_share(values: Tensor, shared: str, parallel: ParallelContext) -> Tensor:
    """Return what this rank reads of a field [b, columns] (Field.shared): [b, columns / c], or own_slots."""
    if parallel.context_size == 1 or shared == "complete":
        return values
    return own_slots(values, parallel) if shared == "slots" else own_positions(values, parallel).contiguous()


def own_positions(values: Tensor, parallel: ParallelContext) -> Tensor:
    """Return this rank's positions [b, s / c] of complete rows [b, s]."""
    return values.chunk(parallel.context_size, dim=1)[parallel.context_rank]


def own_slots(values: Tensor, parallel: ParallelContext, fill: int = IGNORE_LABEL) -> Tensor:
    """Return this rank's share [ceil(b p / c)] of slots [b, p] that all ranks have; `fill` is behind the last slot."""
    size, flat = parallel.context_size, values.flatten()
    return F.pad(flat, (0, -len(flat) % size), value=fill).chunk(size)[parallel.context_rank].contiguous()


@torch._disable_dynamo
def all_slots(values: Tensor, shape: torch.Size, parallel: ParallelContext) -> Tensor:
    """Return slots of `shape` [b, p] from the shares of all ranks, without a gradient; the reverse of own_slots."""
    return _gather(values, parallel)[: shape.numel()].view(shape)


@torch._disable_dynamo
def select_slots(hidden: Tensor, positions: Tensor, parallel: ParallelContext) -> Tensor:
    """Return the vectors of this rank's slots [ceil(b p / c), h].

    `positions` [b, p] are those of all slots in complete rows, hidden [b, s / c, h] this rank's positions. Every slot
    is at a position of one rank, so the sum over ranks is exact.
    """
    length = hidden.shape[1]
    own = positions - parallel.context_rank * length
    elsewhere = (own < 0) | (own >= length)
    row_starts = torch.arange(len(hidden), device=hidden.device)[:, None] * length
    found = hidden.flatten(0, 1).index_select(0, (own.masked_fill(elsewhere, 0) + row_starts).flatten())
    found = found.masked_fill(elsewhere.flatten()[:, None], 0.0)
    padded = F.pad(found, (0, 0, 0, -len(found) % parallel.context_size))
    return _Collective.apply(padded, parallel, _sum_slots, _gather)


@torch._disable_dynamo
def to_heads(tensors: Sequence[Tensor], parallel: ParallelContext) -> tuple[Tensor, ...]:
    """Exchange positions for heads: each x [b, s / c, a, d] becomes [b, s, a / c, d], in one collective."""
    size = parallel.context_size
    pieces = [x.unflatten(2, (size, -1)).movedim(2, 0) for x in tensors]
    heads = _Collective.apply(torch.cat(pieces, dim=3), parallel, _exchange, _exchange).movedim(0, 1).flatten(1, 2)
    return heads.split([x.shape[2] // size for x in tensors], dim=2)


@torch._disable_dynamo
def to_positions(x: Tensor, parallel: ParallelContext) -> Tensor:
    """Exchange heads for positions: x [b, s, a / c, d] becomes [b, s / c, a, d]."""
    pieces = x.unflatten(1, (parallel.context_size, -1)).movedim(1, 0).contiguous()
    return _Collective.apply(pieces, parallel, _exchange, _exchange).movedim(0, 2).flatten(2, 3)


class Run(NamedTuple):
    """Consecutive tokens of a rank that are also consecutive in the complete micro-batch."""

    begin: int
    """Number of the first token on this rank."""
    end: int
    """Number after the last one."""
    first: int
    """Number of the first token in the complete micro-batch."""


def token_runs(count: int, parallel: ParallelContext, split_tokens: bool) -> list[Run]:
    """Return the runs of `count` tokens; `split_tokens`: they are this rank's share under sequence parallelism too."""
    skipped, total = (count * parallel.rank, count * parallel.size) if split_tokens else (0, count)
    if parallel.context_size == 1:
        return [Run(0, count, skipped)]
    length = total // parallel.rows
    runs, place = [], skipped
    while place < skipped + count:
        row, inside = divmod(place, length)
        stop = min(skipped + count, (row + 1) * length)
        first = (row * parallel.context_size + parallel.context_rank) * length + inside
        runs.append(Run(place - skipped, stop - skipped, first))
        place = stop
    return runs


def _exchange(x: Tensor, parallel: ParallelContext) -> Tensor:
    """Send piece i of x [c, ...] to rank i; return the pieces of all ranks."""
    x = x.contiguous()
    received = torch.empty_like(x)
    _counted(CONTEXT + "all_to_all", x, parallel)
    dist.all_to_all_single(received, x, group=parallel.context_group)
    return received


def _sum_slots(x: Tensor, parallel: ParallelContext) -> Tensor:
    """Sum x [k, h] over the ranks and return this rank's share [k / c, h]."""
    share = x.new_empty(len(x) // parallel.context_size, x.shape[1])
    _counted(CONTEXT + "reduce_scatter", x, parallel)
    dist.reduce_scatter_tensor(share, x.contiguous(), group=parallel.context_group)
    return share


def _gather(share: Tensor, parallel: ParallelContext) -> Tensor:
    total = share.new_empty(len(share) * parallel.context_size, *share.shape[1:])
    _counted(CONTEXT + "all_gather", total, parallel)
    dist.all_gather_into_tensor(total, share.contiguous(), group=parallel.context_group)
    return total
