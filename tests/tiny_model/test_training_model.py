"""The training code computes what serving computes."""

import numpy as np
import pytest
import torch

from flide_engine import Engine, EngineConfig
from flide_engine.families.option_vectors import OptionVectors
from flide_engine.families.tokenizer import TextTokenizer
from flide_engine.kernels.gated_delta_rule_ref import gated_delta_rule_ref
from flide_engine.models.weights import weights_hash
from flide_engine.resolve import EMBEDDED
from flide_engine.wire import parse_request
from tiny_model.delta import gated_delta_rule
from tiny_model.export import load
from tiny_model.tokenizer import UserEncoder

REQUEST = {
    "state": "User: My card was charged TWICE, and nobody answers. " * 4,
    "questions": {
        "team": {
            "type": "choice",
            "instructions": "Who?",
            "criteria": {"billing": "money", "x_y": None},
        },
        "angry": {"type": "noul", "instructions": "Angry?", "criteria": {"true": "furious"}},
        "when": {"type": "score", "criteria": ["can wait", None, "at once"]},
    },
}


def test_both_encode_text_alike() -> None:
    """The tokenizer of training and the one of serving give the same ids."""
    training, serving = UserEncoder(EMBEDDED / "tokenizer.json"), TextTokenizer(EMBEDDED)
    texts = ["", "Hello  World\n", "<|state|> é 中文 \N{GRINNING FACE}", "a_b: {x}", " lead"]
    for text, ids in zip(texts, training.encode(texts), strict=True):
        assert serving.encode(text).tolist() == ids.tolist(), text


@pytest.mark.parametrize("length", [3, 64, 65, 150])
def test_both_scan_alike(length: int) -> None:
    """The chunk-parallel rule for training equals the engine's reference, from a zero state."""
    torch.manual_seed(length)
    heads, d = 2, 16
    q, k = (torch.nn.functional.normalize(torch.randn(length, heads, d), dim=-1) for _ in range(2))
    v, g, beta = (
        torch.randn(length, heads, d),
        -torch.rand(length, heads),
        torch.rand(length, heads),
    )
    got = gated_delta_rule(*(t[None] for t in (q, k, v, g, beta)))[0]
    out = torch.full((length, heads, d), torch.nan)
    ints = {"dtype": torch.int32}
    none = torch.zeros(0, **ints)
    gated_delta_rule_ref(
        q, k, v, g, beta, out, torch.zeros(1, heads, d, d), (0, 1),
        torch.tensor([0, length], **ints), torch.zeros(1, **ints), torch.full((1,), -1, **ints),
        torch.full((1, 66), -1, **ints), none, none, none,
    )  # fmt: skip
    torch.testing.assert_close(got, out, atol=2e-5, rtol=0)


def test_the_committed_weights_answer_alike() -> None:
    """Probabilities of a request by the training model on isolated prompts, and by the engine."""
    tokenizer = TextTokenizer(EMBEDDED)
    family = OptionVectors(EMBEDDED, tokenizer, weights_hash(EMBEDDED), 0)
    rendered = family.render(parse_request(REQUEST))
    model = load(EMBEDDED).eval().float()
    vectors = []
    with torch.inference_mode():
        for prompt in rendered.prompts:
            ids = torch.from_numpy(prompt.astype(np.int64))[None]
            vectors.append(model.model(ids)[0, -1].float().numpy())
    want = family.finish(rendered, vectors)
    engine = Engine(EngineConfig())
    try:
        got = engine.decide(REQUEST).answers
    finally:
        engine.close()
    for name, answer in want.items():
        for key, value in answer.model_dump().items():
            if isinstance(value, float):
                assert abs(got[name].model_dump()[key] - value) < 2e-5, (name, key)
