// 32 weights in 24 bytes: `d: f16`, `m: f16`, 32 fifth bits, 32 nibbles, the low ones first; weight `d * q + m`.
fn load(start: u32, number: u32) -> Unit {
    let at = start + number * 24u;
    let bits = word(at + 4u);
    let packed = words(at + 8u);
    let low = (packed & NIBBLES) | fifth_bits(bits, 0u);
    let high = ((packed >> vec4<u32>(4u)) & NIBBLES) | fifth_bits(bits, 16u);
    return Unit(low, high, vec2<f32>(half_float(at)), -half_float(at + 2u));
}
