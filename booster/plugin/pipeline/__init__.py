"""Pipeline parallelism: a model in stages on several ranks, by torch's schedules, without tracing it."""

from booster.plugin.pipeline.pipeline import Pipeline
from booster.plugin.pipeline.plan import PipelinePlan, plan_pipeline
from booster.plugin.pipeline.split import Split, find_split

__all__ = ["Pipeline", "PipelinePlan", "Split", "find_split", "plan_pipeline"]
