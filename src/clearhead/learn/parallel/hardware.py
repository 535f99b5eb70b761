"""What a model is trained on: devices by name, their memory and links; sizes and rates as people write them.

The shares of `Device` are calibrated: `benchmarks/planner.py` holds what they predict against published runs.
"""

import re
from dataclasses import dataclass, replace

from clearhead.errors import InputError, nearest, refuse

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
SCALES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
NUMBER = r"(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+)"


@dataclass(frozen=True)
class Device:
    """A kind of accelerator: what its maker states, and the shares of it that training reaches."""

    name: str
    peak: float  # FLOP/s in half precision, without sparsity
    memory: float  # bytes
    bandwidth: float  # bytes per second between memory and processor
    inside: float = 32e9  # bytes per second to the other devices of the node, one way
    node: int = 8  # devices of a node
    peak_float8: float = 0.0  # FLOP/s in float8; 0: it has none
    products: float = 0.5  # share of the peak that matrix products reach
    float8: float = 0.5  # share of the float8 peak that they reach
    attention: float = 0.25  # share of the peak that fused attention reaches, of what it computes
    measured: bool = False  # the shares come from a run on this device


# By a part of the name that PyTorch gives a device: the first that fits counts.
DEVICES = {
    device.name: device
    for device in (
        Device("b200", 2250e12, 180e9, 8.0e12, 900e9, peak_float8=4500e12),
        Device("h200", 989e12, 141e9, 4.8e12, 450e9, 8, 1979e12, 0.55, 0.5, 0.3, measured=True),
        Device("h100 pcie", 756e12, 80e9, 2.0e12, 64e9, peak_float8=1513e12),
        Device("h100", 989e12, 80e9, 3.35e12, 450e9, 8, 1979e12, 0.49, 0.44, 0.19, measured=True),
        Device("mi300x", 1307e12, 192e9, 5.3e12, 448e9, peak_float8=2614e12),
        Device("a100", 312e12, 80e9, 2.0e12, 300e9, products=0.6, attention=0.55, measured=True),
        Device("l40s", 362e12, 48e9, 0.864e12, peak_float8=733e12),
        Device("l4", 121e12, 24e9, 0.3e12, peak_float8=242e12),
        Device("a10", 125e12, 24e9, 0.6e12),
        Device("v100", 125e12, 32e9, 0.9e12, 150e9),
        Device("t4", 65e12, 16e9, 0.32e12, 16e9),
        Device("rtx 4090", 165e12, 24e9, 1.008e12, peak_float8=330e12),
        Device("rtx 3090", 71e12, 24e9, 0.936e12),
    )
}


@dataclass(frozen=True)
class Cluster:
    """So many devices, in nodes, with a link inside each node and one between nodes."""

    device: Device
    devices: int
    memory: float  # bytes that a device may use
    link: float  # bytes per second of one device to other nodes, one way

    def rate(self, size: int, stride: int) -> float:
        """Return bytes per second and device among `size` ranks that lie `stride` apart.

        Within a node it is the inner link. Beyond, ranks that share a node also share their links to others.
        They are never faster than the inner link.
        """
        node, inside = self.device.node, self.device.inside
        if size * stride <= node or self.devices <= node:
            return inside
        return min(inside, self.link * max(1, node // stride))


def device_named(name: str) -> Device:
    """Return a device by its name: "h100", "H100", "NVIDIA H100 80GB HBM3"."""
    found = find_device(name)
    if found is None:
        raise InputError(
            f'no device is called "{name}"{nearest(name.lower(), DEVICES)}: '
            f"choose from {', '.join(DEVICES)}, or give the peak, in FLOP/s"
        )
    return found


def find_device(name: str) -> Device | None:
    """Return the first device whose name is part of this one."""
    words = re.sub(r"[\s_-]+", " ", name.lower())
    found = (one for part, one in DEVICES.items() if re.search(rf"(?<![a-z0-9]){part}(?![0-9])", words))
    return next(found, None)


def cluster(
    devices: int,
    memory: float | str | None = None,
    link: float | str | None = None,
    peak: float | str = "h100",
    node: int | str | None = None,
) -> Cluster:
    """Describe the devices from what a user says of them.

    Args:
        devices: how many there are.
        memory: bytes of each, or text such as "80GB"; None: what the device has.
        link: bytes per second of each device to other nodes, or text such as "400Gb" (bits) or "50GB"; None:
            400 Gb.
        peak: the name of a device, or its half-precision FLOP/s, as a number or text such as "989T".
        node: devices of a node, or text with the link inside it too, such as "8,450GB"; None: the device's.
    """
    refuse(devices < 1, f"devices {devices} must be 1 or more")
    number = isinstance(peak, float | int) or re.match(NUMBER, peak.strip())
    device = Device("device", read_flops(peak), 80e9, 2e12) if number else device_named(str(peak))
    if node is not None:
        size, _, inside = str(node).partition(",")
        refuse(
            not size.strip().isdecimal() or int(size) < 1,
            f'node "{node}" is not understood: write devices of a node and the link inside, such as 8,450GB',
        )
        device = replace(device, node=int(size), inside=read_link(inside) if inside else device.inside)
    room = device.memory if memory is None else read_bytes(memory, "memory")
    return Cluster(device, devices, room, read_link("400Gb" if link is None else link))


def read_bytes(text: float | str, name: str = "size") -> int:
    """Return the number of bytes in a text such as 500MB."""
    found = re.fullmatch(rf"{NUMBER}\s*({'|'.join(UNITS)})", str(text).strip(), re.IGNORECASE)
    size = int(float(found[1]) * UNITS[found[2].upper()]) if found else 0
    refuse(size < 1, f'{name} "{text}" is not understood: write a number and a unit, such as 500MB or 5GB')
    return size


def read_link(text: float | str) -> float:
    """Return bytes per second in a text: 400Gb, 400Gb/s and 400Gbps are bits, 50GB and 50GB/s are bytes."""
    pattern = rf"{NUMBER}\s*([kKMGT]?)(b|bit|bps|b/s|bit/s|B|B/s)"
    found = re.fullmatch(pattern, str(text).strip())
    rate = float(text) if isinstance(text, float | int) else 0.0
    if found:
        rate = float(found[1]) * SCALES[found[2].upper()] / (1 if found[3].startswith("B") else 8)
    refuse(
        rate <= 0,
        f'link "{text}" is not understood: write bits per second, such as 400Gb, or bytes, such as 50GB',
    )
    return rate


def read_flops(text: float | str) -> float:
    """Return FLOP/s in a text such as 989T, 312TFLOPS or 9.89e14."""
    found = re.fullmatch(
        rf"{NUMBER}\s*([KMGTP]?)(?:FLOPS?(?:/S)?)?", str(text).strip().upper().replace("E", "e")
    )
    rate = float(found[1]) * SCALES[found[2]] if found else 0.0
    refuse(
        rate < 1e9, f'peak "{text}" is not understood: write FLOP/s, such as 989T, or the name of a device'
    )
    return rate
