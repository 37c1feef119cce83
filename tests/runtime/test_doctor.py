"""The doctor names what is missing and the command that mends it, and works where everything is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trtllm_forespark.runtime import doctor


def test_the_report_is_json_and_text(tmp_path: Path) -> None:
    found = doctor.report(tmp_path)
    assert json.loads(json.dumps(found)) == found
    assert found["cpu"]["cores"] >= 1 and found["memory"]["total"] > 0
    assert found["backends"]["torch-cpu"]["works"]
    text = doctor.text(found)
    for part in ("torch-cpu", "tensorrt_llm", str(tmp_path), found["python"]):
        assert part in text


def test_a_missing_model_has_one_command_that_mends_it(tmp_path: Path) -> None:
    found = doctor.report(tmp_path)
    assert not found["ok"]
    (problem,) = found["problems"]
    assert problem["mend"] == "forespark pull smollm2-135m"
    assert problem["mend"] in doctor.text(found)


def test_every_backend_that_does_not_work_says_why(tmp_path: Path) -> None:
    for name, backend in doctor.report(tmp_path)["backends"].items():
        assert backend["works"] or backend["why"], name


def test_a_fetched_model_and_its_tables_are_found(tmp_path: Path) -> None:
    for name in ("models/smollm2-135m/model.gguf", "tables/smollm2-135m.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = doctor.report(tmp_path)
    assert found["ok"] and found["cache"]["embedded_model"] and len(found["cache"]["latency_tables"]) == 1


def test_every_missing_package_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    found = doctor.report(tmp_path)
    assert found["packages"]["tensorrt"]["mend"] == "pip install 'trtllm-forespark[engines]'"
    assert found["problems"][0] == {
        "what": "torch, safetensors, gguf, tokenizers not installed",
        "mend": "pip install 'trtllm-forespark[cpu]'",
    }
    assert not any(b["works"] for b in found["backends"].values())
    assert "torch is not installed" in doctor.text(found)


def test_the_extras_named_exist() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    for name, (_, source) in doctor.OPTIONAL.items():
        assert not source.startswith("[") or f"\n{source[1:-1]} = [" in text, name


def test_the_doctor_runs_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from trtllm_forespark.runtime import doctor\n"
        f"print(doctor.text(doctor.report(__import__('pathlib').Path({str(tmp_path)!r}))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "pip install 'trtllm-forespark[cpu]'" in done.stdout
