"""Pipeline parallelism: a model in stages on several ranks, by torch's schedules, without tracing it.

The idea: every stage runs the user's *own* forward, from its first line. What lies on other stages is a hollow stand-in
there: blocks before the stage answer at once with a tensor without data, the first block of the stage finds what was received
in its arguments instead, and the first block after it ends the forward, with its arguments as what is sent. So no forward is
rewritten, and a mask or a position that is computed from inputs alone is computed on every stage.

An example: embedding, four blocks, norm and head; two ranks; cut before block 2.

    forward(ids):                                       rank 0, stage 0             rank 1, stage 1
        mask = make_mask(ids)                           computed                    computed: needs no parameter
        x = self.embedding(ids)                         computed                    hollow: a fake tensor comes out
        for block in self.blocks:      block 0          computed                    replay: another fake tensor
            x = block(x, mask)         block 1          computed                    replay
                                       block 2          its x is sent, forward ends  its x is what was received, its mask is
                                                                                    the own one; computed
                                       block 3                                      computed
        return self.head(self.norm(x))                                              computed, loss, backward

How it comes about, file by file, in the order in which a model passes them:

    split.py         find the row of blocks, cut it: which stage has which module. What is around the blocks goes where the
                     forward uses it (`booster.plugin.forward_order`): embedding 0, norm and head 1.
    skeleton.py      copy the model without weights: its parameters are FakeTensors, of shape and dtype alone. A FakeTensor
                     that meets a real tensor gives a FakeTensor. So a hollow forward tells by itself what depends on
                     parameters, and what every rank can work out.
    hollow.py        `Hollow`, the class of these FakeTensors. What a function of them returned in the first micro-batch it
                     returns in the next ones too, without torch being asked.
    plan.py          `plan_pipeline` does both while the model is whole and changes nothing. `PipelinePlan.cut(rank)` puts the
                     skeleton's modules in the places of foreign ones. Tensor parallelism comes before it, sharding after.
    rehearsal.py     on the first micro-batch of each shape: run the skeleton once for every stage, as above, on all ranks
                     alike. What is not allowed raises here, before any rank waits for another.
    provenance.py    while rehearsing, remember for every fake tensor which foreign parameters it comes from: one that reaches
                     a block of this stage other than as an argument (a skip over the cut, say) is named in the error.
    route.py         what the rehearsal found. `Boundary`: which arguments cross a cut, their shapes and dtypes, and which are
                     only passed on (relayed). `slots`: where received tensors go. `Echo`: what a foreign block answers.
    stage.py         at run time: the first foreign block raises `StageEnd` (of rehearsal.py) and so leaves the user's forward.
                     A hook on own blocks puts received tensors into the slots.
    schedule.py      torch's schedules (gpipe, 1f1b, interleaved, zbv) over these stages; `STYLES` has their classes, and the
                     plugin's `pp_style` chooses. The route declares what travels.
    tied_weights.py  a weight that two stages hold (embedding and head): its gradients are summed after each run.
    layers_loaded.py when weights are loaded: take this rank's layers out of the state of a whole model.
    pipeline.py      `StagePipeline`, what the plugin gives back for the model: `run(micro_batches, criterion, seed=...)`.

Who calls whom: `HybridParallelPlugin.place` plans, cuts and makes the `StagePipeline`; `b.execute_pipeline` divides a batch
and calls `StagePipeline.run`, which rehearses if the shapes are new and lets the schedule call `Stage.compute` for each
micro-batch.
"""

from booster.plugin.pipeline.pipeline import StagePipeline
from booster.plugin.pipeline.plan import PipelinePlan, plan_pipeline
from booster.plugin.pipeline.split import Split, find_split

__all__ = ["StagePipeline", "PipelinePlan", "Split", "find_split", "plan_pipeline"]
