"""Trains the real-data recipes over several seeds, beside a logistic regression on the same split.

    .venv/bin/python scripts/bench_recipes.py [--seeds 5] [--recipes adult bank …]

The raw files are looked for under $DLRM_SHARED_DATA (default ../shared/data). The regression
(scikit-learn, one-hot ids, standardised dense columns, C of 0.1 and 1, the better one counts) reads
the same prepared rows. Prints one JSON line per recipe.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import OneHotEncoder, StandardScaler

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.lanes import LABEL_COLUMN
from data.parquet import PreparedDataset
from dlrm.__main__ import run

RECIPES = ("criteo_kaggle_sample", "adult", "bank")


def regression_auc(root: Path) -> float:
    """AUC on the test part of the better of two logistic regressions."""
    dataset = PreparedDataset(root)

    def columns(part: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        dense = [dataset.column(part, name) for name in dataset.manifest.dense_columns]
        ids = [dataset.column(part, feature.name) for feature in dataset.features]
        return np.stack(dense, 1), np.stack(ids, 1), dataset.column(part, LABEL_COLUMN)

    dense, ids, labels = columns("train")
    scaler, encoder = StandardScaler().fit(dense), OneHotEncoder(handle_unknown="ignore").fit(ids)

    def design(dense: np.ndarray, ids: np.ndarray) -> Any:
        return scipy.sparse.hstack([scaler.transform(dense), encoder.transform(ids)]).tocsr()

    test_dense, test_ids, test_labels = columns("test")
    aucs = []
    for strength in (0.1, 1.0):
        model = LogisticRegression(C=strength, max_iter=1000).fit(design(dense, ids), labels)
        scores = model.decision_function(design(test_dense, test_ids))
        aucs.append(float(roc_auc_score(test_labels, scores)))
    return max(aucs)


def main() -> None:
    """Runs recipe after recipe."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--recipes", nargs="+", default=RECIPES, choices=RECIPES)
    options = parser.parse_args()
    for recipe in options.recipes:
        evals = []
        with tempfile.TemporaryDirectory() as folder:
            for seed in range(options.seeds):
                run_dir = Path(folder) / str(seed)
                arguments = [f"experiment={recipe}", f"seed={seed}", f"hydra.run.dir={run_dir}"]
                if status := run(["train", *arguments]):
                    sys.exit(status)
                result = json.loads((run_dir / "result.json").read_text())
                evals.append(result["eval"])
        aucs = [entry["auc"] for entry in evals]
        regression = regression_auc(Path(result["data"]["root"]))
        summary = {
            "recipe": recipe,
            "auc": [round(auc, 4) for auc in aucs],
            "auc_mean": round(statistics.mean(aucs), 4),
            "auc_deviation": round(statistics.stdev(aucs), 4) if len(aucs) > 1 else None,
            "logloss_mean": round(statistics.mean(e["logloss"] for e in evals), 4),
            "ne_mean": round(statistics.mean(e["ne"] for e in evals), 4),
            "logistic_regression_auc": round(regression, 4),
        }
        print(json.dumps(summary), flush=True)


if __name__ == "__main__":
    main()
