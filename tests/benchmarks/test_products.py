"""The benchmark of products times what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import products
from lora_serve.core.model_spec import LinearShape


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_report_has_both_products_of_every_layer_and_row_count(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(products, "SHAPES", {"small": LinearShape(64, 96), "output head": LinearShape(64, 128)})
    monkeypatch.setattr(products, "WEIGHT_BYTES", 50_000)
    monkeypatch.setattr(products, "LEAST_FLOPS", 1e5)
    products.main(["--dtype", dtype, "--rows", "1,96", "--rounds", "1", "--out", str(tmp_path / "report.json")])
    report = json.loads((tmp_path / "report.json").read_text())
    assert [(row["layer"], row["rows"]) for row in report["rows"]] == [("small", 1), ("small", 96), ("output head", 1)]
    assert report["rows"][1]["flops"] == 2 * 96 * 64 * 96
    assert all(seconds > 0 for row in report["rows"] for seconds in row["seconds"].values())
    assert len(capsys.readouterr().out.splitlines()) == 4
