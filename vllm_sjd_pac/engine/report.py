"""What the runner tells the scheduler about a step, beside vLLM's own output."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_ATTRIBUTE = "sjd_pac_report"


@dataclass
class StepReport:
    """Travels as an attribute of ``ModelRunnerOutput`` (a plain dataclass, pickled whole between processes).

    Attributes:
        kept: request id → main-chain nodes that the walk passed; their keys and values are final.
        accepted: drafts accepted, per image request that had any.
        undone: ids of guided requests (owners and twins) whose step does not count, since one of the pair had no rows.
    """

    kept: dict[str, int] = field(default_factory=dict)
    undone: set[str] = field(default_factory=set)
    accepted: list[int] = field(default_factory=list)


def attach(output: Any, report: StepReport) -> Any:
    setattr(output, _ATTRIBUTE, report)
    return output


def read(output: Any) -> StepReport:
    """The step's report; an empty one for an output that ran no forward pass."""
    return getattr(output, _ATTRIBUTE, None) or StepReport()
