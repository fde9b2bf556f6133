"""What is wrong with a model's positions, or read differently by others. What cannot be read at all is a PlanError."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from theodolite.plan.findings.dialect import dialect_findings
from theodolite.plan.findings.finding import SEVERITIES, Finding, Severity
from theodolite.plan.findings.formats import gguf_findings, layout_finding, params_findings
from theodolite.plan.findings.layers import layer_findings
from theodolite.plan.findings.scaling import scaling_findings
from theodolite.plan.model import ModelPlan
from theodolite.plan.params import is_mistral

__all__ = ["SEVERITIES", "Finding", "Severity", "find"]

_BY_SOURCE = {"config": dialect_findings, "gguf": gguf_findings, "params": params_findings}


def _length_key(raw: Mapping[str, Any], source: str) -> str:
    if source == "gguf":
        return f"{raw.get('general.architecture')}.context_length"
    return "max_seq_len" if source == "params" and not is_mistral(raw) else "max_position_embeddings"


def find(
    plan: ModelPlan, raw: Mapping[str, Any] | None = None, *, source: str = "config", layout: str | None = None
) -> tuple[Finding, ...]:
    """What is wrong with a plan, gravest first.

    Args:
        raw: the content of the file that the plan was read from, for what is about its dialect.
        source: what `raw` is: "config" (transformers), "gguf" (metadata) or "params" (Meta's or Mistral's).
        layout: the pair layout that the checkpoint is in, where it is another than the family's code has.
    """
    found = [] if layout is None else [layout_finding(plan, layout)]
    found += [*scaling_findings(plan), *layer_findings(plan, _length_key(raw or {}, source))]
    if raw is not None:
        found += _BY_SOURCE[source](plan, raw)
    # Layers may share a fault, and are told of it once.
    return tuple(sorted(dict.fromkeys(found), key=lambda finding: SEVERITIES.index(finding.severity)))
