"""`estimate`: what a run would give and take, from a sample of its inputs, before it is started.

Documents and text are counted, not guessed, where all of the input can be read in a few seconds; else
they are extrapolated from places spread evenly over it, which of a large data set of the Hub are in a few of its files.
Only snippets of the text are encoded, some hundred bytes each from as many documents as possible: what differs most
between texts is their language, and neighbouring sentences have the same. Every figure comes with an interval that
holds in 19 cases of 20.
"""

from __future__ import annotations

from tokenmill.arguments import whole_number
from tokenmill.engines import create
from tokenmill.errors import UsageError
from tokenmill.estimation.concluding import conclude
from tokenmill.estimation.figures import Estimate, Figure, Padded
from tokenmill.estimation.rating import measure_rate
from tokenmill.estimation.surveying import Survey
from tokenmill.pipeline.budget import make_budget
from tokenmill.pipeline.preparing import prepare
from tokenmill.pipeline.request import Request
from tokenmill.progress import Display

__all__ = ["Estimate", "Figure", "Padded", "estimate"]


def estimate(
    request: Request, *, share: float | None = None, seq_len: int | None = None, display: Display | None = None
) -> Estimate:
    """Estimate a run from a `share` of its text; by default two hundredths, within reasonable bounds.

    With `seq_len` also what its documents take as padded arrays.
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
    return conclude(prepared, survey, measure_rate(survey.snippets, engine), budget, seq_len)
