"""What may be asked, and where an output ends."""

from __future__ import annotations

import math

import pytest

from trtllm_forespark.runtime.request import Request, RequestOutput, SamplingParams, Status, cut

STOP, EOS = 12, 2


def request(out: int = 0, prompt: int = 4, **params: object) -> Request:
    return Request("r", [0] * prompt, SamplingParams(**params), frozenset([EOS]), output_ids=[5] * out)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("emitted", "asked", "max_seq_len", "kept", "reason"),
    [
        ([10, 11, STOP, 20, 21, 22], request(max_tokens=5, stop_token_ids=[STOP]), 99, [10, 11, STOP], "stop"),
        ([10, 11, EOS, 20], request(), 99, [10, 11, EOS], "stop"),
        ([10, EOS, 20], request(ignore_eos=True), 99, [10, EOS, 20], None),
        ([10, STOP, EOS], request(ignore_eos=True, stop_token_ids=[STOP]), 99, [10, STOP], "stop"),
        ([10, EOS, 7], request(end_id=7), 99, [10, EOS, 7], "stop"),
        ([10, 11, 12, 13, 14], request(out=9, max_tokens=10), 99, [10], "length"),
        ([10], request(prompt=9), 10, [10], "length"),
        ([10, 11, 12], request(prompt=6, out=2), 10, [10, 11], "length"),
        ([10, EOS], request(out=8, max_tokens=10), 99, [10, EOS], "stop"),
        ([10, 11], request(out=8, max_tokens=10), 99, [10, 11], "length"),
        ([10, 11], request(max_tokens=None), 99, [10, 11], None),
        ([], request(), 99, [], None),
    ],
    ids=[
        "case 10, a stop token within the cap",
        "case 11, EOS in the middle of a block",
        "EOS ignored",
        "stop tokens still count when EOS is ignored",
        "end_id replaces the model's own",
        "case 14, one token left",
        "case 35, a prompt one token short of the context",
        "the context limit in the middle of a run",
        "the last allowed token is EOS: stop goes first",
        "max_tokens reached exactly",
        "no limit but the context",
        "nothing emitted",
    ],
)
def test_a_run_is_cut_where_autoregressive_decoding_would_have_stopped(
    emitted: list[int], asked: Request, max_seq_len: int, kept: list[int], reason: str | None
) -> None:
    assert cut(emitted, asked, max_seq_len) == (kept, reason)


def test_accepted_drafts_behind_the_cut_do_not_count() -> None:
    r = request(max_tokens=1)
    kept, _ = cut([10, 11, 12, 13, 14], r, 99)
    r.emit(kept, drafted=5, verified=4, accepted=4)
    assert (r.output_ids, r.steps, r.drafted, r.verified, r.accepted) == ([10], 1, 5, 4, 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", "warm"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 1.01),
        ("top_p", -0.1),
        ("seed", -1),
        ("seed", 2**64),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("min_tokens", 33),
        ("min_tokens", -1),
        ("stop_token_ids", 7),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("end_id", -2),
        ("ignore_eos", 1),
        ("n", 2),
        ("n", 0),
        ("n", None),
        ("n", True),
        ("stop", 7),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a", 3]),
        ("bad", [""]),
        ("bad", [["a"]]),
        ("bad_token_ids", [[1]]),
        ("bad_token_ids", [-1]),
        ("include_stop_str_in_output", None),
        ("logprobs", 3),
        ("min_p", 1.5),
        ("min_p", -0.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", math.nan),
        ("presence_penalty", "much"),
        ("frequency_penalty", True),
        ("embedding_bias", "up"),
        ("embedding_bias", {-1: 2.0}),
        ("embedding_bias", {3: math.nan}),
        ("embedding_bias", [0.0, math.inf]),
        ("embedding_bias", [[0.0, 1.0]]),
        ("guided_decoding", {"json": "{}"}),
    ],
)
def test_a_wrong_setting_names_field_value_and_mend(field: str, value: object) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    text = str(error.value)
    assert text.startswith(f"SamplingParams.{field} = {value!r}: ")
    assert ";" in text and len(text.splitlines()) == 1


def test_values_that_mean_off_are_taken() -> None:
    SamplingParams(
        n=1, stop=[], repetition_penalty=1, presence_penalty=0.0, min_p=0, logprobs=None, use_beam_search=False
    )


@pytest.mark.parametrize(
    ("params", "greedy"),
    [
        ({}, True),
        ({"temperature": 0}, True),
        ({"temperature": 0.0, "top_p": 0.9}, True),
        ({"top_k": 1}, True),
        ({"top_p": 0.0, "temperature": 1.0}, True),
        ({"top_k": 0}, True),
        ({"seed": 3}, True),
        ({"top_p": 0.9}, False),
        ({"top_k": 40}, False),
        ({"temperature": 1}, False),
    ],
    ids=str,
)
def test_greedy_is_what_tensorrt_llm_takes_for_it(params: dict, greedy: bool) -> None:
    assert SamplingParams(**params).greedy is greedy


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        (request(prompt=0), "prompt is empty"),
        (request(prompt=10), "shorten it to at most 9 tokens"),
        (Request(1, [50]), "token id 50 in prompt is outside the vocabulary of 50"),
        (Request(1, [-1]), "token id -1"),
        (request(end_id=50), "token id 50 in end_id or stop_token_ids"),
        (request(bad_token_ids=[50]), "token id 50 in bad or bad_token_ids"),
        (request(bad=["x"]), r"bad = \['x'\] needs a tokenizer"),
        (request(stop="x"), r"stop = \['x'\] needs a tokenizer"),
        (request(embedding_bias={50: 1.0}), "token id 50 in embedding_bias"),
        (request(embedding_bias=[0.0] * 49), "has 49 values for a vocabulary of 50"),
    ],
    ids=[
        "empty",
        "too long",
        "outside the vocabulary",
        "negative",
        "end_id",
        "bad",
        "bad words",
        "stop",
        "bias",
        "bias of another size",
    ],
)
def test_a_prompt_that_cannot_run_is_refused(asked: Request, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        asked.check_fits(10, 50)
    request(prompt=9).check_fits(10, 50)


def test_a_request_ends_once() -> None:
    r = request()
    r.finish("cancelled")
    assert r.status is Status.FINISHED
    with pytest.raises(RuntimeError, match="ended twice"):
        r.finish("stop")


def test_preemption_keeps_the_output_and_voids_late_results() -> None:
    r = request(out=3)
    before, r.num_computed_tokens = r.key, 6
    r.preempt()
    assert r.key != before and r.num_computed_tokens == 0 and len(r.output_ids) == 3


def test_an_output_has_tensorrt_llms_shape() -> None:
    r = request(stop_token_ids=[STOP])
    kept, reason = cut([10, STOP], r, 99)
    r.emit(kept, drafted=4, verified=3, accepted=1)
    assert reason is not None
    r.finish(reason)
    output = RequestOutput.of(r, "ten")
    first = output.outputs[0]
    assert (output.request_id, output.prompt_token_ids, output.finished) == ("r", [0] * 4, True)
    assert (first.index, first.text, first.token_ids, first.length) == (0, "ten", [10, STOP], 2)
    assert (first.finish_reason, first.stop_reason) == ("stop", STOP)
    assert output.avg_decoded_tokens_per_iter == 2.0
