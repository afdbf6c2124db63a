// Floats of 16 bits, from the bits of one of 32.

// To the nearest, ties to even, on every device alike; beyond the largest, infinity.
fn to_f16(bits: u32) -> u32 {
    let sign = (bits >> 16u) & 0x8000u;
    let magnitude = bits & 0x7fffffffu;
    if magnitude > 0x7f800000u {
        return sign | 0x7e00u;
    }
    // From 65520 on, halfway to what would follow the largest.
    if magnitude >= 0x477ff000u {
        return sign | 0x7c00u;
    }
    // Below 2^-14 the last bit is worth 2^-24: adding 0.5 as a float rounds there.
    if magnitude < 0x38800000u {
        let rounded = bitcast<f32>(magnitude) + 0.5;
        return sign | (bitcast<u32>(rounded) - 0x3f000000u);
    }
    let odd = (magnitude >> 13u) & 1u;
    return sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13u);
}

fn to_bf16(bits: u32) -> u32 {
    if (bits & 0x7fffffffu) > 0x7f800000u {
        return (bits >> 16u) | 0x40u;
    }
    return (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
}
