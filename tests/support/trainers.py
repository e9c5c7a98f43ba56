"""A small causal language model, its rows and arguments, for the Trainer of transformers; nothing is downloaded."""

import torch
from torch.utils.data import Dataset

VOCABULARY = 64


class Rows(Dataset):
    """Rows of tokens of several lengths; the labels of the first few tokens do not count."""

    def __init__(self, count=36, lengths=(12,)):
        chance = torch.Generator().manual_seed(1)
        self.rows = [torch.randint(1, VOCABULARY, (lengths[i % len(lengths)],), generator=chance) for i in range(count)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        labels = self.rows[index].clone()
        labels[: index % 5] = -100  # so that batches differ in what counts
        return {"input_ids": self.rows[index], "labels": labels}


def llama(seed=0, width=32, *, tied=False):
    import transformers

    torch.manual_seed(seed)
    sizes = {
        "hidden_size": width,
        "intermediate_size": max(64, width),
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    sizes |= {"tie_word_embeddings": tied}
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, pad_token_id=0, **sizes)
    return transformers.LlamaForCausalLM(config)


def arguments(folder, **options):
    """TrainingArguments on a CPU, twelve steps of two micro-batches of two rows, with every step logged."""
    import transformers

    usual = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 12, "logging_steps": 1}
    usual |= {"save_strategy": "no", "report_to": [], "learning_rate": 1e-2, "use_cpu": True, "disable_tqdm": True}
    usual |= {"max_grad_norm": 0.5, "lr_scheduler_type": "cosine", "output_dir": str(folder)}
    return transformers.TrainingArguments(**{**usual, **options})


def logged(trainer, key="loss"):
    """By step, what was logged under `key`."""
    return {entry["step"]: entry[key] for entry in trainer.state.log_history if key in entry}
