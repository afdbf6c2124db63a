// 256 weights in 176 bytes: as Q4_K, with a fifth bit of each weight: of sub-block `i`, bit `i` of 32 bytes.
fn load(start: u32, number: u32) -> Unit {
    let at = start + number / 8u * 176u;
    let sub_block = number % 8u;
    let nested = scale_and_minimum(at + 4u, sub_block);
    let source = at + 48u + sub_block / 2u * 32u;
    let shift = vec4<u32>(4u * (sub_block % 2u));
    let fifth = vec4<u32>(sub_block);
    let ones = vec4<u32>(0x01010101u);
    let low_bits = ((words(at + 16u) >> fifth) & ones) << vec4<u32>(4u);
    let high_bits = ((words(at + 32u) >> fifth) & ones) << vec4<u32>(4u);
    let low = ((words(source) >> shift) & NIBBLES) | low_bits;
    let high = ((words(source + 16u) >> shift) & NIBBLES) | high_bits;
    let scale = half_float(at) * nested.x;
    return Unit(low, high, vec2<f32>(scale), half_float(at + 2u) * nested.y);
}
