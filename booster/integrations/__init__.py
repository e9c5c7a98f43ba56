"""What lets other libraries' training loops run under a precision and a plugin of this one.

Hugging Face's Trainer makes an Accelerator for itself and asks it for everything about precision and ranks. A subclass of the
Trainer puts another Accelerator in its place, which hands models, optimizers, backward passes and clips to a `Booster` and
leaves the rest, such as data loaders and gathers, to Accelerate. Nothing of transformers is patched, and trainers made of the
Trainer, such as TRL's, come along::

    Trainer.train()  ->  BoosterAccelerator.prepare(model, optimizer)   ->  TrainerJob.prepare  ->  Booster.boost
                     ->  BoosterAccelerator.backward(loss)              ->  TrainerJob.backward ->  Booster.backward
                     ->  BoosterAccelerator.clip_grad_norm_(...)        ->  TrainerJob.clip_norm
                     ->  optimizer.step()                                   of the boosted optimizer

In reading order:

    trainer             `BoosterTrainer`, `boosted_trainer`: the subclass, its checkpoints and logs; what TrainingArguments
                        say of precision and plugin, and which of them are refused
    trainer_job         the boosted model and optimizer of one Trainer, and the Accelerator's methods

A tool: the core reads none of it, and transformers and accelerate are imported when a class is asked for. What it uses of the
core is what a user's loop uses, and the few facts about a boosted model that a Trainer's checkpoint has to keep.
"""
