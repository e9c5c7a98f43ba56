"""Pipeline parallelism: a model in stages on several ranks, by torch's schedules, without tracing it.

The idea: every stage runs the user's *own* forward, from its first line. Modules of other stages are replaced there by fakes
without weights: blocks before the stage return a tensor without data at once, the first block of the stage finds what was
received in its arguments instead, and the first block after it ends the forward, with its arguments as what is sent. So no
forward is rewritten, and a mask or a position that is computed from inputs alone is computed on every stage.

An example: embedding, four blocks, norm and head; two ranks; cut before block 2.

    forward(ids):                                       rank 0, stage 0             rank 1, stage 1
        mask = make_mask(ids)                           computed                    computed: needs no parameter
        x = self.embedding(ids)                         computed                    fake: a fake tensor comes out
        for block in self.blocks:      block 0          computed                    recorded: another fake tensor
            x = block(x, mask)         block 1          computed                    recorded
                                       block 2          its x is sent, forward ends  its x is what was received, its mask is
                                                                                    the own one; computed
                                       block 3                                      computed
        return self.head(self.norm(x))                                              computed, loss, backward

How it comes about, file by file, in the order in which a model passes them:

    split.py         find the row of blocks, cut it: which stage has which module. What is around the blocks goes where the
                     forward uses it (`booster.model.modules`): embedding 0, norm and head 1. Gradients of a weight
                     that two stages hold (embedding and head) are summed after each run.
    meta_model.py       `MetaModel` copies the model without weights: its parameters are FakeTensors, of shape and dtype alone.
                        A FakeTensor that meets a real tensor gives a FakeTensor. So a forward of the copy tells what depends
                        on parameters, and what every rank can compute. `FakeActivation` is the class of these FakeTensors:
                        what a function of them returned in the first micro-batch it returns in the next ones too.
    shape_inference.py  on the first micro-batch of each shape: run the copy once for every stage, as above, on all ranks alike.
                        What is not allowed raises here, before any rank waits for another. Of every fake tensor it tracks
                        which foreign parameters it comes from: one that reaches a block of this stage other than as an
                        argument (a skip over the cut, say) is named in the error.
                        `Boundary` is what it found: which arguments cross a cut, their shapes and dtypes, and which are only
                        passed on (relays); `StageIO` is made of them and declares what is sent. `RecordedOutput`: what a
                        foreign block returns.
    stage.py            at run time: the first block of the next stage raises `StageEnd` and so leaves the user's forward. A
                        hook on own blocks puts received tensors into their arguments.
    schedule_runner.py  torch's schedules (gpipe, 1f1b, interleaved, zbv) over these stages; `STYLES` has their classes, and
                        the plugin's `pp_style` chooses.
    pipeline.py         `PipelinePlan` splits and copies while the model is whole and changes nothing. `PipelinePlan.cut(rank)`
                        puts the copy's modules in the places of foreign ones. Tensor parallelism comes before, sharding after.
                        `StagePipeline`, what the plugin returns for the model: `run(micro_batches, criterion, seed=...)`; and
                        the hook that takes this rank's layers out of the state of a whole model.

Who calls whom: `HybridParallelPlugin.place` plans, cuts and makes the `StagePipeline`; `b.execute_pipeline` divides a batch
and calls `StagePipeline.run`, which infers shapes if they are new and lets the schedule call `Stage.compute` for each
micro-batch. What may be changed freely: anything in here; outside only the plugin and `booster.plugin.base.Pipeline` are known.
"""

from booster.plugin.pipeline.pipeline import PipelinePlan, StagePipeline
from booster.plugin.pipeline.split import Split, find_split

__all__ = ["StagePipeline", "PipelinePlan", "Split", "find_split"]
