"""Which families can be converted: by our name, and by Hugging Face's model_type."""

from __future__ import annotations

from meshwright.convert.bert import BERT
from meshwright.convert.family import Family
from meshwright.convert.gpt2 import GPT2
from meshwright.convert.settings import Settings
from meshwright.convert.t5 import T5_FAMILY
from meshwright.convert.vit import VIT

FAMILIES: dict[str, Family] = {
    "gpt2": GPT2,
    "bert": BERT,
    "t5": T5_FAMILY,
    "vit": VIT,
}
"""By `model.family`."""


def family_of(settings: Settings) -> Family:
    """The family of a config.json. Raises CheckpointError naming those that there are."""
    known = [kind for family in FAMILIES.values() for kind in family.model_types]
    kind = settings.get("model_type", known[0])
    for family in FAMILIES.values():
        if kind in family.model_types:
            return family
    raise settings.refused(f"model_type={kind} is not supported; valid: {', '.join(known)}")
