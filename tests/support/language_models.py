"""A tokenizer of words, made on the spot, and sets of rows for the trainers of TRL."""


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    words = [*special.values(), *(f"w{number}" for number in range(60))]
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def texts(count, start=0, length=8):
    return [" ".join(f"w{(start + row + step) % 60}" for step in range(length)) for row in range(count)]


def rows(kind, count=24):
    """A dataset for "sft", "dpo" or "grpo"."""
    from datasets import Dataset

    if kind == "sft":
        return Dataset.from_dict({"text": texts(count)})
    if kind == "dpo":
        found = {"prompt": texts(count, length=3), "chosen": texts(count, 3, 4), "rejected": texts(count, 7, 4)}
        return Dataset.from_dict(found)
    return Dataset.from_dict({"prompt": texts(count, length=3)})
