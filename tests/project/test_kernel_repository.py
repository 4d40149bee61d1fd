"""The repository for transformers' Hub kernels runs a model where regard is not installed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/kernel_repository.py"
RUN = """
import importlib.util, json, sys
import torch
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import sdpa_mask

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("regard", "jaxtyping"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
folder = sys.argv[1] + "/build/torch-universal"
name = json.load(open(folder + "/metadata.json"))["id"]
spec = importlib.util.spec_from_file_location(name, folder + "/__init__.py")
kernel = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)

# as transformers registers a kernel that has these two functions
assert kernel.supports_flash_attn()
AttentionInterface.register("regard_attention", kernel.flash_attn_forward)
AttentionMaskInterface.register("regard_attention", sdpa_mask)

torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, vocab_size=32)
config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(config).eval()
given = {"input_ids": torch.arange(1, 13).view(2, 6), "attention_mask": torch.ones(2, 6).long()}
given["attention_mask"][0, :2] = 0
results = []
for implementation in ("eager", "regard_attention"):
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        logits = model(**given).logits[:, 2:]
        text = model.generate(**given, max_new_tokens=5, do_sample=False, pad_token_id=0)
    results.append((logits, text.tolist()))
(logits, text), (others, written) = results
print(json.dumps([float((logits - others).abs().max()), text == written]))
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernel") / "regard-attention"
    subprocess.run([sys.executable, SCRIPT, folder], check=True, capture_output=True)
    return folder


@pytest.mark.long
def test_a_model_runs_without_regard(repository):
    command = [sys.executable, "-c", RUN, str(repository)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    difference, same_text = json.loads(done.stdout)
    assert 0 < difference < 1e-5  # another kernel, to rounding
    assert same_text


def test_the_kernels_package_loads_it(repository):
    kernels = pytest.importorskip("kernels", reason="tried with kernels 0.17.2")
    kernel = kernels.get_local_kernel(repository, trust_remote_code=True)
    assert kernel.supports_flash_attn()


def test_a_folder_that_holds_something_is_left_alone(repository):
    command = [sys.executable, SCRIPT, repository]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "is not empty" in done.stderr
