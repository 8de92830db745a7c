import subprocess
import sys

import pytest
from pydantic import ValidationError

from dflash_serve.speculation.params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", 2.1), ("temperature", float("nan")), ("top_p", 0), ("top_p", 1.1),
        ("top_k", -2), ("min_p", 1.5), ("repetition_penalty", 0), ("presence_penalty", 2.5),
        ("repetition_penalty", 5e-324), ("repetition_penalty", 1e38),  # float32 makes 0 and infinity of them
        ("frequency_penalty", -2.5), ("logit_bias", {1: 101}), ("logit_bias", {-1: 0}), ("max_tokens", 0),
        ("stop", ["a", "b", "c", "d", "e"]), ("stop", ""), ("stop_token_ids", [-1]), ("logprobs", 21), ("best_of", 2),
    ],
)  # fmt: skip
def test_what_is_out_of_range_or_unknown_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingParams.model_validate({field: value})
    assert caught.value.errors()[0]["loc"][0] == field


def test_the_ways_of_saying_off_are_read_as_one() -> None:
    params = SamplingParams.model_validate({"top_k": -1, "seed": -1, "stop": None})
    assert params == SamplingParams()
    assert SamplingParams.model_validate({"stop": "end"}).stop == ("end",)


def test_json_of_a_client_is_read() -> None:
    params = SamplingParams.model_validate_json('{"temperature": 0, "logit_bias": {"12": -3}, "stop": ["a", "b"]}')
    assert params.greedy
    assert params.logit_bias == {12: -3}
    assert params.stop == ("a", "b")


def test_a_temperature_too_small_to_divide_by_is_raised_and_zero_is_not() -> None:
    assert SamplingParams(temperature=1e-6).temperature == 0.01
    assert SamplingParams(temperature=0).temperature == 0


def test_what_needs_no_torch_does_not_import_it() -> None:
    code = (
        "import sys, dflash_serve.speculation, dflash_serve.speculation.params, dflash_serve.speculation.statistics,"
        "dflash_serve.speculation.width; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
