"""From backward to step: loss scale, norm, clip and the decision, in one pass over the gradients."""
