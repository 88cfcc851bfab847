"""Models of `transformers`, as they are: small, with random weights."""

import pytest
import torch
from torch.nn import functional

from fedpsa_strategy import Probe, arrays_of, sensitivity
from support.sensitivities import by_definition
from task.torchvision_import import import_torchvision_datasets

import_torchvision_datasets()  # which transformers imports; works beside any build of torch
transformers = pytest.importorskip("transformers")

WORDS, LENGTH = 50, 10
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {**SMALL, "vocab_size": WORDS, "intermediate_size": 16, "max_position_embeddings": LENGTH}


def per_sample(outputs, targets):
    return functional.cross_entropy(outputs.logits, targets, reduction="none")


def per_token(outputs, targets):
    losses = functional.cross_entropy(outputs.logits.mT.float(), targets, reduction="none")
    return losses.mean(1)


def bert():
    config = transformers.BertConfig(**TEXT, num_labels=3)
    return transformers.BertForSequenceClassification(config)


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT))


def vit():
    config = transformers.ViTConfig(
        **SMALL, intermediate_size=16, image_size=8, patch_size=4, num_labels=3
    )
    return transformers.ViTForImageClassification(config)


TOKENS = {"shape": (LENGTH,), "vocabulary": WORDS}
MODELS = {
    "bert": (bert, per_sample, TOKENS | {"num_classes": 3}),
    "llama": (llama, per_token, TOKENS | {"num_classes": WORDS, "target_shape": (LENGTH,)}),
    "vit": (vit, per_sample, {"shape": (3, 8, 8), "num_classes": 3}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_their_sensitivities_are_those_of_the_definition(name, dtype):
    make, loss_fn, arguments = MODELS[name]
    torch.manual_seed(0)
    model = make().to(dtype)
    probe = Probe.gaussian(model, size=4, loss_fn=loss_fn, **arguments)
    x, y = probe.calibration.tensors("cpu", dtype)
    expected = by_definition(model, x, y, loss_fn).float()
    error = (sensitivity(model, x, y, loss_fn) - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype == torch.float32 else 0.05)
    assert probe.sketch_fn(make().to(dtype))(arrays_of(model)) == probe(model)
