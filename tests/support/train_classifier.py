"""Trains a classifier of texts as transformers' example of that name does, by the same calls of the library.

Written anew: the examples are in no package. What they download is local here: configuration, tokenizer and texts.
"""

from dataclasses import dataclass, field

from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class Given:
    config: str = field(metadata={"help": "folder of a configuration and a tokenizer"})
    train_file: str = field(metadata={"help": "JSON lines with a text and the name of its kind each"})
    validation_file: str = field(metadata={"help": "the same"})
    max_seq_length: int = 16


def main():
    given, training = HfArgumentParser((Given, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training.seed)
    raw = load_dataset("json", data_files={"train": given.train_file, "validation": given.validation_file})
    kinds = sorted(set(raw["train"]["label"]))
    tokenizer = AutoTokenizer.from_pretrained(given.config)
    config = AutoConfig.from_pretrained(given.config, num_labels=len(kinds))
    config.label2id = {kind: index for index, kind in enumerate(kinds)}
    config.id2label = dict(enumerate(kinds))
    model = AutoModelForSequenceClassification.from_config(config)

    def prepared(rows):
        found = tokenizer(rows["text"], max_length=given.max_seq_length, truncation=True)
        return {**found, "label": [config.label2id[kind] for kind in rows["label"]]}

    with training.main_process_first(desc="reading texts"):
        rows = raw.map(prepared, batched=True, remove_columns=["text"])

    def accuracy(found):
        return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}

    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=rows["train"].shuffle(seed=training.seed),
        eval_dataset=rows["validation"],
        compute_metrics=accuracy,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8 if training.fp16 else None),
    )
    result = trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.create_model_card(tasks="text-classification")


if __name__ == "__main__":
    main()
