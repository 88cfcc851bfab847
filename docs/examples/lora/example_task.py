"""Prose, code or a table? Passages of text that every Python brings, and a BERT with LoRA.

The base model is small and has random weights, so that nothing is downloaded. In an app of yours
it comes from a folder that every node has: `AutoModel...from_pretrained("/models/...")`.
"""

import argparse
import html.entities
import inspect
from pydoc_data.topics import topics

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

LENGTH, CHARACTERS, KINDS = 48, 128, 3
PASSAGES = 300  # of each kind; every fifth is for the test


def Net():
    torch.manual_seed(0)  # the same base model everywhere
    base = BertForSequenceClassification(
        BertConfig(
            vocab_size=CHARACTERS,
            hidden_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=LENGTH,
            num_labels=KINDS,
            initializer_range=0.1,
        )
    )
    targets = ["query", "key", "value", "dense"]
    return get_peft_model(
        base,
        LoraConfig(r=4, lora_alpha=8, target_modules=targets, modules_to_save=["classifier"]),
    )


def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs.logits, targets, reduction="none")


def texts():
    prose = [topics[name] for name in ("typesseq", "debugger", "execmodel", "import")]
    return " ".join(prose), inspect.getsource(argparse), inspect.getsource(html.entities)


def load_data(partition_id=None):
    """Return the data of one of four clients, each with much of one kind, or the test data."""
    inputs, targets = [], []
    for kind, text in enumerate(texts()):
        codes = [min(ord(character), CHARACTERS - 1) for character in " ".join(text.split())]
        passages = torch.tensor(codes[: PASSAGES * LENGTH]).reshape(PASSAGES, LENGTH)
        number = torch.arange(PASSAGES)
        owner = torch.where(number % 10 < 6, kind, number % 4)
        test = number % 5 == 0
        chosen = test if partition_id is None else ~test & (owner == partition_id % 4)
        inputs.append(passages[chosen])
        targets.append(torch.full((int(chosen.sum()),), kind))
    return torch.cat(inputs), torch.cat(targets)


def train(net, x, y, lr, epochs):
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=lr)
    net.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(16):
            optimizer.zero_grad()
            value = loss(net(x[batch]), y[batch]).mean()
            value.backward()
            optimizer.step()
    return value.item()


def test(net, x, y):
    net.eval()
    with torch.no_grad():
        return (net(x).logits.argmax(1) == y).float().mean().item()
