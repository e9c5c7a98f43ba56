"""transformers: Llama, BERT, ViT, Whisper and T5 of any size by their configs, with gradient checkpointing and generate.

    pip install transformers
    python examples/integrations/transformers_models.py bf16 llama

The models compute their own loss, so `boost` gets no criterion. `from_pretrained` in place of a config changes nothing else.
"""

import sys

import torch
import transformers as hf

import booster

words = torch.arange(1, 33).repeat(4, 1)  # what is to be learned: to count
small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
whisper = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "max_source_positions": 50,
}
whisper |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 8}
tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 63, "decoder_start_token_id": 1}
MODELS = {
    "llama": lambda: (
        hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=64, num_key_value_heads=2, **small)),
        {"input_ids": words, "labels": words},
    ),
    "bert": lambda: (hf.BertForMaskedLM(hf.BertConfig(vocab_size=64, **small)), {"input_ids": words, "labels": words}),
    "vit": lambda: (
        hf.ViTForImageClassification(hf.ViTConfig(image_size=16, patch_size=4, num_labels=3, **small)),
        {"pixel_values": torch.randn(6, 3, 16, 16), "labels": torch.arange(6) % 3},
    ),
    "whisper": lambda: (
        hf.WhisperForConditionalGeneration(hf.WhisperConfig(vocab_size=64, **whisper, **tokens)),
        {"input_features": torch.randn(4, 8, 100), "labels": words},
    ),
    "t5": lambda: (
        hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, **tokens)
        ),
        {"input_ids": words, "labels": words},
    ),
}


def main(precision: str = "bf16", *names: str) -> None:
    for name in names or MODELS:
        torch.manual_seed(0)
        model, batch = MODELS[name]()
        if name != "vit":
            model.config.use_cache = False  # of no use with gradient checkpointing
        model.gradient_checkpointing_enable()
        b = booster.Booster(mixed_precision=precision, clip_grad_norm=1.0)
        model, optimizer, *_ = b.boost(model, torch.optim.AdamW(model.parameters(), 3e-3))
        model.train()
        losses = []
        for _ in range(30):
            loss = model(**batch).loss
            b.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        b.print(f"{name}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        if name == "llama":
            model.eval()
            with torch.no_grad():
                b.print("generated:", model.generate(words[:1, :4], max_new_tokens=4, do_sample=False)[0].tolist())


if __name__ == "__main__":
    main(*sys.argv[1:])
