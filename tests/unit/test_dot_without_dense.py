"""`model.interaction=dot` on data without dense columns, such as ratings of films."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import scipy.stats
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import OneHotEncoder

from data.errors import UserError
from data.lanes import LABEL_COLUMN
from data.parquet import PreparedDataset
from data.prepare import RawInputs, prepare
from data.schema import RawFormat, Schema, SparseColumn, Split
from dlrm.checkpoint import open_checkpoint
from dlrm.checkpoint_load import load_model
from dlrm.model import DLRM
from tests.commands import build_trainer, compose_config, latest, write_visits

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("one_thread")]


def write_ratings(folder: Path, num_rows: int) -> PreparedDataset:
    """Ratings by a few users of a few items: what users and items are like by themselves says most,
    their products little. The best AUC is about .74."""
    rng = np.random.default_rng(3)
    users, items = 80, 120
    of_user, of_item = rng.normal(size=users) * 0.7, rng.normal(size=items) * 0.9
    tastes, kinds = rng.normal(size=(users, 3)) * 0.3, rng.normal(size=(items, 3)) * 0.3
    user_B, item_B = rng.integers(0, users, num_rows), rng.integers(0, items, num_rows)
    score_B = of_user[user_B] + of_item[item_B] + (tastes[user_B] * kinds[item_B]).sum(1)
    label_B = (rng.random(num_rows) < 1 / (1 + np.exp(-score_B))).astype(int)
    folder.mkdir(parents=True, exist_ok=True)
    raw = folder / "ratings.tsv"
    lines = [f"{y}\t{u}\t{i}" for y, u, i in zip(label_B, user_B, item_B, strict=True)]
    raw.write_text("\n".join(lines) + "\n")
    ids = SparseColumn(token="int", vocabulary="dictionary", missing="row")
    schema = Schema(
        name="ratings",
        format=RawFormat(columns=["label", "user", "item"]),
        sparse={"user": ids, "item": ids},
        split=Split(kind="random", valid=0.0, test=0.25, seed=0),
    )
    prepare(schema, RawInputs([raw]), folder / "prepared")
    return PreparedDataset(folder / "prepared")


def regression_auc(dataset: PreparedDataset) -> tuple[float, float]:
    """Of one-hot logistic regression on the test part: the AUC and its standard error.

    The AUC is the mean, over the m positive rows, of the share of the n negative rows that score
    lower; and just as well the mean, over the negative rows, of the share of the positive ones that
    score higher. Test rows are drawn independently of each other, so to first order its variance is
    the variance of the former shares over m plus that of the latter over n (DeLong, 1988).
    """

    def columns(part: str) -> tuple[Any, Any]:
        ids = np.stack([dataset.column(part, name) for name in ("user", "item")], 1)
        return ids, dataset.column(part, LABEL_COLUMN)

    ids, labels = columns("train")
    encoder = OneHotEncoder(handle_unknown="ignore").fit(ids)
    model = LogisticRegression(max_iter=500).fit(
        scipy.sparse.csr_matrix(encoder.transform(ids)), labels
    )
    test_ids, test_labels = columns("test")
    scores_B = model.decision_function(encoder.transform(test_ids))
    is_positive_B = np.asarray(test_labels) > 0.5
    positive, negative = scores_B[is_positive_B], scores_B[~is_positive_B]
    m, n = positive.size, negative.size
    # Of all rows that score lower, ties by half, those of the same class are taken off.
    ranks_B = scipy.stats.rankdata(scores_B)
    lower_m = (ranks_B[is_positive_B] - scipy.stats.rankdata(positive)) / n
    higher_n = 1 - (ranks_B[~is_positive_B] - scipy.stats.rankdata(negative)) / m
    error = math.sqrt(lower_m.var(ddof=1) / m + higher_n.var(ddof=1) / n)
    return float(lower_m.mean()), error


def test_f41_the_standard_error_is_that_of_drawn_test_rows(tmp_path: Path) -> None:
    """What bounds the comparison below: about .0063 for 6,000 rows of which half are positive, as
    Hanley and McNeil's formula says too."""
    dataset = write_ratings(tmp_path / "ratings", 24_000)
    auc, error = regression_auc(dataset)
    num_positive = int((dataset.column("test", LABEL_COLUMN) > 0.5).sum())
    m, n = num_positive, dataset.num_rows("test") - num_positive
    q1, q2 = auc / (2 - auc), 2 * auc**2 / (1 + auc)
    of_positive, of_negative = (m - 1) * (q1 - auc**2), (n - 1) * (q2 - auc**2)
    expected = math.sqrt((auc * (1 - auc) + of_positive + of_negative) / (m * n))
    assert error == pytest.approx(expected, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("interaction", ["dot", "cat", "dcnv2"])
def test_f41_every_interaction_keeps_up_with_logistic_regression(
    interaction: str, tmp_path: Path
) -> None:
    """With the optimizers of `dlrm train`. The limit is one standard error of the regression's AUC
    over draws of the test rows (`regression_auc` derives it), which is about .006 here."""
    dataset = write_ratings(tmp_path / "ratings", 24_000)
    optim = compose_config("train").optim
    parts = build_trainer(
        dataset,
        tmp_path / "run",
        {
            "data": {"batch_size": 256},
            "model": {
                "embedding_dim": 16,
                "bottom_mlp": [],
                "top_mlp": [64, 32],
                "interaction": interaction,
                **({"dcn_rank": 8} if interaction == "dcnv2" else {}),
            },
            "train": {"epochs": 2},
            "optim": {
                part: {"name": getattr(optim, part).name, "lr": getattr(optim, part).lr}
                for part in ("sparse", "dense")
            },
        },
    )
    parts.trainer.fit()
    found = parts.trainer.evaluate("test").result()
    assert found.auc is not None
    expected, error = regression_auc(dataset)
    assert found.auc >= expected - error


def test_f41_a_checkpoint_of_the_older_dot_is_refused_by_what_it_is(tmp_path: Path) -> None:
    dataset = write_ratings(tmp_path / "ratings", 400)
    parts = build_trainer(dataset, tmp_path / "run", {"model": {"embedding_dim": 4}})
    model = parts.trainer.model
    # As it was: the first layer sees the one product of the pair alone.
    older = torch.nn.Linear(1, model.top[0].out_features)
    model.top[0].weight = older.weight
    parts.trainer._save(is_best=False)
    info = open_checkpoint(latest(tmp_path / "run"))
    fresh = build_trainer(dataset, tmp_path / "new", {"model": {"embedding_dim": 4}}).trainer
    with pytest.raises(UserError, match=r"version whose model\.interaction=dot .* train anew"):
        load_model(info, fresh.model, fresh.embeddings)
    assert isinstance(fresh.model, DLRM)


def test_f41_other_differences_of_dense_weights_are_told_as_ever(tmp_path: Path) -> None:
    dataset = write_visits(tmp_path / "visits", 40)
    parts = build_trainer(dataset, tmp_path / "run", {})
    parts.trainer._save(is_best=False)
    info = open_checkpoint(latest(tmp_path / "run"))
    wider = build_trainer(dataset, tmp_path / "new", {"model": {"top_mlp": [7]}}).trainer
    with pytest.raises(UserError) as caught:
        load_model(info, wider.model, wider.embeddings)
    assert "differ" in str(caught.value)
    assert "interaction" not in str(caught.value)
