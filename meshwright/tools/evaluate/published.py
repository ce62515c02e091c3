"""lm-evaluation-harness' tasks: `lm-eval:hellaswag,arc_easy`."""

from __future__ import annotations

from pathlib import Path

from meshwright.data.files import ShowProgress
from meshwright.tools.evaluate.load import Facts
from meshwright.tools.evaluate.tasks import Question, Task


def measure_published(question: Question, progress: ShowProgress) -> tuple[Path, Facts]:
    """Return the step folder and the harness' metrics of the tasks in `question.task`. Raises as `measure_tasks`."""
    from meshwright.tools.harness import CheckpointLM, measure_tasks  # needs an extra; the import takes seconds

    model = CheckpointLM(question.checkpoint, question.device, question.context)
    names = question.task.partition(":")[2].split(",")
    return model.loaded.folder, measure_tasks(model, names, question.data, question.samples, chat=question.chat is True)


LM_EVAL = Task(measure_published, ("context", "samples", "chat"), takes_names=True)
