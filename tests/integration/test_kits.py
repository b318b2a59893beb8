"""Test kits that come inside the SGLang wheel, run against our server.

Those that need a model with knowledge, a GPU or a server of their own are left out:
`docs/exactness.md` lists which and why.
"""

from __future__ import annotations

import unittest
from typing import Any

import pytest
import requests
from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
from sglang.test.kits.basic_decode_correctness_kit import BasicDecodeCorrectnessMixin
from sglang.test.kits.ebnf_constrained_kit import EBNFConstrainedMixin
from sglang.test.kits.json_constrained_kit import JSONConstrainedMixin
from sglang.test.kits.matched_stop_kit import MatchedStopMixin
from sglang.test.kits.regex_constrained_kit import RegexConstrainedMixin
from sglang.test.kits.spec_server_kits import (
    SpecCorrectnessKit,
    SpecHiddenStatesKit,
    SpecLogprobKit,
    SpecPenaltyKit,
)

from parity.harness import configure, ssd_state

pytestmark = pytest.mark.integration

KITS: dict[type, str] = {
    BasicAPIContractMixin: "health health_generate get_server_info get_model_info "
    "openai_chat_completion openai_completion",
    BasicDecodeCorrectnessMixin: "ascii_ratio determinism_temp_zero max_token_one",
    EBNFConstrainedMixin: "ebnf_generate_email ebnf_generate_greeting ebnf_generate_number "
    "ebnf_generate_phone ebnf_generate_date ebnf_generate_hex_color "
    "ebnf_generate_all_optional_function_params",
    JSONConstrainedMixin: "json_invalid",
    MatchedStopMixin: "finish_stop_str finish_length",
    RegexConstrainedMixin: "regex_generate_email regex_generate_greeting regex_generate_number "
    "regex_generate_phone regex_generate_date regex_generate_hex_color",
    SpecCorrectnessKit: "batch_generation first_token_finish eos_token",
    SpecHiddenStatesKit: "return_hidden_states",
    SpecLogprobKit: "logprob_start_len logprob_match logprob_spec_v2_match "
    "token_ids_logprob_ragged",
    SpecPenaltyKit: "penalty_mixed",
}


class _Server(unittest.TestCase):
    """What the kits expect of the class that they are mixed into."""

    model = "default"
    base_url: str
    tokenizer: Any
    batch_accept_len_thres = 1.1
    logprob_match_delta = 1e-4

    def run_decode(self, sampling_params: dict[str, Any]) -> None:
        sampling = {"max_new_tokens": 48, "temperature": 0.7, **sampling_params}
        body = {"text": "def ", "sampling_params": sampling, "return_logprob": True}
        answer = requests.post(self.base_url + "/generate", json=body, timeout=120)
        self.assertEqual(answer.status_code, 200)


@pytest.fixture(scope="module")
def server(ssd_server):
    configure(ssd_server, ssd_drafting=1, ssd_num_steps=4, ssd_fan_out=3, ssd_backup=2)
    before = ssd_state(ssd_server)
    yield ssd_server
    after = ssd_state(ssd_server)
    configure(ssd_server, ssd_drafting=0)
    assert after["accepted"] > before["accepted"]


@pytest.mark.parametrize(
    ("kit", "name"), [(kit, name) for kit, names in KITS.items() for name in names.split()]
)
def test_kit(server, tokenizer, kit, name):
    case = type(kit.__name__, (kit, _Server), {"base_url": server.url, "tokenizer": tokenizer})
    getattr(case(f"test_{name}"), f"test_{name}")()
