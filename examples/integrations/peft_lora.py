"""peft: low-rank adapters on a frozen model; only they get masters, states and checkpoints.

pip install peft transformers
python examples/integrations/peft_lora.py
"""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import booster


def main(precision: str = "bf16_naive") -> None:
    torch.manual_seed(0)
    words = torch.arange(1, 33).repeat(4, 1)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    lora = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    model = get_peft_model(LlamaForCausalLM(config), lora)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    trained = [p for p in model.parameters() if p.requires_grad]

    b = booster.Booster(mixed_precision=precision)
    model, optimizer, *_ = b.boost(model, torch.optim.AdamW(trained, 1e-2))
    losses = []
    for _ in range(30):
        loss = model(input_ids=words, labels=words).loss
        b.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    b.print(f"lora: loss {losses[0]:.3f} -> {losses[-1]:.3f}")

    adapted = b.unwrap(model)
    same = all(
        torch.equal(p.float(), frozen[n].to(p.dtype).float()) for n, p in adapted.named_parameters() if n in frozen
    )
    b.print(f"frozen weights unchanged: {same}")
    merged = adapted.merge_and_unload()  # plain weights again, for other programs
    with torch.no_grad():
        b.print(f"merged: loss {merged(input_ids=words, labels=words).loss.item():.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
