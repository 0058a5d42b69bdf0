"""The kit's relations at the released sizes, where the Gluon kernel serves; on a GPU only.

TRITON_INTERPRET=0 pytest -m gpu tests/test_attention_gpu.py
"""

from __future__ import annotations

import pytest
import torch
from minideepinfer.operators import interpreting, load_registry
from minideepinfer.testing.contract import Relation
from minideepinfer.testing.families.attention import FAMILY
from minideepinfer.testing.recipes.attention import AttentionRecipe
from minideepinfer.testing.recipes.batch import BatchRecipe
from minideepinfer.testing.subject import Subject

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or interpreting(), reason="needs CUDA, kernels not interpreted"),
]

RELEASED = {"dtype": "bfloat16", "num_heads": 64, "head_dim": 512, "rope_dim": 64, "sliding_window": 128}
BATCHES = (
    BatchRecipe((3, 1), (200, 0), page_tokens=64),
    BatchRecipe((2, 0, 3), (130, 5, 700), window_start=(0, 0, 702), page_tokens=64),
    BatchRecipe((2, 2), (40, 300), padding=(0,), page_tokens=64),
)
RECIPES = tuple(
    AttentionRecipe(
        batch, **RELEASED, compress_ratio=ratio, index_topk=topk, pattern=pattern, with_lens=lens, sink=sink
    )
    for batch in BATCHES
    for ratio, topk, pattern, lens, sink in (
        (2, 130, "mixed", False, 1.0),
        (1, 64, "front", True, None),
        (1, 200, "valid", False, 30.0),
        (2, 70, "none", False, 1.0),
        (0, 1, "none", False, 1.0),
    )
)


@pytest.mark.parametrize("name", ["fused", "indexed"])
@pytest.mark.parametrize("relation", FAMILY.relations, ids=lambda relation: relation.name)
def test_relations_at_the_released_sizes(relation: Relation, name: str) -> None:
    registry = load_registry()
    subject = Subject(registry.get("attention", name), registry, FAMILY, "cuda")
    if relation.needs and not getattr(subject.properties, relation.needs):
        pytest.skip(f"{name} does not declare {relation.needs}")
    for recipe in RECIPES:
        relation.check(subject, recipe.build())
    assert name == "indexed" or subject.tally.forms["gluon"]
