"""Generation without a trace."""

from __future__ import annotations

from typing import Any

import pytest

from invivo import SamplingError
from support.contract import OTHER, PROMPT

pytestmark = pytest.mark.engine


def test_plain_generation(smollm2: Any, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = smollm2.generate([PROMPT, OTHER], max_tokens=1, temperature=0)
    assert [output.outputs[0].text for output in outputs] == [" Paris", " Tokyo"]
    assert "Processed prompts" in capsys.readouterr().err
    (output,) = smollm2.generate(PROMPT, use_tqdm=False, max_tokens=9, temperature=0, stop=["."])
    assert output.outputs[0].text == " Paris"
    assert capsys.readouterr().err == ""
    ids = list(output.prompt_token_ids)
    same_text = smollm2.generate([ids, ids], use_tqdm=False, max_tokens=1, temperature=0, n=1)
    assert [output.outputs[0].text for output in same_text] == [" Paris", " Paris"]
    assert smollm2.generate([], use_tqdm=False) == []
    with pytest.raises(SamplingError, match="unknown sampling argument `max_token`"):
        smollm2.generate(PROMPT, max_token=1)
