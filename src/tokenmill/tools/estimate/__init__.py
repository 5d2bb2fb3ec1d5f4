"""`estimate`: what a run would produce and need, from a sample of its inputs, before it starts.

If all of the input can be read in a few seconds, documents and text are counted. Otherwise they are extrapolated from
places spread evenly over the input; of a large data set of the Hub, these are in a few of its files. Only snippets of
the text are encoded, some hundred bytes each from as many documents as possible, because texts differ most by their
language, and neighbouring sentences have the same. Every figure has a 95% confidence interval.
"""

from __future__ import annotations

from tokenmill.arguments import whole_number
from tokenmill.display import Display
from tokenmill.engines import create
from tokenmill.errors import UsageError
from tokenmill.pipeline.plan.budget import make_budget
from tokenmill.pipeline.plan.prepare import prepare
from tokenmill.pipeline.request import Request
from tokenmill.tools.estimate.projection import project
from tokenmill.tools.estimate.quantities import Estimate
from tokenmill.tools.estimate.survey import Survey, measure_rate

__all__ = ["Estimate", "estimate"]


def estimate(
    request: Request, *, share: float | None = None, seq_len: int | None = None, display: Display | None = None
) -> Estimate:
    """Estimate a run from a `share` of its text; by default 2%, within reasonable bounds.

    With `seq_len`, also estimate the size of its documents as padded arrays.
    """
    if share is not None and not 0 < share <= 1:
        raise UsageError(f"--sample {share} must be above 0 and at most 1")
    if seq_len is not None:
        whole_number(seq_len, "--seq-len", 1)
    prepared = prepare(request, display, is_sample=True)
    tokenizer, policy = prepared.tokenizer, prepared.settings.policy
    budget = make_budget(request, len(tokenizer.files[tokenizer.main_file]))
    engine = create(prepared.choice.engine, tokenizer, policy.special_tokens)
    survey = Survey(prepared, share)
    survey.read()
    return project(prepared, survey, measure_rate(survey.snippets, engine), budget, seq_len)
