"""A checkpoint as bytes, for another process that computes alike: safetensors, checked before use.

The bytes hold the prefix's tokens, its pages, its recurrent and convolution states as they are, and
in the header what they belong to. Nothing of them is used unless weights, stack, layout and
checksum agree.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from flide_engine.cache.pool import Pool
from flide_engine.config import GRAIN
from flide_engine.errors import CheckpointRefused
from flide_engine.layout.plan import Ints

FORMAT = "flide-checkpoint-2"


@dataclass(frozen=True)
class Parcel:
    """A checkpoint on its way: whose it is, what its state goes by and was routed on, its prefix's
    tokens [position] and its tensors; whether it is kept from eviction, and for how many seconds
    nobody had used it.

    tensors: keys, values [layers, position / 64, 64, kv_heads, head_dim], recurrent_state [layers,
    value_heads, key_dim, value_dim] float32, conv_state [layers, conv_rows, channels].
    """

    tenant: str
    name: str
    anchor: str
    tokens: Ints
    tensors: dict[str, Tensor]
    pinned: bool = False
    unused_s: float = 0.0

    @property
    def position(self) -> int:
        """Tokens of the prefix, a multiple of the grain."""
        return len(self.tokens)


def take_out(
    pool: Pool, tenant: str, name: str, tokens: Ints, pages: Ints, slot: int,
    anchor: str = "", pinned: bool = False, unused_s: float = 0.0,
) -> Parcel:  # fmt: skip
    """A checkpoint in a pool, copied to the host."""
    pool.beside.join()  # it may be on its way to the device
    at = torch.from_numpy(pool.places(pages)).long().to(pool.device)
    tensors = {
        "keys": pool.tensors.keys[:, at],
        "values": pool.tensors.values[:, at],
        "recurrent_state": pool.tensors.recurrent_state[:, slot],
        "conv_state": pool.tensors.conv_state[:, slot],
    }
    # copies in any case: on a CPU some of these are views of what the next round writes
    copied = {k: v.to("cpu", copy=True).contiguous() for k, v in tensors.items()}
    return Parcel(tenant, name, anchor, tokens.copy(), copied, pinned, max(unused_s, 0.0))


def write(parcel: Parcel, pool: Pool, origin: Mapping[str, str]) -> bytes:
    """A parcel's bytes. pool: of its layout. origin: what it was computed with, by name.

    Hashing and copying hundreds of megabytes takes a good part of a second: any thread may do it.
    """
    tensors = {**parcel.tensors, "tokens": torch.from_numpy(parcel.tokens)}
    header = {
        **_made(pool, origin),
        "tenant": parcel.tenant,
        "name": parcel.name,
        "anchor": parcel.anchor,
        "pinned": "yes" if parcel.pinned else "",
        "unused_s": f"{parcel.unused_s:.3f}",
        "checksum": _checksum(tensors),
    }
    return bytes(save(tensors, metadata=header))


def read(data: bytes, pool: Pool, origin: Mapping[str, str]) -> Parcel:
    """The checkpoint in some bytes. Raises CheckpointRefused, naming what does not agree."""
    try:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])["__metadata__"]
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointRefused(
            "it is not a checkpoint", f"{type(error).__name__}: {error}"
        ) from None
    for what, ours in _made(pool, origin).items():
        if header.get(what) != ours:
            raise CheckpointRefused(f"its {what} differ", f"{header.get(what)!r}, here {ours!r}")
    if header.get("checksum") != _checksum(tensors):
        raise CheckpointRefused("it is damaged", "the checksum does not agree")
    told = tensors.pop("tokens", torch.zeros(0))
    if told.dtype != torch.int32 or told.dim() != 1 or not len(told) or len(told) % GRAIN:
        detail = f"its tokens are {_kind(told)}, not some grains of {GRAIN}"
        raise CheckpointRefused("it is damaged", detail)
    tokens = told.numpy()
    fits = _kinds(pool, len(tokens) // GRAIN)
    for name in sorted(fits.keys() | tensors.keys()):
        kind = _kind(tensors[name]) if name in tensors else "not there"
        if kind != (ours := fits.get(name, "not known")):
            raise CheckpointRefused("it is damaged", f"its {name} are {kind}, here {ours}")
    try:
        return Parcel(
            header["tenant"], header["name"], header.get("anchor", ""), tokens, tensors,
            bool(header.get("pinned")), float(header.get("unused_s", 0.0)),
        )  # fmt: skip
    except (KeyError, ValueError) as error:
        raise CheckpointRefused("it is damaged", f"its header lacks {error}") from None


def put_in(pool: Pool, parcel: Parcel, pages: Ints, slot: int) -> None:
    """Writes a checkpoint's tensors to `pages` [position / 64] and `slot` of a pool."""
    pool.beside.join()  # pages that it shares may be on their way to the device
    ours = vars(pool.tensors)
    at = torch.from_numpy(pool.places(pages)).long().to(pool.device)
    for name in ("keys", "values"):
        ours[name][:, at] = parcel.tensors[name].to(ours[name].device)
    for name in ("recurrent_state", "conv_state"):
        ours[name][:, slot] = parcel.tensors[name].to(ours[name].device)


def _kinds(pool: Pool, pages: int) -> dict[str, str]:
    """Shapes and types of a parcel's tensors with so many pages."""
    ours = vars(pool.tensors)
    paged = {n: _kind(ours[n][:, :1].expand(-1, pages, -1, -1, -1)) for n in ("keys", "values")}
    return paged | {n: _kind(ours[n][:, 0]) for n in ("recurrent_state", "conv_state")}


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _made(pool: Pool, origin: Mapping[str, str]) -> dict[str, str]:
    """What must agree; layout: what the tensors' shapes and types follow from."""
    layout = json.dumps({**asdict(pool.shape), "dtype": str(pool.dtype)}, sort_keys=True)
    return {"format": FORMAT, **origin, "layout": layout}


def _checksum(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        digest.update(name.encode() + b"\0")
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
