"""One import, and the name works wherever transformers takes one."""

from interpreters import run_python

PROGRAM = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
import regard.auto
from regard.ops.observed import calls_run

config = LlamaConfig(hidden_size=16, num_attention_heads=2, vocab_size=20, num_hidden_layers=1,
    intermediate_size=16)
model = AutoModelForCausalLM.from_config(config, attn_implementation="regard").eval()
calls = []
with calls_run(lambda prepared, q, parts: calls.append(prepared)), torch.no_grad():
    mine = model(torch.tensor([[3, 4, 5]])).logits
assert len(calls) == 1, calls
model.set_attn_implementation("eager")
torch.testing.assert_close(mine, model(torch.tensor([[3, 4, 5]])).logits)
"""


def test_the_name_is_known_after_the_import():
    done = run_python("-c", PROGRAM)
    assert done.returncode == 0, done.stderr[-2000:]
