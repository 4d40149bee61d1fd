"""What does a joint latent cost a model with QK-norm?

    python benchmarks/qk_norm.py --model normed --minutes 25     makes a model, or reads it again

No package has weights with QK-norm, so a model is made: SmolLM2-135M-Instruct as a Qwen3, with
norms of queries and keys whose gains are their mean sizes, healed from SmolLM2 on the texts of
`healing.py`. Its joint latents are calibrated as those of `regard compare`, and measured on half
the topics of Python's own help and on a licence. Nothing is trained after the conversion.
"""

import argparse
import copy
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from common import finish
from healing import perplexities, texts, told
from torch import Tensor

import regard.hf
from regard.convert import (
    Recipe,
    Step,
    convert,
    heal,
    latentize,
    refit_output,
    target_of,
    walk,
    windows_of,
)
from regard.convert.healing.environment import keep_freed_memory
from regard.convert.measuring import ratio
from regard.convert.texts import calibration, python_texts, python_topics
from regard.hf.packages import quiet

LENGTH = 512  # tokens of a window
DESCRIPTIONS = 2000  # texts of installed packages, to heal on
SHARES = (1.0, 0.75, 0.5, 0.25)
COPIED = (  # settings of the Qwen3 that are those of SmolLM2
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rope_parameters"),
    *("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
)


@torch.no_grad()
def normed(model: Any, windows: Tensor) -> Any:
    """The model as a Qwen3 of the same weights; the norms' gains keep the size of the scores."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = model.config
    sizes = {name: getattr(config, name) for name in COPIED}
    head_dim = config.hidden_size // config.num_attention_heads
    made = Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=head_dim)).eval()
    made.load_state_dict(model.state_dict(), strict=False)
    found: dict[str, Tensor] = {}

    def recording(name: str) -> Any:
        def hook(module: Any, given: Any, out: Tensor) -> None:
            found[name] = out.unflatten(-1, (-1, head_dim)).square().mean(-1).sqrt()

        return hook

    for layer, other in zip(model.model.layers, made.model.layers, strict=True):
        hooks = [
            layer.self_attn.get_submodule(name).register_forward_hook(recording(name))
            for name in ("q_proj", "k_proj")
        ]
        model.base_model(input_ids=windows[:1], use_cache=False)
        for hook in hooks:
            hook.remove()
        q, k = (found[name].flatten(0, 1).log().mean(0) for name in ("q_proj", "k_proj"))
        gain = ((q.mean() + k.mean()) / 2).exp()
        for norm in (other.self_attn.q_norm, other.self_attn.k_norm):
            norm.weight.fill_(float(gain))
    return made


def equally_weighted(model: Any, rank: int, windows: Tensor) -> list[Any]:
    """Layers with a joint latent fitted without the weights of tokens."""

    def make(step: Step) -> Any:
        layer, covariance = regard.hf.attention_of(step.module), step.moments.covariance
        made = latentize(layer, rank=rank, covariance=covariance).layer
        refit_output(made, step.x, step.target)
        return made

    return walk(model, windows, [make])[0]


def made_model(folder: Path, minutes: float) -> None:
    """Write a SmolLM2 with QK-norm to `folder`."""
    model, tokenizer = regard.hf.smollm2()
    reading = [*python_texts(), "\n\n".join(islice(texts(0), DESCRIPTIONS))]
    windows = windows_of(tokenizer, reading, length=LENGTH)
    student = normed(model, calibration(tokenizer, windows=3, length=LENGTH))
    recipe = Recipe(lr=4e-4, autocast=torch.bfloat16)
    heal(student, model.bfloat16(), windows, minutes=minutes, recipe=recipe, progress=told)
    student.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", type=Path, required=True, help="a folder, made if it is not there"
    )
    parser.add_argument("--minutes", type=float, default=25.0, help="of healing, where it is made")
    options = parser.parse_args()
    keep_freed_memory()
    with quiet():
        if not (options.model / "config.json").exists():
            made_model(options.model, options.minutes)
        model, tokenizer = regard.hf.load(options.model)
        held_out = {"manual": python_topics()[1]}
        licence = Path("/usr/share/common-licenses/GPL-3")
        if licence.exists():
            held_out["licence"] = licence.read_text()
        measured = {
            name: windows_of(tokenizer, [text], length=LENGTH, most=2)
            for name, text in held_out.items()
        }
        shipped = [
            regard.hf.attention_of(each) for each in regard.hf.attention_modules(model).values()
        ]
        targets = [target_of("mla", shipped, budget=share) for share in SHARES]
        windows = calibration(tokenizer, windows=6, length=LENGTH)
        before = perplexities(model, measured)
        results = {"as made": before}
        made = convert(model, targets, windows, progress=told)
        for share, each in zip(SHARES, made, strict=True):
            other = regard.hf.place(copy.deepcopy(model), each.layers)
            results[f"latent, {share:.0%}"] = perplexities(other, measured)
            if share < 1:
                equal = equally_weighted(model, each.target.rank, windows)
                other = regard.hf.place(copy.deepcopy(model), equal)
                results[f"the same, tokens weighted equally, {share:.0%}"] = perplexities(
                    other, measured
                )
    for name, found in results.items():
        each_text = (f"{key} {value / before[key]:.3f}" for key, value in found.items())
        print(f"{name:<34} {ratio(found, before):.3f} times the perplexity: {', '.join(each_text)}")
    finish("qk_norm", [{"name": name, **found} for name, found in results.items()])


if __name__ == "__main__":
    main()
