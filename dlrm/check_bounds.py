"""How far rounding alone may carry two correct fp64 runs apart: a limit for every element.

Two runs of the same model round differently: other plans, other processors and other numbers of
threads sum in other orders. An optimizer may amplify that (Adagrad near zero state by up to
lr / eps), so no single number says what is too much. `ErrorBounds` follows the plain reference of a
check and keeps for every element of rows, state and dense weights what its difference from another
correct run may be. With the unit round-off u = 2⁻⁵³ and

    γ(n) = 4 √n u        the rounding of a sum of n terms, relative to the sum of their magnitudes
                         (Higham and Mary, "A new approach to probabilistic rounding error
                         analysis", 2019; the certain bound, n u of Higham's "Accuracy and Stability
                         of Numerical Algorithms", chapter 3, is not needed at these lengths)

a step has three parts:

1. Gradients of pooled vectors. What the network's rounding and the errors of weights and rows make
   of them is measured: a probe, a second reference whose weights and pooled vectors are disturbed
   by u with random signs, whose samples are in another order, and whose rows, state and weights go
   their own way from step to step, lies r from the reference. An element may differ by
   `e = 8 max(r, mean of r over the sample, the batch's median of that relative to a)`, where a is
   the largest derivative of the sample's logit. What is exactly 0 in both (a dead unit) stays 0.
2. Gradients. Of a row, `δg = Σ |factor| e + γ(lookups) Σ |factor| a` over its lookups. Of a dense
   weight `δg = 8 max(r, m M) + γ(samples) M`: M is the sum over samples of |input| · |slope|, m the
   root mean square of r relative to M, over a row, a column or all of the matrix.
   Clipping adds `‖δg‖ / ‖g‖`, relative.
3. The update. Rows and state are taken to lie anywhere within their bounds, gradients within δg:
   the farthest that the rule can then go from the reference's own step (`check_rules`) is added to
   the weight's bound; a state's new bound is the same for its new value. The update's own rounding
   is 2 u of the new value and 8 u of the step.

The probe is one draw of what rounding does. 8 times its distance leaves room for what another run
shows and is little enough that a fault of ten times the bound stands out
(`tests/unit/test_check_bounds.py` holds both). Bounds are kept for touched rows only; the others
must be equal. `eps` must be above 0 (`check.prepare_check` refuses 0): at 0 a step may be anything
where a gradient of 0 lies within its bounds.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dlrm.check_compare import comparable_state
from dlrm.check_reference import (
    EvaluatedPart,
    PlainRun,
    PlainStep,
    RowGradients,
    sample_losses,
)
from dlrm.check_rules import Ends, UpdateRule
from dlrm.mlp import LinearReLU

_WEIGHT = "weight"
UNIT_ROUNDOFF = 2.0**-53
PROBE_FACTOR = 8.0
_LIKELY = 4.0


def bytes_of_bounds(num_rows: int, width: int, num_lookups: int) -> int:
    """Memory that the bounds of a table and the probe's distances take at most.

    Args:
        num_rows: of the table.
        width: of a row with its state.
        num_lookups: of the table in all steps; no more rows are touched.
    """
    num_kept = min(2 * num_lookups, num_rows)  # Room is made for twice as many as there are.
    return 2 * num_kept * width * torch.float64.itemsize + num_rows * torch.int32.itemsize


def likely_rounding(num_terms: float) -> float:
    """γ(n), relative to the sum of the terms' magnitudes."""
    return _LIKELY * math.sqrt(max(num_terms, 1.0)) * UNIT_ROUNDOFF


@dataclass
class GradientErrors:
    """Of one step's gradients, clipped.

    Attributes:
        loss: by how much it may differ.
        rows: by table, `(K, D)` beside its `RowGradients`: by how much each may differ.
        row_shifts: by table: the probe's less the reference's.
        dense: by parameter by how much each may differ.
        dense_shifts: by parameter: the probe's less the reference's.
    """

    loss: float
    rows: dict[str, Tensor]
    row_shifts: dict[str, Tensor]
    dense: list[Tensor]
    dense_shifts: list[Tensor]


class _Errors:
    """Bounds and the probe's distances of some elements, by name: `weight` and each state."""

    def __init__(self, widths: Mapping[str, int], num_rows: int) -> None:
        self.bounds = {name: _zeros(num_rows, width) for name, width in widths.items()}
        self.shifts = {name: _zeros(num_rows, width) for name, width in widths.items()}

    def grow(self, num_rows: int) -> None:
        """Makes room, with zeros."""
        for values in (self.bounds, self.shifts):
            for name, old in values.items():
                values[name] = _zeros(num_rows, old.shape[1])
                values[name][: old.shape[0]] = old


class _TableErrors:
    """`_Errors` of the touched rows of a table."""

    def __init__(self, widths: Mapping[str, int], num_rows: int) -> None:
        self._slots_R = torch.full((num_rows,), -1, dtype=torch.int32)
        self._num_slots = 0
        self._errors = _Errors(widths, 0)

    def slots(self, rows_K: Tensor) -> Tensor:
        """Where the errors of these distinct rows are; new rows get a place."""
        is_new_K = self._slots_R[rows_K] < 0
        num_new = int(is_new_K.sum())
        if num_new:
            first, self._num_slots = self._num_slots, self._num_slots + num_new
            self._slots_R[rows_K[is_new_K]] = torch.arange(
                first, self._num_slots, dtype=torch.int32
            )
            if self._num_slots > self._errors.bounds[_WEIGHT].shape[0]:
                self._errors.grow(min(2 * self._num_slots, self._slots_R.numel()))
        return self._slots_R[rows_K].long()

    def take(self, slots_K: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Copies of bounds and shifts."""
        errors = self._errors
        return (
            {name: values[slots_K] for name, values in errors.bounds.items()},
            {name: values[slots_K] for name, values in errors.shifts.items()},
        )

    def put(
        self, slots_K: Tensor, bounds: Mapping[str, Tensor], shifts: Mapping[str, Tensor]
    ) -> None:
        """Replaces them."""
        for name in bounds:
            self._errors.bounds[name][slots_K] = bounds[name]
            self._errors.shifts[name][slots_K] = shifts[name]

    def shifts_of(self, rows_L: Tensor) -> Tensor:
        """The probe's rows less the reference's; `rows_L` may repeat, all were touched."""
        return self._errors.shifts[_WEIGHT][self._slots_R[rows_L].long()]

    def bounds_of(self, rows_K: Tensor) -> dict[str, Tensor]:
        """Bounds of any rows: 0 where nothing was touched."""
        slots_K = self._slots_R[rows_K].long()
        found = {}
        for name, values in self._errors.bounds.items():
            found[name] = _zeros(rows_K.numel(), values.shape[1])
            touched_K = slots_K >= 0
            found[name][touched_K] = values[slots_K[touched_K]]
        return found


class ErrorBounds:
    """Follows a `PlainRun`; each step `measure` after its gradients, `advance` before its update.

    Args:
        run: the reference, in fp64.
        seed: of the probe's disturbances.
    """

    def __init__(self, run: PlainRun, seed: int) -> None:
        self._run = run
        self._rule, self._dense_rule = run.update_rules()
        self._generator = torch.Generator().manual_seed(seed)
        self._model = copy.deepcopy(run.model)
        self._magnitudes: dict[Tensor, Tensor] = {}
        for layer in self._model.modules():
            if isinstance(layer, nn.Linear):
                self._watch(layer)
        self._tables: dict[str, _TableErrors] = {}
        for table in run.table_configs:
            widths = dict.fromkeys((_WEIGHT, *self._rule.states), table.dim)
            if self._rule.name == "rowwise_adagrad":
                widths["sum"] = 1
            self._tables[table.name] = _TableErrors(widths, table.rows)
        names = (_WEIGHT, *self._dense_rule.states)
        self._dense = [
            tuple({name: torch.zeros_like(p) for name in names} for _ in ("bounds", "shifts"))
            for p in run.model.parameters()
        ]

    # ------------------------------------------------------------------------------- gradients

    def measure(self, step: PlainStep) -> GradientErrors:
        """What the gradients of a step may differ by."""
        for table, gradients in step.row_gradients.items():
            self._tables[table].slots(gradients.rows_K)
        self._disturb_model()
        self._magnitudes.clear()
        loss = 0.0
        terms: list[tuple[EvaluatedPart, Tensor, Tensor]] = []
        for part in step.evaluated:
            logit_shifts_B, grad_shifts_BS = self._probe(part)
            assert part.batch.label_B is not None
            slopes_B = (part.logits_B.sigmoid() - part.batch.label_B.double()).abs()
            loss += float((part.shares_B.abs() * slopes_B * logit_shifts_B.abs()).sum())
            terms.append((part, grad_shifts_BS, self._pooled_errors(part, grad_shifts_BS)))
        rows, row_shifts = {}, {}
        for table, gradients in step.row_gradients.items():
            rows[table], row_shifts[table] = self._row_errors(table, gradients, step, terms)
        dense, dense_shifts = self._dense_errors(step)
        errors = GradientErrors(PROBE_FACTOR * loss, rows, row_shifts, dense, dense_shifts)
        return self._clipped(step, errors)

    def _disturb_model(self) -> None:
        """Brings the probe's network to where it is, disturbed by u."""
        parameters = zip(
            self._model.parameters(), self._run.model.parameters(), self._dense, strict=True
        )
        for probe, reference, (_, shifts) in parameters:
            probe.grad = None
            values = reference.detach() + shifts[_WEIGHT]
            probe.data.copy_(values * (1 + UNIT_ROUNDOFF * self._signs(values)))

    def _probe(self, part: EvaluatedPart) -> tuple[Tensor, Tensor]:
        """The probe's logits and gradients of pooled vectors, less the reference's."""
        pooled_BS = part.pooled_BS.clone()
        for found in self._run.occurrences(part.batch.ids):
            shifts_LD = self._tables[found.table].shifts_of(found.rows_L) * found.factors_L1
            columns = self._run.columns[found.feature]
            pooled_BS[:, columns].index_add_(0, found.samples_L, shifts_LD)
        pooled_BS *= 1 + 2 * UNIT_ROUNDOFF * self._signs(pooled_BS)
        order_B = torch.randperm(part.batch.batch_size, generator=self._generator)
        leaf_BS = pooled_BS[order_B].requires_grad_()
        logits_B = self._model(part.batch.dense_BN[order_B].double(), leaf_BS)
        assert part.batch.label_B is not None
        loss_B = sample_losses(logits_B, part.batch.label_B[order_B])
        (loss_B * part.shares_B[order_B]).sum().backward()
        logit_shifts_B = torch.empty_like(part.logits_B)
        logit_shifts_B[order_B] = logits_B.detach()
        grad_BS = torch.zeros_like(part.grad_BS)
        if leaf_BS.grad is not None:
            grad_BS[order_B] = leaf_BS.grad
        return logit_shifts_B - part.logits_B, grad_BS - part.grad_BS

    def _pooled_errors(self, part: EvaluatedPart, grad_shifts_BS: Tensor) -> Tensor:
        """`e_b`, `(B, S)`; 0 where a derivative is exactly 0 in both, as that of a dead unit is."""
        if not grad_shifts_BS.numel():
            return torch.zeros_like(grad_shifts_BS)
        sizes_B1, shifts_BS = part.slopes_B1, grad_shifts_BS.abs()
        typical_B1 = shifts_BS.mean(1, keepdim=True)
        ratio = torch.where(sizes_B1 > 0, typical_B1 / sizes_B1, 0.0).median()
        typical_B1 = torch.maximum(typical_B1, sizes_B1 * (ratio + UNIT_ROUNDOFF))
        is_0_BS = (part.grad_BS == 0) & (grad_shifts_BS == 0)
        return PROBE_FACTOR * torch.maximum(shifts_BS, typical_B1).masked_fill(is_0_BS, 0.0)

    def _row_errors(
        self,
        table: str,
        gradients: RowGradients,
        step: PlainStep,
        terms: Sequence[tuple[EvaluatedPart, Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Margins and the probe's shifts of a table's gradients, before clipping."""
        rows_K = gradients.rows_K
        margin_KD = torch.zeros_like(gradients.grads_KD)
        shifts_KD = torch.zeros_like(gradients.grads_KD)
        for part, grad_shifts_BS, errors_BS in terms:
            for found in self._run.occurrences(part.batch.ids):
                if found.table != table:
                    continue
                columns = self._run.columns[found.feature]
                positions_L = torch.searchsorted(rows_K, found.rows_L)
                errors_LD = errors_BS[:, columns][found.samples_L] * found.factors_L1.abs()
                margin_KD.index_add_(0, positions_L, errors_LD)
                shifts_LD = grad_shifts_BS[:, columns][found.samples_L] * found.factors_L1
                shifts_KD.index_add_(0, positions_L, shifts_LD)
        sizes_KD = torch.where(margin_KD > 0, gradients.magnitudes / step.clip_factor, 0.0)
        rounding_K1 = UNIT_ROUNDOFF * gradients.num_lookups_K[:, None].double().sqrt()
        shifts_KD += rounding_K1 * sizes_KD * self._signs(shifts_KD)
        return margin_KD + _LIKELY * rounding_K1 * sizes_KD, shifts_KD

    def _dense_errors(self, step: PlainStep) -> tuple[list[Tensor], list[Tensor]]:
        """Margins and the probe's shifts of dense gradients, before clipping."""
        num_samples = sum(part.batch.batch_size for part in step.evaluated)
        rounding = likely_rounding(num_samples)
        margins, shifts = [], []
        for gradient, probe in zip(step.dense_gradients, self._model.parameters(), strict=True):
            gradient = gradient / step.clip_factor
            shift = torch.zeros_like(gradient) if probe.grad is None else probe.grad - gradient
            sizes = self._magnitudes.get(probe, torch.zeros_like(gradient))
            margin = PROBE_FACTOR * torch.maximum(shift.abs(), _typical(shift, sizes) * sizes)
            margins.append(margin + rounding * sizes)
            shifts.append(shift)
        return margins, shifts

    def _watch(self, layer: nn.Linear) -> None:
        """Sums the magnitudes of the terms that the gradients of a layer are made of."""

        def see_output(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if not output.requires_grad:
                return
            sizes_BN = _sizes(inputs[0].detach()[:, : layer.in_features])
            is_dead_BM = output.detach() <= 0 if isinstance(layer, LinearReLU) else None

            def see_gradient(grad_BM: Tensor) -> None:
                if is_dead_BM is not None:
                    grad_BM = grad_BM.masked_fill(is_dead_BM, 0.0)
                slopes_BM = _sizes(grad_BM)
                self._add_magnitudes(layer.weight, slopes_BM.t() @ sizes_BN)
                if layer.bias is not None:
                    self._add_magnitudes(layer.bias, slopes_BM.sum(0))

            output.register_hook(see_gradient)

        layer.register_forward_hook(see_output)

    def _add_magnitudes(self, parameter: Tensor, sizes: Tensor) -> None:
        old = self._magnitudes.get(parameter)
        self._magnitudes[parameter] = sizes if old is None else old + sizes

    def _clipped(self, step: PlainStep, errors: GradientErrors) -> GradientErrors:
        """The errors of the clipped gradients."""
        if step.clip_factor == 1.0:
            return errors
        factor, norm = step.clip_factor, step.gradient_norm
        all_margins = [*errors.dense, *errors.rows.values()]
        relative = math.sqrt(sum(float(m.square().sum()) for m in all_margins)) / norm
        relative += likely_rounding(sum(m.numel() for m in all_margins))
        rows = {
            table: factor * errors.rows[table] + relative * gradients.grads_KD.abs()
            for table, gradients in step.row_gradients.items()
        }
        dense = [
            factor * margin + relative * gradient.abs()
            for margin, gradient in zip(errors.dense, step.dense_gradients, strict=True)
        ]
        # To first order the probe's norm is the reference's: the margin has the rest.
        row_shifts = {table: factor * shifts for table, shifts in errors.row_shifts.items()}
        dense_shifts = [factor * shifts for shifts in errors.dense_shifts]
        return GradientErrors(errors.loss, rows, row_shifts, dense, dense_shifts)

    # ---------------------------------------------------------------------------------- update

    def advance(self, step_number: int, step: PlainStep, errors: GradientErrors) -> None:
        """Carries the bounds over a step; called before the reference's own update. Where that
        updates nothing they stay.

        Args:
            step_number: counted from 0.
            step: the gradients.
            errors: of them.
        """
        if not self._run.has_weight:
            return
        number_of_update = self._run.num_updates + 1
        lr_dense, lr_rows = self._run.learning_rates(step_number)
        for table, gradients in step.row_gradients.items():
            slots_K = self._tables[table].slots(gradients.rows_K)
            bounds, shifts = self._tables[table].take(slots_K)
            self._carry(
                self._rule,
                (lr_rows, number_of_update),
                self._run.tables.take(table, gradients.rows_K),
                (gradients.grads_KD, errors.rows[table], errors.row_shifts[table]),
                (bounds, shifts),
            )
            self._tables[table].put(slots_K, bounds, shifts)
        states = self._run.dense_state()
        for number, parameter in enumerate(self._run.model.parameters()):
            before = {name: torch.zeros_like(parameter) for name in self._dense_rule.states}
            before |= states[number] | {_WEIGHT: parameter.detach()}
            self._carry(
                self._dense_rule,
                (lr_dense, number_of_update),
                before,
                (step.dense_gradients[number], errors.dense[number], errors.dense_shifts[number]),
                self._dense[number],
            )

    def _carry(
        self,
        rule: UpdateRule,
        when: tuple[float, int],
        before: Mapping[str, Tensor],
        gradient: tuple[Tensor, Tensor, Tensor],
        errors: tuple[dict[str, Tensor], ...],
    ) -> None:
        """One update: changes `errors`, bounds and shifts by name.

        Args:
            rule: the optimizer's.
            when: learning rate, and number of the update from 1.
            before: values and states.
            gradient: the gradient, its margin, the probe's shift.
            errors: bounds and shifts.
        """
        bounds, shifts = errors
        grads, margin, shift = gradient
        state = {name: comparable_state(name, before[name]) for name in rule.states}
        weight, decay = before[_WEIGHT], rule.weight_decay
        if decay:
            grads = grads + decay * weight
            margin = margin + decay * (bounds[_WEIGHT] + 2 * UNIT_ROUNDOFF * weight.abs())
            shift = shift + decay * shifts[_WEIGHT]
        after = rule.after(*when, grads, state)
        box = {name: Ends.around(values, bounds[name]) for name, values in state.items()}
        ends = rule.ends(*when, Ends.around(grads, margin), box)
        moved = {name: values + shifts[name] for name, values in state.items()}
        for name in set(moved) - {"exp_avg"}:
            moved[name].clamp_(min=0)
        probe = rule.after(*when, grads + shift, moved)
        for name, values in after.items():
            reach = ends[name].margin(values)
            if name == _WEIGHT:
                new = (weight - values).abs()
                rounding = UNIT_ROUNDOFF * (2 * new + 8 * values.abs())
                bounds[name] = bounds[name] + reach + rounding
                shifts[name] = shifts[name] - (probe[name] - values).nan_to_num(nan=0.0)
            else:
                bounds[name] = reach + 4 * UNIT_ROUNDOFF * values.abs()
                shifts[name] = probe[name] - values

    # ---------------------------------------------------------------------------------- limits

    def of_rows(self, table: str, rows_K: Tensor) -> dict[str, Tensor]:
        """Bounds of rows and their state, by name; of sums of squares, of their roots."""
        return self._tables[table].bounds_of(rows_K)

    def of_dense(self, number: int) -> dict[str, Tensor]:
        """Bounds of a parameter and its state."""
        bounds, _ = self._dense[number]
        return bounds

    def _signs(self, like: Tensor) -> Tensor:
        """+1 or -1, at random."""
        signs = torch.randint(0, 2, like.shape, generator=self._generator, dtype=torch.int8)
        return signs.mul_(2).sub_(1).to(like.dtype)


def _sizes(values_BN: Tensor) -> Tensor:
    """What rounding of values is relative to: their size and the mean of their sample's, since a
    small one may be what is left of large ones. Of what is exactly 0, 0."""
    sizes_BN = values_BN.abs()
    return (sizes_BN + sizes_BN.mean(1, keepdim=True)).masked_fill(sizes_BN == 0, 0.0)


def _typical(shifts: Tensor, sizes: Tensor) -> Tensor:
    """Of shifts relative to sizes, the root mean square over all, a row, or a column of a matrix:
    the largest."""

    def ratio(*dims: int) -> Tensor:
        squares = (values.square().sum(dims, keepdim=True) for values in (shifts, sizes))
        numerator, denominator = squares
        return torch.where(denominator > 0, numerator / denominator, 0.0).sqrt()

    if shifts.dim() != 2:
        return ratio(*range(shifts.dim()))
    return torch.maximum(torch.maximum(ratio(0), ratio(1)), ratio(0, 1))


def _zeros(num_rows: int, width: int) -> Tensor:
    return torch.zeros(num_rows, width, dtype=torch.float64)
