"""Trains a causal language model as transformers' example of that name does, by the same calls of the library.

Written anew: the examples are in no package. What they download is local here: configuration, tokenizer and texts.
"""

import math
from dataclasses import dataclass, field
from itertools import chain

from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class Given:
    config: str = field(metadata={"help": "folder of a configuration and a tokenizer"})
    train_file: str = field(metadata={"help": "JSON lines with a text each"})
    validation_file: str = field(metadata={"help": "the same"})
    block_size: int = 16


def main():
    given, training = HfArgumentParser((Given, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training.seed)
    tokenizer = AutoTokenizer.from_pretrained(given.config)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(given.config))
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))
    raw = load_dataset("json", data_files={"train": given.train_file, "validation": given.validation_file})

    def grouped(rows):
        ids = list(chain.from_iterable(tokenizer(rows["text"])["input_ids"]))
        size = given.block_size
        blocks = [ids[start : start + size] for start in range(0, len(ids) // size * size, size)]
        return {"input_ids": blocks, "labels": [list(block) for block in blocks]}

    with training.main_process_first(desc="grouping texts"):
        blocks = raw.map(grouped, batched=True, remove_columns=["text"])

    def predicted(logits, labels):
        return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)

    def accuracy(found):
        right = found.predictions[:, :-1] == found.label_ids[:, 1:]
        return {"accuracy": float(right.mean())}

    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=blocks["train"],
        eval_dataset=blocks["validation"],
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=predicted,
    )
    result = trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.create_model_card(tasks="text-generation")


if __name__ == "__main__":
    main()
