"""Adafactor (Shazeer & Stern 2018, arXiv:1804.04235) as mesh_tensorflow defines it, with which T5 was trained.

The second moment of a matrix is the product of its rows' and its columns' means, divided by the mean of all; here the
product is kept, one number per element, of which the means are those of rows and columns. So every ZeRO stage and
layout keeps and saves it as any moment. Matrices that one layer holds together (query, key and value) are separate
ones. A step is bounded by its root mean square, and its rate is relative to that of the weights.

Source: tensorflow/mesh mesh_tensorflow/optimize.py, AdafactorOptimizer with the values of T5's operative_config.gin.
transformers.optimization.Adafactor with scale_parameter computes the same, but factors matrices of any size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ctxlm_ds.parallel.placement import matrix_shape
from ctxlm_ds.recipe.sections import MOMENTS, OptimizerSection, UpdateSizes
from ctxlm_ds.training.optimizers.base import FLOAT, Optimizer

if TYPE_CHECKING:
    import torch

    from ctxlm_ds.parallel.parameters import ParameterFacts
    from ctxlm_ds.training.engine.fragments import Fragment
    from ctxlm_ds.training.optimizers.steps import ParameterLayout, Stepper

SECOND = MOMENTS[1]
LEAST_SIZE_TO_FACTOR = 128
SQUARE_EPS, SCALE_EPS = 1e-30, 1e-3
"""Added to squared gradients; least root mean square of weights in a rate."""
LARGEST_STEP = 1.0
"""Root mean square above which a step is divided by it."""
DECAY_EXPONENT = 0.8
CHUNK_ELEMENTS = 2**22
"""Elements whose squares are held together."""


class Matrix(NamedTuple):
    """A matrix, of which a parameter may hold several below each other, or any other parameter."""

    number: int
    first_row: int
    rows: int
    columns: int
    sums: int | None
    """Place of its sums of rows, then of columns, among those of all factored matrices; None if it is not factored."""


class Piece(NamedTuple):
    """Consecutive rows and columns of a matrix in a flat tensor."""

    matrix: Matrix
    rows: slice
    columns: slice
    offset: int
    """Of the first element in the flat tensor."""
    counts: bool
    """False if another rank holds the same and counts it."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the view [rows, columns] of a tensor that is laid out as the piece's."""
        shape = self.rows.stop - self.rows.start, self.columns.stop - self.columns.start
        return tensor.view(-1).narrow(0, self.offset, shape[0] * shape[1]).view(shape)


class AdafactorSection(OptimizerSection):
    """Adafactor (Shazeer 2018) with T5's settings: learning_rate is relative to the size of the weights."""

    moments: ClassVar = (SECOND,)
    bytes_per_element: ClassVar = 140
    """Moment 36, sums 8, product 20, norms 8, step 40, decay 8, weight 20."""

    name: str = "adafactor"

    def workspace(self, sizes: UpdateSizes) -> int:
        """Return the bytes of the largest matrix's second moment in fp64, or of its root and the step."""
        return 2 * FLOAT * min(sizes.largest, sizes.share)


class Adafactor(Optimizer):
    """Adafactor without a first moment; weight decay is decoupled and relative to the scaled rate."""

    section = AdafactorSection

    def bind(self, layout: ParameterLayout) -> None:
        import torch

        matrices, self._num_sums = list_matrices(layout.shapes, layout.facts)
        sizes = [matrix.rows * matrix.columns for found in matrices.values() for matrix in found]
        self._sizes = torch.tensor(sizes, dtype=torch.float64)
        self._sharers = layout.sharers
        self._pieces: dict[int, list[Piece]] = {}
        for fragment in layout.fragments:
            pieces = self._pieces.setdefault(id(fragment.owner), [])
            pieces.extend(_pieces(fragment, matrices[fragment.name]))

    def step_group(self, states: Stepper, group: dict[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        import torch

        work = [(parameter, piece) for parameter in parameters for piece in self._pieces.get(id(parameter), [])]
        device = parameters[0].device
        seconds = {parameter: _next_moment(states, parameter) for parameter in parameters}
        sums = torch.zeros(self._num_sums, dtype=torch.float64, device=device)
        squares = torch.zeros(2, len(self._sizes), dtype=torch.float64, device=device)
        for parameter, piece in work:
            if piece.counts:
                _add_sums(sums, piece, piece.of(seconds[parameter]))
                squares[0, piece.matrix.number] += _square(piece.of(parameter))
        self._sharers.add_up(sums)
        for parameter, piece in work:
            second = piece.of(seconds[parameter])
            if piece.matrix.sums is not None:
                second.copy_(_product(sums, piece))
            if piece.counts:
                squares[1, piece.matrix.number] += _square(_update(parameter, second, piece))
        self._sharers.add_up(squares)
        weights, steps = (squares / self._sizes.to(device)).sqrt()
        rates = group["lr"] * weights.clamp_min(SCALE_EPS)
        factors = rates / (steps / LARGEST_STEP).clamp_min(1.0)
        for parameter, piece in work:
            number, weight = piece.matrix.number, piece.of(parameter)
            if group["weight_decay"]:
                weight.mul_((1.0 - group["weight_decay"] * rates[number]).to(weight.dtype))
            # Computed again: those of all pieces would be another copy of the weights.
            weight.sub_(_update(parameter, piece.of(seconds[parameter]), piece).mul_(factors[number].to(weight.dtype)))


def _update(parameter: torch.Tensor, second: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return the gradient of a piece over the root of its second moment."""
    assert parameter.grad is not None
    return piece.of(parameter.grad) * second.rsqrt()


def _next_moment(states: Stepper, parameter: torch.Tensor) -> torch.Tensor:
    """Add the gradient's squares to the second moment as if it were of single elements, and return the moment."""
    state = states.next_state(parameter, (SECOND,))
    assert parameter.grad is not None
    decay = 1.0 - state["step"] ** -DECAY_EXPONENT
    flat = (tensor.view(-1).split(CHUNK_ELEMENTS) for tensor in (parameter.grad, state[SECOND]))
    for gradient, second in zip(*flat, strict=True):
        second.mul_(decay).add_(gradient.square().add_(SQUARE_EPS), alpha=1.0 - decay)
    return state[SECOND]


def list_matrices(
    shapes: Mapping[str, Sequence[int]], facts: Mapping[str, ParameterFacts]
) -> tuple[dict[str, list[Matrix]], int]:
    """Return the matrices of each parameter, and the number of sums of all factored ones."""
    found: dict[str, list[Matrix]] = {}
    number = sums = 0
    for name, shape in shapes.items():
        split, (rows, columns) = facts[name].split, matrix_shape(shape)
        top, found[name] = 0, []
        for height in split.blocks if split is not None and split.blocks else (rows,):
            is_factored = len(shape) > 1 and min(height, columns) >= LEAST_SIZE_TO_FACTOR
            found[name].append(Matrix(number, top, height, columns, sums if is_factored else None))
            sums += (height + columns) * is_factored
            number, top = number + 1, top + height
    return found, sums


def _pieces(fragment: Fragment, matrices: Sequence[Matrix]) -> Iterator[Piece]:
    counts = not fragment.holding.tensor_duplicate
    for rectangle in fragment.shard.rectangles(fragment.start, fragment.length):
        columns = slice(rectangle.column_start, rectangle.column_stop)
        for matrix in matrices:
            top = matrix.first_row
            first, stop = max(top, rectangle.row_start), min(top + matrix.rows, rectangle.row_stop)
            if first < stop:
                skipped = (first - rectangle.row_start) * rectangle.width
                offset = fragment.offset + rectangle.offset - fragment.start + skipped
                yield Piece(matrix, slice(first - top, stop - top), columns, offset, counts)


def _add_sums(sums: torch.Tensor, piece: Piece, values: torch.Tensor) -> None:
    if piece.matrix.sums is None:
        return
    of_rows, of_columns = _sums_of(sums, piece.matrix)
    of_rows[piece.rows] += values.sum(dim=1, dtype=sums.dtype)
    of_columns[piece.columns] += values.sum(dim=0, dtype=sums.dtype)


def _sums_of(sums: torch.Tensor, matrix: Matrix) -> Sequence[torch.Tensor]:
    assert matrix.sums is not None
    return sums.narrow(0, matrix.sums, matrix.rows + matrix.columns).split([matrix.rows, matrix.columns])


def _product(sums: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return the second moment of a piece: means of its rows times means of its columns over the mean of all."""
    of_rows, of_columns = _sums_of(sums, piece.matrix)
    return (of_rows[piece.rows] / of_rows.sum())[:, None] * of_columns[piece.columns]


def _square(values: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.linalg.vector_norm(values, dtype=torch.float64).square()
