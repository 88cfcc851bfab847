"""Make a node's key, and give it demo data: ``python -m jobs.node_setup``.

The private key is made where it is used and never leaves the node's volume; what the SuperLink has
to know is the public one. A key and data that exist already are kept.
"""

from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
)

from fedpsa_strategy.files import PRIVATE, PUBLIC, write_atomically
from task.datasets import load_raw
from task.partition import partition, split_test

# The split of docker/run.toml: the server tests on what no node gets.
_DATASET = "digits"
_PARTITION, _ALPHA = "client-dirichlet", 0.5
_TEST_FRACTION, _SEED = 0.1, 0


def ensure_key(key_dir: Path, public_dir: Path) -> None:
    """Make an elliptic-curve key (NIST P-384) as Flower reads it, unless there is one."""
    key_path = key_dir / "node.key"
    if key_path.exists():
        key = load_ssh_private_key(key_path.read_bytes(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise SystemExit(f"{key_path} is not an elliptic-curve key.")
    else:
        key = ec.generate_private_key(ec.SECP384R1())
        data = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        write_atomically(key_path, data, mode=PRIVATE)
        print("New key.")
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    write_atomically(public_dir / "node.pub", public + b"\n", mode=PUBLIC)


def ensure_demo_data(data_dir: Path, partition_id: int, num_partitions: int) -> None:
    """Write this node's share of the demo dataset to ``data.npz``, unless it has its own data."""
    path = data_dir / "data.npz"
    share = f"{_DATASET} {partition_id} of {num_partitions}"
    if path.exists():
        with np.load(path, allow_pickle=False) as present:
            # Only demo data carry this array. With another number of nodes they are split anew.
            if "demo" not in present:
                print(f"{path} holds data of this node's own: left as it is.")
                return
            if str(present["demo"]) == share:
                return
    images, labels = load_raw(_DATASET)
    train, _ = split_test(len(labels), _TEST_FRACTION, _SEED)
    parts = partition(_PARTITION, labels[train], num_partitions, _ALPHA, _SEED)
    mine = train[parts[partition_id]]
    buffer = BytesIO()
    np.savez_compressed(buffer, x=images[mine], y=labels[mine], demo=np.array(share))
    write_atomically(path, buffer.getvalue(), mode=PRIVATE)
    print(f"Demo data: {share}, {len(mine)} samples.")


def main() -> None:
    """Set up the node that the environment variables describe."""
    ensure_key(Path("/key"), Path("/public"))
    ensure_demo_data(
        Path("/data"), int(os.environ["PARTITION_ID"]), int(os.environ["NUM_PARTITIONS"])
    )


if __name__ == "__main__":
    main()
