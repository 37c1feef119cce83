"""The `forespark` command: what it prints where, its JSON keys, and one line for bad input."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trtllm_forespark.cli import main

from .runtime.test_real_model import make_llm


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(list(argv))
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> str:
    """A latency table file, so that no command measures this machine."""
    llm = make_llm()
    path = tmp_path_factory.mktemp("tables") / "table.json"
    llm.table.save(path)
    path.with_suffix(".caps.json").write_text(json.dumps({"caps": {"1": 3, "4": 2}}))
    return str(path)


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, trtllm_forespark.cli as c\n"
        "try: c.main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert time.perf_counter() - started < 20, "a hang; how quick it is on an idle machine is in docs/benchmarks.md"


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["generate", "hi", "--policy", "fast"], "policy = 'fast'"),
        (["generate", "hi", "--max-tokens", "0"], "max_tokens = 0"),
        (["generate", "hi", "--temperature", "-1"], "temperature = -1.0"),
        (["generate", "  "], "the prompt is empty"),
        (["generate", "hi", "--model", "no-such-model"], "unknown model 'no-such-model'"),
        (["generate", "hi", "--device", "cuda:99"], "not on this machine"),
        (["generate", "hi", "--config", "/nowhere.yaml"], "cannot be read as YAML"),
        (["bench", "decode", "--loads", "1,x"], "not a comma-separated list of whole numbers"),
        (["bench", "decode", "--prompts", "/nowhere.jsonl"], "No such file"),
        (["distill", "--prompts", "/nowhere.jsonl", "--output", "x.npz"], "No such file"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, argv: list[str], text: str) -> None:
    code, out, err = run(capsys, *argv)
    lines = [line for line in err.splitlines() if line.startswith("forespark:")]
    assert code == 2 and out == "" and len(lines) == 1 and text in lines[0], err


def test_unknown_settings_in_a_config_file_are_named(capsys, tmp_path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("policy: wcs\nmax_batch: 4\n")
    code, _, err = run(capsys, "generate", "hi", "--config", str(path))
    assert code == 2 and "engine.yaml: unknown setting 'max_batch'; known: " in err


@pytest.mark.model
def test_generate_prints_the_text_alone_and_writes_statistics(capsys, table, tmp_path) -> None:
    file = tmp_path / "stats.json"
    common = ("--max-tokens", "12", "--dtype", "float32", "--device", "cpu", "--latency-table", table)
    code, out, _ = run(capsys, "generate", "Say hello.", *common, "--json", str(file))
    stats = json.loads(file.read_text())
    assert code == 0 and out == stats["text"] + "\n" and len(stats["token_ids"]) <= 12
    keys = {"acceptance_length", "drafted", "verified", "accepted", "seconds", "finish_reason", "policy", "drafter"}
    assert keys <= stats.keys() and stats["policy"] == "wcs"
    assert {"pre_draft", "schedule", "draft", "distribute", "verify"} <= stats["seconds"].keys()
    code, out, _ = run(capsys, "generate", "Say hello.", *common, "--policy", "ar", "--json", "-")
    assert json.loads(out)["text"] == stats["text"], "every policy writes the same"


@pytest.mark.model
def test_bench_decode_writes_the_promised_keys(capsys, table) -> None:
    code, out, _ = run(
        capsys, "bench", "decode", "--policies", "ar,full,batchwise,adaptive,wcs", "--loads", "1,2", "--tokens", "6",
        "--rounds", "1", "--requests", "2",
        "--dtype", "float32", "--device", "cpu", "--latency-table", table, "--json", "-",
    )  # fmt: skip
    result = json.loads(out)
    assert code == 0 and len(result["runs"]) == 10
    keys = {
        "policy", "drafter", "load", "throughput_tok_s", "interactivity_tok_s", "acceptance_length", "drafted_per_step",
        "verified_per_step", "draft_share", "verify_share", "spread",
    }  # fmt: skip
    assert all(keys <= run_.keys() for run_ in result["runs"])
    assert [g["load"] for g in result["gains"]] == [1, 2] and "wcs_over_best_other" in result["gains"][0]


@pytest.mark.model
def test_another_machines_latency_table_is_refused(capsys, table, tmp_path) -> None:
    data = json.loads(Path(table).read_text())
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**data, "device": "another machine"}))
    common = ("--max-tokens", "4", "--dtype", "float32", "--device", "cpu")
    code, _, err = run(capsys, "generate", "hi", *common, "--latency-table", str(other))
    assert code == 2 and "made for device='another machine'" in err
    code, _, err = run(capsys, "generate", "hi", *common, "--latency-table", str(tmp_path / "none.json"))
    assert code == 2 and "does not exist; make it with" in err


@pytest.mark.model
def test_a_recalibration_file_that_would_go_unread_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--recalibration", "state.json", "--no-recalibrate", "--dtype", "float32", "--device", "cpu")
    code, _, err = run(capsys, "generate", "hi", "--max-tokens", "4", "--policy", "full", *given)
    assert code == 2 and "'state.json': it needs recalibrate and adapt on" in err


def test_recalibration_is_an_option_of_the_engine() -> None:
    from trtllm_forespark.cli import ENGINE_FIELDS, build_parser

    def parsed(*options: str) -> tuple:
        args = build_parser().parse_args(["generate", "Hello", *options])
        return args.recalibrate, args.recalibration

    assert {"recalibrate", "recalibration"} <= set(ENGINE_FIELDS)
    assert parsed() == (None, None)
    assert parsed("--no-recalibrate") == (False, None)
    assert parsed("--recalibration", "state.json") == (None, "state.json")
