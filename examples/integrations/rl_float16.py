"""float16 for reinforcement learning: how far the policy that trains is from the one that sampled, in four precisions.

    pip install transformers
    python examples/integrations/rl_float16.py 5

A sampler as a server has it computes with half weights. Those that train are sampled by it, and scored again: by autocast,
by half weights with float32 masters, and with the head kept in float32. The argument is the number of seeds.
"""

import sys

import torch
import transformers as hf

import booster
from booster.mixed_precision import FP16NaiveMixedPrecision

F16, BF16 = torch.float16, torch.bfloat16
ROWS = {  # of the table: precision of training, dtype of the sampler's weights
    "bf16": (lambda: "bf16", BF16),
    "bf16_naive": (lambda: "bf16_naive", BF16),
    "fp16": (lambda: "fp16", F16),
    "fp16, head in fp32": (lambda: FP16NaiveMixedPrecision(keep_fp32=("lm_head",)), F16),
}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
PROMPT, STEPS = 4, 30
SETTINGS = {"max_new_tokens": 20, "do_sample": True, "top_k": 0, "eos_token_id": None, "pad_token_id": 0}


def policy(dtype: torch.dtype = torch.float32) -> hf.LlamaForCausalLM:
    """A model with weights in `dtype`; its frequencies of rotation are float32, as where a server opens it."""
    config = hf.LlamaConfig(vocab_size=64, initializer_range=0.2, **SIZES)
    return hf.AutoModelForCausalLM.from_config(config, dtype=dtype)


def log_probs(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the sampled tokens, and of all words, in float32."""
    every = torch.log_softmax(logits[:, PROMPT - 1 : -1].float(), -1)
    return every.gather(-1, tokens[:, PROMPT:, None])[..., 0], every


def run(precision: object, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Mean difference of log-probabilities, KL, largest ratio, and share of ratios beyond 1 +- 0.01; means over the steps."""
    torch.manual_seed(seed)
    b = booster.Booster(mixed_precision=precision, clip_grad_norm=1.0)
    model = policy()
    model, optimizer, *_ = b.boost(model, torch.optim.AdamW(model.parameters(), 1e-3))
    sampler = policy(dtype).eval()
    found = []
    for _ in range(STEPS):
        sampler.load_state_dict(model.state_dict())  # rounds float32 weights as the forward does; half ones to the bit
        prompts = torch.randint(0, 64, (16, PROMPT))
        with torch.no_grad():
            tokens = sampler.generate(prompts, attention_mask=torch.ones_like(prompts), **SETTINGS)
            sampled, every_sampled = log_probs(sampler(input_ids=tokens, use_cache=False).logits, tokens)
        trained, every_trained = log_probs(model(input_ids=tokens, use_cache=False).logits, tokens)
        reward = (tokens[:, PROMPT:] % 2 == 0).float().mean(1)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
        ratio = (trained - sampled).exp()
        b.backward(-(ratio * advantage[:, None]).mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        ratio = ratio.detach()
        kl = (every_sampled.exp() * (every_sampled - every_trained.detach())).sum(-1).mean()
        off = (ratio - 1).abs()
        found.append([(sampled - trained.detach()).abs().mean(), kl, ratio.max(), (off > 0.01).float().mean()])
    return torch.tensor(found).mean(0)


def main(seeds: str = "1") -> None:
    print(f"{'precision':20} {'difference':>12} {'KL':>10} {'largest ratio':>14} {'beyond 1%':>10}")
    for name, (precision, dtype) in ROWS.items():
        mean, kl, largest, beyond = (
            torch.stack([run(precision(), dtype, s) for s in range(int(seeds))]).mean(0).tolist()
        )
        print(f"{name:20} {mean:12.2e} {kl:10.2e} {largest:14.4f} {beyond:10.2%}")


if __name__ == "__main__":
    main(*sys.argv[1:])
