#!/usr/bin/env python3
"""Makes targets and drafts for `lacuna bench speculate --draft-model` out of one GGUF file, in which layers are `blk.N`.

    draft_pairs.py deeper m.gguf target.gguf --layers 120     layers that add nothing behind those there are
    draft_pairs.py shallower m.gguf draft.gguf --layers 20    the first and the last of its layers
    draft_pairs.py scrambled m.gguf draft.gguf --layers 6     a model of the same vocabulary that knows nothing

A deeper target says the same as the model it was made of, token for token but for rounding, and takes as many times longer as it
has layers: the best that a draft can be. What comes between is a draft in fewer bits (`lacuna quantize`). Needs nothing but Python.
"""

import argparse
import re
import struct

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9


class Reader:
    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, count):
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form):
        return struct.unpack("<" + form, self.take(struct.calcsize(form)))[0]

    def string(self):
        return self.take(self.number("Q"))

    def value(self, kind):
        """The bytes of a value, as they are."""
        start = self.at
        if kind == STRING:
            self.string()
        elif kind == ARRAY:
            of, count = self.number("I"), self.number("Q")
            for _ in range(count):
                self.value(of)
        else:
            self.take(SIZES[kind])
        return self.data[start : self.at]


class File:
    def __init__(self, path):
        with open(path, "rb") as file:
            reader = Reader(file.read())
        assert reader.take(4) == b"GGUF", "no GGUF file"
        self.version, tensors, entries = (reader.number("I"), reader.number("Q"), reader.number("Q"))
        self.metadata = []
        for _ in range(entries):
            key, kind = reader.string().decode(), reader.number("I")
            self.metadata.append((key, kind, reader.value(kind)))
        infos = []
        for _ in range(tensors):
            name = reader.string().decode()
            shape = [reader.number("Q") for _ in range(reader.number("I"))]
            infos.append((name, shape, reader.number("I"), reader.number("Q")))
        alignment = [raw for key, _, raw in self.metadata if key == "general.alignment"]
        self.alignment = struct.unpack("<I", alignment[0])[0] if alignment else 32
        start = -(-reader.at // self.alignment) * self.alignment
        ends = sorted(offset for *_, offset in infos)[1:] + [len(reader.data) - start]
        following = dict(zip(sorted(offset for *_, offset in infos), ends))
        self.tensors = [
            (name, shape, kind, reader.data[start + offset : start + following[offset]])
            for name, shape, kind, offset in infos
        ]

    def layers(self):
        """The tensors of each layer, and all others."""
        layers, others = {}, []
        for name, *rest in self.tensors:
            found = re.fullmatch(r"blk\.(\d+)\.(.*)", name)
            if found:
                layers.setdefault(int(found[1]), []).append((found[2], *rest))
            else:
                others.append((name, *rest))
        return [layers[index] for index in sorted(layers)], others

    def write(self, path, layers, others):
        tensors = others + [
            (f"blk.{index}.{name}", *rest) for index, layer in enumerate(layers) for name, *rest in layer
        ]
        out = bytearray(b"GGUF" + struct.pack("<IQQ", self.version, len(tensors), len(self.metadata)))
        for key, kind, raw in self.metadata:
            if key.endswith(".block_count"):
                raw = struct.pack("<I", len(layers))
            out += struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + raw
        offset = 0
        for name, shape, kind, data in tensors:
            out += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(shape))
            out += struct.pack(f"<{len(shape)}Q", *shape) + struct.pack("<IQ", kind, offset)
            offset += -(-len(data) // self.alignment) * self.alignment
        out += bytes(-len(out) % self.alignment)
        with open(path, "wb") as file:
            file.write(out)
            for *_, data in tensors:
                file.write(data)
                file.write(bytes(-len(data) % self.alignment))


def deeper(layers, count):
    """Of the added layers nothing comes back: the matrices that would give it are zeros, which all types write as zero bytes."""
    zeroed = lambda name: name in ("attn_output.weight", "ffn_down.weight")
    added = [
        [(name, shape, kind, bytes(len(data)) if zeroed(name) else data) for name, shape, kind, data in layer]
        for layer in layers
    ]
    return layers + [added[index % len(added)] for index in range(count - len(layers))]


def shallower(layers, count):
    return layers[: count - count // 2] + layers[len(layers) - count // 2 :]


def scrambled(layers, count):
    """Layers in reverse: numbers of the right sizes that mean nothing in that order."""
    return layers[::-1][:count]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = {"deeper": deeper, "shallower": shallower, "scrambled": scrambled}
    parser.add_argument("way", choices=ways)
    parser.add_argument("model")
    parser.add_argument("output")
    parser.add_argument("--layers", type=int, required=True)
    args = parser.parse_args()
    file = File(args.model)
    layers, others = file.layers()
    file.write(args.output, ways[args.way](layers, args.layers), others)


if __name__ == "__main__":
    main()
